// Vectors of sixteen columns with AVX2: pairs of 256-bit registers.
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
// `x` in lanes [begin, end), `other` in the rest.
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
// 2^(n - 127) from the last bits n of each float.
inline F16 to_exponent(F16 x) {
  const auto one = [](__m256 v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 23)); };
  return {one(x.low), one(x.high)};
}
// `x` where a > b, else 0.
inline F16 where_greater(F16 a, F16 b, F16 x) {
  return {_mm256_and_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ), x.low),
          _mm256_and_ps(_mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ), x.high)};
}
// Lane i gets the value of lane i ^ kBit.
template <unsigned kBit>
inline F16 exchange(F16 x) {
  if constexpr (kBit == 8) return {x.high, x.low};
  if constexpr (kBit == 4) return {_mm256_permute2f128_ps(x.low, x.low, 1), _mm256_permute2f128_ps(x.high, x.high, 1)};
  constexpr int kOrder = kBit == 2 ? 0x4e : 0xb1;
  return {_mm256_permute_ps(x.low, kOrder), _mm256_permute_ps(x.high, kOrder)};
}
// a: the lower halves of both; b: the upper halves of both.
inline void transpose_halves(F16& a, F16& b) {
  const __m256 upper = a.high;
  a.high = b.low;
  b.low = upper;
}
// Transposes [8][8] squares of 2 x 2 values of 2 bytes, and the values of each: line j of `out` gets the j-th square of
// each of `lines`. Strides are in bytes.
inline void transpose_pairs(const uint16_t* lines, int64_t stride, uint16_t* out, int64_t out_stride) {
  for (int64_t i = 0; i < 8; ++i) {
    for (int64_t j = 0; j < 8; ++j) {
      uint64_t square;
      __builtin_memcpy(&square, lines + i * stride / 2 + j * 4, 8);
      const uint64_t up = square & 0xffff0000, down = square >> 16 & 0xffff0000;
      square = (square & 0xffff00000000ffff) | up << 16 | down;
      __builtin_memcpy(out + j * out_stride / 2 + i * 4, &square, 8);
    }
  }
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
// Of values that are not negative. The bits of a NaN are a larger number than those of any other float.
inline float largest_or_nan(F16 x) {
  const __m256i eight = _mm256_max_epu32(_mm256_castps_si256(x.low), _mm256_castps_si256(x.high));
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1))));
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

inline F16 load(const int8_t* p) {
  const auto one = [](const int8_t* q) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q))));
  };
  return {one(p), one(p + 8)};
}

// The first `count` of 16 values at `p`; the others are 0 and not read.
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

// Writes [count][M] words: those of M rows side by side.
template <int M, class Word>
inline void interleave(const Word* const* rows, int64_t count, Word* out) {
  for (int64_t i = 0; i < count; ++i) {
    for (int m = 0; m < M; ++m) __builtin_memcpy(out++, rows[m] + i, sizeof(Word));
  }
}

inline I16 add(I16 a, I16 b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline int32_t sum(I16 a) {
  const __m256i eight = _mm256_add_epi32(a.low, a.high);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline I16 mul(I16 a, I16 b) { return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)}; }
inline I16 exclusive_or(I16 a, I16 b) { return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)}; }
// The minimum of unsigned numbers.
inline I16 min_unsigned(I16 a, I16 b) { return {_mm256_min_epu32(a.low, b.low), _mm256_min_epu32(a.high, b.high)}; }
template <int kBits>
inline I16 shift_right(I16 a) {
  return {_mm256_srli_epi32(a.low, kBits), _mm256_srli_epi32(a.high, kBits)};
}
inline F16 as_floats(I16 bits) { return {_mm256_castsi256_ps(bits.low), _mm256_castsi256_ps(bits.high)}; }
inline I16 zero_i() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I16 splat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I16 to_int(F16 x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }  // to the nearest
inline F16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
// Conversions to int16 and int8, which saturate.
inline __m256i to_halves(I16 x) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8); }
inline __m128i to_bytes(I16 x) {
  const __m256i halves = to_halves(x);
  return _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}
inline I16 load(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline void store(int32_t* p, I16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.high);
}

