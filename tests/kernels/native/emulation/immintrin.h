// Found before the compiler's header of this name when the tests build the AVX512 and AMX kernels for a processor that
// lacks them: what those kernels use, lane by lane, after Intel's pseudocode.
#pragma once

#include_next <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

// The kernels around this are not optimized, to be compiled soon.
#pragma GCC push_options
#pragma GCC optimize("O2")

#include "tiles.h"

namespace emulated {

using Words = int32_t __attribute__((vector_size(64)));
using Unsigned = uint32_t __attribute__((vector_size(64)));
using Longs = int64_t __attribute__((vector_size(64)));

template <class To, class From>
inline To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class T, class F>
inline __m512 floats(const F& lane) {
  T all[16];
  for (int i = 0; i < 16; ++i) all[i] = lane(i);
  __m512 result;
  std::memcpy(&result, all, sizeof result);
  return result;
}
template <class F>
inline __m512 floats(const F& lane) {
  return floats<float>(lane);
}
template <class F>
inline __m512i words(const F& lane) {
  return as<__m512i>(floats<int32_t>(lane));
}

// -- floats ------------------------------------------------------------------------------------------------------

inline __m512 setzero_ps() { return __m512{}; }
inline __m512 set1_ps(float x) { return __m512{} + x; }
inline __m512 loadu_ps(const void* p) {
  __m512 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void storeu_ps(void* p, __m512 x) { std::memcpy(p, &x, sizeof x); }
inline __m512 maskz_loadu_ps(__mmask16 mask, const float* p) {
  return floats([&](int i) { return mask >> i & 1 ? p[i] : 0.0f; });
}
inline void mask_storeu_ps(float* p, __mmask16 mask, __m512 x) {
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) p[i] = x[i];
  }
}
inline __m512 add_ps(__m512 a, __m512 b) { return a + b; }
inline __m512 sub_ps(__m512 a, __m512 b) { return a - b; }
inline __m512 mul_ps(__m512 a, __m512 b) { return a * b; }
inline __m512 div_ps(__m512 a, __m512 b) { return a / b; }
inline __m512 max_ps(__m512 a, __m512 b) { return a > b ? a : b; }  // b where one is not a number
inline __m512 min_ps(__m512 a, __m512 b) { return a < b ? a : b; }
inline __m256 extractf32x8_ps(__m512 x, int half) {
  __m256 result;
  std::memcpy(&result, reinterpret_cast<const char*>(&x) + 32 * half, sizeof result);
  return result;
}
inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
  __m256 halves[2];
  for (int i = 0; i < 2; ++i) {
    halves[i] = _mm256_fmadd_ps(extractf32x8_ps(a, i), extractf32x8_ps(b, i), extractf32x8_ps(c, i));
  }
  return as<__m512>(halves);
}
inline __m512 roundscale_ps(__m512 a, int mode) {
  if (mode != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) __builtin_trap();
  return floats([&](int i) { return std::nearbyintf(a[i]); });
}
inline __m512 mask_blend_ps(__mmask16 mask, __m512 a, __m512 b) {
  return floats([&](int i) { return mask >> i & 1 ? b[i] : a[i]; });
}
inline __m512 permutexvar_ps(__m512i places, __m512 x) {
  return floats([&](int i) { return x[as<Words>(places)[i] & 15]; });
}
inline __m512 mask_permutexvar_ps(__m512 other, __mmask16 mask, __m512i places, __m512 x) {
  return mask_blend_ps(mask, other, permutexvar_ps(places, x));
}
inline __m512 shuffle_f32x4(__m512 a, __m512 b, int order) {
  return floats([&](int i) {
    const int from = (order >> i / 4 * 2 & 3) * 4 + i % 4;
    return i < 8 ? a[from] : b[from];
  });
}
inline __mmask16 cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  if (predicate != _CMP_UNORD_Q && predicate != _CMP_GT_OQ) __builtin_trap();
  __mmask16 mask = 0;
  for (int i = 0; i < 16; ++i) {
    const bool holds = predicate == _CMP_GT_OQ ? a[i] > b[i] : a[i] != a[i] || b[i] != b[i];
    mask |= static_cast<__mmask16>(holds << i);
  }
  return mask;
}
inline __m256 castps512_ps256(__m512 x) {
  __m256 low;
  std::memcpy(&low, &x, sizeof low);
  return low;
}
inline __m512 cvtph_ps(__m256i x) {
  return floats([&](int i) {
    uint16_t all[16];
    std::memcpy(all, &x, sizeof all);
    return _cvtsh_ss(all[i]);
  });
}

