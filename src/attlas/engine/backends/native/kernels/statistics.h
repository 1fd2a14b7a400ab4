// The pass that computes statistics of rows, columns, diagonals and pictures from a known log-sum-exp, with one product
// and one exponential for each cell.
//
// A task has some rows of one head. Its results for these rows are complete; those for columns are added up over the tasks
// of a head, in their order. The division into tasks does not depend on the number of threads, so neither do results.
//
// A task reads the keys one span of columns after another. Within a span it goes from strip to strip, M::ROWS rows each. The
// logits of a strip are computed rectangle by rectangle, from left to right: one product each.
#pragma once

#include "columns.h"
#include "forward.h"
#include "logits.h"

namespace ATTLAS_ISA {

// Calls f(0) to f(R - 1) without a loop: arrays indexed so stay in registers, even with assembly between the calls.
template <int R, class F>
ATTLAS_INLINE void each(F f) {
  f(0);
  if constexpr (R > 1) f(1);
  if constexpr (R > 2) f(2);
  if constexpr (R > 3) f(3);
}

// What an inner loop computes besides the sums of rows, RowSum.
enum ColumnSum : int {
  COLUMN_SUMS = 1 << 16,
  COLUMN_MAXIMA = 1 << 17,
  DIAGONAL_SUMS = 1 << 18,
};

template <class M>
class StatisticsPass {
  using T = typename M::T;
  using Number = typename M::Number;
  using V = Vec<T>;
  static constexpr int W = WIDTH<T>;
  static constexpr bool NARROW = VECTOR_BYTES == 32;  // such vectors also have only half as many registers
  // Most columns of a rectangle; many, because to begin and end one costs as much as several vectors.
  static constexpr int64_t CHUNK = M::COLUMNS * ((NARROW ? 256 : 128) / M::COLUMNS);
  static_assert(CHUNK / M::COLUMNS <= M::Product::MOST);
  static constexpr int64_t STRIDE = CHUNK + 16;  // from one row of a rectangle to the next: no power of 2, which caches dislike
  static constexpr int64_t RECTANGLE_ROWS = round_up(M::ROWS, 4);  // a rectangle has room for these: a LogitSource fills fours
  static constexpr int64_t SPAN = CHUNK * (2048 / CHUNK);          // most columns of a span
  static constexpr int64_t RECTANGLES = SPAN / CHUNK;              // most rectangles of a strip whose maxima are kept
  static constexpr int64_t STRIP_DIAGONALS = SPAN + M::ROWS + 2 * W;  // room for the diagonals that a strip crosses

 public:
  // Rows of one task: so few that its packed queries stay in the cache while all keys are read.
  static int64_t block_for(const attlas::AttentionParams& p, int q_parts) {
    const int64_t bytes = M::depth_of(p.d) * q_parts * int64_t(sizeof(Number));
    const int64_t most = std::clamp<int64_t>((512 << 10) / bytes, 2 * M::ROWS, 2048);
    return round_up(std::clamp<int64_t>(p.m / 16, M::ROWS, most), M::ROWS);
  }

  // `block` is the number of rows of a task. Without `source`, logits are products of packed tokens.
  StatisticsPass(const attlas::AttentionParams& problem, int64_t block, int q_parts, int k_parts,
                 std::unique_ptr<LogitSource<T>> source = nullptr)
      : p_(problem),
        source_(std::move(source)),
        q_parts_(q_parts),
        k_parts_(k_parts),
        scale_(factor_of<T>(problem)),
        factor_(T(double(scale_) / Weight<T>::UNIT)),
        transforms_logits_(transforms_logits<T>(problem)),
        span_(std::clamp<int64_t>((768 << 10) / (M::depth_of(problem.d) * k_parts * int64_t(sizeof(Number))) / CHUNK * CHUNK,
                                  CHUNK, SPAN)),
        queries_(source_ ? 0 : M::left_size(block, problem.d, q_parts)),
        rectangles_(problem.top_keys ? RECTANGLES : 2),
        logits_(size_t(rectangles_) * RECTANGLE_ROWS * STRIDE),
        peaks_(size_t(M::ROWS) * RECTANGLES * W),
        sums_(M::ROWS),
        diagonal_(2 * STRIP_DIAGONALS),
        columns_(problem, span_),
        rows_(block),
        largest_(block, problem.k_largest) {
    std::fill(logits_.data, logits_.data + rectangles_ * RECTANGLE_ROWS * STRIDE, T(0));
    choose_loop();
  }

