// The pass with the log-sum-exp of each row known: numbers of rows and of columns, diagonals and pictures, all from one
// product and one exponential.
//
// A task owns some rows of one head: what it finds of rows is whole, what it finds of columns is added up over the tasks
// of a head in their order. How rows are divided does not depend on the number of threads, so neither do results.
#pragma once

#include "forward.h"
#include "logits.h"

namespace ATTLAS_ISA {

// f(0) to f(R - 1), written out: arrays that are indexed so stay in registers also where there is assembly between.
template <int R, class F>
ATTLAS_INLINE void each(F f) {
  f(0);
  if constexpr (R > 1) f(1);
  if constexpr (R > 2) f(2);
  if constexpr (R > 3) f(3);
}

// What a pass is compiled with.
enum Wanted : int {
  SUMS = 1,         // of p log p over each row
  PEAKS = 2,        // the largest logits of each row
  MOMENTS = 4,      // of the allowed logits of each row
  COLUMNS = 8,      // sums of columns
  COLUMN_MAXIMA = 16,     // maxima of columns
  DIAGONALS = 32,
  GAPS = 64,        // some logits are -infinity, and moments must not count them
  TOTALS = 128,     // sums of rows, which are 1 unless a sink or keys elsewhere take some of it
  SQUARE_SUMS = 256,  // of p^2 over each row
  EVERYTHING = SUMS | PEAKS | MOMENTS | COLUMNS | COLUMN_MAXIMA | DIAGONALS | SQUARE_SUMS,
};

template <class M>
class StatisticsPass {
  using T = typename M::T;
  using Number = typename M::Number;
  using V = Vec<T>;
  static constexpr int W = WIDTH<T>;
  static constexpr bool NARROW = VECTOR_BYTES == 32;  // so has half the registers too
  // Columns of one rectangle of logits, at most: what begins and ends it costs as much as several vectors.
  static constexpr int64_t CHUNK = M::COLUMNS * ((NARROW ? 256 : 128) / M::COLUMNS);
  static constexpr int64_t STRIDE = CHUNK + 16;
  static constexpr int64_t SPAN = CHUNK * (2048 / CHUNK);  // the most columns that are taken before the next rows
  static constexpr int64_t CHUNKS = SPAN / CHUNK;
  static_assert(CHUNK / M::COLUMNS <= M::Product::MOST);
  static constexpr int64_t DIAGONAL = SPAN + M::ROWS + 2 * W;
  static constexpr int64_t HEIGHT = round_up(M::ROWS, 4);  // rows that a rectangle has room for: Logits come in fours
  // Vectors of sums for each row of a strip.
  enum Sum { PLOGP, SQUARES, DEVIATIONS, SQUARED_DEVIATIONS, TOTAL, SUM_COUNT };

 public:
  using Real = T;

  // Rows of one task; its packed queries stay in the cache while the keys pass by.
  static int64_t block_for(const attlas::AttentionParams& p, int q_parts) {
    const int64_t bytes = M::depth_of(p.d) * q_parts * int64_t(sizeof(Number));
    const int64_t most = std::clamp<int64_t>((512 << 10) / bytes, 2 * M::ROWS, 2048);
    return round_up(std::clamp<int64_t>(p.m / 16, M::ROWS, most), M::ROWS);
  }

  // Without `source` logits are products of packed tokens.
  StatisticsPass(const attlas::AttentionParams& problem, int64_t block, int q_parts, int k_parts, std::unique_ptr<Logits<T>> source = nullptr)
      : p_(problem),
        source_(std::move(source)),
        q_parts_(q_parts),
        k_parts_(k_parts),
        scale_(factor_of<T>(problem)),
        factor_(T(double(scale_) / Weight<T>::UNIT)),
        transforms_logits_(problem.cap > 0 || !usual(T(problem.scale))),
        picture_(problem.picture_sum || problem.picture_max),
        span_(std::clamp<int64_t>((768 << 10) / (M::depth_of(problem.d) * k_parts * int64_t(sizeof(Number))) / CHUNK * CHUNK,
                                  CHUNK, SPAN)),
        queries_(source_ ? 0 : M::left_size(block, problem.d, q_parts)),
        rectangles_(problem.top_keys ? CHUNKS : 2),
        logits_(size_t(rectangles_) * HEIGHT * STRIDE),
        peaks_(size_t(M::ROWS) * CHUNKS * W),
        sums_(size_t(M::ROWS) * SUM_COUNT * W),
        diagonal_(2 * DIAGONAL),
        slots_(picture_ ? M::ROWS + 1 : 1),
        mass_(size_t(slots_) * span_ + 2 * W),
        column_max_(size_t(slots_) * span_ + 2 * W),
        rows_(block),
        top_values_(size_t(block) * problem.k_largest),
        top_keys_(size_t(block) * problem.k_largest) {
    std::fill(logits_.data, logits_.data + rectangles_ * HEIGHT * STRIDE, T(0));
    choose();
  }

