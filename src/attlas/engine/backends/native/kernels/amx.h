// Matrix products of float32 on the tile unit of Intel processors, which multiplies bfloat16.
//
// A float32 number is the sum of three bfloat16 numbers, each with 8 of its 24 bits. Of the nine products of two such
// sums the six largest are added up in float32; what is left out is below 2^-26 of the product, less than float32
// itself rounds off. The tile unit is some twelve times as fast as float32 vectors, so that six products take half
// the time of one. bfloat16 tokens need one product, float16 tokens three (two parts hold their 11 bits).
#pragma once

#include "whole.h"

#if defined(__AMX_BF16__)

namespace ATTLAS_ISA {

struct Amx {
  using T = float;
  using Number = uint16_t;
  static constexpr int ROWS = 32;
  static constexpr int COLUMNS = 32;
  static constexpr int DEPTH = 32;  // of one step of the tile unit
  static constexpr int TILE = 16 * DEPTH;

  static int64_t depth_of(int64_t depth) { return round_up(depth, DEPTH); }
  // A lies as [16 rows][step][part][16][32], B as [32 columns][step][part][2][16 pairs of rows][16 columns][2].
  static size_t left_size(int64_t rows, int64_t depth, int parts) {
    return size_t(round_up(rows, ROWS)) * depth_of(depth) * parts;
  }
  static size_t right_size(int64_t depth, int64_t columns, int parts) {
    return size_t(depth_of(depth)) * round_up(columns, COLUMNS) * parts;
  }
  static const Number* left_at(const Number* left, int64_t row, int64_t depth, int parts) {
    return left + row * depth_of(depth) * parts;
  }
  static const Number* right_at(const Number* right, int64_t column, int64_t at, int64_t depth, int parts) {
    return right + (column * depth_of(depth) + at * COLUMNS) * parts;
  }

