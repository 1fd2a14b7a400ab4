// Gradients of attention by (scaled, capped) dot products: how the work is divided.
#include <memory>
#include <vector>

#include "abi.h"
#include "amx.h"
#include "backward.h"
#include "parallel.h"

#if defined(__AMX_BF16__)
namespace avx512 {
int32_t run_dot_backward(const attlas::AttentionBackwardParams&);
}
#endif

namespace ATTLAS_ISA {

namespace {

using attlas::AttentionBackwardParams;

// What only vectors give: gradients of terms of places, and of capped products beside such terms.
bool needs_vectors(const AttentionBackwardParams& work) {
  return wants_places(work.places) || (work.of.cap > 0 && has_bias(work.of));
}

// Some key heads and some queries of all their heads, which are done with before the next ones begin.
struct Round {
  int64_t first_pair, pairs, first_row, rows;
};

template <class M>
class Division {
  using T = typename M::T;
  using Worker = Backward<M>;
  static constexpr int64_t ROWS = Worker::ROWS;

 public:
  Division(const AttentionBackwardParams& work, BackwardParts parts)
      : w_(work),
        p_(work.of),
        parts_(parts),
        keys_(Worker::keys_of_task(p_)),
        runs_((p_.n + keys_ - 1) / keys_),
        group_(p_.heads / p_.key_heads),
        apart_(key_heads_apart(work)),
        in_turn_(p_.threads == 1 || apart_ >= 4 * p_.threads),
        slots_(in_turn_ ? 1 : runs_),
        pairs_(p_.threads == 1 ? 1 : std::clamp<int64_t>(in_turn_ ? 2 * p_.threads : 4 * p_.threads / runs_, 1, apart_)),
        blocks_(blocks_of_round(p_, runs_)),
        rows_(work, parts.tokens),
        packed_(size_t(pairs_ * group_ * blocks_) * rows_.size()),
        found_(size_t(pairs_ * group_ * slots_ * blocks_ * ROWS * p_.d)),
        totals_(work.places.query ? size_t(pairs_ * group_ * slots_ * blocks_ * ROWS) : 0),
        span_(keys_ + blocks_ * ROWS),
        distances_(work.places.distance ? size_t(pairs_ * group_ * runs_ * span_) : 0),
        any_(size_t(pairs_ * group_ * slots_ * blocks_)),
        workers_(size_t(p_.threads)) {}

  // Blocks of queries of one round: few, so that what is kept of them stays small. The number of threads does not matter
  // here, since the gradients of keys are added up round by round.
  static int64_t blocks_of_round(const attlas::AttentionParams& p, int64_t runs) {
    const int64_t numbers = p.heads / p.key_heads * p.d * std::max<int64_t>(runs / 16, 1);
    return std::min(std::max<int64_t>((4096 * 64) / (numbers * ROWS), 4), (p.m + ROWS - 1) / ROWS);
  }

  // Key heads in a row whose gradients of cells lie apart, so that threads may take them at the same time.
  static int64_t key_heads_apart(const AttentionBackwardParams& work) {
    const attlas::AttentionParams& p = work.of;
    if (work.places.cell && p.heads > 1 && work.places.cell_head == 0) return 1;
    return work.places.cell && work.places.cell_batch == 0 ? p.key_heads : p.batch * p.key_heads;
  }