  // What one task leaves behind of columns, to be joined with the other tasks of its head. Of the picture that is its
  // first row where the task before has some of it, and its last one where the next task has: all others are its own.
  struct Found {
    std::vector<T> mass, column_max;       // of each column
    std::vector<double> diagonals;   // the last of its rows begins at 0
    int64_t shared[2] = {-1, -1};    // rows of the picture, -1 for none
    std::vector<T> sums[2], tops[2];
  };

  // Queries [first, first + count) of one head; `right` is its packed keys.
  template <class Read>
  void run(int64_t b, int64_t h, int64_t first, int64_t count, Read read, const Number* right, Found& found) {
    M::pack_left(queries_.data, count, p_.d, q_parts_, read);
    pass(b, h, first, count, right, found);
  }

  // The same where the rows are packed, or logits have a source of their own.
  void pass(int64_t b, int64_t h, int64_t first, int64_t count, const Number* right, Found& found) {
    begin(b, h, first, count, found);
    take_rows(0, count, right);
    finish();
  }

  // The same in steps: what stands before all rows, some rows from a multiple of ROWS on, and what stands after all.
  void begin(int64_t b, int64_t h, int64_t first, int64_t count, Found& found) {
    batch_ = b;
    head_ = b * p_.heads + h;
    first_ = first;
    count_ = count;
    found_ = &found;
    lse_ = p_.lse + head_ * p_.m + first;
    std::fill(rows_.begin(), rows_.end(), Numbers());
    std::fill(top_values_.begin(), top_values_.end(), -INF<T>);
    std::fill(top_keys_.begin(), top_keys_.end(), -1);
    prepare(found);
  }

  void take_rows(int64_t from, int64_t to, const Number* right) {
    const Flush flush;
    const MaskView mask(p_, batch_, head_ % p_.heads);
    int64_t left, end;
    mask.hull(first_ + from, first_ + to, left, end);
    for (start_ = left / M::COLUMNS * M::COLUMNS; start_ < end; start_ += span_) {
      stop_ = std::min(start_ + span_, round_up(end, M::COLUMNS));
      open_ = 0;
      open_row_ = -1;
      for (int64_t r = from; r < to; r += M::ROWS) strip(mask, r, std::min<int64_t>(to - r, M::ROWS), right);
      if (open_row_ >= 0) close(open_, open_row_);
    }
  }

  void finish() {
    for (int64_t r = 0; r < count_; ++r) {
      const Numbers& row = rows_[r];
      const int64_t at = head_ * p_.m + first_ + r;
      const double lse = lse_[r];
      // Not below 0, as rounding may have it where one key has all the weight.
      const double entropy = -row.plogp;
      RowStatistics<T>{
          .entropy = entropy > 0 ? T(entropy) : T(0),
          .squares = T(row.squares),
          .mass = wanted_ & TOTALS ? T(row.total) : lse > -INF<double> ? T(1) : T(0),
          .max_logit = row.peak * scale_,
          .mean = T(row.mean),
          .variance = row.count > 0 ? T(row.m2 / row.count) : T(0),
      }
          .store(p_, at);
      for (int x = 0; p_.top_keys && x < p_.k_largest; ++x) {
        const double logit = double(top_values_[size_t(r) * p_.k_largest + x]) * double(scale_);
        static_cast<T*>(p_.top_values)[at * p_.k_largest + x] = logit == -INF<double> ? T(0) : T(std::exp(logit - lse));
        p_.top_keys[at * p_.k_largest + x] = top_keys_[size_t(r) * p_.k_largest + x];
      }
    }
  }

