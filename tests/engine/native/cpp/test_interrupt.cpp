// Calls from Python's main thread: all of them look at signals, stop where a handler raises, and go on where it does not.
#include <atomic>
#include <functional>
#include <utility>

#include "abi_additive.h"
#include "abi_distance.h"
#include "problem.h"

extern "C" {
int32_t attlas_dot(const attlas::AttentionParams*, int32_t set);
int32_t attlas_dot_backward(const attlas::AttentionBackwardParams*, int32_t set);
int32_t attlas_additive(const attlas::Additive*, int32_t set);
int32_t attlas_additive_backward(const attlas::AdditiveBackward*, int32_t set);
int32_t attlas_distance(const attlas::Distance*, int32_t set);
int32_t attlas_distance_backward(const attlas::DistanceBackward*, int32_t set);
int32_t attlas_from_main_thread(int32_t (*function)(const void*, int32_t), const void* work, int32_t set);
void attlas_python(void* (*release_lock)(), void (*take_lock)(void*), int (*run_handlers)());
void attlas_look_every(int64_t nanoseconds);
}

using namespace attlas_test;

namespace {

// Python's lock, and a handler that raises at one of the looks, or computes by the kernels itself.
bool locked = true;
std::thread::id main_thread;
int looks = 0, raises_at = 0;
std::function<void()> handler;

void* release_lock() {
  CHECK(locked && std::this_thread::get_id() == main_thread);
  locked = false;
  return &looks;
}
void take_lock(void* state) {
  CHECK(!locked && state == &looks && std::this_thread::get_id() == main_thread);
  locked = true;
}
int run_handlers() {
  CHECK(locked && std::this_thread::get_id() == main_thread);
  if (handler) handler();
  return ++looks == raises_at ? -1 : 0;
}

template <class Structure>
int32_t from_main(int32_t (*function)(const Structure*, int32_t), const Structure& work, int32_t set) {
  const int32_t status = attlas_from_main_thread(reinterpret_cast<int32_t (*)(const void*, int32_t)>(function), &work, set);
  CHECK(locked);
  return status;
}

// A call that is interrupted at each of its looks, and then is not: it computes what a call from another thread does.
template <class Structure>
void interrupt(const char* name, bool alone, int32_t (*function)(const Structure*, int32_t), const Structure& work, int32_t set,
               const std::function<std::vector<double>()>& results) {
  CHECK(function(&work, set) == attlas::DONE);
  const std::vector<double> wanted = results();
  looks = 0, raises_at = 0;
  CHECK(from_main(function, work, set) == attlas::DONE);
  CHECK(results() == wanted);
  const int all = looks;
  if (alone && all < 2) std::fprintf(stderr, "%s: %d looks\n", name, all);
  CHECK(all >= 2 || !alone);
  for (int at : {1, 2, all / 2, all}) {
    if (at == 0) continue;  // beside others, the main thread may have looked once, or not at all; the next time it may look
    looks = 0, raises_at = at;
    const int32_t status = from_main(function, work, set);
    // Beside others, the main thread may have had fewer tasks this time. There is no look after the one that raised.
    if (alone) CHECK(looks == at);
    CHECK(looks <= at && status == (looks == at ? attlas::INTERRUPTED : attlas::DONE));
  }
  looks = 0, raises_at = 0;
  CHECK(from_main(function, work, set) == attlas::DONE);
  CHECK(results() == wanted);
  CHECK(function(&work, set) == attlas::DONE);
}

template <class T>
std::vector<double> joined(std::initializer_list<const std::vector<T>*> parts) {
  std::vector<double> all;
  for (const auto* part : parts) all.insert(all.end(), part->begin(), part->end());
  return all;
}

void dot(int32_t set, int32_t threads) {
  const int64_t heads = 2, m = 150, n = 700, d = 20, e = 12;
  const auto q = normal<float>(heads * m * d, 1), k = normal<float>(heads * n * d, 2), v = normal<float>(heads * n * e, 3);
  auto out = blank<float>(heads * m * e), entropy = blank<float>(heads * m), columns = blank<float>(heads * n);
  auto lse = blank<double>(heads * m);
  std::vector<int64_t> coverage(size_t(heads * m));
  const std::vector<double> levels{0.9};
  attlas::AttentionParams p{};
  p.batch = 1, p.heads = p.key_heads = heads, p.m = m, p.n = n, p.d = d, p.e = e;
  p.q = {q.data(), heads * m * d, m * d, d}, p.k = {k.data(), heads * n * d, n * d, d}, p.v = {v.data(), heads * n * e, n * e, e};
  p.type = attlas::FLOAT32, p.threads = threads, p.scale = 0.2;
  p.out = out.data(), p.lse = lse.data();
  interrupt("output", threads == 1, attlas_dot, p, set, [&] { return joined<float>({&out}); });
  p.entropy = entropy.data(), p.column_mass = columns.data();
  interrupt("output and statistics", threads == 1, attlas_dot, p, set, [&] { return joined<float>({&out, &entropy, &columns}); });
  p.out = nullptr, p.lse_known = 1;
  p.coverage = coverage.data(), p.levels = levels.data(), p.level_count = 1;
  interrupt("statistics", threads == 1, attlas_dot, p, set, [&] { return joined<float>({&entropy, &columns}); });
  attlas::AttentionParams few = p;
  few.m = 2, few.out = out.data(), few.lse = lse.data(), few.lse_known = 0;
  few.entropy = few.column_mass = nullptr, few.coverage = nullptr;
  out.assign(out.size(), 0.0f);
  interrupt("few queries", threads == 1, attlas_dot, few, set, [&] { return joined<float>({&out}); });
  p.out = out.data(), p.lse_known = 0, p.entropy = p.column_mass = nullptr, p.coverage = nullptr;
  CHECK(attlas_dot(&p, set) == attlas::DONE);
  // Gradients are added to what is there.
  const auto grad = normal<float>(heads * m * e, 4), delta = normal<float>(heads * m, 5);
  auto d_q = blank<float>(heads * m * d), d_k = blank<float>(heads * n * d), d_v = blank<float>(heads * n * e);
  attlas::AttentionBackwardParams back{};
  back.of = p, back.of.out = nullptr, back.of.lse_known = 1;
  back.grad = {grad.data(), heads * m * e, m * e, e}, back.delta = delta.data();
  back.d_q = d_q.data(), back.d_k = d_k.data(), back.d_v = d_v.data();
  interrupt("gradients", threads == 1, attlas_dot_backward, back, set, [&] {
    const auto found = joined<float>({&d_q});
    std::fill(d_k.begin(), d_k.end(), 0.0f);
    std::fill(d_v.begin(), d_v.end(), 0.0f);
    return found;
  });
}

void pairs(int32_t set, int32_t threads) {
  const Problem<float> given(70, 600, 3, 2, 0);
  const std::vector<float> scale{0.4f, 0.7f, 1.1f}, left = normal<float>(8 * given.m * given.e, 5);
  auto out = blank<float>(8 * given.m * given.e), first = blank<float>(8 * given.m * 3), delta = normal<float>(8 * given.m, 6);
  auto lse = blank<double>(8 * given.m);
  attlas::Distance distance{given.pairs(threads), attlas::LAPLACE, scale.data()};
  distance.pairs.out = out.data(), distance.pairs.lse = lse.data();
  interrupt("distance", threads == 1, attlas_distance, distance, set, [&] { return joined<float>({&out}); });
  Found<float> found(given);
  const attlas::AttentionParams wanted = found.wanted(lse.data(), threads);
  attlas::Distance statistics = distance;
  statistics.pairs.statistics = &wanted;
  interrupt("statistics of a distance", threads == 1, attlas_distance, statistics, set, [&] { return joined<float>({&found.entropy}); });
  attlas::DistanceBackward back{distance, {left.data(), delta.data()}, first.data(), nullptr};
  back.of.pairs.known = lse.data(), back.of.pairs.out = nullptr, back.of.pairs.lse = nullptr;
  interrupt("gradients of a distance", threads == 1, attlas_distance_backward, back, set, [&] { return joined<float>({&first}); });

  attlas::Additive additive{given.pairs(threads), scale.data()};
  additive.pairs.out = out.data(), additive.pairs.lse = lse.data();
  interrupt("additive", threads == 1, attlas_additive, additive, set, [&] { return joined<float>({&out}); });
  auto d_rows = first, d_columns = blank<float>(8 * given.n * 3), d_values = blank<float>(8 * given.n * given.e);
  auto d_weight = blank<float>(3);
  attlas::AdditiveBackward slopes{additive, {left.data(), delta.data()}, d_rows.data(), d_columns.data(), d_values.data(), d_weight.data()};
  slopes.of.pairs.known = lse.data();
  interrupt("gradients of an additive score", threads == 1, attlas_additive_backward, slopes, set, [&] { return joined<float>({&d_rows}); });
}

// A handler may call the kernels, and a call from another thread is not interrupted by it.
void nested(int32_t set) {
  const Problem<float> given(70, 600, 3, 2, 0);
  const std::vector<float> scale{0.4f, 0.7f, 1.1f};
  auto out = blank<float>(8 * given.m * given.e), inner_out = out, other_out = out;
  auto lse = blank<double>(8 * given.m), inner_lse = lse, other_lse = lse;
  attlas::Distance work{given.pairs(3), attlas::LAPLACE, scale.data()}, inner = work, other = work;
  work.pairs.out = out.data(), work.pairs.lse = lse.data();
  inner.pairs.out = inner_out.data(), inner.pairs.lse = inner_lse.data();
  other.pairs.out = other_out.data(), other.pairs.lse = other_lse.data();
  handler = [&] {
    const auto own = std::exchange(handler, nullptr);
    CHECK(from_main(attlas_distance, inner, set) == attlas::DONE);
    handler = own;
  };
  std::thread beside([&] { CHECK(attlas_distance(&other, set) == attlas::DONE); });
  looks = 0, raises_at = 0;
  CHECK(from_main(attlas_distance, work, set) == attlas::DONE);
  CHECK(out == inner_out && lse == inner_lse);
  beside.join();
  CHECK(out == other_out);
  looks = 0, raises_at = 1'000;
  handler = nullptr;
  CHECK(from_main(attlas_distance, work, set) == attlas::DONE || looks == raises_at);
}

}  // namespace

int main() {
  main_thread = std::this_thread::get_id();
  attlas_python(release_lock, take_lock, run_handlers);
  attlas_look_every(0);
  for (int32_t set = 0; set <= attlas_best(); ++set) {
    for (int32_t threads : {1, 3}) dot(set, threads), pairs(set, threads);
    nested(set);
  }
  std::puts("interrupt: ok");
}
