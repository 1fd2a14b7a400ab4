#include "abi_transport.h"
#include "check.h"

extern "C" int32_t attlas_transport_rows(const attlas::TransportRows*, int32_t set);

using namespace attlas_test;

namespace {

constexpr int64_t BATCH = 2, HEADS = 4;

// A tensor of tokens, (batch, heads of its own, tokens, size), or one number for all tokens.
template <class T>
struct Given {
  std::vector<T> numbers;
  int64_t own, tokens, size;

  Given(int64_t own_heads, int64_t n, int64_t d, unsigned seed, double spread)
      : numbers(normal<T>(BATCH * own_heads * n * d, seed, spread)), own(own_heads), tokens(n), size(d) {}

  const T* at(int64_t b, int64_t h, int64_t j) const {
    return numbers.data() + ((b * own + h / (HEADS / own)) * tokens + (tokens == 1 ? 0 : j)) * size;
  }
  attlas::OfTokens view() const {
    const int64_t row = tokens == 1 ? 0 : size;
    return {{numbers.data(), own * tokens * size, tokens * size, row}, HEADS / own, size};
  }
};

enum Kind { PLAIN, TOKEN_DECAY, CHANNEL_DECAY, DELTA, GATED_DELTA, CHANNEL_DELTA, PAIR, KINDS };

template <class T>
void compare(int32_t set, int kind, int64_t n, int64_t d, double tolerance) {
  Given<T> k(2, n, d, 1, 0.4), queries(HEADS, 4, d, 2, 1.0), decay(1, n, kind == CHANNEL_DECAY || kind == CHANNEL_DELTA || kind == PAIR ? d : 1, 3, 0.3);
  Given<T> write(HEADS, n, 1, 4, 1.0), erase(HEADS, kind == DELTA ? 1 : n, 1, 5, 0.3), p(2, n, d, 6, 0.3), r(HEADS, n, d, 7, 0.3);
  for (T& x : decay.numbers) x = -std::abs(x);
  if (n > 5) decay.numbers[size_t(5 * decay.size)] = -INFINITY;  // forgets
  const std::vector<int64_t> rows{0, n / 2, n - 2, n - 1};
  const int64_t first = n / 5, stop = n - n / 6, width = stop - first;
  std::vector<T> out(size_t(BATCH * HEADS * 4 * width), T(0));
  attlas::TransportRows work{};
  work.batch = BATCH, work.heads = HEADS, work.d = d, work.count = 4, work.rows = rows.data();
  work.first = first, work.stop = stop, work.queries = queries.numbers.data(), work.out = out.data();
  work.k = k.view(), work.type = sizeof(T) == 4 ? attlas::FLOAT32 : attlas::FLOAT64, work.threads = 3;
  const bool decays = kind != PLAIN && kind != DELTA, deltas = kind == DELTA || kind == GATED_DELTA || kind == CHANNEL_DELTA;
  if (decays) work.decay = decay.view();
  if (kind != PLAIN) work.write = write.view();
  if (deltas) work.erase = erase.view();
  if (kind == PAIR) work.p = p.view(), work.r = r.view();
  CHECK(attlas_transport_rows(&work, set) == attlas::DONE);
  for (int64_t b = 0; b < BATCH; ++b)
    for (int64_t h = 0; h < HEADS; ++h)
      for (int64_t x = 0; x < 4; ++x) {
        std::vector<double> u(static_cast<size_t>(d), 0.0);
        const T* found = out.data() + ((b * HEADS + h) * 4 + x) * width;
        for (int64_t j = n - 1; j >= first; --j) {
          if (j == rows[size_t(x)])
            for (int64_t c = 0; c < d; ++c) u[size_t(c)] = queries.at(b, h, x)[c];
          const auto dot = [&](const T* y) {
            double sum = 0;
            for (int64_t c = 0; c < d; ++c) sum += u[size_t(c)] * double(y[c]);
            return sum;
          };
          const double seen = dot(k.at(b, h, j));
          if (j < stop) CHECK(close(found[j - first], kind == PLAIN ? seen : seen * double(*write.at(b, h, j)), tolerance));
          const double s = deltas ? -seen * double(*erase.at(b, h, j)) : kind == PAIR ? dot(p.at(b, h, j)) : 0.0;
          const T* turn = kind == PAIR ? r.at(b, h, j) : k.at(b, h, j);
          for (int64_t c = 0; c < d; ++c) {
            u[size_t(c)] += s * double(turn[c]);
            if (decays) u[size_t(c)] *= std::exp(double(decay.at(b, h, j)[decay.size == 1 ? 0 : c]));
          }
        }
      }
}

}  // namespace

int main() {
  every_set_from_threads([](int32_t set) {
    for (int kind = 0; kind < KINDS; ++kind)
      for (int64_t d : {1, 3, 8, 21}) {
        compare<float>(set, kind, 37, d, 2e-6);
        compare<double>(set, kind, 29, d, 1e-12);
      }
    compare<float>(set, GATED_DELTA, 1100, 5, 2e-6);  // several blocks of gates
  }, 2);
  attlas::TransportRows none{};
  CHECK(attlas_transport_rows(&none, 0) == attlas::DONE);
  std::puts("transport: ok");
}