  // What the tasks of one head found of its columns, added up in their order.
  static void join(const attlas::AttentionParams& p, int64_t head, int64_t block, const Found* found, int64_t tasks) {
    std::vector<double> sums;
    std::vector<T> tops;
    auto give = [&](void* to, int64_t at, const auto& numbers) {
      for (size_t x = 0; x < numbers.size(); ++x) static_cast<T*>(to)[at + int64_t(x)] = T(numbers[x]);
    };
    if (p.column_mass) {
      sums.assign(size_t(p.n), 0.0);
      for (int64_t task = 0; task < tasks; ++task)
        for (int64_t j = 0; j < p.n; ++j) sums[j] += double(found[task].mass[j]);
      give(p.column_mass, head * p.n, sums);
    }
    if (p.column_max) {
      tops.assign(size_t(p.n), T(0));
      for (int64_t task = 0; task < tasks; ++task)
        for (int64_t j = 0; j < p.n; ++j) tops[j] = std::max(tops[j], found[task].column_max[j]);
      give(p.column_max, head * p.n, tops);
    }
    if (p.offsets) {
      sums.assign(size_t(p.m + p.n - 1), 0.0);
      for (int64_t task = 0; task < tasks; ++task) {
        const std::vector<double>& more = found[task].diagonals;
        double* at = sums.data() + p.m - task * block - std::min(block, p.m - task * block);
        for (size_t x = 0; x < more.size(); ++x) at[x] += more[x];
      }
      give(p.offsets, head * (p.m + p.n - 1), sums);
    }
    if (!p.picture_sum && !p.picture_max) return;
    auto line = [&](void* picture, int64_t row) {
      return static_cast<T*>(picture) + (head * p.picture_rows + row) * p.picture_columns;
    };
    // No task has any of these.
    for (int64_t row = 0; row < p.picture_rows; ++row)
      if (p.row_edges[row] == p.row_edges[row + 1])
        for (void* picture : {p.picture_sum, p.picture_max})
          if (picture) std::fill_n(line(picture, row), p.picture_columns, T(0));
    sums.assign(size_t(p.picture_columns), 0.0);
    tops.assign(size_t(p.picture_columns), T(0));
    for (int64_t task = 0, row = -1; task <= tasks; ++task)
      for (int part = 0; part < (task < tasks ? 2 : 1); ++part) {
        const int64_t next = task < tasks ? found[task].shared[part] : -1;
        if (next < 0 && task < tasks) continue;
        if (next != row && row >= 0) {
          if (p.picture_sum) give(line(p.picture_sum, row), 0, sums);
          if (p.picture_max) give(line(p.picture_max, row), 0, tops);
          std::fill(sums.begin(), sums.end(), 0.0);
          std::fill(tops.begin(), tops.end(), T(0));
        }
        row = next;
        if (row < 0) continue;
        const std::vector<T>&more = found[task].sums[part], &higher = found[task].tops[part];
        for (size_t x = 0; x < more.size(); ++x) sums[x] += double(more[x]);
        for (size_t x = 0; x < higher.size(); ++x) tops[x] = std::max(tops[x], higher[x]);
      }
  }

 private:
  // What is known of a row.
  struct Numbers {
    double total = 0, plogp = 0, squares = 0;  // sums of p, p log p and p^2
    double count = 0, mean = 0, m2 = 0;  // of the allowed logits; m2: squared deviations, summed
    T peak = -INF<T>;                        // the largest logit, without the scale
  };

  // Rows of a strip that lie in one row of the picture.
  struct Part {
    int64_t from, to, block_row;
  };

  // A rectangle of logits that was multiplied, and how many of its rows were taken.
  struct Rectangle {
    T* logits = nullptr;
    int64_t left = 0, end = 0, taken = 0, place = 0;  // its place among those of the strip
    bool gaps = false;
  };

  using Core = void (StatisticsPass::*)(const Rectangle&, int64_t, T*, T*);

  void choose() {
    const bool moments = p_.mean || p_.variance;
    const bool columns = p_.column_mass || p_.column_max || picture_;
    const int wanted = (p_.entropy ? SUMS : 0) | (p_.squares ? SQUARE_SUMS : 0) |
                       (p_.max_logit || p_.top_keys ? PEAKS : 0) | (moments ? MOMENTS : 0) | (columns ? COLUMNS : 0) |
                       (p_.column_max || p_.picture_max ? COLUMN_MAXIMA : 0) | (p_.offsets ? DIAGONALS : 0) |
                       (p_.mass && (p_.sink || p_.partial) ? TOTALS : 0);
    // Loops for what is often asked for; what is asked for seldom takes the first that has it.
    if (take<SUMS>(wanted) || take<SUMS | SQUARE_SUMS>(wanted) || take<SUMS | PEAKS>(wanted) ||
        take<SUMS | PEAKS | MOMENTS>(wanted) || take<COLUMNS>(wanted) || take<COLUMNS | COLUMN_MAXIMA>(wanted) ||
        take<COLUMNS | COLUMN_MAXIMA | DIAGONALS>(wanted) || take<SUMS | SQUARE_SUMS | PEAKS | COLUMNS | DIAGONALS>(wanted) ||
        take<EVERYTHING>(wanted))
      return;
    take<EVERYTHING | TOTALS>(wanted);
  }

