// How does a query attend to keys and values that lie in blocks? Decode and chunked prefill in one.
//
// Keys come in tiles of KEYS, aligned to absolute positions, and are packed into panels; scores and values are then two
// products by tile.h with an online softmax between them. Every SPAN positions the softmax starts anew, and the spans
// are merged in ascending order: so spans may be computed by different threads. Nothing depends on where a chunk
// starts, on what else is in the batch, or on who computes what.
#pragma once
#include "attention_units.h"
#include "pool.h"

namespace splitserve {

// Hands out a thread's scratch piece by piece; with a null base it only adds up what is needed.
struct Carver {
  char* base;
  int64_t used = 0;
  template <class T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(base + used);
    used += ceil_div(count * int64_t(sizeof(T)), 64) * 64;
    return piece;
  }
};

template <class T>
struct Attending {
  typedef typename OperandOf<T>::type Op;
  typedef typename Op::Left Left;
  typedef typename Op::Right Right;
  static constexpr int PER_LEFT = Op::DEPTH / Op::PARTS;  // values in one Left

  const AttentionArgs& a;
  const int64_t group, padded_dim, dim_panels, dim_steps;
  TileRows<T> tile_rows[2];  // of the current and the next tile, in turns
  Left *query, *weights;
  Right *key_panels, *value_panels;
  float* scores;
  Softmaxed span, whole;
  int64_t scratch_bytes;

  Attending(const AttentionArgs& args, char* scratch)
      : a(args),
        group(a.num_heads / a.num_kv_heads),
        padded_dim(ceil_div(a.head_dim, PANEL) * PANEL),
        dim_panels(padded_dim / PANEL),
        dim_steps(a.head_dim / Op::DEPTH) {
    Carver c{scratch};
    int64_t rows = larger<int64_t>(UNIT_ROWS, group);
    query = c.take<Left>(rows * padded_dim / PER_LEFT);
    weights = c.take<Left>(MAX_ROWS * KEYS / PER_LEFT);
    key_panels = c.take<Right>(KEYS * dim_steps);
    value_panels = c.take<Right>(KEYS / Op::DEPTH * padded_dim);
    scores = c.take<float>(MAX_ROWS * KEYS);
    span = Softmaxed::in(c.take<float>(Softmaxed::num_floats(rows, padded_dim)), rows, padded_dim);
    whole = Softmaxed::in(c.take<float>(Softmaxed::num_floats(rows, padded_dim)), rows, padded_dim);
    scratch_bytes = c.used;
  }

  // Finds the rows of keys [tile, tile + KEYS) in the blocks. Those that the unit does not see read as zero: what lies
  // there may be anything, NaN too.
  void find_rows(const Unit& unit, int64_t kv_head, int64_t tile, TileRows<T>* rows) const {
    alignas(64) static const T zeros[MAX_HEAD_DIM] = {};
    const int32_t* table = a.block_tables + unit.seq * a.table_stride;
    for (int i = 0; i < KEYS; i++) rows->keys[i] = rows->values[i] = zeros;
    int64_t end = smaller(tile + KEYS, unit.end);
    for (int64_t at = larger(tile, unit.first); at < end;) {
      int64_t offset = at % a.block_size, block_end = smaller(end, at - offset + a.block_size);
      int64_t element = table[at / a.block_size] * a.block_stride + kv_head * a.head_stride + offset * a.token_stride;
      for (; at < block_end; at++, element += a.token_stride) {
        rows->keys[at - tile] = static_cast<const T*>(a.keys) + element;
        rows->values[at - tile] = static_cast<const T*>(a.values) + element;
      }
    }
  }

  // Rows in order of KV head, token, and query head of the group.
  template <class Body>
  void each_row(const Unit& unit, const Body& body) const {
    for (int64_t head = 0, row = 0; head < unit.num_kv_heads; head++)
      for (int64_t token = 0; token < unit.num_tokens; token++)
        for (int64_t i = 0; i < group; i++, row++)
          body(row, unit.token + token, ((unit.kv_head + head) * group + i) * a.head_dim);
  }