  // Runs the task of queries [first, first + count) of one head, which it packs first; `right` are the packed keys.
  template <class Read>
  void run(int64_t b, int64_t h, int64_t first, int64_t count, Read read, const Number* right, TaskColumns<T>& task_columns) {
    M::pack_left(queries_.data, count, p_.d, q_parts_, read);
    run(b, h, first, count, right, task_columns);
  }

  // Runs it where logits come from `source_`, or the queries are packed.
  void run(int64_t b, int64_t h, int64_t first, int64_t count, const Number* right, TaskColumns<T>& task_columns) {
    begin(b, h, first, count, task_columns);
    process_rows(0, count, right);
    finish();
  }

  // Runs it in steps: begin(), then process_rows() any number of times, for rows from a multiple of ROWS on, then finish().
  void begin(int64_t b, int64_t h, int64_t first, int64_t count, TaskColumns<T>& task_columns) {
    batch_ = b;
    head_ = b * p_.heads + h;
    first_ = first;
    count_ = count;
    diagonals_ = &task_columns.diagonals;
    lse_ = p_.lse + head_ * p_.m + first;
    std::fill(rows_.begin(), rows_.end(), Row());
    largest_.clear();
    columns_.begin(head_, first, count, task_columns);
  }

  void process_rows(int64_t from, int64_t to, const Number* right) {
    const Flush flush;
    const PlaceView mask(p_, batch_, head_ % p_.heads);
    int64_t left, end;
    mask.hull(first_ + from, first_ + to, left, end);
    for (start_ = left / M::COLUMNS * M::COLUMNS; start_ < end; start_ += span_) {
      stop_ = std::min(start_ + span_, round_up(end, M::COLUMNS));
      columns_.begin_span(start_, stop_);
      for (int64_t r = from; r < to; r += M::ROWS) {
        M::checkpoint();
        process_strip(mask, r, std::min<int64_t>(to - r, M::ROWS), right);
      }
      columns_.end_span();
    }
  }

  void finish() {
    for (int64_t r = 0; r < count_; ++r) {
      Row& row = rows_[r];
      const int64_t place = head_ * p_.m + first_ + r;  // of the row in the results
      const double lse = lse_[r];
      if (!(wanted_ & TOTALS)) row.total = lse > -INF<double> ? 1 : 0;
      row.statistics(1, 0, row.max_logit * scale_).store(p_, place);
      largest_.store(p_, r, place, scale_, lse);
    }
  }

 private:
  struct Row : RowSums<T, double> {
    T max_logit = -INF<T>;  // without the scale
  };

  // A rectangle of computed logits: its columns, how many of its rows were processed, and its number in the strip.
  struct Rectangle {
    T* logits = nullptr;
    int64_t left = 0, end = 0, rows_done = 0, index = 0;
    bool has_masked = false;  // whether some logits may be -infinity
  };

  using AddRows = void (StatisticsPass::*)(const Rectangle&, int64_t, T*, T*);

  void choose_loop() {
    const bool columns = p_.column_mass || p_.column_max || p_.picture_sum || p_.picture_max;
    const int wanted = row_sums_for(p_) | (columns ? COLUMN_SUMS : 0) | (p_.column_max || p_.picture_max ? COLUMN_MAXIMA : 0) |
                       (p_.offsets ? DIAGONAL_SUMS : 0);
    // Loops are compiled for frequent requests; any other request uses the first loop that computes all of it.
    with_first_loop<PLOGP, PLOGP | SQUARES, PLOGP | MAXIMA, PLOGP | MAXIMA | MOMENTS, COLUMN_SUMS, COLUMN_SUMS | COLUMN_MAXIMA,
                    COLUMN_SUMS | COLUMN_MAXIMA | DIAGONAL_SUMS, PLOGP | SQUARES | MAXIMA | COLUMN_SUMS | DIAGONAL_SUMS,
                    ~(MASKED | TOTALS), ~MASKED>(wanted, [this]<int LOOP>() { use_loop<LOOP>(); });
  }