  template <int WANTED>
  bool take(int wanted) {
    if (wanted & ~WANTED) return false;
    wanted_ = WANTED;
    constexpr bool LIGHT = !(WANTED & (PEAKS | MOMENTS));
    // Rows whose sums fit into registers.
    constexpr int TOGETHER = (LIGHT && !(WANTED & DIAGONALS) ? 4 : 2) / (NARROW ? 2 : 1);
    core_[0][0] = &StatisticsPass::core<WANTED, 1>;
    core_[0][1] = &StatisticsPass::core<WANTED, TOGETHER>;
    constexpr int GAPPED = WANTED & MOMENTS ? WANTED | GAPS : WANTED;
    core_[1][0] = &StatisticsPass::core<GAPPED, 1>;
    core_[1][1] = &StatisticsPass::core<GAPPED, TOGETHER>;
    // The fewer numbers a row needs, the sooner a small rectangle pays, which leaves the cache to the tokens.
    together_ = TOGETHER;
    chunk_ = LIGHT && !NARROW ? M::COLUMNS * std::max<int64_t>(64 / M::COLUMNS, 1) : CHUNK;
    return true;
  }

  void prepare(Found& found) const {
    // Whole vectors of them.
    if (p_.column_mass) found.mass.assign(size_t(round_up(p_.n, M::COLUMNS)), T(0));
    if (p_.column_max) found.column_max.assign(size_t(round_up(p_.n, M::COLUMNS)), T(0));
    if (p_.offsets) found.diagonals.assign(size_t(count_ + p_.n - 1), 0.0);
    if (!picture_) return;
    const int64_t *edges = p_.row_edges, stop = first_ + count_;
    for (int64_t row = std::upper_bound(edges, edges + p_.picture_rows + 1, first_) - edges - 1;
         row < p_.picture_rows && edges[row] < stop; ++row) {
      const bool begun = edges[row] < first_, open = edges[row + 1] > stop;
      if (begun || open) {
        const int part = begun ? 0 : 1;
        found.shared[part] = row;
        if (p_.picture_sum) found.sums[part].assign(size_t(p_.picture_columns), T(0));
        if (p_.picture_max) found.tops[part].assign(size_t(p_.picture_columns), T(0));
      } else if (edges[row] < edges[row + 1]) {
        if (p_.picture_sum) std::fill_n(line_of(p_.picture_sum, row), p_.picture_columns, T(0));
        if (p_.picture_max) std::fill_n(line_of(p_.picture_max, row), p_.picture_columns, T(0));
      }
    }
  }

  T* line_of(void* picture, int64_t row) const {
    return static_cast<T*>(picture) + (head_ * p_.picture_rows + row) * p_.picture_columns;
  }

  // Rows r to r + some of the task against the columns of this span. The rows of one rectangle are taken while the
  // next one is multiplied.
  void strip(const MaskView& mask, int64_t r, int64_t some, const Number* right) {
    int64_t left, end, inner_left, inner_end;
    mask.hull(first_ + r, first_ + r + some, left, end);
    mask.core(first_ + r, first_ + r + some, inner_left, inner_end);
    left = std::max(left / M::COLUMNS * M::COLUMNS, start_);
    end = std::min(round_up(end, M::COLUMNS), stop_);
    if (left >= end) return;
    if (source_) source_->take_rows(batch_, head_ % p_.heads, first_ + r, some);
    divide(r, some);
    std::fill(sums_.data, sums_.data + M::ROWS * SUM_COUNT * W, T(0));
    if (p_.offsets) std::fill(diagonal_.data, diagonal_.data + 2 * DIAGONAL, T(0));
    for (int64_t i = 0; i < some; ++i) {
      shift_[i] = lse_[r + i] == -INF<double> ? Shift<T>::none() : Weight<T>::shift_of(lse_[r + i], scale_);
      centred_[i] = rows_[r + i].count > 0;
      centre_[i] = T(rows_[r + i].mean / double(scale_));
      cells_[i] = 0;
    }
    strip_ = r;
    some_ = some;
    mask_ = &mask;
    Rectangle before;
    left_ = left;
    end_ = end;
    for (int64_t place = 0; left < end; left += chunk_, ++place) {
      Rectangle next;
      next.logits = logits_.at(size_t(place % rectangles_) * HEIGHT * STRIDE);
      next.place = place;
      next.left = left;
      next.end = std::min(left + chunk_, end);
      // A source may have logits of -infinity anywhere.
      next.gaps = (source_ && !source_->only_masked) || mask.allowed || left < inner_left || next.end > inner_end;
      if (!plan(next, right)) {
        for (int64_t i = 0; (wanted_ & PEAKS) && i < some; ++i) store(peaks_of(i) + place * W, all(-INF<T>));
        continue;
      }
      if (before.logits) take(before);
      product_.finish();
      before = next;
      if (!M::Product::STEPS) take(before);
    }
    product_ = typename M::Product();
    if (before.logits) take(before);
    gather(r, some, (end_ - left_ + chunk_ - 1) / chunk_);
    if (p_.offsets) give_diagonals();
  }

