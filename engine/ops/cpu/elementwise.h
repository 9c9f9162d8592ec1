// What happens to rows between the products: norms, rotation, and the write into the cache.
#pragma once
#include <cmath>

#include "pool.h"

namespace splitserve {

// Mirrored by ctypes, as are the structs below. Strides in elements; the last dimension is contiguous.
struct NormArgs {
  const void *x, *weight;
  void *residual, *out;  // with a residual: residual += x, and the sum is normalised
  int64_t num_rows, num_heads, width;  // x and out [rows, heads, width]; a residual has one head
  int64_t x_stride, x_head_stride, out_stride, out_head_stride, residual_stride;
  float eps;
};

struct RopeArgs {
  void* x;  // [rows, heads, head_dim], in place
  const void *cos, *sin;  // [rows, head_dim]; the first half of sin is negated
  int64_t num_rows, num_heads, head_dim, x_stride, x_head_stride, cos_stride;
};

struct WriteArgs {
  const void *keys, *values;  // [rows, kv heads, head_dim]
  void *key_blocks, *value_blocks;
  const int64_t* slots;  // [rows], block * block_size + offset
  int64_t num_rows, num_heads, head_dim, block_size;
  int64_t key_stride, value_stride, block_stride, head_stride, token_stride;
};

// Calls body(row) for each row, on more than one thread where that pays.
template <class Body>
void for_rows(Pool& pool, int64_t num_rows, int64_t row_values, const Body& body) {
  constexpr int64_t UNIT_VALUES = 8192;
  int64_t rows = larger<int64_t>(UNIT_VALUES / larger<int64_t>(row_values, 1), 1);
  pool.run(ceil_div(num_rows, rows), 0, [&](Pool::Units& units, char*) {
    for (int64_t unit; units.take(&unit);)
      for (int64_t row = unit * rows; row < smaller(num_rows, (unit + 1) * rows); row++) body(row);
  });
}

// out = weight * T(x / rms(x)), rounded where Hugging Face's modules round.
template <class T>
void norm_row(const T* x, T* residual, const T* weight, T* out, int64_t width, float eps) {
  Floats squares = {};
  for (int64_t i = 0; i < width; i += LANES) {
    Floats v = load_first(x + i, width - i);
    if (residual) {
      v = as_stored<T>(v + load_first(residual + i, width - i));
      store_first(residual + i, v, width - i);
    }
    squares = fmadd(v, v, squares);
  }
  if (residual) x = residual;
  Floats scale = splat(1.0f / std::sqrt(sum(squares) / float(width) + eps));
  for (int64_t i = 0; i < width; i += LANES) {
    Floats v = as_stored<T>(load_first(x + i, width - i) * scale);
    store_first(out + i, v * load_first(weight + i, width - i), width - i);
  }
}

template <class T>
void rms_norm(Pool& pool, const NormArgs& a) {
  for_rows(pool, a.num_rows, a.num_heads * a.width, [&](int64_t row) {
    for (int64_t head = 0; head < a.num_heads; head++)
      norm_row(static_cast<const T*>(a.x) + row * a.x_stride + head * a.x_head_stride,
               a.residual ? static_cast<T*>(a.residual) + row * a.residual_stride : nullptr,
               static_cast<const T*>(a.weight),
               static_cast<T*>(a.out) + row * a.out_stride + head * a.out_head_stride, a.width, a.eps);
  });
}

template <class T>
void rope(Pool& pool, const RopeArgs& a) {
  int64_t half = a.head_dim / 2;
  for_rows(pool, a.num_rows, a.num_heads * a.head_dim, [&](int64_t row) {
    const T *cos = static_cast<const T*>(a.cos) + row * a.cos_stride;
    const T *sin = static_cast<const T*>(a.sin) + row * a.cos_stride;
    for (int64_t head = 0; head < a.num_heads; head++) {
      T* x = static_cast<T*>(a.x) + row * a.x_stride + head * a.x_head_stride;
      for (int64_t i = 0; i < half; i += LANES) {
        int64_t left = half - i;
        auto at = [&](const T* p) { return load_first(p + i, left); };
        Floats low = at(x), high = at(x + half);
        store_first(x + i, fmadd(high, at(sin), low * at(cos)), left);
        store_first(x + half + i, fmadd(low, at(sin + half), high * at(cos + half)), left);
      }
    }
  });
}

template <class T>
void write_kv(Pool& pool, const WriteArgs& a) {
  for_rows(pool, a.num_rows, 2 * a.num_heads * a.head_dim, [&](int64_t row) {
    int64_t slot = a.slots[row];
    int64_t at = slot / a.block_size * a.block_stride + slot % a.block_size * a.token_stride;
    int64_t bytes = a.head_dim * sizeof(T);
    for (int64_t head = 0; head < a.num_heads; head++) {
      int64_t to = at + head * a.head_stride, from = head * a.head_dim;
      memcpy(static_cast<T*>(a.key_blocks) + to, static_cast<const T*>(a.keys) + row * a.key_stride + from, bytes);
      memcpy(static_cast<T*>(a.value_blocks) + to, static_cast<const T*>(a.values) + row * a.value_stride + from,
             bytes);
    }
  });
}

}  // namespace splitserve
