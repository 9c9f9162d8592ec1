// How are values weighed where they lie? For few rows of weights it costs less than packing the values first.
//
// The sums are those of tile.h on packed values, bit for bit: one chain of multiply-adds per element, in the same order.
#pragma once
#include "attention_pack.h"

namespace splitserve {

constexpr int MOST_WEIGHED_ROWS = 4;

template <class Op>
constexpr bool weighs_in_place() { return sizeof(typename Op::Left) == sizeof(float) && Op::DEPTH == Op::PARTS; }

// sums[row][column] = sums[row][column] * carry[row] + weights[row] @ values, of WIDTH vectors of columns.
// Meanwhile it asks for these columns of the second half of the rows of `next`.
template <class T, int ROWS, int WIDTH>
void weigh_columns(const float* weights, const T* const* values, const T* const* next, int64_t column, float* sums,
                   int64_t sums_stride, const float* carry) {
  Floats acc[ROWS][WIDTH];
#pragma GCC unroll 4
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
    for (int j = 0; j < WIDTH; j++)
      acc[i][j] = load(sums + i * sums_stride + column + j * LANES) * splat(carry[i]);
  for (int key = 0; key < KEYS; key++) {
    _mm_prefetch((const char*)(next[KEYS / 2 + key / 2] + column + key % 2 * WIDTH * LANES / 2), _MM_HINT_T1);
    Floats left[ROWS];
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; i++) left[i] = splat(weights[i * KEYS + key]);
#pragma GCC unroll 8
    for (int j = 0; j < WIDTH; j++) {
      Floats right = load(values[key] + column + j * LANES);
#pragma GCC unroll 4
      for (int i = 0; i < ROWS; i++) accumulate(acc[i][j], left[i], right);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
    for (int j = 0; j < WIDTH; j++) store(sums + i * sums_stride + column + j * LANES, acc[i][j]);
}

// For `rows` <= MOST_WEIGHED_ROWS rows of KEYS weights; head_dim is a multiple of LANES.
template <class T, int ROWS = MOST_WEIGHED_ROWS>
void weigh(int rows, const float* weights, const T* const* values, const T* const* next, int64_t head_dim, float* sums,
           int64_t sums_stride, const float* carry) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return weigh<T, ROWS - 1>(rows, weights, values, next, head_dim, sums, sums_stride, carry);
  }
  constexpr int WIDTH = ROWS == 1 ? 8 : ROWS < 4 ? 4 : 2;
  int64_t column = 0;
  for (; column + WIDTH * LANES <= head_dim; column += WIDTH * LANES)
    weigh_columns<T, ROWS, WIDTH>(weights, values, next, column, sums, sums_stride, carry);
  for (; column < head_dim; column += LANES)
    weigh_columns<T, ROWS, 1>(weights, values, next, column, sums, sums_stride, carry);
}

}  // namespace splitserve