  // The product that makes a rectangle, or the rectangle itself where it has a source; false where the mask hides it wholly.
  bool plan(const Rectangle& next, const Number* right) {
    if (source_) {
      const int64_t size = next.end - next.left;
      if (mask_->hides(first_ + strip_, some_, next.left, size)) return false;
      source_->fill(next.left, size, next.logits, STRIDE);
      return true;
    }
    product_ = typename M::Product(M::left_at(queries_.data, strip_, p_.d, q_parts_), q_parts_, p_.d, k_parts_, STRIDE);
    bool any = false;
    for (int64_t j = next.left; j < next.end; j += M::COLUMNS) {
      if (mask_->hides(first_ + strip_, some_, j, M::COLUMNS)) continue;
      any = true;
      product_.add(M::right_at(right, j, 0, p_.d, k_parts_), next.logits + (j - next.left));
    }
    return any;
  }

  // All rows of a rectangle, and the product that there is to do, side by side.
  void take(Rectangle& rectangle) {
    pending_ = 0;
    steps_ = product_.steps();
    vectors_ = some_ * (rectangle.end - rectangle.left) / W;
    while (rectangle.taken < some_) advance(rectangle);
  }

  // The next rows of a rectangle.
  void advance(Rectangle& rectangle) {
    const int64_t i = rectangle.taken;
    int64_t to = some_, slot = 0;
    if (picture_) {
      size_t part = 0;
      while (parts_[part].to <= i) ++part;
      to = parts_[part].to;
      slot = (open_ + int64_t(part)) % slots_;
    }
    const int64_t rows = to - i >= together_ ? together_ : 1;
    if (rectangle.gaps || transforms_logits_)
      for (int64_t x = i; x < i + rows; ++x)
        finish_row<T>(rectangle.logits + x * STRIDE, *mask_, first_ + strip_ + x, rectangle.left, rectangle.end, T(p_.scale),
                      T(p_.cap));
    if (wanted_ & MOMENTS)
      for (int64_t x = i; x < i + rows; ++x)
        if (!centred_[x]) find_centre(rectangle.logits + x * STRIDE, rectangle.end - rectangle.left, x);
    const size_t at = size_t(slot * span_ + rectangle.left - start_);
    // Looked up first: the sanitizer misreads an index inside a call through a pointer to a member.
    const Core core = core_[rectangle.gaps][rows > 1];
    (this->*core)(rectangle, i, mass_.at(at), column_max_.at(at));
    rectangle.taken += rows;
  }

