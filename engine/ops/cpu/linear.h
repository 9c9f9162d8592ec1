// How is y = x @ w^T computed on packed weights, and what happens to a result before it is stored?
#pragma once
#include "pool.h"
#include "tile.h"

namespace splitserve {

enum class Epilogue : int32_t {
  STORE = 0,    // y = x @ w^T
  GATE = 1,     // y = silu(x @ gate^T) * (x @ up^T); a panel holds LANES columns of each
  FLOAT32 = 2,  // as STORE, unrounded, into float32
};

// Mirrored by ctypes. Strides in elements; n is the number of output columns. bias is float32 in panel order, or null.
struct LinearArgs {
  const void *x, *panels;
  const float* bias;
  void* y;
  int64_t num_rows, n, k, x_stride, y_stride;
  Epilogue epilogue;
};

// `up` is null, or for GATE the second matrix, of the same shape and stride as `weight`; n is the rows of one of them.
struct PackArgs {
  const void *weight, *up;
  int64_t n, k, weight_stride;
  void* panels;
};

constexpr int columns_of_panel(Epilogue e) { return e == Epilogue::GATE ? LANES : PANEL; }

// panels[p][step][column][k in step] from w[n, k]; with `up`, the second half of a panel's columns is from it.
template <class T>
void pack_panel(const T* w, const T* up, int64_t n, int64_t k, int64_t w_stride, int64_t p, T* panel) {
  constexpr int DEPTH = OperandOf<T>::type::DEPTH;
  int64_t num_steps = ceil_div(k, DEPTH);
  for (int column = 0; column < PANEL; column++) {
    const T* source = up && column >= LANES ? up : w;
    int64_t row = up ? p * LANES + column % LANES : p * PANEL + column;
    for (int64_t i = 0; i < num_steps * DEPTH; i++)
      panel[(i / DEPTH * PANEL + column) * DEPTH + i % DEPTH] = row < n && i < k ? source[row * w_stride + i] : T{};
  }
}

template <class T>
void pack(Pool& pool, const PackArgs& a) {
  int64_t num_panels = ceil_div(a.n, a.up ? LANES : PANEL);
  int64_t panel_values = ceil_div(a.k, OperandOf<T>::type::DEPTH) * OperandOf<T>::type::DEPTH * PANEL;
  pool.run(num_panels, 0, [&](Pool::Units& units, char*) {
    for (int64_t p; units.take(&p);)
      pack_panel(static_cast<const T*>(a.weight), static_cast<const T*>(a.up), a.n, a.k, a.weight_stride, p,
                 static_cast<T*>(a.panels) + p * panel_values);
  });
}

// Rows of x in the form that a tile reads: as they are where possible, else widened or padded into `staged`.
template <class T, class Left>
const Left* stage_rows(const T* x, int64_t x_stride, int64_t rows, int64_t k, Left* staged, int64_t* left_stride) {
  constexpr int PER_LEFT = sizeof(Left) == 4 && sizeof(T) == 2 ? 2 : 1;
  if constexpr (sizeof(T) == 4) {
    *left_stride = x_stride;
    return x;
  } else if constexpr (OperandOf<T>::type::PARTS == 1) {
    if (k % PER_LEFT == 0 && x_stride % PER_LEFT == 0) {
      *left_stride = x_stride / PER_LEFT;
      return reinterpret_cast<const Left*>(x);
    }
    *left_stride = ceil_div(k, 2);
    for (int64_t i = 0; i < rows; i++) {
      staged[(i + 1) * *left_stride - 1] = 0;
      memcpy(staged + i * *left_stride, x + i * x_stride, k * sizeof(T));
    }
  } else {
    *left_stride = ceil_div(k, LANES) * LANES + 16;  // rows a power of two apart would share few cache sets
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < k; j += LANES)
        store(staged + i * *left_stride + j, load_first(x + i * x_stride + j, k - j));
  }
  return staged;
}

