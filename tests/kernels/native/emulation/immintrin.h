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
inline __m512 permute_ps(__m512 x, int order) {  // within each 16 bytes
  return floats([&](int i) { return x[i / 4 * 4 + (order >> i % 4 * 2 & 3)]; });
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
// Bit by bit: the bits of the three say which bit of the table it is.
inline __m512i ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  __m512i result{};
  for (int i = 0; i < 8; ++i) {
    if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return result;
}
inline __m512i or_si512(__m512i a, __m512i b) { return a | b; }
inline __m512i permutexvar_epi32(__m512i places, __m512i a) {
  return as<__m512i>(permutexvar_ps(places, as<__m512>(a)));
}
inline __m256i castsi512_si256(__m512i x) { return as<__m256i>(castps512_ps256(as<__m512>(x))); }
inline __m512i inserti64x4(__m512i a, __m256i b, int half) {
  std::memcpy(reinterpret_cast<char*>(&a) + 32 * half, &b, sizeof b);
  return a;
}
inline __m512i castsi256_si512(__m256i x) { return inserti64x4(__m512i{}, x, 0); }
inline __m256i extracti64x4_epi64(__m512i a, int half) { return as<__m256i>(extractf32x8_ps(as<__m512>(a), half)); }
// Takes elements from the lower or the upper 8 of each 16 bytes of a and b in turn.
template <class T>
inline __m512i unpack(__m512i a, __m512i b, bool upper) {
  constexpr int kCount = 16 / sizeof(T);
  T from[2][4 * kCount], to[4 * kCount];
  std::memcpy(from[0], &a, sizeof to);
  std::memcpy(from[1], &b, sizeof to);
  for (int i = 0; i < 4 * kCount; ++i) {
    to[i] = from[i % 2][i / kCount * kCount + i % kCount / 2 + (upper ? kCount / 2 : 0)];
  }
  return as<__m512i>(to);
}
inline __m512i unpacklo_epi8(__m512i a, __m512i b) { return unpack<uint8_t>(a, b, false); }
inline __m512i unpackhi_epi8(__m512i a, __m512i b) { return unpack<uint8_t>(a, b, true); }
inline __m512i unpacklo_epi16(__m512i a, __m512i b) { return unpack<uint16_t>(a, b, false); }
inline __m512i unpackhi_epi16(__m512i a, __m512i b) { return unpack<uint16_t>(a, b, true); }
inline __m512i unpacklo_epi32(__m512i a, __m512i b) { return unpack<uint32_t>(a, b, false); }
inline __m512i unpackhi_epi32(__m512i a, __m512i b) { return unpack<uint32_t>(a, b, true); }
inline __m512i unpacklo_epi64(__m512i a, __m512i b) { return unpack<uint64_t>(a, b, false); }
inline __m512i unpackhi_epi64(__m512i a, __m512i b) { return unpack<uint64_t>(a, b, true); }
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

// -- integers of 16 bits ------------------------------------------------------------------------------------------

using Shorts = int16_t __attribute__((vector_size(64)));
using UnsignedShorts = uint16_t __attribute__((vector_size(64)));

template <class F>
inline __m512i shorts(const F& lane) {
  uint16_t all[32];
  for (int i = 0; i < 32; ++i) all[i] = static_cast<uint16_t>(lane(i));
  return as<__m512i>(all);
}
inline __m512i set1_epi16(short x) { return as<__m512i>(Shorts{} + x); }
inline __m512i add_epi16(__m512i a, __m512i b) { return as<__m512i>(as<UnsignedShorts>(a) + as<UnsignedShorts>(b)); }
inline __m512i sub_epi16(__m512i a, __m512i b) { return as<__m512i>(as<UnsignedShorts>(a) - as<UnsignedShorts>(b)); }
inline __m512i mullo_epi16(__m512i a, __m512i b) { return as<__m512i>(as<UnsignedShorts>(a) * as<UnsignedShorts>(b)); }
inline __m512i mulhi_epu16(__m512i a, __m512i b) {
  return shorts([left = as<UnsignedShorts>(a), right = as<UnsignedShorts>(b)](int i) {
    return static_cast<uint32_t>(left[i]) * right[i] >> 16;
  });
}
inline __m512i mulhrs_epi16(__m512i a, __m512i b) {
  return shorts([left = as<Shorts>(a), right = as<Shorts>(b)](int i) { return (left[i] * right[i] + 0x4000) >> 15; });
}
inline __m512i slli_epi16(__m512i a, unsigned count) { return as<__m512i>(as<Shorts>(a) << count); }
inline __m512i srli_epi16(__m512i a, unsigned count) { return as<__m512i>(as<UnsignedShorts>(a) >> count); }
inline __m512i srai_epi16(__m512i a, unsigned count) { return as<__m512i>(as<Shorts>(a) >> count); }
inline __m512i permutexvar_epi16(__m512i places, __m512i a) {
  return shorts([from = as<UnsignedShorts>(a), at = as<UnsignedShorts>(places)](int i) { return from[at[i] & 31]; });
}
inline __m512i maskz_loadu_epi16(__mmask32 mask, const void* p) {
  return shorts([&](int i) {
    uint16_t x = 0;
    if (mask >> i & 1) std::memcpy(&x, static_cast<const char*>(p) + 2 * i, 2);
    return x;
  });
}
inline __m512i cvtepu8_epi16(__m256i x) {
  const __m256i halves[] = {_mm256_cvtepu8_epi16(_mm256_castsi256_si128(x)),
                            _mm256_cvtepu8_epi16(_mm256_extracti128_si256(x, 1))};
  return as<__m512i>(halves);
}

// -- floats of 16 bits --------------------------------------------------------------------------------------------

// Four numbers to fp16, rounded once: 24 bits with all that is beyond them in the last one become fp16's 11.
inline __m128i to_half(__m256d x) {
  const __m256i bits = _mm256_castpd_si256(x), beyond = _mm256_set1_epi64x((1 << 29) - 1);
  const __m256i exact = _mm256_cmpeq_epi64(_mm256_and_si256(bits, beyond), _mm256_setzero_si256());
  const __m256i odd = _mm256_or_si256(_mm256_andnot_si256(beyond, bits),
                                      _mm256_andnot_si256(exact, _mm256_set1_epi64x(1 << 29)));
  return _mm_cvtps_ph(_mm256_cvtpd_ps(_mm256_castsi256_pd(odd)), _MM_FROUND_TO_NEAREST_INT);
}
// The lanes of an operation that is exact in fp64, or so close that it is rounded to the same fp16.
template <class F, class... V>
inline __m512h halves(const F& operation, const V&... operands) {
  const auto wide = [](const __m512h& x, int i) {
    return _mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadu_si64(reinterpret_cast<const char*>(&x) + i)));
  };
  __m512h result;
  for (int i = 0; i < 64; i += 8) {
    _mm_storeu_si64(reinterpret_cast<char*>(&result) + i, to_half(operation(wide(operands, i)...)));
  }
  return result;
}
inline __m512h setzero_ph() { return __m512h{}; }
inline __m512h set1_ph(_Float16 x) { return as<__m512h>(set1_epi16(as<short>(x))); }
inline __m512h loadu_ph(const void* p) { return as<__m512h>(loadu_ps(p)); }
inline void storeu_ph(void* p, __m512h x) { std::memcpy(p, &x, sizeof x); }
inline __m512h mul_ph(__m512h a, __m512h b) {
  return halves([](__m256d x, __m256d y) { return _mm256_mul_pd(x, y); }, a, b);
}
inline __m512h add_ph(__m512h a, __m512h b) {
  return halves([](__m256d x, __m256d y) { return _mm256_add_pd(x, y); }, a, b);
}
inline __m512h sub_ph(__m512h a, __m512h b) {
  return halves([](__m256d x, __m256d y) { return _mm256_sub_pd(x, y); }, a, b);
}
inline __m512h fmadd_ph(__m512h a, __m512h b, __m512h c) {
  return halves([](__m256d x, __m256d y, __m256d z) { return _mm256_fmadd_pd(x, y, z); }, a, b, c);
}
inline __m512h fnmadd_ph(__m512h a, __m512h b, __m512h c) {
  return halves([](__m256d x, __m256d y, __m256d z) { return _mm256_fnmadd_pd(x, y, z); }, a, b, c);
}
inline __m512h cvtepi16_ph(__m512i x) {
  __m128i eights[4], parts[4];
  std::memcpy(parts, &x, sizeof parts);
  for (int i = 0; i < 4; ++i) {
    eights[i] = _mm256_cvtps_ph(_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(parts[i])), _MM_FROUND_TO_NEAREST_INT);
  }
  return as<__m512h>(eights);
}
inline __m512h cvtepu16_ph(__m512i x) {
  __m128i eights[4], parts[4];
  std::memcpy(parts, &x, sizeof parts);
  for (int i = 0; i < 4; ++i) {
    eights[i] = _mm256_cvtps_ph(_mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(parts[i])), _MM_FROUND_TO_NEAREST_INT);
  }
  return as<__m512h>(eights);
}
inline __m512 cvtxph_ps(__m256h x) { return cvtph_ps(as<__m256i>(x)); }

