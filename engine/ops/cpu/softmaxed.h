// How are sums under a softmax kept while their keys come in parts?
#pragma once
#include "vec.h"

namespace splitserve {

constexpr float UNSEEN = -1e30f;

// Sums of values under a softmax whose greatest score so far is `peak`: all but the peaks are scaled by exp(-peak).
struct Softmaxed {
  float *sums, *peak, *total;  // [rows, padded_dim], [rows], [rows]

  static int64_t num_floats(int64_t rows, int64_t padded_dim) { return rows * (padded_dim + 2); }
  static Softmaxed in(float* at, int64_t rows, int64_t padded_dim) {
    return {at, at + rows * padded_dim, at + rows * (padded_dim + 1)};
  }

  void clear(int64_t rows, int64_t padded_dim) {
    memset(sums, 0, rows * padded_dim * sizeof(float));
    for (int64_t row = 0; row < rows; row++) peak[row] = UNSEEN, total[row] = 0;
  }

  // Takes in what was found at later positions. Keys that a row does not see change no bit of it.
  void merge(const Softmaxed& later, int64_t rows, int64_t padded_dim) {
    for (int64_t row = 0; row < rows; row++) {
      float new_peak = larger(peak[row], later.peak[row]);
      Floats mine = exp(splat(peak[row] - new_peak)), its = exp(splat(later.peak[row] - new_peak));
      peak[row] = new_peak;
      total[row] = total[row] * mine[0] + later.total[row] * its[0];
      for (int64_t i = row * padded_dim; i < (row + 1) * padded_dim; i += LANES)
        store(sums + i, fmadd(load(later.sums + i), its, load(sums + i) * mine));
    }
  }
};

}  // namespace splitserve
