// What does the library export? A plain C interface; each call is on float32 or bfloat16 by `dtype` (0 or 1).
//
// The file is compiled once per instruction set, into a library of its own: nothing is shared between them, so no
// linker can mix their code. Calls on one pool are serialised; they return when the work is done. Errors: none, for
// well-formed arguments (ops.py checks them); running out of scratch memory ends the process.
#include "attention.h"
#include "draw.h"
#include "elementwise.h"
#include "experts.h"
#include "linear.h"

using namespace splitserve;

#define EXPORT extern "C" __attribute__((visibility("default")))
#define BY_DTYPE(function, ...) \
  do {                          \
    if (dtype == 0)             \
      function<float>(__VA_ARGS__); \
    else                        \
      function<bf16>(__VA_ARGS__);  \
  } while (0)

EXPORT Pool* splitserve_pool_create(int32_t num_threads) { return new Pool(num_threads); }
EXPORT void splitserve_pool_destroy(Pool* pool) { delete pool; }

// Columns of a panel and values of k in a step: a packed matrix is [panels, steps, columns, depth].
EXPORT int32_t splitserve_panel_columns() { return PANEL; }
EXPORT int32_t splitserve_step_depth(int32_t dtype) { return dtype == 0 ? Float32::DEPTH : Bf16::DEPTH; }

EXPORT void splitserve_pack(Pool* pool, int32_t dtype, const PackArgs* a) { BY_DTYPE(pack, *pool, *a); }
EXPORT void splitserve_linear(Pool* pool, int32_t dtype, const LinearArgs* a) { BY_DTYPE(linear, *pool, *a); }
EXPORT void splitserve_attention(Pool* pool, int32_t dtype, const AttentionArgs* a) { BY_DTYPE(attention, *pool, *a); }
EXPORT void splitserve_rms_norm(Pool* pool, int32_t dtype, const NormArgs* a) { BY_DTYPE(rms_norm, *pool, *a); }
EXPORT void splitserve_rope(Pool* pool, int32_t dtype, const RopeArgs* a) { BY_DTYPE(rope, *pool, *a); }
EXPORT void splitserve_write_kv(Pool* pool, int32_t dtype, const WriteArgs* a) { BY_DTYPE(write_kv, *pool, *a); }
EXPORT void splitserve_experts(Pool* pool, int32_t dtype, const ExpertsArgs* a) { BY_DTYPE(experts, *pool, *a); }

EXPORT void splitserve_route(Pool* pool, int32_t, const RouteArgs* a) { route(*pool, *a); }
EXPORT void splitserve_draw(Pool* pool, int32_t, const DrawArgs* a) { draw(*pool, *a); }

// Makes calls again that were made before, one after the other: a step costs Python a call, not hundreds.
struct Call {
  void (*function)(Pool*, int32_t, const void*);
  int64_t dtype;
  const void* args;
};
EXPORT void splitserve_replay(Pool* pool, const Call* calls, int64_t num_calls) {
  for (int64_t i = 0; i < num_calls; i++) calls[i].function(pool, int32_t(calls[i].dtype), calls[i].args);
}