// -- bf16, and products --------------------------------------------------------------------------------------------

inline __m512i dpwssd_epi32(__m512i sums, __m512i a, __m512i b) {
  return words([all = as<Words>(sums), left = as<Shorts>(a), right = as<Shorts>(b)](int i) {
    return all[i] + left[2 * i] * right[2 * i] + left[2 * i + 1] * right[2 * i + 1];
  });
}
// Sums of bf16 products: the odd one of a pair is added first.
[[gnu::noinline]] inline void add_pairs(__m512& sums, const Unsigned& left, const Unsigned& right) {
  const auto floats_of = [](const Unsigned& pairs) { return as<__m512>(pairs); };
  sums = fmadd_ps(floats_of(left & 0xffff0000u), floats_of(right & 0xffff0000u), sums);
  sums = fmadd_ps(floats_of(left << 16), floats_of(right << 16), sums);
}
inline __m512 dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
  without_denormals([&] { add_pairs(sums, as<Unsigned>(a), as<Unsigned>(b)); });
  return sums;
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
inline __m512bh cvtne2ps_pbh(__m512 upper, __m512 lower) {
  const __m256i both[2] = {cvtneps_pbh(lower), cvtneps_pbh(upper)};
  return as<__m512bh>(both);
}
inline __m256i mm256_maskz_loadu_epi16(__mmask16 mask, const void* p) {
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
#undef _mm512_permute_ps
#define _mm512_permute_ps emulated::permute_ps
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
#define _mm256_maskz_loadu_epi16 emulated::mm256_maskz_loadu_epi16
#undef _mm256_mask_storeu_epi16
#define _mm256_mask_storeu_epi16 emulated::mask_storeu_epi16
#undef _mm512_permutexvar_epi16
#define _mm512_permutexvar_epi16 emulated::permutexvar_epi16
#undef _mm512_srli_epi16
#define _mm512_srli_epi16 emulated::srli_epi16
#undef _mm512_mulhi_epu16
#define _mm512_mulhi_epu16 emulated::mulhi_epu16
#undef _mm512_mulhrs_epi16
#define _mm512_mulhrs_epi16 emulated::mulhrs_epi16
#undef _mm512_set1_epi16
#define _mm512_set1_epi16 emulated::set1_epi16
#undef _mm512_add_epi16
#define _mm512_add_epi16 emulated::add_epi16
#undef _mm512_sub_epi16
#define _mm512_sub_epi16 emulated::sub_epi16
#undef _mm512_mullo_epi16
#define _mm512_mullo_epi16 emulated::mullo_epi16
#undef _mm512_or_si512
#define _mm512_or_si512 emulated::or_si512
#undef _mm512_ternarylogic_epi32
#define _mm512_ternarylogic_epi32 emulated::ternarylogic_epi32
#undef _mm512_cvtepu16_ph
#define _mm512_cvtepu16_ph emulated::cvtepu16_ph
#undef _mm512_cvtepi16_ph
#define _mm512_cvtepi16_ph emulated::cvtepi16_ph
#undef _mm512_fmadd_ph
#define _mm512_fmadd_ph emulated::fmadd_ph
#undef _mm512_fnmadd_ph
#define _mm512_fnmadd_ph emulated::fnmadd_ph
#undef _mm512_mul_ph
#define _mm512_mul_ph emulated::mul_ph
#undef _mm512_add_ph
#define _mm512_add_ph emulated::add_ph
#undef _mm512_sub_ph
#define _mm512_sub_ph emulated::sub_ph
#undef _mm512_setzero_ph
#define _mm512_setzero_ph emulated::setzero_ph
#undef _mm512_set1_ph
#define _mm512_set1_ph emulated::set1_ph
#undef _mm512_loadu_ph
#define _mm512_loadu_ph emulated::loadu_ph
#undef _mm512_storeu_ph
#define _mm512_storeu_ph emulated::storeu_ph
#undef _mm512_cvtxph_ps
#define _mm512_cvtxph_ps emulated::cvtxph_ps
#undef _mm512_cvtne2ps_pbh
#define _mm512_cvtne2ps_pbh emulated::cvtne2ps_pbh
#undef _mm512_castsi256_si512
#define _mm512_castsi256_si512 emulated::castsi256_si512
#undef _mm512_castsi512_si256
#define _mm512_castsi512_si256 emulated::castsi512_si256
#undef _mm512_inserti64x4
#define _mm512_inserti64x4 emulated::inserti64x4
#undef _mm512_extracti64x4_epi64
#define _mm512_extracti64x4_epi64 emulated::extracti64x4_epi64
#undef _mm512_permutexvar_epi32
#define _mm512_permutexvar_epi32 emulated::permutexvar_epi32
#undef _mm512_unpacklo_epi8
#define _mm512_unpacklo_epi8 emulated::unpacklo_epi8
#undef _mm512_unpackhi_epi8
#define _mm512_unpackhi_epi8 emulated::unpackhi_epi8
#undef _mm512_unpacklo_epi16
#define _mm512_unpacklo_epi16 emulated::unpacklo_epi16
#undef _mm512_unpackhi_epi16
#define _mm512_unpackhi_epi16 emulated::unpackhi_epi16
#undef _mm512_unpacklo_epi32
#define _mm512_unpacklo_epi32 emulated::unpacklo_epi32
#undef _mm512_unpackhi_epi32
#define _mm512_unpackhi_epi32 emulated::unpackhi_epi32
#undef _mm512_maskz_loadu_epi16
#define _mm512_maskz_loadu_epi16 emulated::maskz_loadu_epi16
#undef _mm512_cvtepu8_epi16
#define _mm512_cvtepu8_epi16 emulated::cvtepu8_epi16
#undef _mm512_castsi512_ps
#define _mm512_castsi512_ps(x) emulated::as<__m512>(x)
#undef _mm512_castps_si512
#define _mm512_castps_si512(x) emulated::as<__m512i>(x)
#undef _mm512_castsi512_ph
#define _mm512_castsi512_ph(x) emulated::as<__m512h>(x)
#undef _mm512_castph_si512
#define _mm512_castph_si512(x) emulated::as<__m512i>(x)