// -- integers ----------------------------------------------------------------------------------------------------

inline __m512i setzero_si512() { return __m512i{}; }
inline __m512i set1_epi32(int32_t x) { return as<__m512i>(Words{} + x); }
inline __m512i set1_epi8(char x) { return set1_epi32(static_cast<uint8_t>(x) * 0x01010101); }
inline __m512i broadcast_i32x4(__m128i x) {
  const __m128i all[4] = {x, x, x, x};
  return as<__m512i>(all);
}
inline int32_t reduce_add_epi32(__m512i x) {
  uint32_t sum = 0;  // wraps
  for (int i = 0; i < 16; ++i) sum += as<Unsigned>(x)[i];
  return static_cast<int32_t>(sum);
}
// Within each 16 bytes.
inline __m512i shuffle_epi8(__m512i a, __m512i places) {
  uint8_t from[64], at[64], to[64];
  std::memcpy(from, &a, sizeof from);
  std::memcpy(at, &places, sizeof at);
  for (int i = 0; i < 64; ++i) to[i] = at[i] & 0x80 ? 0 : from[i / 16 * 16 + (at[i] & 15)];
  __m512i result;
  std::memcpy(&result, to, sizeof result);
  return result;
}
inline __m512i unpack_epi64(__m512i a, __m512i b, int half) {
  const auto left = as<Longs>(a), right = as<Longs>(b);
  Longs result;
  for (int i = 0; i < 8; ++i) result[i] = i % 2 == 0 ? left[i + half] : right[i - 1 + half];
  return as<__m512i>(result);
}
inline __m512i unpacklo_epi64(__m512i a, __m512i b) { return unpack_epi64(a, b, 0); }
inline __m512i unpackhi_epi64(__m512i a, __m512i b) { return unpack_epi64(a, b, 1); }
inline __m512i shuffle_i64x2(__m512i a, __m512i b, int order) {
  return as<__m512i>(shuffle_f32x4(as<__m512>(a), as<__m512>(b), order));
}
// The lower or the upper four words of each 16 bytes.
inline __m512i shuffle_words(__m512i a, int order, int first) {
  uint16_t from[32], to[32];
  std::memcpy(from, &a, sizeof from);
  std::memcpy(to, &a, sizeof to);
  for (int i = 0; i < 32; i += 8) {
    for (int j = 0; j < 4; ++j) to[i + first + j] = from[i + first + (order >> 2 * j & 3)];
  }
  __m512i result;
  std::memcpy(&result, to, sizeof result);
  return result;
}
inline __m512i shufflelo_epi16(__m512i a, int order) { return shuffle_words(a, order, 0); }
inline __m512i shufflehi_epi16(__m512i a, int order) { return shuffle_words(a, order, 4); }
inline __m512i loadu_si512(const void* p) { return as<__m512i>(loadu_ps(p)); }
inline void storeu_si512(void* p, __m512i x) { std::memcpy(p, &x, sizeof x); }
inline __m512i and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512i xor_si512(__m512i a, __m512i b) { return a ^ b; }
inline __m512i add_epi32(__m512i a, __m512i b) { return as<__m512i>(as<Unsigned>(a) + as<Unsigned>(b)); }  // wraps
inline __m512i mullo_epi32(__m512i a, __m512i b) { return as<__m512i>(as<Unsigned>(a) * as<Unsigned>(b)); }
inline __m512i min_epu32(__m512i a, __m512i b) {
  const auto left = as<Unsigned>(a), right = as<Unsigned>(b);
  return as<__m512i>(left < right ? left : right);
}
inline __m512i slli_epi32(__m512i a, int count) { return as<__m512i>(as<Words>(a) << count); }
inline __m512i srai_epi32(__m512i a, int count) { return as<__m512i>(as<Words>(a) >> count); }
inline __m512i srli_epi32(__m512i a, int count) {
  return words([&, all = as<Words>(a)](int i) {
    return static_cast<int32_t>(static_cast<uint32_t>(all[i]) >> count);
  });
}
inline __m512i mask_blend_epi32(__mmask16 mask, __m512i a, __m512i b) {
  return as<__m512i>(mask_blend_ps(mask, as<__m512>(a), as<__m512>(b)));
}
inline __m512i cvtps_epi32(__m512 x) {
  return words([&](int i) { return _mm_cvtss_si32(_mm_set_ss(x[i])); });
}
inline __m512 cvtepi32_ps(__m512i x) {
  return floats([all = as<Words>(x)](int i) { return static_cast<float>(all[i]); });
}
inline __m512i cvtepu16_epi32(__m256i x) {
  uint16_t all[16];
  std::memcpy(all, &x, sizeof all);
  return words([&](int i) { return static_cast<int32_t>(all[i]); });
}
inline __m512i cvtepi8_epi32(__m128i x) {
  int8_t all[16];
  std::memcpy(all, &x, sizeof all);
  return words([&](int i) { return static_cast<int32_t>(all[i]); });
}
inline __m256i cvtepi32_epi16(__m512i x) {
  int16_t all[16];
  for (int i = 0; i < 16; ++i) all[i] = static_cast<int16_t>(as<Words>(x)[i]);
  __m256i result;
  std::memcpy(&result, all, sizeof result);
  return result;
}
inline __m128i cvtepi32_epi8(__m512i x) {
  int8_t all[16];
  for (int i = 0; i < 16; ++i) all[i] = static_cast<int8_t>(as<Words>(x)[i]);
  __m128i result;
  std::memcpy(&result, all, sizeof result);
  return result;
}
inline __m512i dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
  uint8_t left[64];
  int8_t right[64];
  std::memcpy(left, &a, sizeof left);
  std::memcpy(right, &b, sizeof right);
  return words([&, all = as<Words>(sums)](int i) {
    int32_t sum = all[i];
    for (int j = 4 * i; j < 4 * i + 4; ++j) sum += left[j] * right[j];
    return sum;
  });
}
using Halves = int16_t __attribute__((vector_size(64)));