  // Rows i to i + R of a rectangle: weights, and what they add up to.
  template <int WANTED, int R>
  void core(const Rectangle& rectangle, int64_t i, T* mass, T* column_max) {
    const int64_t size = rectangle.end - rectangle.left;
    const V none = all(-INF<T>), one = all(T(1)), factor = all(factor_);
    V plogp[R], squares[R], peak[R], sum_dev[R], squared_dev[R], count[R], mine[R];
    const T* logits[R];
    T* diagonal[R];
    V high[R], low[R], centre[R];
    typename M::Product& product = product_;
    const int64_t steps = steps_, vectors = vectors_;
    int64_t pending = pending_;
    each<R>([&](int r) __attribute__((always_inline)) {
      plogp[r] = squares[r] = sum_dev[r] = squared_dev[r] = count[r] = mine[r] = V{};
      peak[r] = none;
      logits[r] = rectangle.logits + (i + r) * STRIDE;
      // Two sums in turn: what the row before has just stored is not read at once.
      diagonal[r] = diagonal_.at(size_t((i + r) % 2 * DIAGONAL + rectangle.left - left_ + M::ROWS - 1 - (i + r)));
      high[r] = all(shift_[i + r].high);
      low[r] = all(shift_[i + r].low);
      centre[r] = all(centre_[i + r]);
    });
    for (int64_t j = 0; j < size; j += W) {
      V total, top;
      each<R>([&](int r) __attribute__((always_inline)) {
        const V x = load(logits[r] + j);
        const Weight<T> w(x, factor, high[r], low[r]);
        if (WANTED & SUMS) plogp[r] = w.add_plogp(plogp[r]);
        if (WANTED & SQUARE_SUMS) squares[r] += w.e * w.e;
        if (WANTED & PEAKS) peak[r] = larger<T>(peak[r], x);
        if (WANTED & MOMENTS) {
          V from = x - centre[r];
          if (WANTED & GAPS) {
            from = x > none ? from : V{};
            count[r] += x > none ? one : V{};
          }
          sum_dev[r] += from;
          squared_dev[r] += from * from;
        }
        if (WANTED & TOTALS) mine[r] += w.e;
        if (WANTED & COLUMNS) total = r ? total + w.e : w.e;
        if (WANTED & COLUMN_MAXIMA) top = r ? larger<T>(top, w.e) : w.e;
        if (WANTED & DIAGONALS) store(diagonal[r] + j, load(diagonal[r] + j) + w.e);
      });
      if (WANTED & COLUMNS) store(mass + j, load(mass + j) + total);
      if (WANTED & COLUMN_MAXIMA) store(column_max + j, larger<T>(load(column_max + j), top));
      if (M::Product::STEPS)
        for (pending += R * steps; pending >= vectors; pending -= vectors) product.template step<(WANTED & (PEAKS | MOMENTS)) != 0>();
    }
    pending_ = pending;
    each<R>([&](int r) __attribute__((always_inline)) {
      if (WANTED & TOTALS) add(i + r, TOTAL, mine[r]);
      if (WANTED & SUMS) add(i + r, PLOGP, plogp[r]);
      if (WANTED & SQUARE_SUMS) add(i + r, SQUARES, squares[r]);
      if (WANTED & MOMENTS) {
        add(i + r, DEVIATIONS, sum_dev[r]);
        add(i + r, SQUARED_DEVIATIONS, squared_dev[r]);
        cells_[i + r] += WANTED & GAPS ? int64_t(sum<T>(count[r])) : size;
      }
      if (WANTED & PEAKS) store(peaks_of(i + r) + rectangle.place * W, peak[r]);
    });
  }

  T* peaks_of(int64_t i) const { return peaks_.at(size_t(i * CHUNKS * W)); }
  T* sum_of(int64_t i, Sum which) const { return sums_.at(size_t((i * SUM_COUNT + which) * W)); }
  ATTLAS_INLINE void add(int64_t i, Sum which, V more) const {
    T* at = sum_of(i, which);
    store(at, load(at) + more);
  }

  // Moments are taken about a number near the mean, so that their difference loses nothing: that of a few in the middle.
  void find_centre(const T* row, int64_t size, int64_t i) {
    T total = 0;
    int count = 0;
    for (int64_t j = std::max<int64_t>(size / 2 - 8, 0); j < std::min<int64_t>(size, size / 2 + 8); ++j)
      if (row[j] > -INF<T>) {
        total += row[j];
        ++count;
      }
    for (int64_t j = 0; !count && j < size; ++j)
      if (row[j] > -INF<T>) {
        total = row[j];
        count = 1;
      }
    if (!count) return;
    centre_[i] = total / T(count);
    centred_[i] = true;
  }

  // The largest logits of row i of the strip in this span.
  void keep_largest(int64_t i, int64_t places) {
    const int k = p_.k_largest;
    const size_t r = size_t(strip_ + i) * size_t(k);
    const Largest<T> best{&top_values_[r], &top_keys_[r], k};
    best.take(reinterpret_cast<const V*>(peaks_of(i)), int(places), W, [&](int place, const T*& row, int64_t& key, int64_t& size) {
      row = logits_.at(size_t((place % rectangles_) * HEIGHT + i) * STRIDE);
      key = left_ + place * chunk_;
      size = std::min(chunk_, end_ - key);
    });
  }

