// Which token does one uniform number choose from a row of logits?
//
// Weights are exp((logit - greatest) / temperature). The tail is cut at a threshold: top-k, then top-p of what top-k
// left, then min-p; what ties with the last one kept is kept. The choice is the first token, in order of id, at which
// the sum of kept weights exceeds noise * total. A row is computed by one thread, in one order.
#pragma once
#include <algorithm>
#include <functional>
#include <vector>

#include "pool.h"

namespace splitserve {

// Mirrored by a numpy dtype.
struct DrawRow {
  double noise, top_p;  // noise in (0, 1)
  float temperature, min_p;
  int32_t top_k, padding;  // top_k 0: off
};

// Mirrored by ctypes.
struct DrawArgs {
  const float* logits;
  const DrawRow* rows;
  int32_t* tokens;
  int64_t num_rows, num_logits, logits_stride;
};

class Drawing {
 public:
  // `scratch` holds scratch_bytes(num_logits).
  Drawing(int64_t num_logits, char* scratch)
      : num_logits_(num_logits),
        num_blocks_(ceil_div(num_logits, BLOCK)),
        weights_(reinterpret_cast<float*>(scratch)),
        sums_(reinterpret_cast<double*>(weights_ + num_blocks_ * BLOCK)) {}

  static int64_t scratch_bytes(int64_t num_logits) {
    return ceil_div(num_logits, BLOCK) * (BLOCK * sizeof(float) + sizeof(double));
  }

  int32_t draw(const float* logits, const DrawRow& row) {
    weigh(logits, row.temperature);
    double total = sum_from(0);
    float threshold = larger(ranked_threshold(row, total), row.min_p);  // the greatest weight is 1
    if (threshold > 0) total = sum_from(threshold);
    return find(row.noise * total, threshold);
  }

 private:
  static constexpr int64_t BLOCK = 512;  // weights summed in registers

  void weigh(const float* logits, float temperature) {
    Floats top = splat(UNSEEN_LOGIT);
    for (int64_t i = 0; i < num_logits_; i += LANES) top = max(top, load_logits(logits, i));
    float greatest = max(top);
    for (int64_t i = 0; i < num_blocks_ * BLOCK; i += LANES) {
      Floats x = (load_logits(logits, i) - greatest) / temperature;
      store(weights_ + i, x > SMALLEST_EXPONENT ? exp(x) : Floats{});
    }
  }

  static constexpr float UNSEEN_LOGIT = -3e38f, SMALLEST_EXPONENT = -87.0f;

  Floats load_logits(const float* logits, int64_t i) const {
    if (i + LANES <= num_logits_) return load(logits + i);
    float padded[LANES];
    for (int lane = 0; lane < LANES; lane++) padded[lane] = i + lane < num_logits_ ? logits[i + lane] : UNSEEN_LOGIT;
    return load(padded);
  }

  // Sums the weights that reach the threshold, block by block.
  double sum_from(float threshold) {
    double total = 0;
    for (int64_t block = 0; block < num_blocks_; block++) {
      Floats acc = {};
      for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i += LANES) {
        Floats w = load(weights_ + i);
        acc += w >= threshold ? w : Floats{};
      }
      total += sums_[block] = sum(acc);
    }
    return total;
  }

  // The least weight that top-k and top-p keep. Ranks as few of the greatest weights as will do.
  float ranked_threshold(const DrawRow& row, double total) {
    bool cuts_ranks = row.top_k > 0 && row.top_k < num_logits_, cuts_mass = row.top_p < 1;
    if (!cuts_ranks && !cuts_mass) return 0;
    for (float floor = 1 / 64.0f;; floor = floor > 1e-12f ? floor / 8 : 0) {
      double mass = gather(floor);
      int64_t found = int64_t(ranked_.size());
      if (floor > 0 && (cuts_ranks ? found < row.top_k : mass < row.top_p * total)) continue;
      int64_t num_kept = cuts_ranks ? row.top_k : found;
      std::partial_sort(ranked_.begin(), ranked_.begin() + num_kept, ranked_.end(), std::greater<float>());
      if (cuts_ranks) total = 0;
      for (int64_t i = 0; cuts_ranks && i < num_kept; i++) total += ranked_[i];
      mass = 0;
      for (int64_t i = 0; cuts_mass && i < num_kept; i++)
        if ((mass += ranked_[i]) >= row.top_p * total) return ranked_[i];
      return ranked_[num_kept - 1];
    }
  }

  // Puts the weights of at least `floor` into ranked_; returns their sum.
  double gather(float floor) {
    double mass = 0;
    ranked_.clear();
    for (int64_t i = 0; i < num_blocks_ * BLOCK; i += LANES) {
      if (all_below(load(weights_ + i), floor)) continue;
      for (int64_t j = i; j < smaller(i + LANES, num_logits_); j++)
        if (weights_[j] >= floor) ranked_.push_back(weights_[j]), mass += weights_[j];
    }
    return mass;
  }

  int32_t find(double target, float threshold) const {
    double before = 0;
    int64_t block = 0;
    while (block + 1 < num_blocks_ && before + sums_[block] <= target) before += sums_[block++];
    int64_t last = 0;
    for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i++) {
      if (weights_[i] < threshold || weights_[i] == 0) continue;
      last = i;
      if ((before += weights_[i]) > target) break;  // if rounding lets none exceed it, the last one is meant
    }
    return int32_t(last);
  }

  const int64_t num_logits_, num_blocks_;
  float* weights_;
  double* sums_;
  std::vector<float> ranked_;
};

inline void draw(Pool& pool, const DrawArgs& a) {
  pool.run(a.num_rows, Drawing::scratch_bytes(a.num_logits), [&](Pool::Units& units, char* scratch) {
    Drawing drawing(a.num_logits, scratch);
    for (int64_t row; units.take(&row);)
      a.tokens[row] = drawing.draw(a.logits + row * a.logits_stride, a.rows[row]);
  });
}

}  // namespace splitserve
