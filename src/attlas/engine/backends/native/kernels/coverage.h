// How many of the largest weights hold a share (a level) of the mass of their row: exact, without sorting the row.
//
// For each level a threshold is sought such that all weights up to it may be left out: they sum to no more than what the
// level leaves of the mass. To probe a threshold is one pass over the row, which lies in the cache, for up to four levels
// together; the first threshold is that of the row before. When few weights are left between the best threshold from below
// and from above, those alone are sorted.
#pragma once

#include "forward.h"
#include "logits.h"

namespace ATTLAS_ISA {

template <class M>
class CoveragePass {
  using T = typename M::T;
  using Number = typename M::Number;
  using V = Vec<T>;
  static constexpr int W = WIDTH<T>;
  static constexpr int FEW = 32;  // weights that are sorted
  static constexpr T LEAST = std::numeric_limits<T>::min();  // no weight but 0 is smaller

 public:
  // Without `source` logits are products of packed tokens.
  CoveragePass(const attlas::AttentionParams& problem, int q_parts, int k_parts, std::unique_ptr<LogitSource<T>> source = nullptr)
      : p_(problem),
        source_(std::move(source)),
        q_parts_(q_parts),
        k_parts_(k_parts),
        stride_(round_up(problem.n, M::COLUMNS) + 16),
        queries_(source_ ? 0 : M::left_size(M::ROWS, problem.d, q_parts)),
        weights_(size_t(round_up(M::ROWS, 4)) * stride_),
        levels_(size_t(problem.level_count)) {}

  template <class Read>
  void run(int64_t b, int64_t h, int64_t first, int64_t some, Read read, const Number* right) {
    M::pack_left(queries_.data, some, p_.d, q_parts_, read);
    run(b, h, first, some, right);
  }

  // The same where the rows are packed, or logits have a source of their own.
  void run(int64_t b, int64_t h, int64_t first, int64_t some, const Number* right) {
    const int64_t head = b * p_.heads + h;
    // What is known from other rows must not depend on which thread had them.
    for (Level& level : levels_) level.guess = T(0), level.density = 0;
    const PlaceView mask(p_, b, h);
    int64_t left, end;
    mask.hull(first, first + some, left, end);
    left = left / M::COLUMNS * M::COLUMNS;
    end = round_up(end, M::COLUMNS);
    if (source_ && left < end) {
      source_->prepare_rows(b, h, first, some);
      source_->fill(left, end - left, weights_.data, stride_);
    } else {
      for (int64_t j = left; j < end; j += M::COLUMNS)
        M::template multiply<false>(queries_.data, q_parts_, p_.d, M::right_at(right, j, 0, p_.d, k_parts_), k_parts_,
                                    M::depth_of(p_.d), weights_.at(j - left), stride_);
    }
    for (int64_t i = 0; i < some; ++i) {
      M::checkpoint();
      int64_t* out = p_.coverage + (head * p_.m + first + i) * p_.level_count;
      const double lse = p_.lse[head * p_.m + first + i];
      if (left >= end || lse == -INF<double>) {
        std::fill(out, out + p_.level_count, 0);
        continue;
      }
      T* row = weights_.at(size_t(i) * stride_);
      finish_row<T>(row, mask, first + i, left, end, T(p_.scale), T(p_.cap));
      const T scale = factor_of<T>(p_);
      const Shift<T> shift = Shift<T>::of(lse);
      V total = {}, top = {};
      for (int64_t j = 0; j < end - left; j += W) {
        const V e = exp_below(load(row + j) * scale - all(shift.high) - all(shift.low));
        store(row + j, e);
        total += e;
        top = larger<T>(top, e);
      }
      count(row, end - left, double(sum<T>(total)), most<T>(top), out);
    }
  }

 private:
  struct Level {
    T guess = 0;          // the threshold of the row before
    double density = 0;   // of the row before: weights that a threshold e times as large would add
    double spare = 0;     // what may be left out
    T low = 0, high = 0;  // weights up to `low` may be left out, those up to `high` are too many
    double mass_low = 0;  // sum of the weights up to low
    int64_t count_low = -1, count_high = 0;  // -1: not known, as weights may be exactly 0
    T threshold = 0;      // the one to probe next
    double missing = 0;   // how many weights more make up what may be left out, by the last probe
    bool done = false;
  };

