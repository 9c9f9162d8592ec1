// How fast can this machine multiply and read at all? Measured with the kernels' own vectors and threads.
//
// The functions of the ops are here, too, doing nothing: what a step costs without its arithmetic.
#include "../engine/ops/cpu/tile.h"
#include "../engine/ops/cpu/pool.h"

using namespace splitserve;

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT Pool* splitserve_pool_create(int32_t num_threads) { return new Pool(num_threads); }
EXPORT void splitserve_pool_destroy(Pool* pool) { delete pool; }
EXPORT int32_t splitserve_panel_columns() { return PANEL; }
EXPORT int32_t splitserve_step_depth(int32_t dtype) { return dtype == 0 ? Float32::DEPTH : Bf16::DEPTH; }

#define NOTHING(name) \
  EXPORT void splitserve_##name(Pool*, int32_t, const void*) {}
NOTHING(pack)
NOTHING(linear)
NOTHING(attention)
NOTHING(rms_norm)
NOTHING(rope)
NOTHING(write_kv)
NOTHING(route)
NOTHING(experts)
NOTHING(draw)
EXPORT void splitserve_replay(Pool*, const void*, int64_t) {}

constexpr int CHAINS = 12;  // independent ones: enough to hide the latency of a multiply-add

template <class Op>
static int64_t multiply_in_registers(Pool& pool, int64_t num_units, int64_t rounds) {
  pool.run(num_units, 0, [&](Pool::Units& units, char*) {
    for (int64_t unit; units.take(&unit);) {
      Floats acc[CHAINS] = {};
      typename Op::Vector left{}, right{};
      asm volatile("" : "+m"(left), "+m"(right));
      for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) Op::multiply_add(left, right, acc[i]);
      }
      for (int i = 0; i < CHAINS; i++) asm volatile("" : : "x"(acc[i]));
    }
  });
  return num_units * rounds * CHAINS * LANES * 2 * Op::DEPTH / Op::PARTS;
}

// Returns the floating point operations done.
EXPORT int64_t limits_multiply(Pool* pool, int32_t dtype, int64_t num_units, int64_t rounds) {
  return dtype == 0 ? multiply_in_registers<Float32>(*pool, num_units, rounds)
                    : multiply_in_registers<Bf16>(*pool, num_units, rounds);
}

// Reads `num_pieces` pieces of `piece_bytes` (a multiple of 64) at base + offsets[i].
EXPORT void limits_read(Pool* pool, const char* base, const int64_t* offsets, int64_t num_pieces,
                        int64_t piece_bytes) {
  constexpr int64_t UNIT_BYTES = 256 << 10;
  int64_t per_unit = larger<int64_t>(UNIT_BYTES / piece_bytes, 1);
  pool->run(ceil_div(num_pieces, per_unit), 0, [&](Pool::Units& units, char*) {
    Words seen[4] = {};
    for (int64_t unit; units.take(&unit);)
      for (int64_t i = unit * per_unit; i < smaller(num_pieces, (unit + 1) * per_unit); i++)
        for (int64_t at = 0; at < piece_bytes; at += 64) {
          const char* line = base + offsets[i] + at;
          for (int64_t part = 0; part < 64; part += int64_t(sizeof(Words)))
            seen[part / int64_t(sizeof(Words))] ^= load_raw<Words>(line + part);
        }
    for (Words& words : seen) asm volatile("" : : "m"(words));
  });
}