  static ATTLAS_INLINE void split(__m512 x, int parts, __m256i* out) {
    for (int p = 0; p < parts; ++p) {
      const __m256i half = (__m256i)_mm512_cvtneps_pbh(x);
      out[p] = half;
      if (p + 1 < parts) x = _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)));
    }
  }

  template <class Read>
  static void pack_left(Number* to, int64_t rows, int64_t depth, int parts, Read read) {
    const int64_t whole = depth_of(depth);
    for (int64_t i = 0; i < round_up(rows, ROWS); ++i)
      for (int64_t t = 0; t < whole; t += 16) {
        __m256i out[3];
        split(gather(read, i, t, i < rows ? depth : 0), parts, out);
        Number* tile = to + (i / 16 * 16 * whole + t / DEPTH * TILE) * parts + i % 16 * DEPTH + t % DEPTH;
        for (int p = 0; p < parts; ++p) _mm256_store_si256((__m256i*)(tile + p * TILE), out[p]);
      }
  }
  template <class Read>
  static void pack_transposed(Number* to, int64_t first, int64_t columns, int64_t depth, int parts, Read read) {
    Number* block = to + first * depth_of(depth) * parts;
    alignas(64) uint32_t pairs[3][16][16];
    for (int64_t step = 0; step < depth_of(depth) / DEPTH; ++step)
      for (int half = 0; half < 2; ++half) {
        for (int j = 0; j < 16; ++j) {
          const int64_t column = first + half * 16 + j;
          for (int side = 0; side < 2; ++side) {
            __m256i out[3];
            split(gather(read, column, step * DEPTH + side * 16, column < columns ? depth : 0), parts, out);
            for (int p = 0; p < parts; ++p) _mm256_store_si256((__m256i*)&pairs[p][j][side * 8], out[p]);
          }
        }
        for (int p = 0; p < parts; ++p) {
          uint32_t* tile = (uint32_t*)(block + ((step * parts + p) * 2 + half) * TILE);
          for (int t = 0; t < 16; ++t)
            for (int j = 0; j < 16; ++j) tile[t * 16 + j] = pairs[p][j][t];
        }
      }
  }
  template <class Read>
  static void pack_rows(Number* to, int64_t first, int64_t some, int64_t depth, int64_t columns, int parts, Read read) {
    const int64_t whole = depth_of(depth);
    for (int64_t i = first; i < first + some; i += 2)
      for (int64_t j = 0; j < round_up(columns, COLUMNS); j += 16) {
        __m256i even[3], odd[3];
        split(gather(read, i, j, i < depth ? columns : 0), parts, even);
        split(gather(read, i + 1, j, i + 1 < depth ? columns : 0), parts, odd);
        for (int p = 0; p < parts; ++p) {
          Number* tile = to + j / COLUMNS * COLUMNS * whole * parts +
                         ((i / DEPTH * parts + p) * 2 + (j / 16) % 2) * TILE + (i % DEPTH) / 2 * 32;
          const __m512i low = _mm512_cvtepu16_epi32(even[p]);
          const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd[p]), 16);
          _mm512_store_si512(tile, _mm512_or_si512(low, high));
        }
      }
  }

  // The weights of 32 neighbouring columns: one part is rounded to nearest, more are cut after 8 bits each, so that three
  // parts hold all 24 bits of a number.
  static ATTLAS_INLINE void put(Number* left, int64_t row, int64_t column, int64_t depth, int parts, const Vec<float>* x) {
    Number* tile = left + (row / 16 * 16 * depth_of(depth) + column / DEPTH * TILE) * parts + row % 16 * DEPTH;
    if (parts == 1) {
      _mm512_store_si512(tile, (__m512i)_mm512_cvtne2ps_pbh((__m512)x[1], (__m512)x[0]));
      return;
    }
    Vec<float> low = x[0], high = x[1];
    for (int p = 0;; ++p) {
      _mm512_store_si512(tile + p * TILE, upper_halves(low, high));
      if (p + 1 == parts) return;
      low = without_upper_half(low);
      high = without_upper_half(high);
    }
  }

  // Two neighbouring rows (even one first) of two vectors each, as the right side of a product `right_depth` rows deep, and
  // as the left side of one; cut after 8 bits, as above.
  template <bool LEFT>
  static ATTLAS_INLINE void put_both(Number* left, Number* right, int64_t row, int64_t column, int64_t left_depth,
                                     int64_t right_depth, int parts, Vec<float> x[2][2]) {
    Number* across = right + (column * right_depth + row / 32 * 32 * 32) * parts + row % 32 / 2 * 32;
    Number* along = left + (row / 16 * 16 * left_depth + column / 32 * TILE) * parts + row % 16 * 32;
    for (int p = 0;; ++p) {
      for (int v = 0; v < 2; ++v)
        _mm512_store_si512(across + (p * 2 + v) * TILE,
                           _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32((__m512i)x[0][v], 16), (__m512i)x[1][v]));
      for (int r = 0; LEFT && r < 2; ++r) _mm512_store_si512(along + p * TILE + r * 32, upper_halves(x[r][0], x[r][1]));
      if (p + 1 == parts) return;
      for (int r = 0; r < 2; ++r)
        for (int v = 0; v < 2; ++v) x[r][v] = without_upper_half(x[r][v]);
    }
  }

  // The parts that a step of four products of tiles loads, -1 for one that is there. Small products come first, and each part
  // is loaded as seldom as eight tiles allow.
  struct Load {
    int8_t a, b;
  };
  static constexpr const Load* plan_of(int a_parts, int b_parts) {
    if (b_parts == 3) return NINE;
    if (b_parts == 2) return a_parts == 2 ? FOUR : TWO_OF_B;
    return a_parts == 2 ? TWO_OF_A : ONE;
  }
  static constexpr int plan_length(int a_parts, int b_parts) { return b_parts == 3 ? 6 : a_parts * b_parts; }

  // How often `between` is called for a product so many numbers deep.
  static int64_t pauses(int64_t depth, int a_parts, int b_parts) {
    return depth_of(depth) / DEPTH * plan_length(a_parts, b_parts);
  }

  // `between` runs after every four products of tiles: these take 64 cycles of a unit beside the vectors', so that the
  // work of vectors that stands between them costs less than it would alone.
  template <bool ADD, int A_PARTS, int B_PARTS, class Between>
  static ATTLAS_INLINE void multiply(const Number* a, int64_t depth, const Number* b, int64_t steps, float* c, int64_t stride,
                                     Between&& between) {
    begin_sums(ADD, c, stride);
    const Number* below = a + 16 * depth_of(depth) * A_PARTS;
    for (int64_t step = 0; step < steps; step += DEPTH) {
      [&]<size_t... X>(std::index_sequence<X...>) __attribute__((always_inline)) {
        ((take_parts(plan_of(A_PARTS, B_PARTS)[X], a, below, b), products(), between()), ...);
      }(std::make_index_sequence<size_t(plan_length(A_PARTS, B_PARTS))>());
      a += TILE * A_PARTS;
      below += TILE * A_PARTS;
      b += 2 * TILE * B_PARTS;
    }
    store_sums(c, stride);
  }
  template <bool ADD, class Between>
  static ATTLAS_INLINE void multiply(const Number* a, int a_parts, int64_t depth, const Number* b, int b_parts, int64_t steps,
                                     float* c, int64_t stride, Between&& between) {
    if (b_parts == 3) return multiply<ADD, 3, 3>(a, depth, b, steps, c, stride, between);
    if (b_parts == 2 && a_parts == 2) return multiply<ADD, 2, 2>(a, depth, b, steps, c, stride, between);
    if (b_parts == 2) return multiply<ADD, 1, 2>(a, depth, b, steps, c, stride, between);
    if (a_parts == 2) return multiply<ADD, 2, 1>(a, depth, b, steps, c, stride, between);
    return multiply<ADD, 1, 1>(a, depth, b, steps, c, stride, between);
  }
  template <bool ADD>
  static void multiply(const Number* a, int a_parts, int64_t depth, const Number* b, int b_parts, int64_t steps, float* c,
                       int64_t stride) {
    multiply<ADD>(a, a_parts, depth, b, b_parts, steps, c, stride, [] {});
  }

  // The product of 32 rows and some blocks of 32 columns, in steps of four products of tiles, between which there is room
  // for vectors: these lose half of their multipliers while the tile unit works, and no other port.
  class Product {
   public:
    static constexpr bool STEPS = true;
    static constexpr int MOST = 16;  // blocks

    Product() = default;
    // `room` is how deep a row of A may be; `more` where the product is added to what is there.
    Product(const Number* a, int a_parts, int64_t depth, int b_parts, int64_t stride, int64_t room = 0, bool more = false)
        : left_(a),
          a_parts_(a_parts),
          b_parts_(b_parts),
          depths_(int(depth_of(depth) / DEPTH)),
          below_(depth_of(room ? room : depth) * 16 * a_parts),
          more_(more),
          stride_(stride) {
      plan_ = plan_of(a_parts, b_parts);
      length_ = plan_length(a_parts, b_parts);
    }

    void add(const Number* b, float* c) {
      blocks_[count_++] = {b, c};
      if (count_ == 1) start(blocks_[0]);
    }
    bool done() const { return block_ == count_; }
    int64_t steps() const { return int64_t(count_) * depths_ * length_; }

    // The next step; nothing where there is none. FAR: the next block of columns is fetched meanwhile, which pays where
    // the vectors' own memory drives it out of the first cache.
    template <bool FAR>
    ATTLAS_INLINE void step() {
      if (block_ == count_) return;
      // Not before: another product may be under way until here.
      if (depth_ == 0 && at_ == 0) begin_sums(more_, blocks_[block_].c, stride_);
      const Load load = plan_[at_];
      if (load.a >= 0) take_a(a_, a_ + below_, load.a);
      if (load.b >= 0) {
        take_b(b_, load.b);
        const Number* far = b_ + (depths_ * b_parts_ + load.b) * 2 * TILE;
        for (int x = 0; FAR && x < 32; ++x) _mm_prefetch(reinterpret_cast<const char*>(far + x * DEPTH), _MM_HINT_T0);
      }
      products();
      if (++at_ < length_) return;
      at_ = 0;
      a_ += TILE * a_parts_;
      b_ += 2 * TILE * b_parts_;
      if (++depth_ < depths_) return;
      store_sums(blocks_[block_].c, stride_);
      if (++block_ < count_) start(blocks_[block_]);
    }
    void finish() {
      while (block_ < count_) step<false>();
    }

   private:
    struct Block {
      const Number* b;
      float* c;
    };

    ATTLAS_INLINE void start(const Block& block) {
      a_ = left_;
      b_ = block.b;
      depth_ = at_ = 0;
    }

    const Number *left_ = nullptr, *a_ = nullptr, *b_ = nullptr;
    const Load* plan_ = nullptr;
    int a_parts_ = 0, b_parts_ = 0, depths_ = 0, length_ = 0;
    int at_ = 0, depth_ = 0, block_ = 0, count_ = 0;
    int64_t below_ = 0;  // from a row of A to the one 16 further
    bool more_ = false;
    int64_t stride_ = 0;
    Block blocks_[MOST];
  };

  // Each thread configures its tiles; the configuration of another user of the tile unit is not kept by it either.
  static void begin() {
    alignas(64) uint8_t config[64] = {};
    config[0] = 1;
    for (int t = 0; t < 8; ++t) {
      config[16 + 2 * t] = 64;
      config[48 + t] = 16;
    }
    // The compiler's header says of eight bytes only that they are read.
    __asm__ volatile("" : : "r"(config) : "memory");
    _tile_loadconfig(config);
  }
  static void end() { _tile_release(); }
  static void checkpoint() { attlas::stop_if_interrupted(); }

 private:
  // The four tiles of sums: what is there, where it is to be added to, or nothing.
  static ATTLAS_INLINE void begin_sums(bool add, const float* c, int64_t stride) {
    const size_t line = size_t(stride) * 4;
    if (add) {
      _tile_loadd(0, c, line);
      _tile_loadd(1, c + 16, line);
      _tile_loadd(2, c + 16 * stride, line);
      _tile_loadd(3, c + 16 * stride + 16, line);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  static ATTLAS_INLINE void store_sums(float* c, int64_t stride) {
    const size_t line = size_t(stride) * 4;
    _tile_stored(0, c, line);
    _tile_stored(1, c + 16, line);
    _tile_stored(2, c + 16 * stride, line);
    _tile_stored(3, c + 16 * stride + 16, line);
  }

  static constexpr Load NINE[] = {{2, 0}, {1, -1}, {-1, 1}, {0, -1}, {-1, 2}, {-1, 0}};
  static constexpr Load FOUR[] = {{1, 1}, {0, -1}, {1, 0}, {0, -1}};
  static constexpr Load TWO_OF_A[] = {{1, 0}, {0, -1}}, TWO_OF_B[] = {{0, 1}, {-1, 0}}, ONE[] = {{0, 0}};

  static ATTLAS_INLINE void take_a(const Number* a, const Number* below, int part) {
    _tile_loadd(4, a + part * TILE, 64);
    _tile_loadd(5, below + part * TILE, 64);
  }
  static ATTLAS_INLINE void take_b(const Number* b, int part) {
    _tile_loadd(6, b + part * 2 * TILE, 64);
    _tile_loadd(7, b + (part * 2 + 1) * TILE, 64);
  }
  static ATTLAS_INLINE void take_parts(Load load, const Number* a, const Number* below, const Number* b) {
    if (load.a >= 0) take_a(a, below, load.a);
    if (load.b >= 0) take_b(b, load.b);
  }
  static ATTLAS_INLINE void products() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }

  // The upper halves of 32 numbers, which are 8 bits of each, in their order; and what is left of a number without its own.
  static ATTLAS_INLINE __m512i upper_halves(Vec<float> low, Vec<float> high) {
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23,
                                         21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_epi16((__m512i)low, odd, (__m512i)high);
  }
  static ATTLAS_INLINE Vec<float> without_upper_half(Vec<float> x) {
    return x - (Vec<float>)_mm512_and_si512((__m512i)x, _mm512_set1_epi32(int(0xffff0000)));
  }

  template <class Read>
  static ATTLAS_INLINE __m512 gather(Read read, int64_t i, int64_t first, int64_t count) {
    return first < count ? (__m512)read.vector(i, first, count - first) : _mm512_setzero_ps();
  }
};

}  // namespace ATTLAS_ISA

#endif
