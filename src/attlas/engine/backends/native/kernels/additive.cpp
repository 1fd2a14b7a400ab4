// The additive score, forward and backward, without a hidden unit ever stored.
#include "units.h"

namespace ATTLAS_ISA {

using namespace attlas;

// Gradients by recomputation. One worker takes some rows of one head at a time and sums the gradients of the columns
// in memory of its own; these are then added up in a fixed order.
template <class T>
struct AdditiveGradients {
  static constexpr int W = WIDTH<T>;
  const AdditiveBackward& x;
  const PairwiseParams& p;
  const AdditiveScore<T> score;
  const PackedValues<T> right;
  const int64_t slots, whole, column_numbers;
  const int workers;

  struct Worker {
    Scratch<T> s;
    SlopeRows<T> given;
    Aligned<T> columns;         // gradients of e^2b's exponent, as AdditiveScore::packed
    Aligned<T> values;          // as PackedValues, by coordinate
    Aligned<T> rows;            // [row][slot]
    std::vector<double> weight;  // sum of slope * r of each slot
    double slopes = 0;
    Worker(const AdditiveGradients& of)
        : s(0, of.score.row_numbers),
          given(of.p.e),
          columns(size_t(of.column_numbers)),
          values(size_t(of.whole * of.p.e)),
          rows(size_t(ROWS * of.slots)),
          weight(size_t(of.slots), 0.0) {}
  };
  std::vector<Worker> team;

  explicit AdditiveGradients(const AdditiveBackward& given)
      : x(given),
        p(given.of.pairs),
        score(given.of),
        right(p, true),
        slots(score.slots),
        whole(padded<T>(p.n)),
        column_numbers(whole / W * score.stride),
        workers(std::max(1, p.threads)) {
    for (int t = 0; t < workers; ++t) team.emplace_back(*this);
  }

  void clear(Worker& w) const {
    std::fill(w.columns.data, w.columns.data + column_numbers, T(0));
    std::fill(w.values.data, w.values.data + whole * p.e, T(0));
  }

  void block(Worker& w, int64_t b, int64_t h, int64_t i0) const {
    Scratch<T>& s = w.s;
    const int count = int(std::min<int64_t>(ROWS, p.m - i0));
    const int64_t row0 = (b * p.heads + h) * p.m + i0;
    w.given.read(p, x.slopes, row0, count);
    std::fill(w.rows.data, w.rows.data + ROWS * slots, T(0));
    const PairwiseMaskView<T> mask(p, b, h);
    score.prepare_rows(b, h, i0, count, s);
    for (int64_t j0 = 0; j0 < p.n; j0 += COLS<T>) {
      attlas::checkpoint();
      const int columns = int(std::min<int64_t>(COLS<T>, p.n - j0)), vectors = (columns + W - 1) / W;
      const auto cover = mask.cover(i0, count, j0, columns);
      if (cover == PairwiseMaskView<T>::NONE) continue;
      score.tile(b, h, j0, vectors, s.tile.data, s);
      if (p.places) add_places(p, b, h, i0, count, j0, columns, s.tile.data, COLS<T>);
      if (cover == PairwiseMaskView<T>::SOME) mask.apply(s.tile.data, i0, count, j0, columns, -INF<T>);
      slopes_of<T>(w.given, p.e, right.head(p, b, h) + j0 * p.e, nullptr, whole, nullptr, vectors, s);
      values(w, j0, vectors);
      units(w, b, h, j0, vectors);
    }
    for (int r = 0; r < count; ++r) {
      T* to = static_cast<T*>(x.d_rows) + (row0 + r) * p.d;
      std::fill(to, to + p.d, T(0));
      for (int64_t slot = 0; slot < slots; ++slot)
        if (score.units.unit[size_t(slot)] >= 0)
          to[score.units.unit[size_t(slot)]] = w.rows[size_t(r * slots + slot)] * chain(slot);
    }
  }

  // d tanh = 4 r (1 - r), times the weight.
  T chain(int64_t slot) const { return T(4 * score.units.largest * double(score.units.weight[size_t(slot)])); }