inline __m512i slli_epi16(__m512i a, int count) { return as<__m512i>(as<Halves>(a) << count); }
inline __m512i srai_epi16(__m512i a, int count) { return as<__m512i>(as<Halves>(a) >> count); }
inline __m512i dpwssd_epi32(__m512i sums, __m512i a, __m512i b) {
  return words([all = as<Words>(sums), left = as<Halves>(a), right = as<Halves>(b)](int i) {
    return all[i] + left[2 * i] * right[2 * i] + left[2 * i + 1] * right[2 * i + 1];
  });
}
// Sums of bf16 products. The order of a pair's two additions is the instruction's; denormals are not flushed.
inline __m512 dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
  return floats([&, left = as<Unsigned>(a), right = as<Unsigned>(b)](int i) {
    const auto product = [&](uint32_t x, uint32_t y) { return as<float>(x) * as<float>(y); };
    const float odd = sums[i] + product(left[i] & 0xffff0000u, right[i] & 0xffff0000u);
    return odd + product(left[i] << 16, right[i] << 16);
  });
}
// To the nearest, ties to even. Denormals become zeros, and a NaN stays one.
inline __m256i cvtneps_pbh(__m512 x) {
  uint16_t all[16];
  for (int i = 0; i < 16; ++i) {
    const auto bits = as<Unsigned>(x)[i];
    const uint32_t exponent = bits & 0x7f800000, sign = bits & 0x80000000;
    const bool nan = x[i] != x[i];
    const uint32_t rounded = nan ? bits | 0x400000 : exponent == 0 ? sign : bits + 0x7fff + (bits >> 16 & 1);
    all[i] = static_cast<uint16_t>(rounded >> 16);
  }
  __m256i result;
  std::memcpy(&result, all, sizeof result);
  return result;
}
inline __m256i maskz_loadu_epi16(__mmask16 mask, const void* p) {
  uint16_t all[16] = {};
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) std::memcpy(&all[i], static_cast<const char*>(p) + 2 * i, 2);
  }
  __m256i result;
  std::memcpy(&result, all, sizeof result);
  return result;
}
inline void mask_storeu_epi16(void* p, __mmask16 mask, __m256i x) {
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) std::memcpy(static_cast<char*>(p) + 2 * i, reinterpret_cast<const char*>(&x) + 2 * i, 2);
  }
}

}  // namespace emulated

#pragma GCC pop_options