  template <int WANTED>
  void use_loop() {
    wanted_ = WANTED;  // what the loop computes: all that was asked for, and maybe more
    constexpr bool LIGHT = !(WANTED & (MAXIMA | MOMENTS));
    // As many rows at a time as have sums that fit into registers.
    constexpr int ROWS_TOGETHER = (LIGHT && !(WANTED & DIAGONAL_SUMS) ? 4 : 2) / (NARROW ? 2 : 1);
    add_rows_[0][0] = &StatisticsPass::add_rows<WANTED, 1>;
    add_rows_[0][1] = &StatisticsPass::add_rows<WANTED, ROWS_TOGETHER>;
    constexpr int WITH_MASKED = WANTED & MOMENTS ? WANTED | MASKED : WANTED;
    add_rows_[1][0] = &StatisticsPass::add_rows<WITH_MASKED, 1>;
    add_rows_[1][1] = &StatisticsPass::add_rows<WITH_MASKED, ROWS_TOGETHER>;
    // A light loop works well on small rectangles, which leave more of the cache to the tokens.
    rows_together_ = ROWS_TOGETHER;
    chunk_ = LIGHT && !NARROW ? M::COLUMNS * std::max<int64_t>(64 / M::COLUMNS, 1) : CHUNK;
  }

  // Processes one strip: rows [r, r + rows) of the task and the columns of this span. The rows of one rectangle are
  // processed while the product of the next one is computed.
  void process_strip(const PlaceView& mask, int64_t r, int64_t rows, const Number* right) {
    int64_t left, end, inner_left, inner_end;
    mask.hull(first_ + r, first_ + r + rows, left, end);
    mask.core(first_ + r, first_ + r + rows, inner_left, inner_end);
    left = std::max(left / M::COLUMNS * M::COLUMNS, start_);
    end = std::min(round_up(end, M::COLUMNS), stop_);
    if (left >= end) return;
    if (source_) source_->prepare_rows(batch_, head_ % p_.heads, first_ + r, rows);
    columns_.begin_strip(r, rows, wanted_ & COLUMN_MAXIMA);
    if (p_.offsets) std::fill(diagonal_.data, diagonal_.data + 2 * STRIP_DIAGONALS, T(0));
    for (int64_t i = 0; i < rows; ++i) {
      shift_[i] = lse_[r + i] == -INF<double> ? Shift<T>::none() : Weight<T>::shift_of(lse_[r + i], scale_);
      const Moments& moments = rows_[r + i].moments;
      centre_[i] = moments.count > 0 ? T(moments.mean / double(scale_)) : -INF<T>;
      cells_[i] = 0;
      sums_[i] = VectorSums<T>();
    }
    strip_row_ = r;
    strip_rows_ = rows;
    mask_ = &mask;
    Rectangle previous;
    left_ = left;
    end_ = end;
    for (int64_t index = 0; left < end; left += chunk_, ++index) {
      Rectangle next;
      next.logits = logits_.at(size_t(index % rectangles_) * RECTANGLE_ROWS * STRIDE);
      next.index = index;
      next.left = left;
      next.end = std::min(left + chunk_, end);
      // A source may have logits of -infinity anywhere.
      next.has_masked = (source_ && !source_->only_masked) || mask.allowed || mask.has_bias || left < inner_left || next.end > inner_end;
      const bool visible = start_rectangle(next, right);
      if (previous.logits) process_rectangle(previous);  // even if `next` is hidden: its memory is used again
      product_.finish();
      previous = visible ? next : Rectangle();
      if (visible && !M::Product::STEPS) process_rectangle(previous);
      for (int64_t i = 0; !visible && (wanted_ & MAXIMA) && i < rows; ++i) store(peaks_of(i) + index * W, all(-INF<T>));
    }
    product_ = typename M::Product();
    if (previous.logits) process_rectangle(previous);
    finish_strip(r, rows, (end_ - left_ + chunk_ - 1) / chunk_);
    if (p_.offsets) add_diagonals();
  }

  // Sets up the product that computes a rectangle, or fills it from `source_`; returns false where the mask hides all of it.
  bool start_rectangle(const Rectangle& next, const Number* right) {
    if (source_) {
      const int64_t size = next.end - next.left;
      if (mask_->hides(first_ + strip_row_, strip_rows_, next.left, size)) return false;
      source_->fill(next.left, size, next.logits, STRIDE);
      return true;
    }
    product_ = typename M::Product(M::left_at(queries_.data, strip_row_, p_.d, q_parts_), q_parts_, p_.d, k_parts_, STRIDE);
    bool any = false;
    for (int64_t j = next.left; j < next.end; j += M::COLUMNS) {
      if (mask_->hides(first_ + strip_row_, strip_rows_, j, M::COLUMNS)) continue;
      any = true;
      product_.add(M::right_at(right, j, 0, p_.d, k_parts_), next.logits + (j - next.left));
    }
    return any;
  }

