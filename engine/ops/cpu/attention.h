// How does a query attend to keys and values that lie in blocks? Decode and chunked prefill in one.
//
// A unit is a run of one sequence's tokens with the query heads of one KV head. Keys come in tiles of KEYS, aligned to
// absolute positions, and are packed into panels once per unit; scores and values are then two products by tile.h with
// an online softmax between them. Nothing depends on where a chunk starts or on what else is in the batch.
#pragma once
#include "pool.h"
#include "tile.h"

namespace splitserve {

// Mirrored by ctypes. Strides in elements. `keys` and `values` point to one layer's part of block 0, laid out
// [block, kv head, offset in block, head_dim] by strides; head_dim and query heads are contiguous.
struct AttentionArgs {
  const void *query, *keys, *values;
  void* out;
  const int32_t *block_tables, *query_start, *context_len;  // [seqs, table_stride], [seqs + 1], [seqs]
  int64_t query_stride, out_stride, block_stride, head_stride, token_stride, table_stride;
  int32_t num_seqs, num_heads, num_kv_heads, head_dim, block_size;
  int32_t window;  // a query sees its last `window` positions, itself included; 0: all
  float scale;
};

constexpr int KEYS = 64, MAX_HEAD_DIM = 256, UNIT_ROWS = 96;
constexpr float UNSEEN = -1e30f;

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
// The packers ask for the rows of the next tile as they go: evenly spread, and early enough to hide the memory.
inline void pack_keys(const void* const* rows, const void* const* next, int64_t num_words, uint32_t* panels) {
  for (int key = 0; key < KEYS; key += 8) {
    for (int i = 0; i < 8; i++) prefetch(next[key + i], num_words * 4);
    for (int64_t word = 0; word < num_words; word += 8)
      transpose_8x8(rows + key, word, panels + (key / PANEL * num_words + word) * PANEL + key % PANEL, PANEL);
  }
}

// panels[column / PANEL][step][column % PANEL]: keys are the k of the product.
inline void pack_values(const float* const* rows, const float* const* next, int64_t head_dim, float* panels) {
  for (int key = 0; key < KEYS; key++) {
    prefetch(next[key], head_dim * sizeof(float));
    for (int64_t column = 0; column < head_dim; column += 16)
      memcpy(panels + (column / PANEL * KEYS + key) * PANEL + column % PANEL, rows[key] + column, 16 * sizeof(float));
  }
}
inline void pack_values(const bf16* const* rows, const bf16* const* next, int64_t head_dim, uint32_t* panels) {
  for (int key = 0; key < KEYS; key += 2) {
    prefetch(next[key], head_dim * sizeof(bf16));
    prefetch(next[key + 1], head_dim * sizeof(bf16));
    for (int64_t column = 0; column < head_dim; column += 16) {
      __m256i even = _mm256_loadu_si256((const __m256i*)(rows[key] + column));
      __m256i odd = _mm256_loadu_si256((const __m256i*)(rows[key + 1] + column));
      __m256i low = _mm256_unpacklo_epi16(even, odd), high = _mm256_unpackhi_epi16(even, odd);
      uint32_t* out = panels + (column / PANEL * (KEYS / 2) + key / 2) * PANEL + column % PANEL;
      _mm256_storeu_si256((__m256i*)out, _mm256_permute2x128_si256(low, high, 0x20));
      _mm256_storeu_si256((__m256i*)(out + 8), _mm256_permute2x128_si256(low, high, 0x31));
    }
  }
}

// A row of floats in the form of a tile's left side.
inline void store_left(float* p, Floats v) { store(p, v); }
inline void store_left(uint32_t* p, Floats v) { store(reinterpret_cast<bf16*>(p), v); }

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
  float *scores, *sums, *peak, *total;
  int64_t scratch_bytes;

