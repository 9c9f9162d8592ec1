// How is a small matrix product computed? One register tile, used by the linears and by attention alike.
//
// The right matrix [k, n] is packed in panels of PANEL columns, each panel k-major, its values in the pairs that
// the operand type wants. An output element is one chain of multiply-adds in ascending k, whatever the tile's shape:
// that makes a row's bits independent of how many rows are computed with it.
#pragma once
#include "vec.h"

namespace splitserve {

constexpr int PANEL = 2 * LANES;
constexpr int MAX_ROWS = LANES == 16 ? 12 : 6;  // rows of accumulators that fit the registers beside one panel

// float32 x float32, a step covers one k.
struct Float32 {
  typedef float Left, Right;
  typedef Floats Vector;
  static constexpr int DEPTH = 1, PARTS = 1;
  static Floats left(float a) { return splat(a); }
  static Floats right(const float* p, int) { return load(p); }
  static void multiply_add(Floats a, Floats b, Floats& acc) { accumulate(acc, a, b); }
};

// float32 x bfloat16 pairs widened in registers, a step covers two k: the even one, then the odd one.
struct WidenedBf16 {
  typedef float Left;
  typedef uint32_t Right;
  typedef Floats Vector;
  static constexpr int DEPTH = 2, PARTS = 2;
  static Floats left(float a) { return splat(a); }
  static Floats right(const uint32_t* p, int part) {
    Words pair = load_raw<Words>(p);
    return (Floats)(part ? pair & 0xffff0000u : pair << 16);
  }
  static void multiply_add(Floats a, Floats b, Floats& acc) { accumulate(acc, a, b); }
};

#if SPLITSERVE_NATIVE_BF16
// bfloat16 pairs x bfloat16 pairs by the CPU's own dot product, a step covers two k.
struct NativeBf16 {
  typedef uint32_t Left, Right;
  typedef Words Vector;
  static constexpr int DEPTH = 2, PARTS = 1;
  static Words left(uint32_t a) { return Words{} + a; }
  static Words right(const uint32_t* p, int) { return load_raw<Words>(p); }
  static void multiply_add(Words a, Words b, Floats& acc) {
#ifdef __AVX512BF16__
    acc = (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    accumulate(acc, (Floats)(a & 0xffff0000u), (Floats)(b & 0xffff0000u));
    accumulate(acc, (Floats)(a << 16), (Floats)(b << 16));
#endif
  }
};
typedef NativeBf16 Bf16;
#else
typedef WidenedBf16 Bf16;
#endif

template <class T>
struct OperandOf {
  typedef Float32 type;
};
template <>
struct OperandOf<bf16> {
  typedef Bf16 type;
};

// out = left @ right, or out * carry[row] + left @ right where `carry` is given. Strides in elements.
// Meanwhile panel p asks for the memory at ahead[p], LINES lines per step, `ahead_step` bytes further each time.
template <class Op>
struct Product {
  const typename Op::Left* left;
  int64_t left_stride;
  const typename Op::Right* panels;
  int64_t panel_stride, num_steps;
  float* out;
  int64_t out_stride;
  const float* carry;
  const void* const* ahead;
  int64_t ahead_step;
};

constexpr int LINES = PANEL * 4 / 64;  // cache lines of a panel's step

// A left row advances by PARTS, a panel by PANEL, in each step.
template <class Op, int ROWS, int PANELS>
void tile(const Product<Op>& product, int64_t first_panel) {
  constexpr int WIDTH = 2 * PANELS;
  const auto [lefts, left_stride, panels, panel_stride, num_steps, outs, out_stride, carry, aheads, ahead_step] =
      product;
  const typename Op::Right* panel = panels + first_panel * panel_stride;
  const typename Op::Left* row = lefts;
  const char* ahead[PANELS];
#pragma GCC unroll 4
  for (int j = 0; j < PANELS; j++) ahead[j] = static_cast<const char*>(aheads[first_panel + j]);
  float* out = outs + first_panel * PANEL;
  Floats acc[ROWS][WIDTH];
#pragma GCC unroll 12
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
    for (int j = 0; j < WIDTH; j++)
      acc[i][j] = carry ? load(out + i * out_stride + j * LANES) * splat(carry[i]) : Floats{};
  for (int64_t step = 0; step < num_steps; step++) {
#pragma GCC unroll 8
    for (int j = 0; j < PANELS * LINES; j++) _mm_prefetch(ahead[j / LINES] + j % LINES * 64, _MM_HINT_T1);
#pragma GCC unroll 2
    for (int part = 0; part < Op::PARTS; part++) {
      // The shorter side stays in registers, the longer one passes through.
      if constexpr (ROWS < WIDTH) {
        typename Op::Vector left[ROWS];
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; i++) left[i] = Op::left(row[i * left_stride + part]);
#pragma GCC unroll 8
        for (int j = 0; j < WIDTH; j++) {
          typename Op::Vector right = Op::right(panel + j / 2 * panel_stride + j % 2 * LANES, part);
#pragma GCC unroll 12
          for (int i = 0; i < ROWS; i++) Op::multiply_add(left[i], right, acc[i][j]);
        }
      } else {
        typename Op::Vector right[WIDTH];
#pragma GCC unroll 8
        for (int j = 0; j < WIDTH; j++) right[j] = Op::right(panel + j / 2 * panel_stride + j % 2 * LANES, part);
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; i++) {
          typename Op::Vector left = Op::left(row[i * left_stride + part]);
#pragma GCC unroll 8
          for (int j = 0; j < WIDTH; j++) Op::multiply_add(left, right[j], acc[i][j]);
        }
      }
    }
    row += Op::PARTS;
    panel += PANEL;
#pragma GCC unroll 4
    for (int j = 0; j < PANELS; j++) ahead[j] += ahead_step;
  }
#pragma GCC unroll 12
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
    for (int j = 0; j < WIDTH; j++) store(out + i * out_stride + j * LANES, acc[i][j]);
}

// Few rows have few chains of multiply-adds: they take several panels at once to keep the units busy.
constexpr int FEW_ROWS = LANES == 16 ? 6 : 2;  // for which two panels' accumulators fit the registers
constexpr int MOST_AT_ONCE = 4;
constexpr int panels_at_once(int64_t rows) { return rows == 1 ? MOST_AT_ONCE : rows <= FEW_ROWS ? 2 : 1; }

// tile() for run-time sizes: `rows` <= MAX_ROWS, any number of adjacent panels.
template <class Op, int ROWS = MAX_ROWS>
void tiles(int rows, int64_t num_panels, const Product<Op>& product) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return tiles<Op, ROWS - 1>(rows, num_panels, product);
  }
  constexpr int AT_ONCE = panels_at_once(ROWS);
  int64_t p = 0;
  for (; p + AT_ONCE <= num_panels; p += AT_ONCE) tile<Op, ROWS, AT_ONCE>(product, p);
  for (; p < num_panels; p++) tile<Op, ROWS, 1>(product, p);
}

// Calls body(first, rows) for near-equal pieces of at most MAX_ROWS: 8 rows are 4 + 4, not 6 + 2.
template <class Body>
inline void split_rows(int64_t num_rows, const Body& body) {
  int64_t pieces = ceil_div(num_rows, MAX_ROWS), first = 0;
  for (int64_t i = 0; i < pieces; i++) {
    int64_t end = num_rows * (i + 1) / pieces;
    body(first, int(end - first));
    first = end;
  }
}

}  // namespace splitserve
