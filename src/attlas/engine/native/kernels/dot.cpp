// Attention by (scaled, capped) dot products: which products are used, how the work is divided.
#include "abi.h"
#include "amx.h"
#include "forward.h"
#include "parallel.h"
#include "reader.h"

namespace ATTLAS_ISA {

namespace {

using attlas::Dot;

template <class T, class Source>
Reader<T, Source> reader(const attlas::Tensor4& t, int64_t b, int64_t h) {
  return {static_cast<const Source*>(t.data) + b * t.batch + h * t.head, t.row};
}

struct Parts {
  int q, k, p, v;
};

// Keys and values of some heads, packed for products.
template <class M>
class Packed {
  using Number = typename M::Number;

 public:
  Packed(const Dot& p, Parts parts, int64_t heads)
      : p_(p),
        parts_(parts),
        keys_(M::right_size(p.d, padded(p.n), parts.k)),
        values_(p.out ? M::right_size(padded(p.n), p.e, parts.v) : 0),
        memory_(heads * (keys_ + values_)) {}

  static int64_t padded(int64_t n) { return round_up(n, M::COLUMNS); }
  static size_t bytes(const Dot& p, Parts parts) {
    return sizeof(Number) * (M::right_size(p.d, padded(p.n), parts.k) + (p.out ? M::right_size(padded(p.n), p.e, parts.v) : 0));
  }
  Number* keys(int64_t slot) const { return memory_.at(slot * (keys_ + values_)); }
  Number* values(int64_t slot) const { return keys(slot) + keys_; }

  template <class T, class Source>
  void fill(int64_t slot, int64_t b, int64_t g, int64_t first, int64_t stop) {
    for (int64_t j = first; j < stop; j += M::COLUMNS)
      M::pack_transposed(keys(slot), j, p_.n, p_.d, parts_.k, reader<T, Source>(p_.k, b, g));
    if (p_.out)
      M::pack_rows(values(slot), first, stop - first, padded(p_.n), p_.e, parts_.v,
                   Limited<T, Source>{reader<T, Source>(p_.v, b, g), p_.n});
  }

 private:
  // Values beyond the last key are 0.
  template <class T, class Source>
  struct Limited {
    Reader<T, Source> read;
    int64_t rows;
    ATTLAS_INLINE T operator()(int64_t i, int64_t t) const { return i < rows ? read(i, t) : T(0); }
#if defined(__AVX512F__)
    ATTLAS_INLINE __m512 vector(int64_t i, int64_t first, int64_t count) const {
      return read.vector(i, first, i < rows ? count : 0);
    }
#endif
  };

  const Dot& p_;
  const Parts parts_;
  const size_t keys_, values_;
  Aligned<Number> memory_;
};

template <class T, class Source>
bool tame(const Dot& p) {
  std::atomic<bool> good{true};
  const T limit = sizeof(T) == 8 ? T(1e150) : T(1e17);
  auto look = [&](const attlas::Tensor4& t, int64_t heads, int64_t rows, int64_t size) {
    const int64_t some = 1024, blocks = (rows + some - 1) / some;
    attlas::share(size_t(p.batch * heads * blocks), p.threads, [&](size_t task, int) {
      const int64_t block = task % blocks, h = task / blocks % heads, b = task / blocks / heads;
      auto read = reader<T, Source>(t, b, h);
      read.data += block * some * read.stride;
      if (!read.tame(std::min(some, rows - block * some), size, limit)) good = false;
    });
  };
  look(p.q, p.heads, p.m, p.d);
  look(p.k, p.key_heads, p.n, p.d);
  if (p.out) look(p.v, p.key_heads, p.n, p.e);
  return good;
}

template <class M, class Source>
int32_t run(const Dot& p, Parts parts) {
  using T = typename M::T;
  if (!tame<T, Source>(p)) return attlas::NOT_FINITE;
  const int64_t pairs = p.batch * p.key_heads, group = p.heads / p.key_heads;
  const int64_t together = std::clamp<int64_t>((64 << 20) / int64_t(Packed<M>::bytes(p, parts) + 1), 1, pairs);
  Packed<M> packed(p, parts, together);
  const int64_t block = Forward<M>::BLOCK, blocks = (p.m + block - 1) / block;
  const int64_t some = 512, pieces = (Packed<M>::padded(p.n) + some - 1) / some;
  std::vector<std::unique_ptr<Forward<M>>> workers(size_t(p.threads));
  for (int64_t first = 0; first < pairs; first += together) {
    const int64_t here = std::min(together, pairs - first);
    attlas::share(size_t(here * pieces), p.threads, [&](size_t task, int) {
      const int64_t slot = task / pieces, pair = first + slot, start = task % pieces * some;
      packed.template fill<T, Source>(slot, pair / p.key_heads, pair % p.key_heads, start,
                                      std::min(start + some, Packed<M>::padded(p.n)));
    });
    attlas::share(size_t(here * group * blocks), p.threads, [&](size_t task, int thread) {
      // Last rows first: under a causal mask they see the most, and the short ones fill the gaps at the end.
      const int64_t row = (blocks - 1 - task / size_t(here * group)) * block, which = task % size_t(here * group);
      const int64_t slot = which / group, pair = first + slot, b = pair / p.key_heads;
      const int64_t h = pair % p.key_heads * group + which % group;
      if (!workers[thread]) workers[thread] = std::make_unique<Forward<M>>(p, parts.q, parts.k, parts.p, parts.v);
      auto read = reader<T, Source>(p.q, b, h);
      read.data += row * read.stride;
      M::begin();
      workers[thread]->run(b, h, row, std::min(block, p.m - row), read, packed.keys(slot), packed.values(slot));
      M::end();
    });
  }
  return attlas::DONE;
}

}  // namespace

int32_t run_dot(const Dot& p) {
  if (p.cap > 0 && p.type == attlas::FLOAT64) return attlas::UNSUPPORTED;
#if defined(__AMX_BF16__)
  if (p.type == attlas::FLOAT32) return run<Amx, float>(p, {3, 3, 3, 3});
  if (p.type == attlas::BFLOAT16) return run<Amx, Bfloat16>(p, {1, 1, 2, 1});
  if (p.type == attlas::FLOAT16) return run<Amx, Float16>(p, {2, 2, 2, 2});
#else
  if (p.type == attlas::FLOAT32) return run<Plain<float>, float>(p, {1, 1, 1, 1});
  if (p.type == attlas::BFLOAT16) return run<Plain<float>, Bfloat16>(p, {1, 1, 1, 1});
  if (p.type == attlas::FLOAT16) return run<Plain<float>, Float16>(p, {1, 1, 1, 1});
#endif
  if (p.type == attlas::FLOAT64) return run<Plain<double>, double>(p, {1, 1, 1, 1});
  return attlas::UNSUPPORTED;
}

}  // namespace ATTLAS_ISA

#ifdef ATTLAS_ALONE
extern "C" int32_t attlas_dot_alone(const attlas::Dot* p) { return ATTLAS_ISA::run_dot(*p); }
#endif
