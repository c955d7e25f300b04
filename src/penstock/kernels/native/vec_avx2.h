// Sixteen columns at a time, with AVX2: pairs of 256-bit registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace penstock::avx2 {

struct F16 {  // 16 floats
  __m256 low, high;
};

struct I16 {  // 16 int32
  __m256i low, high;
};

inline F16 zero_f() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
inline F16 add(F16 a, F16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline F16 sub(F16 a, F16 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline F16 mul(F16 a, F16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline F16 div(F16 a, F16 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
// a * b + c
inline F16 fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline F16 round(F16 a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.low, mode), _mm256_round_ps(a.high, mode)};
}
inline F16 absolute(F16 a) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(a.low, mask), _mm256_and_ps(a.high, mask)};
}
// `x` where the lane's number is in [begin, end), else `other`.
inline F16 within(F16 x, F16 other, int64_t begin, int64_t end) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const auto clamp = [](int64_t v) { return static_cast<int>(v < 0 ? 0 : v > 16 ? 16 : v); };
  const __m256i from = _mm256_set1_epi32(clamp(begin) - 1), to = _mm256_set1_epi32(clamp(end));
  const auto mask = [&](__m256i lane) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(lane, from), _mm256_cmpgt_epi32(to, lane)));
  };
  return {_mm256_blendv_ps(other.low, x.low, mask(lanes)),
          _mm256_blendv_ps(other.high, x.high, mask(_mm256_add_epi32(lanes, _mm256_set1_epi32(8))))};
}
// 2^n for whole n in [-127, 127]; -127 gives 0.
inline F16 power_of_two(F16 n) {
  const __m256i bias = _mm256_set1_epi32(127);
  const auto one = [&](__m256 v) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(v), bias), 23));
  };
  return {one(n.low), one(n.high)};
}
inline float sum(F16 x) {
  const __m256 eight = _mm256_add_ps(x.low, x.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float largest(F16 x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

inline F16 load(const uint16_t* p) {  // bf16
  const auto widen = [](const uint16_t* q) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  };
  return {widen(p), widen(p + 8)};
}
inline void store(uint16_t* p, F16 x) {  // to bf16, to the nearest, ties to even; a NaN stays one
  const auto narrow = [](__m256 v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  };
  const __m256i packed = _mm256_packus_epi32(narrow(x.low), narrow(x.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline F16 load_half(const uint16_t* p) {  // fp16
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}

// 16 values of `p`, of which only the first `count` are read; the others are 0.
template <class T>
inline F16 load_part(const T* p, int64_t count) {
  if (count >= 16) return load(p);
  T all[16] = {};
  for (int64_t i = 0; i < count; ++i) all[i] = p[i];
  return load(all);
}

template <class T>
inline void store_part(T* p, F16 x, int64_t count) {
  if (count >= 16) return store(p, x);
  T all[16];
  store(all, x);
  for (int64_t i = 0; i < count; ++i) p[i] = all[i];
}

inline I16 zero_i() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I16 splat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I16 to_int(F16 x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }  // to the nearest
inline F16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline I16 load(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline void store(int32_t* p, I16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.high);
}

// The ways to multiply lines of packed weights (see ops.h). A line holds kLineValues values along k and gives kWords
// vectors; each is multiplied with one 4-byte word of a row of x and added to the row's sums. `Wide` reads lines that
// were widened before: one vector a line.

struct DotF32 {
  using Word = float;
  using Vector = F16;
  using Wide = DotF32;
  static constexpr bool kInteger = false;
  static constexpr int kWideSums = 6, kWideTileRows = 6;
  static constexpr int kWords = 1, kLineValues = 1, kOffset = 0;
  static Vector zero() { return zero_f(); }
  static void widen(const uint8_t* line, Vector* out) { out[0] = load(reinterpret_cast<const float*>(line)); }
  static Vector multiply_add(Vector sums, Word x, Vector weights) { return fma(splat(x), weights, sums); }
};

struct DotBf16 : DotF32 {
  static constexpr int kWords = 2, kLineValues = 2;
  static void widen(const uint8_t* line, Vector* out) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + 32));
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    out[0] = {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
    out[1] = {_mm256_castsi256_ps(_mm256_and_si256(low, upper)), _mm256_castsi256_ps(_mm256_and_si256(high, upper))};
  }
};

// int8 as floats: for pages, whose tokens have scales of their own.
struct DotI8AsF32 : DotF32 {
  static constexpr int kWords = 4, kLineValues = 4;
  static void widen(const uint8_t* line, Vector* out) {
    const I16 bytes = load(reinterpret_cast<const int32_t*>(line));
    const auto top = [](__m256i v) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(v, 24)); };
    out[0] = {top(_mm256_slli_epi32(bytes.low, 24)), top(_mm256_slli_epi32(bytes.high, 24))};
    out[1] = {top(_mm256_slli_epi32(bytes.low, 16)), top(_mm256_slli_epi32(bytes.high, 16))};
    out[2] = {top(_mm256_slli_epi32(bytes.low, 8)), top(_mm256_slli_epi32(bytes.high, 8))};
    out[3] = {top(bytes.low), top(bytes.high)};
  }
};

// A word is two int16, and so is a lane: their products are exact, and so are the sums.
struct DotPairs {
  using Word = int32_t;
  using Piece = int16_t;
  using Vector = I16;
  using Wide = DotPairs;
  static constexpr bool kInteger = true;
  static constexpr int kWideSums = 4, kWideTileRows = 4;  // a product takes a register before it is added
  static constexpr int kWords = 1, kLineValues = 2, kOffset = 0;
  static Vector zero() { return zero_i(); }
  static void widen(const uint8_t* line, Vector* out) { out[0] = load(reinterpret_cast<const int32_t*>(line)); }
  static Vector multiply_add(Vector sums, Word x, Vector weights) {
    const __m256i pair = _mm256_set1_epi32(x);
    return {_mm256_add_epi32(sums.low, _mm256_madd_epi16(pair, weights.low)),
            _mm256_add_epi32(sums.high, _mm256_madd_epi16(pair, weights.high))};
  }
};

// Puts 16 values along k where the words of `Dot` want them.
template <class Dot>
inline void put_in_order(int16_t* pieces, I16 x) {
  constexpr int kValues = Dot::kLineValues;
  int32_t all[16];
  store(all, x);
  for (int i = 0; i < 16; ++i) {
    pieces[i] = static_cast<int16_t>(all[i / kValues * kValues + Dot::kOrder[i % kValues]]);
  }
}

struct DotInt8 : DotPairs {
  static constexpr int kWords = 2, kLineValues = 4;
  static constexpr int kOrder[4] = {0, 2, 1, 3};  // the values along k in the order of the words' pieces
  static void put(Piece* pieces, I16 x) { put_in_order<DotInt8>(pieces, x); }
  static void widen(const uint8_t* line, Vector* out) {
    const I16 bytes = load(reinterpret_cast<const int32_t*>(line));
    out[0] = {_mm256_srai_epi16(_mm256_slli_epi16(bytes.low, 8), 8),
              _mm256_srai_epi16(_mm256_slli_epi16(bytes.high, 8), 8)};
    out[1] = {_mm256_srai_epi16(bytes.low, 8), _mm256_srai_epi16(bytes.high, 8)};
  }
};

struct DotInt4 : DotPairs {
  static constexpr int kWords = 4, kLineValues = 8;
  static constexpr int kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  static void put(Piece* pieces, I16 x) { put_in_order<DotInt4>(pieces, x); }
  static void widen(const uint8_t* line, Vector* out) {
    const I16 nibbles = load(reinterpret_cast<const int32_t*>(line));
    const auto top = [](__m256i v) { return _mm256_srai_epi16(v, 12); };
    out[0] = {top(_mm256_slli_epi16(nibbles.low, 12)), top(_mm256_slli_epi16(nibbles.high, 12))};
    out[1] = {top(_mm256_slli_epi16(nibbles.low, 8)), top(_mm256_slli_epi16(nibbles.high, 8))};
    out[2] = {top(_mm256_slli_epi16(nibbles.low, 4)), top(_mm256_slli_epi16(nibbles.high, 4))};
    out[3] = {top(nibbles.low), top(nibbles.high)};
  }
};

// How many vectors of sums the registers hold beside the weights and a word of x.
constexpr int kSums = 4;           // while lines are widened; when they were widened before, see kWideSums
constexpr int kWideBlocks = 1;     // of 16 columns that are widened at once: they stay in the second cache
constexpr int64_t kWideRows = 12;  // widening first pays from so many rows on

}  // namespace penstock::avx2