// The ways to multiply lines of packed weights (see ops.h). A line holds kLineValues values along k and gives kWords
// vectors. Each vector is multiplied with one 4-byte word of a row of x and added to the row's sums. `Wide` reads lines
// that were widened beforehand, one vector per line. A tile has at most kPanelRows rows of x, and no more blocks than
// give kTileSums vectors of sums: with the words of weights and of x they fill the registers.
//
// Additions are written in `asm`, since GCC otherwise moves sums between registers and, in a loop, to memory.

struct DotF32 {
  using Word = float;
  using Piece = float;
  using Vector = F16;
  using Wide = DotF32;
  static constexpr bool kInteger = false;
  static constexpr int kTileSums = 4;
  static constexpr int kWords = 1, kLineValues = 1;
  static Vector zero() { return zero_f(); }
  static Vector widen(const uint8_t* line, int) { return load(reinterpret_cast<const float*>(line)); }
  static Vector multiply_add(Vector sums, Word x, Vector weights) {
    const __m256 all = _mm256_set1_ps(x);
    asm("vfmadd231ps %2, %1, %0" : "+x"(sums.low) : "x"(all), "x"(weights.low));
    asm("vfmadd231ps %2, %1, %0" : "+x"(sums.high) : "x"(all), "x"(weights.high));
    return sums;
  }
};

struct DotBf16 : DotF32 {
  using Wide = DotBf16;
  static constexpr int kWords = 2, kLineValues = 2;
  static Vector widen(const uint8_t* line, int word) {
    const I16 pairs = load(reinterpret_cast<const int32_t*>(line));
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    const auto one = [&](__m256i v) {
      return _mm256_castsi256_ps(word == 0 ? _mm256_slli_epi32(v, 16) : _mm256_and_si256(v, upper));
    };
    return {one(pairs.low), one(pairs.high)};
  }
};

// A word is two int16, and so is a lane. Products and sums are exact.
struct DotPairs {
  using Word = int32_t;
  using Piece = int16_t;
  using Vector = I16;
  using Wide = DotPairs;
  static constexpr bool kInteger = true;
  static constexpr int kTileSums = 4;  // a product needs a register before it is added
  static constexpr int kWords = 1, kLineValues = 2;
  static Vector zero() { return zero_i(); }
  static Vector widen(const uint8_t* line, int) { return load(reinterpret_cast<const int32_t*>(line)); }
  static Vector multiply_add(Vector sums, Word x, Vector weights) {
    const __m256i pair = _mm256_set1_epi32(x);
    asm("vpaddd %1, %0, %0" : "+x"(sums.low) : "x"(_mm256_madd_epi16(pair, weights.low)));
    asm("vpaddd %1, %0, %0" : "+x"(sums.high) : "x"(_mm256_madd_epi16(pair, weights.high)));
    return sums;
  }
};

// A word is two int16 of x, and a lane two of a weight.
struct DotInt16 : DotPairs {
  using Wide = DotInt16;
  static constexpr int64_t kSpanLines = kSpan / kLineValues;
  static void put(Piece* pieces, I16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(pieces), to_halves(x));
  }
};

struct DotPage8 : DotPairs {  // for int8 pages
  static constexpr int kWords = 2, kLineValues = 4;
  // The first and third of four values are the low bytes of a lane's pairs.
  static void put(Piece* pieces, I16 x) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(pieces),
                        _mm256_shuffle_epi8(to_halves(x), _mm256_broadcastsi128_si256(order)));
  }
  static Vector widen(const uint8_t* line, int word) {
    const I16 bytes = load(reinterpret_cast<const int32_t*>(line));
    const auto one = [&](__m256i v) { return _mm256_srai_epi16(word == 1 ? v : _mm256_slli_epi16(v, 8), 8); };
    return {one(bytes.low), one(bytes.high)};
  }
};

// Codes of a grouped weight as unsigned bytes, widened to 16 bits. A word is two int16 of x, which hold int8. A sum begins
// with what subtracts the codes' zero from all of them. `vpmaddubsw` would save no instruction: two products of bytes fill
// 16 bits, so each pair would be widened, and one factor must lose its sign.
struct DotCodes : DotPairs {  // already widened
  using Wide = DotCodes;
  static constexpr int kCentre = 0;  // subtracted from codes when they are widened
  static Vector begin(int32_t start) { return splat(start); }
  static I16 end(Vector sums, int32_t) { return sums; }
  static void put(Piece* pieces, I16 x) { DotPage8::put(pieces, x); }
};

