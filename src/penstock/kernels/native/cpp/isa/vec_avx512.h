// Vectors of sixteen columns with AVX512 (F, BW, VL, DQ) and VNNI: one register each. Included by the files of several
// instruction sets, each in its own namespace PENSTOCK_ISA.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace penstock::PENSTOCK_ISA {

using F16 = __m512;   // 16 floats
using I16 = __m512i;  // 16 int32

inline F16 zero_f() { return _mm512_setzero_ps(); }
inline F16 splat(float x) { return _mm512_set1_ps(x); }
inline F16 load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F16 x) { _mm512_storeu_ps(p, x); }
inline F16 add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
inline F16 sub(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
inline F16 mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
inline F16 div(F16 a, F16 b) { return _mm512_div_ps(a, b); }
inline F16 max(F16 a, F16 b) { return _mm512_max_ps(a, b); }
inline F16 min(F16 a, F16 b) { return _mm512_min_ps(a, b); }
// a * b + c
inline F16 fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
inline F16 round(F16 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F16 absolute(F16 a) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)));
}

// Lanes [0, count).
inline __mmask16 lanes_below(int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffffu : count <= 0 ? 0u : (1u << count) - 1u);
}
// `x` in lanes [begin, end), `other` in the rest.
inline F16 within(F16 x, F16 other, int64_t begin, int64_t end) {
  return _mm512_mask_blend_ps(static_cast<__mmask16>(lanes_below(end) & ~lanes_below(begin)), other, x);
}
// 2^n for whole n in [-127, 127]; -127 gives 0.
inline F16 power_of_two(F16 n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
// 2^(n - 127) from the last bits n of each float.
inline F16 to_exponent(F16 x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 23)); }
// `x` where a > b, else 0.
inline F16 where_greater(F16 a, F16 b, F16 x) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), zero_f(), x);
}
// Lane i gets the value of lane i ^ kBit.
template <unsigned kBit>
inline F16 exchange(F16 x) {
  if constexpr (kBit >= 4) return _mm512_shuffle_f32x4(x, x, kBit == 8 ? 0x4e : 0xb1);
  return _mm512_permute_ps(x, kBit == 2 ? 0x4e : 0xb1);
}
// a: the lower halves of both; b: the upper halves of both.
inline void transpose_halves(F16& a, F16& b) {
  const F16 lower = _mm512_shuffle_f32x4(a, b, 0x44);
  b = _mm512_shuffle_f32x4(a, b, 0xee);
  a = lower;
}
// Transposes [8][8] squares of 2 x 2 values of 2 bytes, and the values of each: line j of `out` gets the j-th square of
// each of `lines`. Strides are in bytes.
inline void transpose_pairs(const uint16_t* lines, int64_t stride, uint16_t* out, int64_t out_stride) {
  __m512i pairs[8], quarters[8];
  for (int64_t i = 0; i < 8; i += 2) {
    const __m512i a = _mm512_loadu_si512(lines + i * stride / 2), b = _mm512_loadu_si512(lines + (i + 1) * stride / 2);
    pairs[i] = _mm512_unpacklo_epi64(a, b);
    pairs[i + 1] = _mm512_unpackhi_epi64(a, b);
  }
  for (int i = 0; i < 2; ++i) {  // of even and of odd squares
    for (int j = 0; j < 4; j += 2) {
      const __m512i a = pairs[2 * j + i], b = pairs[2 * j + 2 + i];
      quarters[i * 4 + j] = _mm512_shuffle_i64x2(a, b, 0x88);
      quarters[i * 4 + j + 1] = _mm512_shuffle_i64x2(a, b, 0xdd);
    }
  }
  const auto put = [&](int line, __m512i x) {
    x = _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(x, 0xd8), 0xd8);
    _mm512_storeu_si512(out + line * out_stride / 2, x);
  };
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) {
      const __m512i a = quarters[i * 4 + j], b = quarters[i * 4 + j + 2];
      put(i + 2 * j, _mm512_shuffle_i64x2(a, b, 0x88));
      put(i + 2 * j + 4, _mm512_shuffle_i64x2(a, b, 0xdd));
    }
  }
}
inline float sum(F16 x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float largest(F16 x) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
// Of values that are not negative. The bits of a NaN are a larger number than those of any other float.
inline float largest_or_nan(F16 x) {
  const __m256 low = _mm512_castps512_ps256(x), high = _mm512_extractf32x8_ps(x, 1);
  const __m256i eight = _mm256_max_epu32(_mm256_castps_si256(low), _mm256_castps_si256(high));
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1))));
}

inline F16 widen_bf16(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
// To the nearest, ties to even; a NaN stays one.
#ifdef PENSTOCK_NARROWS_TO_BF16
inline __m256i narrow_bf16(F16 x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }
#else
inline __m256i narrow_bf16(F16 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7fc0)));
}
#endif
inline F16 load(const uint16_t* p) {  // bf16
  return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store(uint16_t* p, F16 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(x)); }
