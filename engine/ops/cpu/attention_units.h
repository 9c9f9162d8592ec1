// Who computes which part of an attention? Units of work, made on one thread for all.
#pragma once
#include <vector>

#include "attention_pack.h"
#include "softmaxed.h"

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

constexpr int SPAN = 4 * KEYS, UNIT_ROWS = 96;

// What one thread computes at a time: some tokens of one sequence, some KV heads, and the keys that those tokens see,
// or one span of them.
struct Unit {
  int32_t seq, kv_head, num_kv_heads;
  int64_t token, num_tokens;  // of the step's rows
  int64_t pos;                // of the first token
  int64_t first, end;         // of the keys
  float* partial;             // where the span's sums go; null: the keys are all, and the output is written

  int64_t num_rows(int64_t group) const { return num_kv_heads * num_tokens * group; }
  int64_t first_tile() const { return first / KEYS * KEYS; }
};

// Few sequences are cut by KV head, and then by span, so that every thread has work; of many sequences' decodes all
// heads go together, since the heads of a block lie together in memory.
class Units {
 public:
  // Adjacent units that are the spans of the same rows.
  struct Spans {
    int64_t first_unit, num_units;
  };

  Units(const AttentionArgs& a, int64_t num_threads)
      : a_(a),
        group_(a.num_heads / a.num_kv_heads),
        piece_tokens_(larger<int64_t>(UNIT_ROWS / group_, 1)) {
    int64_t num_pieces = 0, enough = 4 * num_threads;
    for (int32_t seq = 0; seq < a.num_seqs; seq++) num_pieces += ceil_div(num_tokens(seq), piece_tokens_);
    cut_heads_ = num_pieces < enough;
    cut_spans_ = num_threads > 1 && num_pieces * a.num_kv_heads < enough;
    for (int32_t seq = 0; seq < a.num_seqs; seq++)
      for (int64_t piece = ceil_div(num_tokens(seq), piece_tokens_); piece-- > 0;)  // the long ones first
        add_piece(seq, piece * piece_tokens_, smaller(num_tokens(seq), (piece + 1) * piece_tokens_));
  }

  int64_t count() const { return int64_t(units_.size()); }
  const Unit& operator[](int64_t i) const { return i < count() ? units_[i] : none_; }
  const std::vector<Spans>& spans() const { return spans_; }

  // Gives every cut unit its place in the memory that `reserve` returns for so many bytes.
  template <class Reserve>
  void place_partials(int64_t padded_dim, const Reserve& reserve) {
    int64_t num_floats = 0;
    for (const Spans& s : spans_) num_floats += s.num_units * floats_of(units_[s.first_unit], padded_dim);
    float* at = num_floats ? reserve(num_floats * int64_t(sizeof(float))) : nullptr;
    for (const Spans& s : spans_)
      for (int64_t i = s.first_unit; i < s.first_unit + s.num_units; i++) {
        units_[i].partial = at;
        at += floats_of(units_[i], padded_dim);
      }
  }

 private:
  int64_t num_tokens(int32_t seq) const { return a_.query_start[seq + 1] - a_.query_start[seq]; }
  int64_t floats_of(const Unit& unit, int64_t padded_dim) const {
    return ceil_div(Softmaxed::num_floats(unit.num_rows(group_), padded_dim), 16) * 16;
  }

  // Tokens [from, to) of the sequence's part of the step.
  void add_piece(int32_t seq, int64_t from, int64_t to) {
    int64_t end = a_.context_len[seq] - num_tokens(seq) + to, pos = end - (to - from);
    int64_t padding = smaller(larger<int64_t>(-pos, 0), to - from);
    if (padding == to - from) return;
    Unit unit{};
    unit.seq = seq;
    unit.num_tokens = to - from - padding;
    unit.token = a_.query_start[seq] + from + padding;
    unit.pos = pos + padding;
    unit.first = a_.window ? larger<int64_t>(unit.pos - a_.window + 1, 0) : 0;
    unit.end = end;
    bool together = !cut_heads_ && unit.num_tokens * a_.num_heads <= UNIT_ROWS;
    unit.num_kv_heads = together ? a_.num_kv_heads : 1;
    for (; unit.kv_head < a_.num_kv_heads; unit.kv_head += unit.num_kv_heads) add(unit);
  }

  void add(const Unit& unit) {
    int64_t first_span = unit.first / SPAN, num_spans = ceil_div(unit.end, SPAN) - first_span;
    if (!cut_spans_ || num_spans == 1) return units_.push_back(unit);
    spans_.push_back({count(), num_spans});
    for (int64_t span = first_span; span < first_span + num_spans; span++) {
      units_.push_back(unit);
      units_.back().first = larger(unit.first, span * SPAN);
      units_.back().end = smaller(unit.end, (span + 1) * SPAN);
    }
  }

  const AttentionArgs& a_;
  const int64_t group_, piece_tokens_;
  bool cut_heads_, cut_spans_;
  std::vector<Unit> units_;
  std::vector<Spans> spans_;
  const Unit none_{};
};

}  // namespace splitserve
