// Which experts does each row pass, and what do they give together? Row by row the same, whatever rows are beside it.
#pragma once
#include <cmath>

#include "elementwise.h"
#include "linear.h"

namespace splitserve {

// Mirrored by ctypes. logits [rows, experts] -> experts and weights [rows, chosen], in the order of experts.
struct RouteArgs {
  const float* logits;
  int64_t* experts;
  float* weights;
  int64_t num_rows, num_experts, num_chosen;
  int32_t normalizes;
};

// Mirrored by ctypes. `gate_ups` and `downs` are the packed matrices of the experts [first, first + num_held), one after
// the other; x and y are [rows, hidden].
struct ExpertsArgs {
  const void* x;
  const int64_t* experts;
  const float* weights;
  const void *gate_ups, *downs;
  void* y;
  int64_t num_rows, num_chosen, first, num_held, hidden, inner, x_stride;
};

// Of equal odds the first is chosen; so it is where odds are no numbers.
inline void route_row(const RouteArgs& a, int64_t row, float* odds, bool* is_chosen) {
  const float* logits = a.logits + row * a.num_experts;
  float most = logits[0], sum = 0, chosen_sum = 0;
  for (int64_t e = 1; e < a.num_experts; e++) most = logits[e] > most ? logits[e] : most;
  for (int64_t e = 0; e < a.num_experts; e++) {
    sum += odds[e] = std::exp(logits[e] - most);
    is_chosen[e] = false;
  }
  for (int64_t i = 0; i < a.num_chosen; i++) {
    int64_t best = -1;
    for (int64_t e = 0; e < a.num_experts; e++)
      if (!is_chosen[e] && (best < 0 || odds[e] > odds[best])) best = e;
    is_chosen[best] = true;
  }
  int64_t place = row * a.num_chosen, first = place;
  for (int64_t e = 0; e < a.num_experts; e++) {
    if (!is_chosen[e]) continue;
    a.experts[place] = e;
    chosen_sum += a.weights[place++] = odds[e] / sum;
  }
  for (; a.normalizes && first < place; first++) a.weights[first] /= chosen_sum;
}

inline void route(Pool& pool, const RouteArgs& a) {
  pool.run(a.num_rows, a.num_experts * (sizeof(float) + sizeof(bool)), [&](Pool::Units& units, char* scratch) {
    float* odds = reinterpret_cast<float*>(scratch);
    for (int64_t row; units.take(&row);) route_row(a, row, odds, reinterpret_cast<bool*>(odds + a.num_experts));
  });
}

// The pairs of row and expert, [rows * chosen], sorted by expert and then by row. `starts` [held + 1]: where an
// expert's begin. `pairs`: the sorted ones; `places`: where a pair went, or -1 for those of experts that are elsewhere.
inline void sort_by_expert(const ExpertsArgs& a, int64_t* starts, int64_t* pairs, int64_t* places) {
  int64_t num_pairs = a.num_rows * a.num_chosen;
  auto is_held = [&](int64_t pair) { return a.experts[pair] >= a.first && a.experts[pair] < a.first + a.num_held; };
  for (int64_t e = 0; e <= a.num_held; e++) starts[e] = 0;
  for (int64_t pair = 0; pair < num_pairs; pair++)
    if (is_held(pair)) starts[a.experts[pair] - a.first + 1]++;
  for (int64_t e = 0; e < a.num_held; e++) starts[e + 1] += starts[e];
  for (int64_t pair = 0; pair < num_pairs; pair++) {
    places[pair] = is_held(pair) ? starts[a.experts[pair] - a.first]++ : -1;
    if (places[pair] >= 0) pairs[places[pair]] = pair;
  }
  for (int64_t e = a.num_held; e > 0; e--) starts[e] = starts[e - 1];
  starts[0] = 0;
}

// y[row] = the sum over its experts, in their order, of weight * result; rounded once.
template <class T>
void add_up(const ExpertsArgs& a, const int64_t* places, const T* results, int64_t row) {
  for (int64_t j = 0; j < a.hidden; j += LANES) {
    Floats total = splat(0);
    for (int64_t pair = row * a.num_chosen; pair < (row + 1) * a.num_chosen; pair++)
      if (places[pair] >= 0)
        total = fmadd(splat(a.weights[pair]), load_first(results + places[pair] * a.hidden + j, a.hidden - j), total);
    store_first(static_cast<T*>(a.y) + row * a.hidden + j, total, a.hidden - j);
  }
}

template <class T>
int64_t matrix_values(int64_t n, int64_t k, Epilogue epilogue) {
  return ceil_div(n, columns_of_panel(epilogue)) * ceil_div(k, OperandOf<T>::type::DEPTH) * OperandOf<T>::type::DEPTH *
         PANEL;
}

template <class T>
void experts(Pool& pool, const ExpertsArgs& a) {
  int64_t num_pairs = a.num_rows * a.num_chosen, num_indices = ceil_div(a.num_held + 1 + 2 * num_pairs, 8) * 8;
  int64_t index_bytes = num_indices * sizeof(int64_t);
  char* memory = pool.shared<char>(index_bytes + num_pairs * (a.hidden + a.inner) * sizeof(T));
  int64_t* starts = reinterpret_cast<int64_t*>(memory);
  int64_t *pairs = starts + a.num_held + 1, *places = pairs + num_pairs;
  T* rows = reinterpret_cast<T*>(memory + index_bytes);  // [pairs, hidden]: what experts take, then what they give
  T* inner = rows + num_pairs * a.hidden;
  sort_by_expert(a, starts, pairs, places);

  for_rows(pool, starts[a.num_held], a.hidden, [&](int64_t place) {
    const T* row = static_cast<const T*>(a.x) + pairs[place] / a.num_chosen * a.x_stride;
    memcpy(rows + place * a.hidden, row, a.hidden * sizeof(T));
  });
  for (int64_t e = 0; e < a.num_held; e++) {
    int64_t first = starts[e], count = starts[e + 1] - first;
    if (!count) continue;
    const T* gate_up = static_cast<const T*>(a.gate_ups) + e * matrix_values<T>(a.inner, a.hidden, Epilogue::GATE);
    const T* down = static_cast<const T*>(a.downs) + e * matrix_values<T>(a.hidden, a.inner, Epilogue::STORE);
    T *mine = rows + first * a.hidden, *mine_inner = inner + first * a.inner;
    linear<T>(pool, {mine, gate_up, nullptr, mine_inner, count, a.inner, a.hidden, a.hidden, a.inner, Epilogue::GATE});
    linear<T>(pool, {mine_inner, down, nullptr, mine, count, a.hidden, a.inner, a.inner, a.hidden, Epilogue::STORE});
  }
  for_rows(pool, a.num_rows, a.hidden * a.num_chosen, [&](int64_t row) { add_up<T>(a, places, rows, row); });
}

}  // namespace splitserve