inline F16 load_half(const uint16_t* p) {  // fp16
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline F16 load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// The first `count` of 16 values at `p`; the others are 0 and not read.
inline F16 load_part(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(lanes_below(count), p); }
inline F16 load_part(const uint16_t* p, int64_t count) {
  return widen_bf16(_mm256_maskz_loadu_epi16(lanes_below(count), p));
}
inline void store_part(float* p, F16 x, int64_t count) { _mm512_mask_storeu_ps(p, lanes_below(count), x); }
inline void store_part(uint16_t* p, F16 x, int64_t count) {
  _mm256_mask_storeu_epi16(p, lanes_below(count), narrow_bf16(x));
}

// The source of lane `lane` of the j-th vector of [16][M] words: a place in one of M vectors.
template <int M>
struct Interleaving {
  alignas(64) int32_t places[M][16];
  __mmask16 lanes[M][M];  // of the j-th vector, those from the m-th

  constexpr Interleaving() : places{}, lanes{} {
    for (int j = 0; j < M; ++j) {
      for (int lane = 0; lane < 16; ++lane) {
        const int at = 16 * j + lane;
        places[j][lane] = at / M;
        lanes[j][at % M] = static_cast<__mmask16>(lanes[j][at % M] | 1u << lane);
      }
    }
  }
};

// Writes [count][M] words: those of M rows side by side.
template <int M, class Word>
inline void interleave(const Word* const* rows, int64_t count, Word* out) {
  static constexpr Interleaving<M> kOrder;
  auto* to = reinterpret_cast<float*>(out);
  for (int64_t i = 0; i < count; i += 16, to += 16 * M) {
    F16 from[M];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) from[m] = load_part(reinterpret_cast<const float*>(rows[m] + i), count - i);
#pragma GCC unroll 16
    for (int j = 0; j < M; ++j) {
      const __m512i places = _mm512_loadu_si512(kOrder.places[j]);
      F16 v = _mm512_permutexvar_ps(places, from[0]);
#pragma GCC unroll 16
      for (int m = 1; m < M; ++m) v = _mm512_mask_permutexvar_ps(v, kOrder.lanes[j][m], places, from[m]);
      store_part(to + 16 * j, v, (count - i) * M - 16 * j);
    }
  }
}

inline I16 add(I16 a, I16 b) { return _mm512_add_epi32(a, b); }
inline int32_t sum(I16 a) { return _mm512_reduce_add_epi32(a); }
inline I16 mul(I16 a, I16 b) { return _mm512_mullo_epi32(a, b); }
inline I16 exclusive_or(I16 a, I16 b) { return _mm512_xor_si512(a, b); }
// The minimum of unsigned numbers.
inline I16 min_unsigned(I16 a, I16 b) { return _mm512_min_epu32(a, b); }
template <int kBits>
inline I16 shift_right(I16 a) {
  return _mm512_srli_epi32(a, kBits);
}
inline F16 as_floats(I16 bits) { return _mm512_castsi512_ps(bits); }
inline I16 zero_i() { return _mm512_setzero_si512(); }
inline I16 splat(int32_t x) { return _mm512_set1_epi32(x); }
inline I16 to_int(F16 x) { return _mm512_cvtps_epi32(x); }  // to the nearest
inline F16 to_float(I16 x) { return _mm512_cvtepi32_ps(x); }
inline I16 load(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void store(int32_t* p, I16 x) { _mm512_storeu_si512(p, x); }

// The ways to multiply lines of packed weights: see vec_avx2.h.

struct DotF32 {
  using Word = float;
  using Piece = float;
  using Vector = F16;
  using Wide = DotF32;
  static constexpr bool kInteger = false;
  static constexpr int kWords = 1, kLineValues = 1;
  static constexpr int kTileSums = 24, kMostBlocks = 4;  // memory is read more slowly with six blocks at once
  static constexpr int64_t kRunWords = 768;  // the hardware prefetches lines from the L2 cache in time
  static Vector zero() { return zero_f(); }
  static Vector widen(const uint8_t* line, int) { return load(reinterpret_cast<const float*>(line)); }
  static Vector multiply_add(Vector sums, Word x, Vector weights) { return fma(splat(x), weights, sums); }
};

#ifdef PENSTOCK_MULTIPLIES_BF16
// A word is two bf16 of x, and a lane two of a weight. Sums are fp32.
struct DotBf16 {
  using Word = int32_t;
  using Piece = uint16_t;
  using Vector = F16;
  using Wide = DotBf16;
  static constexpr bool kInteger = false;
  static constexpr int kWords = 1, kLineValues = 2;
  static constexpr int kTileSums = 24, kMostBlocks = 4;
  static constexpr int64_t kRunWords = 768;
  static Vector zero() { return zero_f(); }
  static I16 widen(const uint8_t* line, int) { return _mm512_loadu_si512(line); }
  static Vector multiply_add(Vector sums, Word x, I16 pairs) {
    return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(pairs), reinterpret_cast<__m512bh>(_mm512_set1_epi32(x)));
  }
};
#else
struct DotBf16 : DotF32 {
  static constexpr int kWords = 2, kLineValues = 2, kTileSums = 8;
  static constexpr int64_t kRunWords = 256;
  static Vector widen(const uint8_t* line, int word) {
    const __m512i pairs = _mm512_loadu_si512(line);
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm512_castsi512_ps(word == 0 ? _mm512_slli_epi32(pairs, 16) : _mm512_and_si512(pairs, upper));
  }
};
#endif