  Attending(const AttentionArgs& args, char* scratch)
      : a(args),
        group(a.num_heads / a.num_kv_heads),
        padded_dim(ceil_div(a.head_dim, PANEL) * PANEL),
        dim_panels(padded_dim / PANEL),
        dim_steps(a.head_dim / Op::DEPTH) {
    Carver c{scratch};
    int64_t rows = UNIT_ROWS;
    query = c.take<Left>(rows * padded_dim / PER_LEFT);
    weights = c.take<Left>(MAX_ROWS * KEYS / PER_LEFT);
    key_panels = c.take<Right>(KEYS * dim_steps);
    value_panels = c.take<Right>(KEYS / Op::DEPTH * padded_dim);
    scores = c.take<float>(MAX_ROWS * KEYS);
    sums = c.take<float>(rows * padded_dim);
    peak = c.take<float>(rows);
    total = c.take<float>(rows);
    scratch_bytes = c.used;
  }

  static int64_t unit_tokens(const AttentionArgs& a) { return larger(UNIT_ROWS * a.num_kv_heads / a.num_heads, 1); }

  // Finds the rows of keys [tile, tile + KEYS) in the blocks. Positions outside [first, end) read as zero: what lies
  // there may be anything, NaN too.
  void find_rows(const int32_t* table, int64_t kv_head, int64_t tile, int64_t first, int64_t end,
                 TileRows<T>* rows) const {
    alignas(64) static const T zeros[MAX_HEAD_DIM] = {};
    int64_t block = tile / a.block_size, offset = tile % a.block_size;
    for (int i = 0; i < KEYS; i++) {
      rows->keys[i] = rows->values[i] = zeros;
      if (tile + i >= first && tile + i < end) {
        int64_t at = table[block] * a.block_stride + kv_head * a.head_stride + offset * a.token_stride;
        rows->keys[i] = static_cast<const T*>(a.keys) + at;
        rows->values[i] = static_cast<const T*>(a.values) + at;
      }
      if (++offset == a.block_size) block++, offset = 0;
    }
  }

  void load_query(const T* q, int64_t rows) {
    for (int64_t row = 0; row < rows; row++) {
      const T* from = q + row / group * a.query_stride + row % group * a.head_dim;
      Left* to = query + row * padded_dim / PER_LEFT;
      int64_t i = 0;
      for (; i + LANES <= a.head_dim; i += LANES) store_left(to + i / PER_LEFT, load(from + i));
    }
  }

  // Turns `rows` rows of scores into weights; row r is at position pos + r / group. carry[r] rescales earlier sums.
  void softmax(int rows, int64_t row, int64_t pos, int64_t tile, float* carry) {
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    constexpr int WIDTH = KEYS / LANES;
    for (int r = 0; r < rows; r++) {
      int64_t at = pos + (row + r) / group, oldest = a.window ? at - a.window + 1 : 0;
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
      float new_peak = larger(peak[row + r], max(top));
      Floats added = {};
      for (int j = 0; j < WIDTH; j++) {
        Floats w = exp(s[j] - new_peak);
        if (!all_seen) w = seen[j] ? w : Floats{};
        added += w;
        store_left(weights + (r * KEYS + j * LANES) / PER_LEFT, w);
      }
      carry[r] = exp(splat(peak[row + r] - new_peak))[0];
      total[row + r] = total[row + r] * carry[r] + sum(added);
      peak[row + r] = new_peak;
    }
  }

