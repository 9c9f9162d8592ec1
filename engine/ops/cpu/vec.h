// What is one vector of floats, and what can be done with it? All that depends on the instruction set is here.
//
// The build defines SPLITSERVE_LANES (8 or 16) and SPLITSERVE_NATIVE_BF16 (0 or 1). Sixteen lanes without
// AVX-512 is legal and slow: tests build it, to run the wide code on a CPU that lacks the instructions.
// Multiply-adds are always explicit (-ffp-contract=off), so every instantiation rounds alike.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace splitserve {

constexpr int LANES = SPLITSERVE_LANES;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct bf16 {
  uint16_t bits;
};

template <class T>
inline T smaller(T a, T b) { return a < b ? a : b; }
template <class T>
inline T larger(T a, T b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

#if SPLITSERVE_LANES == 8
inline Floats splat(float x) { return (Floats)_mm256_set1_ps(x); }
inline Floats fmadd(Floats a, Floats b, Floats c) { return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#elif defined(__AVX512F__)
inline Floats splat(float x) { return (Floats)_mm512_set1_ps(x); }
inline Floats fmadd(Floats a, Floats b, Floats c) { return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#else
inline Floats splat(float x) {
  Floats v;
  for (int i = 0; i < LANES; i++) v[i] = x;
  return v;
}
inline Floats fmadd(Floats a, Floats b, Floats c) {
  __m256 x[2], y[2], z[2];
  memcpy(x, &a, sizeof a), memcpy(y, &b, sizeof b), memcpy(z, &c, sizeof c);
  for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
  memcpy(&c, z, sizeof c);
  return c;
}
#endif

// acc += a * b in acc's own register. Left to itself GCC 12 writes the sum over `a`, runs out of registers in the
// inner loop of tile.h and spills accumulators: a quarter of the speed.
inline void accumulate(Floats& acc, Floats a, Floats b) {
#if SPLITSERVE_LANES == 8 || defined(__AVX512F__)
  asm("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
#else
  acc = fmadd(a, b, acc);
#endif
}

template <class V, class T>
inline V load_raw(const T* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

// The bits of each float rounded to bfloat16 (nearest, ties to even), in the low half of its lane.
inline Words round_bf16(Floats x) {
  Words u = (Words)x;
  Words rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return x == x ? rounded : Words{} + 0x7fc0;
}

inline Floats load(const float* p) { return load_raw<Floats>(p); }
// GCC 12 makes five instructions of a conversion between vectors of 16 and 32 bits, where one will do.
inline Words widen(Halves h) {
#if SPLITSERVE_LANES == 8
  return (Words)_mm256_cvtepu16_epi32((__m128i)h);
#elif defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32((__m256i)h);
#else
  return __builtin_convertvector(h, Words);
#endif
}
inline Halves narrow(Words w) {  // each below 2^16
#if SPLITSERVE_LANES == 8
  return (Halves)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)w), _mm256_extracti128_si256((__m256i)w, 1));
#elif defined(__AVX512F__)
  return (Halves)_mm512_cvtepi32_epi16((__m512i)w);
#else
  return __builtin_convertvector(w, Halves);
#endif
}

inline Floats load(const bf16* p) { return (Floats)(widen(load_raw<Halves>(p)) << 16); }
inline void store(float* p, Floats v) { memcpy(p, &v, sizeof v); }
inline void store(bf16* p, Floats v) {
#if SPLITSERVE_LANES == 16 && defined(__AVX512BF16__)
  __m256bh h = _mm512_cvtneps_pbh((__m512)v);
#else
  Halves h = narrow(round_bf16(v));
#endif
  memcpy(p, &h, sizeof h);
}

// As load and store, for the first `count` lanes only; the others read as zero and are not written.
template <class T>
inline Floats load_first(const T* p, int64_t count) {
  if (count >= LANES) return load(p);
  T padded[LANES] = {};
  memcpy(padded, p, count * sizeof(T));
  return load(padded);
}
template <class T>
inline void store_first(T* p, Floats v, int64_t count) {
  if (count >= LANES) return store(p, v);
  T padded[LANES];
  store(padded, v);
  memcpy(p, padded, count * sizeof(T));
}

// What is left of `v` once stored as T: the rounding of a model that computes in T.
template <class T>
inline Floats as_stored(Floats v) {
  if constexpr (sizeof(T) == 4) return v;
  else return (Floats)(round_bf16(v) << 16);
}

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

inline bool all_below(Floats v, float bound) {
#if SPLITSERVE_LANES == 8
  return !_mm256_movemask_ps(_mm256_cmp_ps((__m256)v, _mm256_set1_ps(bound), _CMP_GE_OQ));
#elif defined(__AVX512F__)
  return !_mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(bound), _CMP_GE_OQ);
#else
  for (int i = 0; i < LANES; i++)
    if (v[i] >= bound) return false;
  return true;
#endif
}

// Lanes are folded in halves: one fixed order for sums.
template <class Fold>
inline float fold(Floats v, Fold two) {
  typedef float Quarter __attribute__((vector_size(16)));
  Quarter part[LANES / 4];
  memcpy(part, &v, sizeof v);
  for (int half = LANES / 8; half; half /= 2)
    for (int i = 0; i < half; i++) part[i] = two(part[i], part[i + half]);
  Quarter upper = (Quarter)_mm_movehl_ps((__m128)part[0], (__m128)part[0]);
  Quarter pair = two(part[0], upper);
  return two(pair, (Quarter)_mm_movehdup_ps((__m128)pair))[0];
}
inline float sum(Floats v) {
  return fold(v, [](auto a, auto b) { return a + b; });
}
inline float max(Floats v) {
  return fold(v, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x to about 1 ulp for -87 <= x <= 88, clamped outside (Cephes' polynomial).
inline Floats exp(Floats x) {
  x = x > -87.0f ? x : splat(-87.0f);
  x = x < 88.0f ? x : splat(88.0f);
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, found in the low bits
  Floats shifted = fmadd(x, splat(1.44269504f), splat(magic));
  Floats n = shifted - magic;
  Floats r = fmadd(n, splat(-0.693359375f), x);
  r = fmadd(n, splat(2.12194440e-4f), r);
  Floats p = splat(1.9875691500e-4f);
  p = fmadd(p, r, splat(1.3981999507e-3f));
  p = fmadd(p, r, splat(8.3334519073e-3f));
  p = fmadd(p, r, splat(4.1665795894e-2f));
  p = fmadd(p, r, splat(1.6666665459e-1f));
  p = fmadd(p, r, splat(5.0000001201e-1f));
  p = fmadd(p * r, r, r + 1.0f);
  return (Floats)((Ints)p + ((Ints)shifted << 23));
}

inline Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

}  // namespace splitserve