  void run() {
    const int64_t all = p_.batch * p_.key_heads, rows = blocks_ * ROWS;
    for (int64_t pair = 0, together; pair < all; pair += together) {
      together = std::min(pairs_, apart_ - pair % apart_);
      for (int64_t row = 0; row < p_.m; row += rows) {
        const Round round{pair, together, row, std::min(rows, p_.m - row)};
        const int64_t blocks = (round.rows + ROWS - 1) / ROWS;
        attlas::share(size_t(round.pairs * group_ * blocks), p_.threads,
                      [&](size_t task, int) { pack(round, int64_t(task) / blocks, int64_t(task) % blocks); });
        for (const bool summing : {true, false}) {
          if (summing && !w_.column) continue;
          // The first keys first: under a causal mask the most queries see them.
          const int64_t in_row = in_turn_ ? runs_ : 1;
          attlas::share(size_t(round.pairs * runs_ / in_row), p_.threads, [&](size_t task, int thread) {
            for (int64_t run = 0; run < in_row; ++run) {
              attlas::checkpoint();
              pass(round, int64_t(task) % round.pairs, int64_t(task) / round.pairs + run, thread, summing);
            }
          });
          attlas::share(size_t(round.pairs * group_ * blocks), p_.threads,
                        [&](size_t task, int) { add_up(round, int64_t(task) / blocks, int64_t(task) % blocks, summing); });
        }
        for (int64_t which = 0; w_.places.distance && which < round.pairs * group_; ++which) add_distances(round, which);
      }
    }
  }

 private:
  // What a run of keys found of a block of queries: added to what those before it found, where they take turns.
  size_t place(int64_t head, int64_t run, int64_t block) const { return size_t((head * slots_ + run % slots_) * blocks_ + block); }

  int64_t batch(const Round& round, int64_t which) const { return (round.first_pair + which / group_) / p_.key_heads; }
  int64_t head(const Round& round, int64_t which) const {
    return (round.first_pair + which / group_) % p_.key_heads * group_ + which % group_;
  }

  void pack(const Round& round, int64_t which, int64_t block) const {
    const int64_t row = round.first_row + block * ROWS;
    Aligned<T> turned(rows_.room());
    rows_.pack(batch(round, which), head(round, which), row, std::min(ROWS, round.first_row + round.rows - row),
               packed_.at(size_t(which * blocks_ + block) * rows_.size()), turned.data);
  }

  void pass(const Round& round, int64_t pair, int64_t run, int thread, bool summing) {
    const int64_t b = (round.first_pair + pair) / p_.key_heads, g = (round.first_pair + pair) % p_.key_heads;
    const int64_t first = run * keys_;
    if (!workers_[thread]) workers_[thread] = std::make_unique<Worker>(w_, rows_, keys_, parts_);
    Worker& worker = *workers_[thread];
    const Flush flush;
    const Started<M> started;
    worker.begin(b, g, first, std::min(first + keys_, p_.n), summing);
    for (int64_t x = 0; x < group_; ++x) {
      double* const distances = w_.places.distance ? distances_of(pair * group_ + x, run) : nullptr;
      if (distances) std::fill_n(distances, span_, 0.0);
      for (int64_t block = 0; block * ROWS < round.rows; ++block) {
        M::checkpoint();
        const size_t at = place(pair * group_ + x, run, block);
        const int64_t row = block * ROWS;
        const bool more = in_turn_ && run && any_[at];
        any_[at] = worker.take(b, g * group_ + x, round.first_row + row, std::min(ROWS, round.rows - row),
                               packed_.at(size_t((pair * group_ + x) * blocks_ + block) * rows_.size()),
                               found_.at(at * size_t(ROWS * p_.d)), more, totals_of(at),
                               distances ? distances + (blocks_ - block) * ROWS : nullptr) || more;
      }
    }
    if (!summing) worker.finish(b, g);
  }

  void add_up(const Round& round, int64_t which, int64_t block, bool summing) const {
    const int64_t b = batch(round, which), h = head(round, which), row = round.first_row + block * ROWS;
    const int64_t size = summing ? 1 : p_.d, count = std::min(ROWS, round.first_row + round.rows - row) * size;
    T* to = static_cast<T*>(summing ? w_.column_sums : w_.d_q) + ((b * p_.heads + h) * p_.m + row) * size;
    std::fill_n(to, count, T(0));
    for (int64_t run = 0; run < slots_; ++run) {
      const size_t at = place(which, run, block);
      if (!any_[at]) continue;
      const T* from = found_.at(at * size_t(ROWS * p_.d));
      for (int64_t x = 0; x < count; ++x) to[x] += from[x];
    }
    for (int64_t x = 0; x < count && !summing; ++x) to[x] *= T(p_.scale);
    if (!w_.places.query || summing) return;
    for (int64_t i = 0; i < count / size; ++i) {
      T total = 0;
      for (int64_t run = 0; run < slots_; ++run)
        if (const size_t at = place(which, run, block); any_[at]) total += totals_of(at)[i];
      w_.places.query[(b * p_.heads + h) * w_.places.query_head + row + i] += double(total);
    }
  }