  // Attends with `num_tokens` tokens, the first one at position pos >= 0.
  void attend(const T* q, T* out, int64_t num_tokens, int64_t pos, const int32_t* table, int64_t kv_head) {
    int64_t rows = num_tokens * group, end = pos + num_tokens;
    int64_t first = a.window ? larger<int64_t>(pos - a.window + 1, 0) : 0;
    load_query(q, rows);
    memset(sums, 0, rows * padded_dim * sizeof(float));
    if (padded_dim != a.head_dim) memset(value_panels, 0, KEYS / Op::DEPTH * padded_dim * sizeof(Right));
    for (int64_t row = 0; row < rows; row++) peak[row] = UNSEEN, total[row] = 0;
    int64_t tile = first / KEYS * KEYS;
    find_rows(table, kv_head, tile, first, end, &tile_rows[0]);
    for (int turn = 0; tile < end; tile += KEYS, turn ^= 1) {
      const TileRows<T>&now = tile_rows[turn], &next = tile_rows[turn ^ 1];
      find_rows(table, kv_head, tile + KEYS, first, end, &tile_rows[turn ^ 1]);
      pack_keys(reinterpret_cast<const void* const*>(now.keys), reinterpret_cast<const void* const*>(next.keys),
                dim_steps, reinterpret_cast<uint32_t*>(key_panels));
      pack_values(now.values, next.values, a.head_dim, value_panels);
      split_rows(rows, [&](int64_t row, int count) {
        float carry[MAX_ROWS];
        tiles<Op>(count, KEYS / PANEL,
                  {query + row * padded_dim / PER_LEFT, padded_dim / PER_LEFT, key_panels, dim_steps * PANEL, dim_steps,
                   scores, KEYS, nullptr, nullptr, 0});
        softmax(count, row, pos, tile, carry);
        tiles<Op>(count, dim_panels,
                  {weights, KEYS / PER_LEFT, value_panels, KEYS / Op::DEPTH * PANEL, KEYS / Op::DEPTH,
                   sums + row * padded_dim, padded_dim, carry, nullptr, 0});
      });
    }
    for (int64_t row = 0; row < rows; row++) {
      Floats share = splat(1.0f / total[row]);
      T* to = out + row / group * a.out_stride + row % group * a.head_dim;
      for (int64_t i = 0; i < a.head_dim; i += LANES)
        store_first(to + i, load(sums + row * padded_dim + i) * share, a.head_dim - i);
    }
  }
};

// Tokens at negative positions (a padding row: context_len 0) yield zeros.
template <class T>
void attention(Pool& pool, const AttentionArgs& a) {
  int64_t unit_tokens = Attending<T>::unit_tokens(a), num_pieces = 0;
  auto pieces = [&](int32_t seq) { return ceil_div(a.query_start[seq + 1] - a.query_start[seq], unit_tokens); };
  for (int32_t seq = 0; seq < a.num_seqs; seq++) num_pieces += pieces(seq);
  int64_t scratch_bytes = Attending<T>(a, nullptr).scratch_bytes;
  pool.run(num_pieces * a.num_kv_heads, scratch_bytes, [&](Pool::Units& units, char* scratch) {
    Attending<T> task(a, scratch);
    int64_t before = 0;  // pieces of the sequences before `seq`; units come in ascending order
    int32_t seq = 0;
    for (int64_t unit; units.take(&unit);) {
      int64_t piece = unit / a.num_kv_heads, kv_head = unit % a.num_kv_heads;
      for (; piece - before >= pieces(seq); seq++) before += pieces(seq);
      int64_t length = a.query_start[seq + 1] - a.query_start[seq];
      int64_t from = (pieces(seq) - 1 - (piece - before)) * unit_tokens;  // the long ones first
      int64_t num_tokens = smaller(unit_tokens, length - from), pos = a.context_len[seq] - length + from;
      int64_t row = a.query_start[seq] + from, column = kv_head * task.group * a.head_dim;
      T* out = static_cast<T*>(a.out) + row * a.out_stride + column;
      int64_t padding = smaller(larger<int64_t>(-pos, 0), num_tokens);
      for (int64_t i = 0; i < padding; i++) memset(out + i * a.out_stride, 0, task.group * a.head_dim * sizeof(T));
      if (padding == num_tokens) continue;
      const T* q = static_cast<const T*>(a.query) + (row + padding) * a.query_stride + column;
      task.attend(q, out + padding * a.out_stride, num_tokens - padding, pos + padding,
                  a.block_tables + seq * a.table_stride, kv_head);
    }
  });
}

}  // namespace splitserve
