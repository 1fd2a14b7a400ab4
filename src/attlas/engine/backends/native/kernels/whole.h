// Matrix products with the vectors of any instruction set: C (rows x columns) += A (rows x depth) B (depth x columns).
#pragma once

#include <algorithm>

#include "interrupt.h"
#include "simd.h"

namespace ATTLAS_ISA {

ATTLAS_INLINE constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// A lies as [row][depth], B as [block of columns][depth][columns of the block].
template <class T_, int TILES = 1>
struct Whole {
  using T = T_;
  using Number = T;  // what a packed number is kept in
  static constexpr int TILE = VECTOR_BYTES == 64 ? 12 : 6;  // rows of A whose sums stay in registers
  static constexpr int ROWS = TILES * TILE;                 // rows of A that are multiplied together
  static constexpr int VECTORS = 2;
  static constexpr int COLUMNS = VECTORS * WIDTH<T>;  // columns of B that are multiplied together

  static int64_t depth_of(int64_t depth) { return depth; }
  static size_t left_size(int64_t rows, int64_t depth, int) { return size_t(round_up(rows, ROWS)) * depth; }
  static size_t right_size(int64_t depth, int64_t columns, int) { return size_t(depth) * round_up(columns, COLUMNS); }
  static const Number* left_at(const Number* left, int64_t row, int64_t depth, int) { return left + row * depth; }
  static const Number* right_at(const Number* right, int64_t column, int64_t at, int64_t depth, int) {
    return right + column * depth + at * COLUMNS;
  }

  // Rows of A; those that are missing to a multiple of ROWS are 0.
  template <class Read>
  static void pack_left(Number* to, int64_t rows, int64_t depth, int, Read read) {
    for (int64_t i = 0; i < round_up(rows, ROWS); ++i)
      for (int64_t t = 0; t < depth; ++t) to[i * depth + t] = i < rows ? T(read(i, t)) : T(0);
  }
  // Columns of B from their transpose, one block of COLUMNS; those from `columns` on are 0.
  template <class Read>
  static void pack_transposed(Number* to, int64_t first, int64_t columns, int64_t depth, int, Read read) {
    constexpr int W = WIDTH<T>;
    for (int64_t j = first; j < first + COLUMNS; j += W)
      for (int64_t t = 0; t < depth; t += W) {
        Vec<T> x[W];
#pragma GCC unroll 16
        for (int r = 0; r < W; ++r) x[r] = j + r < columns ? read.vector(j + r, t, depth - t) : Vec<T>{};
        transpose<T>(x);
        Number* block = to + first * depth + t * COLUMNS + (j - first);
        if (t + W <= depth) {
#pragma GCC unroll 16
          for (int r = 0; r < W; ++r) store(block + r * COLUMNS, x[r]);
        } else {
          for (int r = 0; r < depth - t; ++r) store(block + r * COLUMNS, x[r]);
        }
      }
  }
  // Rows `first` to `first + some` of B, which has `columns` columns and `depth` rows in all.
  template <class Read>
  static void pack_rows(Number* to, int64_t first, int64_t some, int64_t depth, int64_t columns, int, Read read) {
    for (int64_t i = first; i < first + some; ++i)
      for (int64_t j = 0; j < round_up(columns, COLUMNS); j += WIDTH<T>)
        store(to + j / COLUMNS * COLUMNS * depth + i * COLUMNS + j % COLUMNS,
              i < depth ? read.vector(i, j, std::max<int64_t>(columns - j, 0)) : Vec<T>{});
  }

  // Where the weights of one row go, two vectors at a time; `depth` is how many a row has room for.
  static ATTLAS_INLINE void put(Number* left, int64_t row, int64_t column, int64_t depth, int, const Vec<T>* x) {
    store(left + row * depth + column, x[0]);
    store(left + row * depth + column + WIDTH<T>, x[1]);
  }