  // Sums of the gradients of the logits of some rows, and those of the distances of some keys: number j - i of these is that
  // of key j and query i of the round.
  T* totals_of(size_t at) const { return w_.places.query ? totals_.at(at * size_t(ROWS)) : nullptr; }
  double* distances_of(int64_t which, int64_t run) const { return distances_.at(size_t((which * runs_ + run) * span_)); }

  // The runs of keys in their order.
  void add_distances(const Round& round, int64_t which) const {
    double* to = w_.places.distance + (batch(round, which) * p_.heads + head(round, which)) * w_.places.distance_head - round.first_row;
    for (int64_t run = 0; run < runs_; ++run) {
      const double* from = distances_of(which, run) + blocks_ * ROWS;
      const int64_t first = run * keys_, count = std::min(keys_, p_.n - first);
      for (int64_t x = 1 - round.rows; x < count; ++x) to[first + x] += from[x];
    }
  }

  const AttentionBackwardParams& w_;
  const attlas::AttentionParams& p_;
  const BackwardParts parts_;
  const int64_t keys_, runs_;             // keys of one task; how many such runs make up all keys
  const int64_t group_;                   // query heads of a key head
  const int64_t apart_;                   // key heads in a row of which threads may take several at the same time
  const bool in_turn_;                    // whether one thread takes all runs of a head: there are heads for all of them
  const int64_t slots_;                   // for what the runs of a head find of queries
  const int64_t pairs_, blocks_;          // key heads and blocks of queries of one round
  const Rows<M> rows_;
  Aligned<typename M::Number> packed_;
  Aligned<T> found_, totals_;
  const int64_t span_;                    // numbers of distances between the queries of a round and the keys of a task
  Aligned<double> distances_;
  std::vector<uint8_t> any_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

template <class M>
int32_t run(const AttentionBackwardParams& work, BackwardParts parts) {
  using T = typename M::T;
  const attlas::AttentionParams& p = work.of;
  if (has_bias(p) && !biases_in_range<T>(p)) return attlas::NOT_FINITE;
  if (!in_range<T, T>(p.q, p.heads, 0, p.batch * p.heads, p.m, p.d, p.threads) ||
      !in_range<T, T>(p.k, p.key_heads, 0, p.batch * p.key_heads, p.n, p.d, p.threads) ||
      !in_range<T, T>(p.v, p.key_heads, 0, p.batch * p.key_heads, p.n, p.e, p.threads) ||
      !in_range<T, T>(work.grad, p.heads, 0, p.batch * p.heads, p.m, p.e, p.threads))
    return attlas::NOT_FINITE;
  Division<M>(work, parts).run();
  return attlas::DONE;
}

}  // namespace

int32_t run_dot_backward(const AttentionBackwardParams& work) {
  const attlas::AttentionParams& p = work.of;
  if (p.cap > 0 && p.type == attlas::FLOAT64) return attlas::UNSUPPORTED;
#if defined(__AMX_BF16__)
  if (needs_vectors(work)) return avx512::run_dot_backward(work);
  if (p.type == attlas::FLOAT32) return run<Amx>(work, {3, 3});
  if (p.type == attlas::BFLOAT16) return run<Amx>(work, {1, 2});
  if (p.type == attlas::FLOAT16) return run<Amx>(work, {2, 2});
  return avx512::run_dot_backward(work);  // the tile unit has no product for float64
#else
  if (p.type == attlas::FLOAT64) return run<Whole<double, 24 / Whole<double>::TILE>>(work, {1, 1});
  return run<Whole<float, 24 / Whole<float>::TILE>>(work, {1, 1});
#endif
}

}  // namespace ATTLAS_ISA