  // A strip is done with this span: its sums go to the numbers of its rows.
  void gather(int64_t r, int64_t some, int64_t places) {
    for (int64_t i = 0; i < some; ++i) {
      Numbers& row = rows_[r + i];
      if (wanted_ & TOTALS) row.total += double(sum<T>(load(sum_of(i, TOTAL))));
      if (wanted_ & SUMS) row.plogp += double(sum<T>(load(sum_of(i, PLOGP)))) * Weight<T>::UNIT;
      if (wanted_ & SQUARE_SUMS) row.squares += double(sum<T>(load(sum_of(i, SQUARES))));
      if (wanted_ & PEAKS) {
        V peak = load(peaks_of(i));
        for (int64_t place = 1; place < places; ++place) peak = larger<T>(peak, load(peaks_of(i) + place * W));
        row.peak = std::max(row.peak, most<T>(peak));
      }
      if ((wanted_ & MOMENTS) && cells_[i] > 0) {
        // Two sets of numbers joined (Chan, Golub, LeVeque 1979).
        const double here = double(cells_[i]), scale = double(scale_);
        const double shift = double(sum<T>(load(sum_of(i, DEVIATIONS)))) / here * scale;
        const double together = row.count + here, apart = double(centre_[i]) * scale + shift - row.mean;
        const double about = std::max(double(sum<T>(load(sum_of(i, SQUARED_DEVIATIONS)))) * scale * scale - shift * shift * here, 0.0);
        row.m2 += about + apart * apart * row.count * here / together;
        row.mean += apart * here / together;
        row.count = together;
      }
    }
    // On their own: what they find out cannot be foreseen, and would hold up what is above.
    for (int64_t i = 0; p_.top_keys && i < some; ++i) keep_largest(i, places);
    if (!picture_) return;
    const int64_t last = int64_t(parts_.size()) - 1;
    for (int64_t x = 0; x < last; ++x) close((open_ + x) % slots_, parts_[size_t(x)].block_row);
    open_ = (open_ + last) % slots_;
    open_row_ = parts_[size_t(last)].block_row;
  }

  // Which rows of a strip lie in which row of the picture, and room for the sums of their columns. Without a picture all
  // rows lie in one.
  void divide(int64_t r, int64_t some) {
    if (!picture_) {
      if (open_row_ < 0 && (wanted_ & COLUMNS)) clear(0);
      open_row_ = 0;
      return;
    }
    parts_.clear();
    const int64_t first = first_ + r;
    int64_t row = std::upper_bound(p_.row_edges, p_.row_edges + p_.picture_rows + 1, first) - p_.row_edges - 1;
    for (int64_t from = 0; from < some;) {
      while (first + from >= p_.row_edges[row + 1]) ++row;
      const int64_t to = std::min(some, p_.row_edges[row + 1] - first);
      parts_.push_back({from, to, row});
      from = to;
    }
    if (open_row_ >= 0 && open_row_ != parts_[0].block_row) close(open_, open_row_), open_row_ = -1;
    for (size_t x = open_row_ >= 0 ? 1 : 0; x < parts_.size(); ++x) clear((open_ + int64_t(x)) % slots_);
  }

  void clear(int64_t slot) const {
    const int64_t size = stop_ - start_;
    std::fill_n(mass_.at(size_t(slot) * span_), size, T(0));
    if (wanted_ & COLUMN_MAXIMA) std::fill_n(column_max_.at(size_t(slot) * span_), size, T(0));
  }

  // The rows of one slot are all taken: its sums of columns go to the columns and to their row of the picture, and need
  // not be kept.
  void close(int64_t slot, int64_t block_row) const {
    Found& found = *found_;
    T *mass = mass_.at(size_t(slot) * span_), *column_max = column_max_.at(size_t(slot) * span_);
    const int64_t size = stop_ - start_;
    if (p_.column_mass)
      for (int64_t j = 0; j < size; j += W) {
        T* at = found.mass.data() + start_ + j;
        store(at, load(at) + load(mass + j));
      }
    if (p_.column_max)
      for (int64_t j = 0; j < size; j += W) {
        T* at = found.column_max.data() + start_ + j;
        store(at, larger<T>(load(at), load(column_max + j)));
      }
    if (!picture_) return;
    const int part = block_row == found.shared[0] ? 0 : 1;
    const bool own = block_row != found.shared[part];
    T* sums = !p_.picture_sum ? nullptr : own ? line_of(p_.picture_sum, block_row) : found.sums[part].data();
    T* tops = !p_.picture_max ? nullptr : own ? line_of(p_.picture_max, block_row) : found.tops[part].data();
    const int64_t *edges = p_.column_edges, *last = edges + p_.picture_columns, stop = std::min(stop_, p_.n);
    for (int64_t x = std::upper_bound(edges, last + 1, start_) - edges - 1; x < p_.picture_columns && edges[x] < stop;) {
      const int64_t from = std::max(edges[x], start_), end = std::min(edges[x + 1], stop), width = end - from;
      int64_t some = 1;
      const bool narrow = width < W && !(width & (width - 1));
      while (narrow && x + some < p_.picture_columns && edges[x + some + 1] == end + some * width && edges[x + some + 1] <= stop)
        ++some;
      if (narrow && some * width >= 2 * W) {
        T *low = mass + (from - start_), *high = column_max + (from - start_);
        if (sums) pool(low, width, some, sums + x, sum_of_pairs<T>, [](T a, T b) { return a + b; });
        if (tops) pool(high, width, some, tops + x, most_of_pairs<T>, [](T a, T b) { return std::max(a, b); });
      } else {
        some = 1;
        if (sums) sums[x] += T(total_of(mass + (from - start_), width));
        if (tops) tops[x] = std::max(tops[x], top_of(column_max + (from - start_), width));
      }
      x += some;
    }
  }