  // Weights times the left vectors, for each column.
  void values(Worker& w, int64_t j0, int vectors) const {
    T* to = w.values.data + j0 * p.e;
    const T *left = w.given.left.data, *weights = w.s.tile.data;
    for (int64_t c = 0; c < p.e; ++c)
      for (int v = 0; v < vectors; ++v) {
        Vec<T> total = load(to + c * COLS<T> + v * W);
        for (int r = 0; r < ROWS; ++r) total += all(left[r * p.e + c]) * load(weights + r * COLS<T> + v * W);
        store(to + c * COLS<T> + v * W, total);
      }
  }

  // Sums of slope * r (1 - r) for rows and columns, and of slope * r for the weights, r = 1 / (1 + AB).
  void units(Worker& w, int64_t b, int64_t h, int64_t j0, int vectors) const {
    const RowParts<T> part(w.s.rows.data, slots);
    const T* slope = w.s.slopes.data;
    int fast[COLS<T> / W], count = 0;
    Vec<T> sums{};
    for (int v = 0; v < vectors; ++v) {
      for (int r = 0; r < ROWS; ++r) sums += load(slope + r * COLS<T> + v * W);
      if (score.in_range(part, b, h, j0 / W + v))
        fast[count++] = v;
      else
        exact(w, part, b, h, j0, v);
    }
    w.slopes += double(sum<T>(sums));
    const T* column = score.columns(b, h, j0 / W);
    T* gradient = w.columns.data + j0 / W * score.stride;
    for (int64_t slot = 0; slot < slots; slot += SHARED) {
      Vec<T> weight[SHARED] = {};
      for (int r = 0; r < ROWS; r += 2) {
        Vec<T> moved[2][SHARED] = {};
        for (int place = 0; place < count; ++place) {
          const int64_t at = fast[place] * score.stride + slot * W;
          two_rows(part.plain + r * slots + slot, column + at, slope + r * COLS<T> + fast[place] * W, gradient + at,
                   moved, weight);
        }
        for (int i = 0; i < 2; ++i)
          for (int u = 0; u < SHARED; ++u) w.rows[size_t((r + i) * slots + slot + u)] += sum<T>(moved[i][u]);
      }
      for (int u = 0; u < SHARED; ++u) w.weight[size_t(slot + u)] += double(sum<T>(weight[u]));
    }
  }

  ATTLAS_INLINE void two_rows(const T* a, const T* column, const T* slope, T* gradient, Vec<T> (&moved)[2][SHARED],
                              Vec<T> (&weight)[SHARED]) const {
    const Vec<T> one = all(T(1));
    Vec<T> down[SHARED];
    for (int u = 0; u < SHARED; ++u) down[u] = load(gradient + u * W);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      Vec<T> d[SHARED], r[SHARED];
      for (int u = 0; u < SHARED; ++u) d[u] = all(a[i * slots + u]) * load(column + u * W) + one;
      const Vec<T> left = d[0] * d[1], right_ = d[2] * d[3], whole_ = reciprocal(left * right_);
      const Vec<T> first = whole_ * right_, second = whole_ * left;
      r[0] = first * d[1];
      r[1] = first * d[0];
      r[2] = second * d[3];
      r[3] = second * d[2];
      const Vec<T> above = load(slope + i * COLS<T>);
      for (int u = 0; u < SHARED; ++u) {
        const Vec<T> steep = r[u] - r[u] * r[u];
        moved[i][u] += above * steep;
        down[u] += above * steep;
        weight[u] += above * r[u];
      }
    }
    for (int u = 0; u < SHARED; ++u) store(gradient + u * W, down[u]);
  }

  // The same for one vector of columns, from tanh itself.
  __attribute__((noinline)) void exact(Worker& w, const RowParts<T>& part, int64_t b, int64_t h, int64_t j0,
                                       int v) const {
    score.raw_columns(b, h / (p.heads / p.token_heads), j0 + v * W, part.block);
    T* gradient = w.columns.data + (j0 / W + v) * score.stride;
    for (int64_t slot = 0; slot < slots; ++slot) {
      if (score.units.unit[size_t(slot)] < 0) continue;
      Vec<T> down = load(gradient + slot * W), weight{};
      for (int r = 0; r < ROWS; ++r) {
        const Vec<T> t = tanh_(all(part.raw[r * slots + slot]) + load(part.block + slot * W));
        const Vec<T> above = load(w.s.slopes.data + r * COLS<T> + v * W);
        const Vec<T> steep = above * (all(T(0.25)) - all(T(0.25)) * t * t);
        down += steep;
        weight += above * (all(T(0.5)) - all(T(0.5)) * t);
        w.rows[size_t(r * slots + slot)] += sum<T>(steep);
      }
      store(gradient + slot * W, down);
      w.weight[size_t(slot)] += double(sum<T>(weight));
    }
  }