  void count(const T* row, int64_t size, double mass, T top, int64_t* out) {
    for (int64_t x = 0; x < p_.level_count; ++x) {
      Level& level = levels_[x];
      const double slack = 1.0 + 64.0 * double(std::numeric_limits<T>::epsilon());
      const double spare = (1.0 - p_.levels[x]) * mass * slack;
      level = {.guess = level.guess, .density = level.density, .spare = spare, .high = top, .count_high = size};
      level.threshold = level.guess > 0 && level.guess < top ? level.guess : top * T(0.25);
      // All of a row may be left out where it has no mass.
      level.done = mass <= level.spare;
      if (level.done) level.count_low = size;
    }
    for (size_t first = 0; first < levels_.size(); first += 4)
      for (int round = 0, count = 1; count; ++round) {
        Level* active[4];
        count = 0;
        for (size_t x = first; x < std::min(first + 4, levels_.size()); ++x)
          if (!levels_[x].done) active[count++] = &levels_[x];
        if (count) probe<4>(row, size, active, count, round);
      }
    for (int64_t x = 0; x < p_.level_count; ++x) out[x] = size - left_out(row, size, levels_[x]);
  }

  // One pass over the row: how many weights are up to each of `count` thresholds, at most N, and their sum.
  template <int N>
  void probe(const T* row, int64_t size, Level* const* levels, int count, int round) {
    if constexpr (N > 1)
      if (count < N) return probe<N - 1>(row, size, levels, count, round);
    V mass[N] = {}, number[N] = {}, at[N];
    for (int x = 0; x < N; ++x) at[x] = all(levels[x]->threshold);
    const V one = all(T(1));
    for (int64_t j = 0; j < size; j += W) {
      const V e = load(row + j);
      for (int x = 0; x < N; ++x) {
        mass[x] += e <= at[x] ? e : V{};
        number[x] += e <= at[x] ? one : V{};
      }
    }
    for (int x = 0; x < N; ++x) update(*levels[x], double(sum<T>(mass[x])), int64_t(sum<T>(number[x])), size, round);
  }

  // What a probe tells: on which side the threshold is, and which to probe next.
  void update(Level& level, double below, int64_t number, int64_t size, int round) const {
    if (below <= level.spare) {
      level.low = level.threshold;
      level.mass_low = below;
      level.count_low = number;
    } else {
      level.high = level.threshold;
      level.count_high = number;
    }
    // Weights near the threshold are all about as large as it is: so many of them make up the difference.
    level.missing = (level.spare - below) / double(level.threshold > 0 ? level.threshold : T(1));
    if (level.low > 0 && level.high > level.low && level.count_low >= 0 && level.count_high < size) {
      level.density = double(level.count_high - level.count_low) / std::log(double(level.high) / double(level.low));
    } else if (!(level.density > 0)) {
      level.density = double(number);
    }
    // Neighbours in the order of the weights, none of which lies between 0 and the normal numbers: all weights between the
    // two are equal. Where small numbers are flushed to 0, those below the normal ones cannot be compared.
    const bool narrow = !(std::max(std::nextafter(level.low, level.high), LEAST) < level.high);
    level.done = level.count_low >= 0 && (narrow || level.count_high - level.count_low <= FEW);
    if (!level.done) level.threshold = next(level, round);
  }

  // The next threshold: a step that the density of the weights gives, and a little beyond, so that the two sides come
  // near each other; now and then the middle, so that no distribution can keep it from ending.
  T next(const Level& level, int round) const {
    const double low = double(level.low), high = double(level.high);
    if (round % 4 != 3 && level.threshold > 0 && level.density > 0) {
      const double beyond = level.missing > 0 ? FEW / 4 : -FEW / 4;
      const double step = std::clamp((level.missing + beyond) / level.density, -2.0, 2.0);
      const double guess = double(level.threshold) * std::exp(step);
      if (guess > low && guess < high && guess >= double(LEAST)) return T(guess);
    }
    if (low <= 0 && high * 0.0625 < double(LEAST)) return level.count_low < 0 ? T(0) : LEAST;
    if (low <= 0) return T(high * 0.0625);
    return high > 4 * low ? T(std::sqrt(low) * std::sqrt(high)) : T(low + (high - low) / 2);
  }

  // The weights between the two thresholds, smallest first, as many as may be left out.
  int64_t left_out(const T* row, int64_t size, Level& level) {
    if (level.count_low == size) return size;
    between_.clear();
    const T low = level.low, high = level.high;
    for (int64_t j = 0; j < size; j += W) {
      const V e = load(row + j);
      for (uint32_t found = above<T>(e, all(low)) & ~above<T>(e, all(high)); found; found &= found - 1)
        between_.push_back(row[j + __builtin_ctz(found)]);
    }
    std::sort(between_.begin(), between_.end());
    double mass = level.mass_low;
    int64_t count = level.count_low;
    T last = low;
    for (T e : between_) {
      mass += double(e);
      if (mass > level.spare) {
        last = e;
        break;
      }
      ++count;
    }
    level.guess = last;
    return count;
  }

  const attlas::AttentionParams& p_;
  const std::unique_ptr<LogitSource<T>> source_;
  const int q_parts_, k_parts_;
  const int64_t stride_;
  Aligned<Number> queries_;
  Aligned<T> weights_;
  std::vector<Level> levels_;
  std::vector<T> between_;
};

}  // namespace ATTLAS_ISA