  void load_query(const Unit& unit) {
    each_row(unit, [&](int64_t row, int64_t token, int64_t column) {
      const T* from = static_cast<const T*>(a.query) + token * a.query_stride + column;
      Left* to = query + row * padded_dim / PER_LEFT;
      for (int64_t i = 0; i + LANES <= a.head_dim; i += LANES) store_left(to + i / PER_LEFT, load(from + i));
    });
  }

  void store_output(const Unit& unit, const Softmaxed& from) const {
    each_row(unit, [&](int64_t row, int64_t token, int64_t column) {
      Floats share = splat(1.0f / from.total[row]);
      T* to = static_cast<T*>(a.out) + token * a.out_stride + column;
      for (int64_t i = 0; i < a.head_dim; i += LANES)
        store_first(to + i, load(from.sums + row * padded_dim + i) * share, a.head_dim - i);
    });
  }

  // Turns `rows` rows of scores into weights. Row r is row `row` + r of its KV head, whose first token is at `pos`; its
  // sums are at first_sum + r. carry[r] rescales earlier sums.
  void softmax(int rows, int64_t row, int64_t first_sum, int64_t pos, int64_t tile, const Softmaxed& to, float* carry) {
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    constexpr int WIDTH = KEYS / LANES;
    for (int r = 0; r < rows; r++) {
      int64_t at = pos + (row + r) / group, oldest = a.window ? at - a.window + 1 : 0;
      float &peak = to.peak[first_sum + r], &total = to.total[first_sum + r];
      Floats s[WIDTH];
      Ints seen[WIDTH];
      bool all_seen = tile + KEYS - 1 <= at && tile >= oldest;
      Floats top = splat(UNSEEN);
      for (int j = 0; j < WIDTH; j++) {
        s[j] = load(scores + r * KEYS + j * LANES) * a.scale;
        if (!all_seen) {
          Ints key = lane + int(tile + j * LANES);
          seen[j] = (key <= int(at)) & (key >= int(oldest));
          s[j] = seen[j] ? s[j] : splat(UNSEEN);
        }
        top = max(top, s[j]);
      }
      float new_peak = larger(peak, max(top));
      Floats added = {};
      for (int j = 0; j < WIDTH; j++) {
        Floats w = exp(s[j] - new_peak);
        if (!all_seen) w = seen[j] ? w : Floats{};
        added += w;
        store_left(weights + (r * KEYS + j * LANES) / PER_LEFT, w);
      }
      carry[r] = exp(splat(peak - new_peak))[0];
      total = total * carry[r] + sum(added);
      peak = new_peak;
    }
  }

  // Attends with one KV head's rows to one tile. Each stage asks for a part of the rows that come next: a CPU can wait
  // for some twenty lines at once, so what is asked for in one go would hold it up.
  void attend_tile(const Unit& unit, int64_t head, int64_t tile, const TileRows<T>& now, const TileRows<T>& next,
                   const Softmaxed& to) {
    const void *score_ahead[KEYS / PANEL], *value_ahead[MAX_HEAD_DIM / PANEL];
    for (int i = 0; i < KEYS / PANEL; i++) score_ahead[i] = (i < KEYS / PANEL / 2 ? next.values : next.keys)[i * PANEL];
    for (int64_t i = 0; i < dim_panels; i++) value_ahead[i] = next.values[i * KEYS / dim_panels];
    pack_keys(reinterpret_cast<const void* const*>(now.keys), reinterpret_cast<const void* const*>(next.keys), dim_steps,
              reinterpret_cast<uint32_t*>(key_panels));
    int64_t rows = unit.num_tokens * group, first_row = head * rows, ahead_step = LINES * 64;
    pack_values(now.values, a.head_dim, value_panels);
    split_rows(rows, [&](int64_t row, int count) {
      int64_t at = first_row + row;
      float carry[MAX_ROWS];
      tiles<Op>(count, KEYS / PANEL,
                {query + at * padded_dim / PER_LEFT, padded_dim / PER_LEFT, key_panels, dim_steps * PANEL, dim_steps,
                 scores, KEYS, nullptr, score_ahead, ahead_step});
      softmax(count, row, at, unit.pos, tile, to, carry);
      tiles<Op>(count, dim_panels,
                {weights, KEYS / PER_LEFT, value_panels, KEYS / Op::DEPTH * PANEL, KEYS / Op::DEPTH,
                 to.sums + at * padded_dim, padded_dim, carry, value_ahead, ahead_step});
      ahead_step = 0;  // once is enough
    });
  }