// A word is two int16, and so is a lane. For int8 pages, whose queries and weights need more than eight bits.
struct DotPairs {
  using Word = int32_t;
  using Piece = int16_t;
  using Vector = I16;
  static constexpr bool kInteger = true;
  static constexpr int kWords = 1, kLineValues = 2;
  static constexpr int kTileSums = 16;
  static Vector zero() { return zero_i(); }
  static Vector widen(const uint8_t* line, int) { return _mm512_loadu_si512(line); }
  static Vector multiply_add(Vector sums, Word x, Vector pairs) {
    return _mm512_dpwssd_epi32(sums, pairs, _mm512_set1_epi32(x));
  }
};

// A word is two int16 of x, and a lane two of a weight.
struct DotInt16 : DotPairs {
  static constexpr int64_t kSpanLines = kSpan / kLineValues;
  using Wide = DotInt16;
  static void put(Piece* pieces, I16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(pieces), _mm512_cvtepi32_epi16(x));
  }
};

struct DotPage8 : DotPairs {
  static constexpr int kWords = 2, kLineValues = 4;
  // The first and third of four values are the low bytes of a lane's pairs.
  static void put(Piece* pieces, I16 x) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(pieces),
                        _mm256_shuffle_epi8(_mm512_cvtepi32_epi16(x), _mm256_broadcastsi128_si256(order)));
  }
  static Vector widen(const uint8_t* line, int word) {
    const __m512i bytes = _mm512_loadu_si512(line);
    return _mm512_srai_epi16(word == 1 ? bytes : _mm512_slli_epi16(bytes, 8), 8);
  }
};

// Codes of a grouped weight as unsigned bytes. A word is four int8 of x, a lane four codes. A sum begins with what
// subtracts the codes' zero from all of them.
struct DotBytes {
  using Word = int32_t;
  using Piece = int8_t;
  using Vector = I16;
  using Wide = DotBytes;
  static constexpr bool kInteger = true;
  static constexpr int kWords = 1, kLineValues = 4, kTileSums = 12;
  static constexpr int kCentre = 0;  // subtracted from codes when they are widened
  static Vector begin(int32_t start) { return splat(start); }
  static I16 end(Vector sums, int32_t) { return sums; }
  static Vector widen(const uint8_t* line, int) { return _mm512_loadu_si512(line); }
  static Vector multiply_add(Vector sums, Word x, Vector weights) {
    return _mm512_dpbusd_epi32(sums, weights, _mm512_set1_epi32(x));
  }
  static void put(Piece* pieces, I16 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(pieces), _mm512_cvtepi32_epi8(x));
  }
};

// A lane has eight codes of four bits: the low nibbles, then the high ones.
struct DotNibbles : DotBytes {
  static constexpr int kWords = 2, kLineValues = 8, kTileSums = 8;
  static Vector widen(const uint8_t* line, int word) {
    const __m512i nibbles = _mm512_loadu_si512(line);
    return _mm512_and_si512(word == 0 ? nibbles : _mm512_srli_epi32(nibbles, 4), _mm512_set1_epi8(15));
  }
};

// The codes are places in a table of bytes (see kTables in ops.h), to which 128 is added.
template <Codes kCodes>
struct DotTable : DotNibbles {
  static Vector widen(const uint8_t* line, int word) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table_of(kCodes)));
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_xor_si128(table, _mm_set1_epi8(-128)));
    return _mm512_shuffle_epi8(bytes, DotNibbles::widen(line, word));
  }
};

// Prefetches a line into the L2 cache.
inline void fetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

constexpr int kSums = 8;                // independent vectors of sums that hide the latency of an addition
constexpr int kIntegerStreams = 1;      // blocks that one row of int16 reads side by side
constexpr int kGroupedStreams = 1;      // the same for grouped weights
constexpr int kPanelRows = 6;           // most rows that are multiplied together
constexpr int64_t kWideRows = 12;       // from this many rows on, widening lines beforehand is faster
constexpr int kWideHeights = 2;         // heights of panels that occur with so many rows
constexpr int64_t kRowsTogether = 256;  // rows whose words of a run stay in the L2 cache
constexpr int64_t kRunWords = 256;      // words along k of a run: two blocks' lines stay in the L1 cache

}  // namespace penstock::PENSTOCK_ISA
