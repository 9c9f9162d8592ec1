// How do keys and values, rows of scattered blocks, become the panels that tile.h multiplies with?
#pragma once
#include "tile.h"

namespace splitserve {

constexpr int KEYS = 64, MAX_HEAD_DIM = 256;  // of a tile

// Where the KEYS rows of one tile lie, keys and values.
template <class T>
struct TileRows {
  const T *keys[KEYS], *values[KEYS];
};

inline void prefetch(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch((const char*)row + i, _MM_HINT_T1);
}

// Rows of 8 keys, 8 words of each, to 8 rows of 8 words, `out_stride` words apart.
inline void transpose_8x8(const void* const* rows, int64_t word, uint32_t* out, int64_t out_stride) {
  __m256i r[8], t[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_si256((const __m256i*)((const uint32_t*)rows[i] + word));
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_si256((__m256i*)(out + i * out_stride), _mm256_permute2x128_si256(r[i], r[i + 4], 0x20));
    _mm256_storeu_si256((__m256i*)(out + (i + 4) * out_stride), _mm256_permute2x128_si256(r[i], r[i + 4], 0x31));
  }
}

// panels[key / PANEL][step][key % PANEL]: head_dim is the k of the product. A word is a float or a bfloat16 pair.
// Meanwhile it asks for the first half of the rows of `next`.
inline void pack_keys(const void* const* rows, const void* const* next, int64_t num_words, uint32_t* panels) {
  for (int key = 0; key < KEYS; key += 8) {
    for (int i = 0; i < 4; i++) prefetch(next[key / 2 + i], num_words * 4);
    for (int64_t word = 0; word < num_words; word += 8)
      transpose_8x8(rows + key, word, panels + (key / PANEL * num_words + word) * PANEL + key % PANEL, PANEL);
  }
}

// panels[column / PANEL][step][column % PANEL]: keys are the k of the product.
inline void pack_values(const float* const* rows, int64_t head_dim, float* panels) {
  for (int key = 0; key < KEYS; key++)
    for (int64_t column = 0; column < head_dim; column += 16)
      memcpy(panels + (column / PANEL * KEYS + key) * PANEL + column % PANEL, rows[key] + column, 16 * sizeof(float));
}
inline void pack_values(const bf16* const* rows, int64_t head_dim, uint32_t* panels) {
  for (int key = 0; key < KEYS; key += 2)
    for (int64_t column = 0; column < head_dim; column += 16) {
      __m256i even = _mm256_loadu_si256((const __m256i*)(rows[key] + column));
      __m256i odd = _mm256_loadu_si256((const __m256i*)(rows[key + 1] + column));
      __m256i low = _mm256_unpacklo_epi16(even, odd), high = _mm256_unpackhi_epi16(even, odd);
      uint32_t* out = panels + (column / PANEL * (KEYS / 2) + key / 2) * PANEL + column % PANEL;
      _mm256_storeu_si256((__m256i*)out, _mm256_permute2x128_si256(low, high, 0x20));
      _mm256_storeu_si256((__m256i*)(out + 8), _mm256_permute2x128_si256(low, high, 0x31));
    }
}

// A row of floats in the form of a tile's left side.
inline void store_left(float* p, Floats v) { store(p, v); }
inline void store_left(uint32_t* p, Floats v) { store(reinterpret_cast<bf16*>(p), v); }

}  // namespace splitserve