  // Processes all rows of a rectangle; the steps of the next one's product are done in between.
  void process_rectangle(Rectangle& rectangle) {
    pending_ = 0;
    steps_ = product_.steps();
    vectors_ = strip_rows_ * (rectangle.end - rectangle.left) / W;
    while (rectangle.rows_done < strip_rows_) process_next_rows(rectangle);
  }

  // Processes one row of a rectangle, or several that lie in one row of the picture.
  void process_next_rows(Rectangle& rectangle) {
    const int64_t i = rectangle.rows_done;
    const auto& part = columns_.part_of(i);
    const int64_t rows = part.to - i >= rows_together_ ? rows_together_ : 1;
    if (rectangle.has_masked || transforms_logits_)
      for (int64_t x = i; x < i + rows; ++x)
        finish_row<T>(rectangle.logits + x * STRIDE, *mask_, first_ + strip_row_ + x, rectangle.left, rectangle.end, T(p_.scale),
                      T(p_.cap));
    if (wanted_ & MOMENTS)
      for (int64_t x = i; x < i + rows; ++x)
        if (centre_[x] == -INF<T>) centre_[x] = find_centre(rectangle.logits + x * STRIDE, rectangle.end - rectangle.left);
    // In a variable of its own: the sanitizer misreads an index inside a call through a pointer to a member.
    const AddRows add = add_rows_[rectangle.has_masked][rows > 1];
    (this->*add)(rectangle, i, columns_.sums(part, rectangle.left), columns_.maxima(part, rectangle.left));
    rectangle.rows_done += rows;
  }

  // The inner loop: computes the weights of rows [i, i + R) of a rectangle, and adds them to the sums.
  template <int WANTED, int R>
  void add_rows(const Rectangle& rectangle, int64_t i, T* mass, T* column_max) {
    const int64_t size = rectangle.end - rectangle.left;
    const V factor = all(factor_);
    VectorSums<T> sums[R];
    V peak[R];
    const T* logits[R];
    T* diagonal[R];
    V high[R], low[R], centre[R];
    typename M::Product& product = product_;
    const int64_t steps = steps_, vectors = vectors_;
    int64_t pending = pending_;
    each<R>([&](int r) __attribute__((always_inline)) {
      peak[r] = all(-INF<T>);
      logits[r] = rectangle.logits + (i + r) * STRIDE;
      // Even and odd rows have sums of their own: a sum is not read right after the row before has stored it.
      diagonal[r] = diagonal_.at(size_t((i + r) % 2 * STRIP_DIAGONALS + rectangle.left - left_ + M::ROWS - 1 - (i + r)));
      high[r] = all(shift_[i + r].high);
      low[r] = all(shift_[i + r].low);
      centre[r] = all(centre_[i + r]);
    });
    for (int64_t j = 0; j < size; j += W) {
      V total, top;
      each<R>([&](int r) __attribute__((always_inline)) {
        const V x = load(logits[r] + j);
        const Weight<T> w(x, factor, high[r], low[r]);
        sums[r].template accumulate<WANTED>(x, w, centre[r]);
        if (WANTED & MAXIMA) peak[r] = larger<T>(peak[r], x);
        if (WANTED & COLUMN_SUMS) total = r ? total + w.e : w.e;
        if (WANTED & COLUMN_MAXIMA) top = r ? larger<T>(top, w.e) : w.e;
        if (WANTED & DIAGONAL_SUMS) store(diagonal[r] + j, load(diagonal[r] + j) + w.e);
      });
      if (WANTED & COLUMN_SUMS) store(mass + j, load(mass + j) + total);
      if (WANTED & COLUMN_MAXIMA) store(column_max + j, larger<T>(load(column_max + j), top));
      if (M::Product::STEPS)
        for (pending += R * steps; pending >= vectors; pending -= vectors) product.template step<(WANTED & (MAXIMA | MOMENTS)) != 0>();
    }
    pending_ = pending;
    each<R>([&](int r) __attribute__((always_inline)) {
      if (WANTED & MOMENTS) cells_[i + r] += sums[r].template count<WANTED>(size);
      sums_[i + r].template merge<WANTED>(sums[r]);
      if (WANTED & MAXIMA) store(peaks_of(i + r) + rectangle.index * W, peak[r]);
    });
  }

  T* peaks_of(int64_t i) const { return peaks_.at(size_t(i * RECTANGLES * W)); }

  // Returns the number about which the moments of a row are taken: near the mean, to avoid cancellation. It is the mean of a
  // few logits in the middle, and -infinity where all logits are.
  static T find_centre(const T* row, int64_t size) {
    T centre = mean_in_the_middle(row, size);
    for (int64_t j = 0; centre == -INF<T> && j < size; ++j) centre = row[j];
    return centre;
  }

