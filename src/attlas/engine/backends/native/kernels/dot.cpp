// Attention by (scaled, capped) dot products: which products are used, how the work is divided.
#include "abi.h"
#include "amx.h"
#include "coverage.h"
#include "decode.h"
#include "forward.h"
#include "statistics.h"
#include "logits.h"
#include "parallel.h"
#include "tokens.h"

namespace ATTLAS_ISA {

namespace {

using attlas::AttentionParams;

// Columns that were read for one tile of narrow vectors are still in the nearest cache for a second.
template <class T>
using Vectors = Whole<T, VECTOR_BYTES == 64 ? 1 : 2>;

struct Parts {
  int q, k, p, v;
};

// Keys and values of some heads, packed for products.
template <class M>
class Packed {
  using Number = typename M::Number;

 public:
  Packed(const AttentionParams& p, Parts parts, int64_t heads)
      : p_(p),
        parts_(parts),
        keys_(M::right_size(p.d, padded(p.n), parts.k)),
        values_(p.out ? M::right_size(padded(p.n), p.e, parts.v) : 0),
        memory_(heads * (keys_ + values_)) {}

  static int64_t padded(int64_t n) { return round_up(n, M::COLUMNS); }
  static size_t bytes(const AttentionParams& p, Parts parts) {
    return sizeof(Number) * (M::right_size(p.d, padded(p.n), parts.k) + (p.out ? M::right_size(padded(p.n), p.e, parts.v) : 0));
  }
  Number* keys(int64_t slot) const { return memory_.at(slot * (keys_ + values_)); }
  Number* values(int64_t slot) const { return keys(slot) + keys_; }

  // Keys and values [first, stop) of a head, read from memory once; false where one of them is not in range.
  template <class T, class Source>
  bool fill(int64_t slot, int64_t b, int64_t g, int64_t first, int64_t stop) {
    const auto k = rows_of<T, Source>(p_.k, b, g), v = rows_of<T, Source>(p_.v, b, g);
    const int64_t count = std::min(stop, p_.n) - first;
    if (!in_range(k.from(first), count, p_.d) || (p_.out && !in_range(v.from(first), count, p_.e))) return false;
    for (int64_t j = first; j < stop; j += M::COLUMNS) M::pack_transposed(keys(slot), j, p_.n, p_.d, parts_.k, k);
    if (p_.out)
      M::pack_rows(values(slot), first, stop - first, padded(p_.n), p_.e, parts_.v, Limited<T, Source>{v, p_.n});
    return true;
  }

 private:
  const AttentionParams& p_;
  const Parts parts_;
  const size_t keys_, values_;
  Aligned<Number> memory_;
};

// A problem in two passes: output and log-sum-exp, and what needs the log-sum-exp. Numbers of rows go with whichever pass
// there is anyway.
struct Passes {
  AttentionParams forward, given;
  bool has_forward, has_statistics;

  // Entropy alone is found sooner with the log-sum-exp, known or not, where the forward pass compares few logits.
  Passes(const AttentionParams& p, bool few_compared) : forward(p), given(p) {
    has_forward = p.out || !p.lse_known || (few_compared && !wants_column_statistics(p));
    has_statistics = wants_column_statistics(p) || (!has_forward && wants_row_statistics(p));
    given.out = nullptr;
    given.lse_known = 1;
    clear_row_statistics(has_statistics ? forward : given);
  }
};

// Query heads of one wave: those whose packed keys and values are in memory together.
struct Wave {
  int64_t first, pairs, group, key_heads;