  // Write the gradients of the columns of one head, summed over some workers.
  void write(int64_t head, int first, int last, int64_t from, int64_t to) const {
    for (int64_t j = from; j < to; ++j) {
      T* d_columns = static_cast<T*>(x.d_columns) + (head * p.n + j) * p.d;
      T* d_values = static_cast<T*>(x.d_values) + (head * p.n + j) * p.e;
      std::fill(d_columns, d_columns + p.d, T(0));
      for (int64_t slot = 0; slot < slots; ++slot) {
        if (score.units.unit[size_t(slot)] < 0) continue;
        T total = 0;
        for (int t = first; t < last; ++t)
          total += team[size_t(t)].columns[size_t(j / W * score.stride + slot * W + j % W)];
        d_columns[score.units.unit[size_t(slot)]] = total * chain(slot);
      }
      for (int64_t c = 0; c < p.e; ++c) {
        T total = 0;
        for (int t = first; t < last; ++t)
          total += team[size_t(t)].values[size_t(j / COLS<T> * COLS<T> * p.e + c * COLS<T> + j % COLS<T>)];
        d_values[c] = total;
      }
    }
  }

  void run() {
    const int64_t heads = p.batch * p.heads, blocks = (p.m + ROWS - 1) / ROWS;
    // Where there are heads for all workers, one worker takes all rows of a head, whichever it is. Else all of them share the
    // rows of one head, and sum what each of them found.
    const int64_t parts = heads >= workers ? 1 : workers, together = parts == 1 ? heads : 1;
    for (int64_t first = 0; first < heads; first += together) {
      share(size_t(together * parts), workers, [&](size_t item, int thread) {
        const Flush flush;
        const int64_t head = first + int64_t(item) / parts, part = int64_t(item) % parts;
        Worker& w = team[parts == 1 ? size_t(thread) : item];
        clear(w);
        for (int64_t i = blocks * part / parts; i < blocks * (part + 1) / parts; ++i)
          block(w, head / p.heads, head % p.heads, i * ROWS);
        if (parts == 1) write(head, thread, thread + 1, 0, p.n);
      });
      if (parts == 1) continue;
      share(size_t(parts), workers, [&](size_t part, int) {
        write(first, 0, workers, p.n * int64_t(part) / parts, p.n * int64_t(part + 1) / parts);
      });
    }
    T* d_weight = static_cast<T*>(x.d_weight);
    double slopes = 0;
    for (const Worker& w : team) slopes += w.slopes;
    for (int64_t slot = 0; slot < slots; ++slot) {
      if (score.units.unit[size_t(slot)] < 0) continue;
      double total = 0;
      for (const Worker& w : team) total += w.weight[size_t(slot)];
      d_weight[score.units.unit[size_t(slot)]] = T(slopes - 2 * total);
    }
  }
};

bool in_range(const PairwiseParams& p) {
  return p.type == FLOAT64 ? places_in_range<double>(p) : places_in_range<float>(p);
}

int32_t run_additive(const Additive& x) {
  if (!in_range(x.pairs)) return NOT_FINITE;
  if (x.pairs.type == FLOAT64) run_score<double>(x.pairs, AdditiveScore<double>(x));
  else run_score<float>(x.pairs, AdditiveScore<float>(x));
  return DONE;
}

int32_t run_additive_backward(const AdditiveBackward& x) {
  if (!in_range(x.of.pairs)) return NOT_FINITE;
  if (x.of.pairs.type == FLOAT64) AdditiveGradients<double>(x).run();
  else AdditiveGradients<float>(x).run();
  return DONE;
}

}  // namespace ATTLAS_ISA