  // Adds the logits of row i of the strip in this span to the k largest of its row.
  void keep_largest(int64_t i, int64_t rectangles) {
    const auto segment_at = [&](int index) {
      const int64_t key = left_ + index * chunk_;
      return typename KLargest<T>::Segment{logits_.at(size_t((index % rectangles_) * RECTANGLE_ROWS + i) * STRIDE), key,
                                          std::min(chunk_, end_ - key)};
    };
    largest_.row(strip_row_ + i).add(reinterpret_cast<const V*>(peaks_of(i)), int(rectangles), W, segment_at);
  }

  // Adds the sums of a strip over this span to the running sums of its rows.
  void finish_strip(int64_t r, int64_t rows, int64_t rectangles) {
    for (int64_t i = 0; i < rows; ++i) {
      Row& row = rows_[r + i];
      row.add(sums_[i], cells_[i], centre_[i], scale_, wanted_);
      if (wanted_ & MAXIMA) {
        V peak = load(peaks_of(i));
        for (int64_t index = 1; index < rectangles; ++index) peak = larger<T>(peak, load(peaks_of(i) + index * W));
        row.max_logit = std::max(row.max_logit, most<T>(peak));
      }
    }
    // In a loop of its own: its branches are unpredictable, and would delay the sums above.
    for (int64_t i = 0; p_.top_keys && i < rows; ++i) keep_largest(i, rectangles);
  }

  // Adds the diagonals of a strip over this span to those of the task; diagonal_[x] is the sum of the strip's cells with
  // j - i = left_ - (ROWS - 1) + x.
  void add_diagonals() const {
    const T *even = diagonal_.data, *odd = even + STRIP_DIAGONALS;
    const int64_t shift = left_ - (M::ROWS - 1) - strip_row_ + count_ - 1;
    const int64_t stop = std::min(end_ - left_ + M::ROWS - 1, int64_t(diagonals_->size()) - shift);
    double* to = diagonals_->data();
    for (int64_t x = std::max<int64_t>(0, -shift); x < stop; ++x) to[shift + x] += double(even[x] + odd[x]);
  }

  const attlas::AttentionParams& p_;
  const std::unique_ptr<LogitSource<T>> source_;
  const int q_parts_, k_parts_;
  const T scale_, factor_;  // what a product is multiplied by, to become a logit, or a logit in the unit of Weight
  const bool transforms_logits_;
  const int64_t span_;  // columns of a span: so few that their packed keys stay in the cache
  int wanted_ = 0;      // of RowSum and ColumnSum
  AddRows add_rows_[2][2] = {};  // the inner loop: [whether some logits may be -infinity][whether for several rows]
  int64_t rows_together_ = 1, chunk_ = CHUNK;  // rows that the inner loop processes at a time, columns of a rectangle
  int64_t batch_ = 0, head_ = 0, first_ = 0, count_ = 0;         // the task: queries [first_, first_ + count_) of a head
  int64_t start_ = 0, stop_ = 0;                                 // the span: columns [start_, stop_)
  int64_t strip_row_ = 0, strip_rows_ = 0, left_ = 0, end_ = 0;  // the strip: its rows in the task, columns [left_, end_)
  const double* lse_ = nullptr;  // of the rows of the task
  const PlaceView* mask_ = nullptr;
  std::vector<double>* diagonals_ = nullptr;  // of the task
  typename M::Product product_;  // of the next rectangle; steps_ of it are done during vectors_ vectors of this one
  int64_t steps_ = 0, vectors_ = 1, pending_ = 0;
  Aligned<Number> queries_;
  const int64_t rectangles_;  // rectangles of logits in memory: two, or those of a whole strip for the largest logits
  Aligned<T> logits_, peaks_;  // of the rectangles; the largest logits of each lane of each row of a rectangle
  Aligned<VectorSums<T>> sums_;  // of the rows of a strip
  Aligned<T> diagonal_;          // sums of the diagonals of a strip
  ColumnAccumulator<M> columns_;
  // Of each row of a strip: its log-sum-exp, the number about which its moments are taken, and how many logits these count.
  Shift<T> shift_[M::ROWS] = {};
  T centre_[M::ROWS] = {};
  int64_t cells_[M::ROWS] = {};
  std::vector<Row> rows_;  // of the task
  KLargestOfRows<T> largest_;
};

}  // namespace ATTLAS_ISA