  int64_t heads() const { return pairs * group; }
  int64_t slot(int64_t which) const { return which / group; }
  int64_t batch(int64_t which) const { return (first + slot(which)) / key_heads; }
  int64_t head(int64_t which) const { return (first + slot(which)) % key_heads * group + which % group; }
};

// Runs work(worker, which, row, count) for all rows of some heads, a block at a time. The last rows come first: under a causal
// mask they see the most, and the short ones fill the gaps at the end. make() gives each thread a worker.
template <class M, class Make, class Work>
void share_rows(const AttentionParams& p, int64_t block, int64_t heads, Make make, Work work) {
  const int64_t blocks = (p.m + block - 1) / block;
  std::vector<decltype(make())> workers(size_t(p.threads));
  attlas::share(size_t(heads * blocks), p.threads, [&](size_t task, int thread) {
    const int64_t row = (blocks - 1 - int64_t(task) / heads) * block;
    if (!workers[thread]) workers[thread] = make();
    const Started<M> started;
    work(*workers[thread], int64_t(task) % heads, row, std::min(block, p.m - row));
  });
}

template <class M, class Source>
void along_rows(const AttentionParams& p, Parts parts, const Packed<M>& packed, const Wave& wave) {
  const int64_t block = Forward<M>::block_for(p, parts.q);
  share_rows<M>(
      p, block, wave.heads(), [&] { return std::make_unique<Forward<M>>(p, block, parts.q, parts.k, parts.p, parts.v); },
      [&](Forward<M>& pass, int64_t which, int64_t row, int64_t count) {
        const int64_t b = wave.batch(which), h = wave.head(which), slot = wave.slot(which);
        pass.run(b, h, row, count, rows_of<typename M::T, Source>(p.q, b, h, row), packed.keys(slot), packed.values(slot));
      });
}

// The pass of some heads with their log-sum-exp known. make() gives what one thread needs, head(which) the place of a head,
// and work(worker, which, row, count, task_columns) passes some rows of it.
template <class M, class Make, class Head, class Work>
void share_statistics(const AttentionParams& p, int64_t block, int64_t heads, Make make, Head head, Work work) {
  using T = typename M::T;
  const int64_t tasks = (p.m + block - 1) / block;
  // As many heads at a time as keep what the tasks find of columns small, and all threads busy.
  const int64_t columns = ((p.column_mass != nullptr) + (p.column_max != nullptr)) * p.n * int64_t(sizeof(T));
  const int64_t bytes = tasks * (columns + (p.offsets ? (block + p.n) * 8 : 0)) + 1;
  const int64_t together = std::clamp<int64_t>((64 << 20) / bytes, 1, heads);
  for (int64_t from = 0; from < heads; from += together) {
    const int64_t here = std::min(together, heads - from);
    std::vector<TaskColumns<T>> task_columns(size_t(here * tasks));
    share_rows<M>(p, block, here, make, [&](auto& worker, int64_t which, int64_t row, int64_t count) {
      work(worker, from + which, row, count, task_columns[size_t(which * tasks + row / block)]);
    });
    if (!wants_column_statistics(p)) continue;
    attlas::share(size_t(here), p.threads, [&](size_t which, int) {
      merge_tasks<T>(p, head(from + int64_t(which)), block, task_columns.data() + which * tasks, tasks);
    });
  }
}

template <class M, class Source>
void along_statistics(const AttentionParams& p, Parts parts, const Packed<M>& packed, const Wave& wave) {
  using Pass = StatisticsPass<M>;
  const int64_t block = Pass::block_for(p, parts.q);
  share_statistics<M>(
      p, block, wave.heads(), [&] { return std::make_unique<Pass>(p, block, parts.q, parts.k); },
      [&](int64_t which) { return wave.batch(which) * p.heads + wave.head(which); },
      [&](Pass& pass, int64_t which, int64_t row, int64_t count, auto& task_columns) {
        const int64_t b = wave.batch(which), h = wave.head(which);
        const auto read = rows_of<typename M::T, Source>(p.q, b, h, row);
        pass.run(b, h, row, count, read, packed.keys(wave.slot(which)), task_columns);
      });
}

// Both passes over a few rows at a time, whose logits are kept: the second needs no product. Only for vectors, which take
// longer for a product than for writing and reading its logits.
template <class M>
class BothPasses {
  using Statistics = StatisticsPass<M>;
  using T = typename M::T;

 public:
  // Rows whose logits are kept: the more, the seldomer all keys and values pass by, but they should stay in the cache. 0
  // where not even a few do.
  static int64_t group_for(const AttentionParams& p) {
    const int64_t rows = (3 << 19) / (Packed<M>::padded(p.n) * int64_t(sizeof(T)));
    return M::Product::STEPS || 2 * rows < M::ROWS ? 0 : std::clamp<int64_t>(rows / M::ROWS, 1, 16) * M::ROWS;
  }