// The low bytes of pairs, then the high ones.
inline I16 widened_bytes(I16 bytes, int word) {
  const __m256i low = _mm256_set1_epi16(255);
  const auto one = [&](__m256i v) { return word == 0 ? _mm256_and_si256(v, low) : _mm256_srli_epi16(v, 8); };
  return {one(bytes.low), one(bytes.high)};
}

struct DotBytes : DotCodes {
  static constexpr int kWords = 2, kLineValues = 4;
  static Vector widen(const uint8_t* line, int word) {
    return widened_bytes(load(reinterpret_cast<const int32_t*>(line)), word);
  }
};

// A lane has eight codes of four bits: the low nibbles, then the high ones.
inline I16 nibbles(const uint8_t* line, int word) {
  const I16 both = load(reinterpret_cast<const int32_t*>(line));
  const __m256i low = _mm256_set1_epi8(15);
  const auto one = [&](__m256i v) { return _mm256_and_si256(word == 0 ? v : _mm256_srli_epi32(v, 4), low); };
  return {one(both.low), one(both.high)};
}

// The codes are places in a table of int8 (see table_of), to which 128 is added.
template <Codes kCodes>
struct DotTable : DotCodes {
  static constexpr int kWords = 4, kLineValues = 8;
  static Vector widen(const uint8_t* line, int word) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table_of(kCodes)));
    const __m256i bytes = _mm256_broadcastsi128_si256(_mm_xor_si128(table, _mm_set1_epi8(-128)));
    const I16 places = nibbles(line, word / 2);
    return widened_bytes({_mm256_shuffle_epi8(bytes, places.low), _mm256_shuffle_epi8(bytes, places.high)}, word % 2);
  }
};

// Codes of four bits as bytes from 0 to 15. A word is four int8 of x. A lane holds two sums in 16 bits, each at most of
// 32 / 4 pairs of products: 8 x 2 x 15 x 127 fit.
struct DotSmall {  // already widened
  using Word = int32_t;
  using Piece = int8_t;
  using Vector = I16;
  using Wide = DotSmall;
  static constexpr bool kInteger = true;
  static constexpr int kWords = 1, kLineValues = 4, kTileSums = 4;
  static constexpr int kCentre = 0;
  static_assert(kGroupOfX / 4 * 2 * 15 * 127 <= 32767);
  static Vector begin(int32_t) { return zero_i(); }
  static I16 end(Vector sums, int32_t start) {
    const __m256i one = _mm256_set1_epi16(1);
    return add({_mm256_madd_epi16(sums.low, one), _mm256_madd_epi16(sums.high, one)}, splat(start));
  }
  static Vector widen(const uint8_t* line, int) { return load(reinterpret_cast<const int32_t*>(line)); }
  static Vector multiply_add(Vector sums, Word x, Vector weights) {
    const __m256i four = _mm256_set1_epi32(x);
    asm("vpaddw %1, %0, %0" : "+x"(sums.low) : "x"(_mm256_maddubs_epi16(weights.low, four)));
    asm("vpaddw %1, %0, %0" : "+x"(sums.high) : "x"(_mm256_maddubs_epi16(weights.high, four)));
    return sums;
  }
  static void put(Piece* pieces, I16 x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(pieces), to_bytes(x)); }
};

struct DotNibbles : DotSmall {
  static constexpr int kWords = 2, kLineValues = 8;
  static Vector widen(const uint8_t* line, int word) { return nibbles(line, word); }
};

// Prefetches a line into the L2 cache.
inline void fetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

constexpr int kSums = 4;                // independent vectors of sums that hide the latency of an addition
constexpr int kIntegerStreams = 4;      // blocks that one row of int16 reads side by side
constexpr int kGroupedStreams = 2;      // the same for grouped weights, whose totals need registers too
constexpr int kPanelRows = 5;           // most rows that are multiplied together
constexpr int64_t kWideRows = 12;       // from this many rows on, widening lines beforehand is faster
constexpr int kWideHeights = 2;         // heights of panels that occur with so many rows
constexpr int64_t kRowsTogether = 256;  // rows whose words of a run stay in the L2 cache
constexpr int64_t kRunWords = 256;      // words along k of a run: a block's lines stay in the L1 cache

}  // namespace penstock::avx2