#undef _mm512_setzero_ps
#define _mm512_setzero_ps emulated::setzero_ps
#undef _mm512_set1_ps
#define _mm512_set1_ps emulated::set1_ps
#undef _mm512_loadu_ps
#define _mm512_loadu_ps emulated::loadu_ps
#undef _mm512_storeu_ps
#define _mm512_storeu_ps emulated::storeu_ps
#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps emulated::maskz_loadu_ps
#undef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps emulated::mask_storeu_ps
#undef _mm512_add_ps
#define _mm512_add_ps emulated::add_ps
#undef _mm512_sub_ps
#define _mm512_sub_ps emulated::sub_ps
#undef _mm512_mul_ps
#define _mm512_mul_ps emulated::mul_ps
#undef _mm512_div_ps
#define _mm512_div_ps emulated::div_ps
#undef _mm512_max_ps
#define _mm512_max_ps emulated::max_ps
#undef _mm512_min_ps
#define _mm512_min_ps emulated::min_ps
#undef _mm512_fmadd_ps
#define _mm512_fmadd_ps emulated::fmadd_ps
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps emulated::roundscale_ps
#undef _mm512_mask_blend_ps
#define _mm512_mask_blend_ps emulated::mask_blend_ps
#undef _mm512_permutexvar_ps
#define _mm512_permutexvar_ps emulated::permutexvar_ps
#undef _mm512_mask_permutexvar_ps
#define _mm512_mask_permutexvar_ps emulated::mask_permutexvar_ps
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4 emulated::shuffle_f32x4
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask emulated::cmp_ps_mask
#undef _mm512_castps512_ps256
#define _mm512_castps512_ps256 emulated::castps512_ps256
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps emulated::extractf32x8_ps
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps emulated::cvtph_ps
#undef _mm512_setzero_si512
#define _mm512_setzero_si512 emulated::setzero_si512
#undef _mm512_set1_epi32
#define _mm512_set1_epi32 emulated::set1_epi32
#undef _mm512_set1_epi8
#define _mm512_set1_epi8 emulated::set1_epi8
#undef _mm512_broadcast_i32x4
#define _mm512_broadcast_i32x4 emulated::broadcast_i32x4
#undef _mm512_reduce_add_epi32
#define _mm512_reduce_add_epi32 emulated::reduce_add_epi32
#undef _mm512_shuffle_epi8
#define _mm512_shuffle_epi8 emulated::shuffle_epi8
#undef _mm512_unpacklo_epi64
#define _mm512_unpacklo_epi64 emulated::unpacklo_epi64
#undef _mm512_unpackhi_epi64
#define _mm512_unpackhi_epi64 emulated::unpackhi_epi64
#undef _mm512_shuffle_i64x2
#define _mm512_shuffle_i64x2 emulated::shuffle_i64x2
#undef _mm512_shufflelo_epi16
#define _mm512_shufflelo_epi16 emulated::shufflelo_epi16
#undef _mm512_shufflehi_epi16
#define _mm512_shufflehi_epi16 emulated::shufflehi_epi16
#undef _mm512_loadu_si512
#define _mm512_loadu_si512 emulated::loadu_si512
#undef _mm512_storeu_si512
#define _mm512_storeu_si512 emulated::storeu_si512
#undef _mm512_and_si512
#define _mm512_and_si512 emulated::and_si512
#undef _mm512_xor_si512
#define _mm512_xor_si512 emulated::xor_si512
#undef _mm512_add_epi32
#define _mm512_add_epi32 emulated::add_epi32
#undef _mm512_mullo_epi32
#define _mm512_mullo_epi32 emulated::mullo_epi32
#undef _mm512_min_epu32
#define _mm512_min_epu32 emulated::min_epu32
#undef _mm512_slli_epi32
#define _mm512_slli_epi32 emulated::slli_epi32
#undef _mm512_srai_epi32
#define _mm512_srai_epi32 emulated::srai_epi32
#undef _mm512_srli_epi32
#define _mm512_srli_epi32 emulated::srli_epi32
#undef _mm512_mask_blend_epi32
#define _mm512_mask_blend_epi32 emulated::mask_blend_epi32
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16 emulated::cvtepi32_epi16
#undef _mm512_cvtepi32_epi8
#define _mm512_cvtepi32_epi8 emulated::cvtepi32_epi8
#undef _mm512_dpbusd_epi32
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#undef _mm512_slli_epi16
#define _mm512_slli_epi16 emulated::slli_epi16
#undef _mm512_srai_epi16
#define _mm512_srai_epi16 emulated::srai_epi16
#undef _mm512_dpwssd_epi32
#define _mm512_dpwssd_epi32 emulated::dpwssd_epi32
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#undef _mm512_cvtneps_pbh
#define _mm512_cvtneps_pbh emulated::cvtneps_pbh
#undef _mm256_maskz_loadu_epi16
#define _mm256_maskz_loadu_epi16 emulated::maskz_loadu_epi16
#undef _mm256_mask_storeu_epi16
#define _mm256_mask_storeu_epi16 emulated::mask_storeu_epi16
#undef _mm512_castsi512_ps
#define _mm512_castsi512_ps(x) emulated::as<__m512>(x)
#undef _mm512_castps_si512
#define _mm512_castps_si512(x) emulated::as<__m512i>(x)