  BothPasses(const Passes& passes, int64_t block)
      : known_(passes.given),
        group_(group_for(known_)),
        stride_(Packed<M>::padded(known_.n)),
        logits_(size_t(group_ * stride_)),
        kept_(new KeptLogits<T>(logits_.data, stride_, !has_bias(passes.given))),
        forward_(passes.forward, group_, 1, 1, 1, 1),
        statistics_(known_, block, 1, 1, std::unique_ptr<LogitSource<T>>(kept_)) {
    forward_.keep_logits(logits_.data, stride_);
  }

  template <class Read>
  void run(int64_t b, int64_t h, int64_t first, int64_t count, Read read, const typename M::Number* keys,
           const typename M::Number* values, TaskColumns<T>& task_columns) {
    statistics_.begin(b, h, first, count, task_columns);
    for (int64_t from = 0; from < count; from += group_) {
      const int64_t some = std::min(group_, count - from);
      kept_->group = first + from;
      forward_.run(b, h, first + from, some, read, keys, values);
      statistics_.process_rows(from, from + some, nullptr);
      read = read.from(some);
    }
    statistics_.finish();
  }

 private:
  const Finished<T> known_;
  const int64_t group_, stride_;
  const Aligned<T> logits_;
  KeptLogits<T>* const kept_;  // belongs to the statistics
  Forward<M> forward_;
  Statistics statistics_;
};

template <class M, class Source>
void along_both(const Passes& passes, const Packed<M>& packed, const Wave& wave) {
  using Pass = BothPasses<M>;
  const AttentionParams& p = passes.given;
  const int64_t block = StatisticsPass<M>::block_for(p, 1);
  share_statistics<M>(
      p, block, wave.heads(), [&] { return std::make_unique<Pass>(passes, block); },
      [&](int64_t which) { return wave.batch(which) * p.heads + wave.head(which); },
      [&](Pass& pass, int64_t which, int64_t row, int64_t count, auto& task_columns) {
        const int64_t b = wave.batch(which), h = wave.head(which), slot = wave.slot(which);
        const auto read = rows_of<typename M::T, Source>(p.q, b, h, row);
        pass.run(b, h, row, count, read, packed.keys(slot), packed.values(slot), task_columns);
      });
}

template <class M, class Source>
void run_coverage(const AttentionParams& p, Parts parts, const Packed<M>& packed, const Wave& wave) {
  using Pass = CoveragePass<M>;
  share_rows<M>(
      p, M::ROWS, wave.heads(), [&] { return std::make_unique<Pass>(p, parts.q, parts.k); },
      [&](Pass& pass, int64_t which, int64_t row, int64_t count) {
        const int64_t b = wave.batch(which), h = wave.head(which);
        pass.run(b, h, row, count, rows_of<typename M::T, Source>(p.q, b, h, row), packed.keys(wave.slot(which)));
      });
}

template <class M, class Source>
int32_t run(const AttentionParams& p, Parts parts) {
  using T = typename M::T;
  if (has_bias(p) && !biases_in_range<T>(p)) return attlas::NOT_FINITE;
  if (Decode<T, Source>::suits(p)) return Decode<T, Source>(p).run();
  const Passes passes(p, p.entropy && !p.partial && Forward<M>::compares_few_logits(p));
  const bool both = passes.has_forward && passes.has_statistics && BothPasses<M>::group_for(p) > 0;
  const int64_t pairs = p.batch * p.key_heads, padded = Packed<M>::padded(p.n);
  // Small heads are packed a few megabytes at a time: caches keep that much, and the C library gives it out again without
  // new pages. Of large ones there are as many as keep all threads busy.
  const int64_t bytes = int64_t(Packed<M>::bytes(p, parts) + 1), some_heads = (std::min(p.threads, 16) << 21) / bytes;
  const int64_t together = std::min(std::max(some_heads, std::clamp<int64_t>((64 << 20) / bytes, 1, 8)), pairs);
  Packed<M> packed(p, parts, together);
  const int64_t some = 512, pieces = (padded + some - 1) / some;
  for (int64_t first = 0; first < pairs; first += together) {
    const Wave wave{first, std::min(together, pairs - first), p.heads / p.key_heads, p.key_heads};
    const int64_t group = wave.group;
    std::atomic<bool> good{in_range<T, Source>(p.q, p.heads, first * group, wave.heads(), p.m, p.d, p.threads)};
    attlas::share(size_t(wave.pairs * pieces), p.threads, [&](size_t task, int) {
      const int64_t slot = int64_t(task) / pieces, pair = first + slot, start = int64_t(task) % pieces * some;
      if (!packed.template fill<T, Source>(slot, pair / p.key_heads, pair % p.key_heads, start, std::min(start + some, padded)))
        good = false;
    });
    if (!good) return attlas::NOT_FINITE;
    if (both) {
      if constexpr (!M::Product::STEPS) along_both<M, Source>(passes, packed, wave);
    } else {
      if (passes.has_forward) along_rows<M, Source>(passes.forward, parts, packed, wave);
      if (passes.has_statistics) along_statistics<M, Source>(passes.given, parts, packed, wave);
    }
    if (p.coverage) run_coverage<M, Source>(p, parts, packed, wave);
  }
  return attlas::DONE;
}

// What wants the log-sum-exp, where logits have a source of their own.
template <class M>
void all_statistics(const AttentionParams& p, const MakeLogitSource<typename M::T>& make) {
  using Pass = StatisticsPass<M>;
  using Coverage = CoveragePass<M>;
  static_assert(M::ROWS <= LogitSource<typename M::T>::ROWS);
  const int64_t heads = p.batch * p.heads, block = Pass::block_for(p, 1);
  if (wants_column_statistics(p) || wants_row_statistics(p))
    share_statistics<M>(
        p, block, heads, [&] { return std::make_unique<Pass>(p, block, 1, 1, make()); }, [](int64_t which) { return which; },
        [&](Pass& pass, int64_t which, int64_t row, int64_t count, auto& task_columns) {
          pass.run(which / p.heads, which % p.heads, row, count, nullptr, task_columns);
        });
  if (p.coverage)
    share_rows<M>(
        p, M::ROWS, heads, [&] { return std::make_unique<Coverage>(p, 1, 1, make()); },
        [&](Coverage& pass, int64_t which, int64_t row, int64_t count) {
          pass.run(which / p.heads, which % p.heads, row, count, nullptr);
        });
}

}  // namespace

#if !defined(__AMX_BF16__)  // other scores have no products for tile registers, and use those of AVX-512
template <>
void logit_statistics<float>(const AttentionParams& p, const MakeLogitSource<float>& make) {
  all_statistics<Vectors<float>>(p, make);
}
template <>
void logit_statistics<double>(const AttentionParams& p, const MakeLogitSource<double>& make) {
  all_statistics<Vectors<double>>(p, make);
}
#endif

int32_t run_dot(const AttentionParams& p) {
  if (p.cap > 0 && p.type == attlas::FLOAT64) return attlas::UNSUPPORTED;
#if defined(__AMX_BF16__)
  if (p.type == attlas::FLOAT32) return run<Amx, float>(p, {3, 3, 3, 3});
  // Weights rounded to 8 bits, and independently of each other, add no more to an output than its own rounding does.
  if (p.type == attlas::BFLOAT16) return run<Amx, Bfloat16>(p, {1, 1, p.rounded ? 1 : 2, 1});
  if (p.type == attlas::FLOAT16) return run<Amx, Float16>(p, {2, 2, 2, 2});
#else
  if (p.type == attlas::FLOAT32) return run<Vectors<float>, float>(p, {1, 1, 1, 1});
  if (p.type == attlas::BFLOAT16) return run<Vectors<float>, Bfloat16>(p, {1, 1, 1, 1});
  if (p.type == attlas::FLOAT16) return run<Vectors<float>, Float16>(p, {1, 1, 1, 1});
#endif
  if (p.type == attlas::FLOAT64) return run<Vectors<double>, double>(p, {1, 1, 1, 1});
  return attlas::UNSUPPORTED;
}

}  // namespace ATTLAS_ISA