  // `after` is a guess at the unit that this thread computes next.
  void attend(const Unit& unit, const Unit& after) {
    int64_t rows = unit.num_rows(group);
    Softmaxed to = unit.partial ? Softmaxed::in(unit.partial, rows, padded_dim) : span;
    load_query(unit);
    whole.clear(rows, padded_dim);
    if (padded_dim != a.head_dim) memset(value_panels, 0, KEYS / Op::DEPTH * padded_dim * sizeof(Right));
    int64_t tile = unit.first_tile();
    int turn = 0;
    find_rows(unit, unit.kv_head, tile, &tile_rows[turn]);
    to.clear(rows, padded_dim);
    while (tile < unit.end) {
      int64_t next_tile = tile + KEYS;
      for (int64_t head = 0; head < unit.num_kv_heads; head++, turn ^= 1) {
        TileRows<T>* next = &tile_rows[turn ^ 1];
        if (head + 1 < unit.num_kv_heads) find_rows(unit, unit.kv_head + head + 1, tile, next);
        else if (next_tile < unit.end) find_rows(unit, unit.kv_head, next_tile, next);
        else find_rows(after, after.kv_head, after.first_tile(), next);
        attend_tile(unit, head, tile, tile_rows[turn], *next, to);
      }
      tile = next_tile;
      if (!unit.partial && (tile % SPAN == 0 || tile >= unit.end)) {
        whole.merge(to, rows, padded_dim);
        to.clear(rows, padded_dim);
      }
    }
    if (!unit.partial) store_output(unit, whole);
  }

  // Does for spans that were computed apart what attend() does for its own.
  void merge(const Unit* spans, int64_t num_spans) {
    int64_t rows = spans->num_rows(group);
    whole.clear(rows, padded_dim);
    for (int64_t i = 0; i < num_spans; i++)
      whole.merge(Softmaxed::in(spans[i].partial, rows, padded_dim), rows, padded_dim);
    store_output(*spans, whole);
  }
};

// Tokens at negative positions (a padding row: context_len 0) yield zeros.
template <class T>
void zero_padding(const AttentionArgs& a) {
  for (int32_t seq = 0; seq < a.num_seqs; seq++) {
    int64_t num_tokens = a.query_start[seq + 1] - a.query_start[seq];
    int64_t padding = smaller(larger<int64_t>(num_tokens - a.context_len[seq], 0), num_tokens);
    for (int64_t i = 0; i < padding; i++)
      memset(static_cast<T*>(a.out) + (a.query_start[seq] + i) * a.out_stride, 0,
             a.num_heads * a.head_dim * sizeof(T));
  }
}

template <class T>
void attention(Pool& pool, const AttentionArgs& a) {
  zero_padding<T>(a);
  Units units(a, pool.num_threads());
  Attending<T> sizes(a, nullptr);
  units.place_partials(sizes.padded_dim, [&](int64_t bytes) { return pool.shared<float>(bytes); });
  pool.run(units.count(), sizes.scratch_bytes, [&](Pool::Units& work, char* scratch) {
    Attending<T> task(a, scratch);
    for (int64_t i; work.take(&i);) task.attend(units[i], units[i + pool.num_threads()]);
  });
  const auto& spans = units.spans();
  if (spans.empty()) return;
  constexpr int64_t MERGED_ROWS = 32;  // what is worth waking a thread for
  int64_t num_spans = int64_t(spans.size()), rows = units[spans[0].first_unit].num_rows(sizes.group);
  int64_t at_once = larger<int64_t>(MERGED_ROWS / rows, 1);
  pool.run(ceil_div(num_spans, at_once), sizes.scratch_bytes, [&](Pool::Units& work, char* scratch) {
    Attending<T> task(a, scratch);
    for (int64_t unit; work.take(&unit);)
      for (int64_t i = unit * at_once; i < smaller(num_spans, (unit + 1) * at_once); i++)
        task.merge(&units[spans[i].first_unit], spans[i].num_units);
  });
}

}  // namespace splitserve