  // One tile of ROWS x COLUMNS; `steps` numbers deep, out of `depth` that a row of A holds. What is added to C is summed up by
  // itself first: one sum over all calls would round at every step. TURNED: A lies as [depth][row], `depth` rows apart.
  template <bool ADD, bool TURNED = false>
  static void multiply(const Number* a, int, int64_t depth, const Number* b, int, int64_t steps, T* c, int64_t stride) {
    tile<ADD, true, TURNED>(a, depth, b, steps, c, stride);
    // B is in the nearest cache now.
    for (int r = TILE; r < ROWS; r += TILE)
      tile<ADD, false, TURNED>(a + r * (TURNED ? 1 : depth), depth, b, steps, c + r * stride, stride);
  }
  template <bool ADD, bool FETCH, bool TURNED>
  static ATTLAS_INLINE void tile(const Number* a, int64_t depth, const Number* b, int64_t steps, T* c, int64_t stride) {
    Vec<T> sums[TILE][VECTORS];
#if defined(__AVX2__) && !defined(__AVX512F__)
    loop<FETCH, TURNED>(a, depth, b, steps, sums);
#else
    for (int r = 0; r < TILE; ++r)
      for (int x = 0; x < VECTORS; ++x) sums[r][x] = Vec<T>{};
    for (int64_t t = 0; t < steps; ++t) {
      Vec<T> right[VECTORS];
      for (int x = 0; x < VECTORS; ++x) right[x] = load(b + t * COLUMNS + x * WIDTH<T>);
      if (FETCH) __builtin_prefetch(b + (t + 16) * COLUMNS);
#pragma GCC unroll 16
      for (int r = 0; r < TILE; ++r) {
        const Vec<T> left = all(a[TURNED ? t * depth + r : r * depth + t]);
#pragma GCC unroll 2
        for (int x = 0; x < VECTORS; ++x) sums[r][x] += left * right[x];
      }
    }
#endif
    for (int r = 0; r < TILE; ++r)
      for (int x = 0; x < VECTORS; ++x) {
        T* to = c + r * stride + x * WIDTH<T>;
        store(to, ADD ? load(to) + sums[r][x] : sums[r][x]);
      }
  }
#if defined(__AVX2__) && !defined(__AVX512F__)
  // The loop of a tile in assembly: compilers keep the six rows in more registers than there are, and lose a tenth of its
  // speed.
#define ATTLAS_ROW(type, row, first, second)                 \
  "vbroadcasts" type " " row ", %%ymm15\n\t"                 \
  "vfmadd231p" type " %%ymm13, %%ymm15, %[" first "]\n\t"    \
  "vfmadd231p" type " %%ymm14, %%ymm15, %[" second "]\n\t"
#define ATTLAS_LOOP(type, row1, row2, row3, row4, row5)                                                              \
  asm(".irp n, %[s0], %[s1], %[s2], %[s3], %[s4], %[s5], %[s6], %[s7], %[s8], %[s9], %[s10], %[s11]\n\t"             \
      "vxorps \\n, \\n, \\n\n\t.endr\n\tjmp 2f\n"                                                                    \
      "1:\n\tvmovups (%[b]), %%ymm13\n\tvmovups 32(%[b]), %%ymm14\n\t"                                             \
      ".if %c[fetch]\n\tprefetcht0 4096(%[b])\n\t.endif\n\t"                                                        \
      ATTLAS_ROW(type, "(%[a])", "s0", "s1") ATTLAS_ROW(type, row1, "s2", "s3") ATTLAS_ROW(type, row2, "s4", "s5")   \
      ATTLAS_ROW(type, row3, "s6", "s7") ATTLAS_ROW(type, row4, "s8", "s9") ATTLAS_ROW(type, row5, "s10", "s11")     \
      "add %[step], %[a]\n\tadd $64, %[b]\n2:\n\tcmp %[end], %[b]\n\tjne 1b"                                       \
      : [a] "+r"(a), [b] "+r"(b), [s0] "=&x"(s[0][0]), [s1] "=&x"(s[0][1]), [s2] "=&x"(s[1][0]),                    \
        [s3] "=&x"(s[1][1]), [s4] "=&x"(s[2][0]), [s5] "=&x"(s[2][1]), [s6] "=&x"(s[3][0]), [s7] "=&x"(s[3][1]),    \
        [s8] "=&x"(s[4][0]), [s9] "=&x"(s[4][1]), [s10] "=&x"(s[5][0]), [s11] "=&x"(s[5][1])                        \
      : [row] "r"(row), [three] "r"(3 * row), [five] "r"(5 * row), [step] "re"(TURNED ? row : size), [end] "r"(end), \
        [fetch] "i"(FETCH), [size] "i"(size)                                                                         \
      : "xmm13", "xmm14", "xmm15", "cc", "memory")
#define ATTLAS_ALONG(type) ATTLAS_LOOP(type, "(%[a],%[row])", "(%[a],%[row],2)", "(%[a],%[three])", "(%[a],%[row],4)", "(%[a],%[five])")
#define ATTLAS_ACROSS(type) ATTLAS_LOOP(type, "%c[size](%[a])", "2*%c[size](%[a])", "3*%c[size](%[a])", "4*%c[size](%[a])", "5*%c[size](%[a])")
  template <bool FETCH, bool TURNED>
  static ATTLAS_INLINE void loop(const Number* a, int64_t depth, const Number* b, int64_t steps, Vec<T> (&s)[TILE][VECTORS]) {
    constexpr int64_t size = sizeof(T);
    const int64_t row = depth * size;
    const Number* end = b + steps * COLUMNS;
    if constexpr (size == 4 && TURNED) {
      ATTLAS_ACROSS("s");
    } else if constexpr (size == 4) {
      ATTLAS_ALONG("s");
    } else if constexpr (TURNED) {
      ATTLAS_ACROSS("d");
    } else {
      ATTLAS_ALONG("d");
    }
  }
#undef ATTLAS_ACROSS
#undef ATTLAS_ALONG
#undef ATTLAS_LOOP
#undef ATTLAS_ROW
#endif

  // All at once, as there are no other registers to work in meanwhile.
  class Product {
   public:
    static constexpr bool STEPS = false;
    static constexpr int MOST = 256 / COLUMNS;

    Product() = default;
    Product(const Number* a, int, int64_t depth, int, int64_t stride) : a_(a), depth_(depth), stride_(stride) {}
    void add(const Number* b, T* c) const { multiply<false>(a_, 1, depth_, b, 1, depth_, c, stride_); }
    int64_t steps() const { return 0; }
    template <bool FAR>
    void step() const {}
    void finish() const {}

   private:
    const Number* a_ = nullptr;
    int64_t depth_ = 0, stride_ = 0;
  };
  static void begin() {}
  static void end() {}
  static void checkpoint() { attlas::checkpoint(); }
};

// Tile registers are in use while this lives, where M has any.
template <class M>
struct Started {
  Started() { M::begin(); }
  ~Started() { M::end(); }
  Started(const Started&) = delete;
};

}  // namespace ATTLAS_ISA