  // `some` blocks of `width` numbers each, a power of two: neighbours are joined until one number is left of each.
  template <class Pairs, class Join>
  static ATTLAS_INLINE void pool(T* from, int64_t width, int64_t some, T* to, Pairs pairs, Join join) {
    for (; width > 1; width /= 2)
      for (int64_t j = 0; j < some * width / 2; j += W) store(from + j, pairs(load(from + 2 * j), load(from + 2 * j + W)));
    for (int64_t x = 0; x < some; ++x) to[x] = join(to[x], from[x]);
  }

  static double total_of(const T* from, int64_t size) {
    double total = 0;
    int64_t j = 0;
    if (size >= W) {
      V sums{};
      for (; j + W <= size; j += W) sums += load(from + j);
      total = double(sum<T>(sums));
    }
    for (; j < size; ++j) total += double(from[j]);
    return total;
  }

  static T top_of(const T* from, int64_t size) {
    T top = 0;
    int64_t j = 0;
    if (size >= W) {
      V tops{};
      for (; j + W <= size; j += W) tops = larger<T>(tops, load(from + j));
      top = most<T>(tops);
    }
    for (; j < size; ++j) top = std::max(top, from[j]);
    return top;
  }

  // A strip is done with this span: diagonal_[x] holds its cells with j - i = left_ - (ROWS - 1) + x.
  void give_diagonals() const {
    const T *even = diagonal_.data, *odd = even + DIAGONAL;
    const int64_t shift = left_ - (M::ROWS - 1) - strip_ + count_ - 1;
    const int64_t stop = std::min(end_ - left_ + M::ROWS - 1, int64_t(found_->diagonals.size()) - shift);
    double* to = found_->diagonals.data();
    for (int64_t x = std::max<int64_t>(0, -shift); x < stop; ++x) to[shift + x] += double(even[x] + odd[x]);
  }

  const attlas::AttentionParams& p_;
  const std::unique_ptr<Logits<T>> source_;
  const int q_parts_, k_parts_;
  const T scale_, factor_;  // of a product, to a logit and to the unit of Weight
  const bool transforms_logits_;  // a cap or an unusual scale: logits are not just multiples of products
  const bool picture_;
  const int64_t span_;
  int wanted_ = 0;
  Core core_[2][2] = {};
  int64_t together_ = 1, chunk_ = CHUNK;  // rows and columns that are taken together
  int64_t batch_ = 0, head_ = 0, first_ = 0, count_ = 0, start_ = 0, stop_ = 0, strip_ = 0, some_ = 0, left_ = 0, end_ = 0;
  const double* lse_ = nullptr;
  const MaskView* mask_ = nullptr;
  Found* found_ = nullptr;
  typename M::Product product_;  // of the next rectangle; so many of its steps for so many vectors of this one
  int64_t steps_ = 0, vectors_ = 1, pending_ = 0;
  Aligned<Number> queries_;
  const int64_t rectangles_;  // logits that are kept: of two rectangles, or of a whole strip where the largest are sought
  Aligned<T> logits_, peaks_, sums_, diagonal_;
  // Sums of columns, for each row of the picture that a strip touches.
  const int64_t slots_;
  int64_t open_ = 0, open_row_ = -1;  // the slot and the row of the picture that the next strip may go on with
  Aligned<T> mass_, column_max_;
  std::vector<Part> parts_;
  Shift<T> shift_[M::ROWS] = {};
  T centre_[M::ROWS] = {};
  bool centred_[M::ROWS] = {};
  int64_t cells_[M::ROWS] = {};
  std::vector<Numbers> rows_;
  std::vector<T> top_values_;
  std::vector<int32_t> top_keys_;
};

}  // namespace ATTLAS_ISA