// Applies the epilogue to rows [first, first + rows) x panels [p, p + num_panels) of float32 sums.
template <class T>
void finish(const LinearArgs& a, const float* sums, int64_t first, int rows, int64_t p, int64_t num_panels) {
  int64_t width = columns_of_panel(a.epilogue);
  for (int i = 0; i < rows; i++) {
    T* y = static_cast<T*>(a.y) + (first + i) * a.y_stride;
    float* y32 = static_cast<float*>(a.y) + (first + i) * a.y_stride;
    for (int64_t j = 0; j < num_panels * 2; j++) {
      auto biased = [&](int64_t v) {
        Floats s = load(sums + i * num_panels * PANEL + v * LANES);
        return a.bias ? s + load(a.bias + p * PANEL + v * LANES) : s;
      };
      int64_t column = p * width + (a.epilogue == Epilogue::GATE ? j / 2 : j) * LANES, left = a.n - column;
      if (left <= 0) continue;
      Floats value = biased(j);
      if (a.epilogue == Epilogue::FLOAT32) {
        store_first(y32 + column, value, left);
        continue;
      }
      value = as_stored<T>(value);
      if (a.epilogue == Epilogue::GATE) value = as_stored<T>(silu(value)) * as_stored<T>(biased(++j));
      store_first(y + column, value, left);
    }
  }
}

template <class T>
void linear(Pool& pool, const LinearArgs& a) {
  typedef typename OperandOf<T>::type Op;
  typedef typename Op::Left Left;
  constexpr int64_t STAGED_BYTES = 256 << 10, AHEAD_BYTES = 2048;
  int64_t num_panels = ceil_div(a.n, columns_of_panel(a.epilogue)), num_steps = ceil_div(a.k, Op::DEPTH);
  // A block of rows stays in L2 while panels pass by; a unit is a run of panels, so weights are read in long pieces.
  int64_t fit = smaller<int64_t>(larger<int64_t>(STAGED_BYTES / (a.k * 4) / MAX_ROWS, 2), 96 / MAX_ROWS) * MAX_ROWS;
  int64_t num_blocks = ceil_div(a.num_rows, fit);
  int64_t block_rows = ceil_div(ceil_div(a.num_rows, num_blocks), MAX_ROWS) * MAX_ROWS;
  int64_t run = larger<int64_t>(smaller(ceil_div(num_panels, 4 * pool.num_threads()), 384 / block_rows), 1);
  int64_t num_runs = ceil_div(num_panels, run);

  int64_t sums_bytes = MAX_ROWS * 4 * PANEL * sizeof(float);
  int64_t staged_bytes = block_rows * (a.k + LANES + 16) * sizeof(Left);
  pool.run(num_blocks * num_runs, sums_bytes + staged_bytes, [&](Pool::Units& units, char* scratch) {
    float* sums = reinterpret_cast<float*>(scratch);
    Left* staged = reinterpret_cast<Left*>(scratch + sums_bytes);
    const Left* left = nullptr;
    int64_t left_stride = 0, staged_block = -1;
    for (int64_t unit; units.take(&unit);) {
      int64_t block = unit / num_runs, first = block * block_rows, rows = smaller(block_rows, a.num_rows - first);
      if (block != staged_block)
        left = stage_rows(static_cast<const T*>(a.x) + first * a.x_stride, a.x_stride, rows, a.k, staged,
                          &left_stride);
      staged_block = block;
      int64_t p = unit % num_runs * run, end = smaller(num_panels, p + run);
      for (int64_t count; p < end; p += count) {
        count = smaller<int64_t>(rows <= MAX_ROWS ? panels_at_once(rows) : 1, end - p);
        const auto* panels = static_cast<const typename Op::Right*>(a.panels) + p * PANEL * num_steps;
        // Memory is kept busy while tiles compute: a lone one looks AHEAD_BYTES forward, which soon is the next panel;
        // several that share a panel fetch the next one whole, each its part.
        int64_t num_tiles = ceil_div(rows, MAX_ROWS), share = PANEL * 4 / num_tiles;
        const char* first_ahead = reinterpret_cast<const char*>(panels);
        first_ahead += num_tiles == 1 ? AHEAD_BYTES : PANEL * 4 * num_steps;
        split_rows(rows, [&](int64_t i, int tile_rows) {
          const void* ahead[MOST_AT_ONCE];
          for (int j = 0; j < MOST_AT_ONCE; j++) ahead[j] = first_ahead + j * PANEL * 4 * num_steps;
          tiles<Op>(tile_rows, count,
                    {left + i * left_stride, left_stride, panels, PANEL * num_steps, num_steps, sums, count * PANEL,
                     nullptr, ahead, share});
          finish<T>(a, sums, first + i, tile_rows, p, count);
          first_ahead += share * num_steps;
        });
      }
    }
  });
}

}  // namespace splitserve
