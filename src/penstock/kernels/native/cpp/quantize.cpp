#include "quantize.h"

#include <immintrin.h>

namespace penstock {
namespace {

constexpr float kMostByte = 127.0f, kMostNibble = 15.0f;

float half_to_float(uint16_t half) { return _cvtsh_ss(half); }
uint16_t to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

// Rounds a factor as it is stored: as an fp16, or by column as the 11 bits that an fp16 has in some power of two.
float rounded(float factor, Scales scales) {
  if (scales != Scales::by_column) return half_to_float(to_half(factor));
  const auto bits = __builtin_bit_cast(uint32_t, factor);
  return __builtin_bit_cast(float, (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu);
}

float sum_of(__m256 x) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

struct Range {
  float least, most;
};

Range range_of(const float* x, int64_t count) {
  __m256 least = _mm256_loadu_ps(x), most = least;
  for (int64_t i = 8; i < count; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i);
    least = _mm256_min_ps(least, v);
    most = _mm256_max_ps(most, v);
  }
  float low[8], high[8];
  _mm256_storeu_ps(low, least);
  _mm256_storeu_ps(high, most);
  Range range{low[0], high[0]};
  for (int i = 1; i < 8; ++i) {
    range.least = low[i] < range.least ? low[i] : range.least;
    range.most = high[i] > range.most ? high[i] : range.most;
  }
  return range;
}

// The codes round((x - offset) * factor), within [0, most], of eight values.
__m256 codes_of(__m256 x, __m256 offset, __m256 factor, __m256 most) {
  const __m256 code = _mm256_round_ps(_mm256_mul_ps(_mm256_sub_ps(x, offset), factor),
                                      _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm256_min_ps(_mm256_max_ps(code, _mm256_setzero_ps()), most);
}

void store_codes(const float* x, int64_t count, float offset, float factor, float most, float add, uint8_t* out) {
  for (int64_t i = 0; i < count; i += 8) {
    const __m256 code = codes_of(_mm256_loadu_ps(x + i), _mm256_set1_ps(offset), _mm256_set1_ps(factor),
                                 _mm256_set1_ps(most));
    const __m256i whole = _mm256_cvtps_epi32(_mm256_add_ps(code, _mm256_set1_ps(add)));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + i), _mm_packus_epi16(words, words));
  }
}

void quantize_bytes(const float* x, int64_t group, Scales scales, uint8_t* codes, float& scale) {
  const Range range = range_of(x, group);
  const float most = -range.least > range.most ? -range.least : range.most;
  scale = rounded(most / kMostByte, scales);
  const float factor = scale == 0.0f ? 0.0f : 1.0f / scale;
  store_codes(x, group, -kMostByte * scale, factor, 2 * kMostByte, 1.0f, codes);
}

// value = scale * code + min
struct Line {
  float scale, min;
};

struct Fit {
  Line line;
  float explained;  // the sum of squared errors is that of x less this
};

// The best line for the codes round((x - offset) * factor): a linear regression.
Fit fit_of(const float* x, int64_t group, float sum_x, float offset, float factor) {
  __m256 codes = _mm256_setzero_ps(), squares = codes, products = codes;
  for (int64_t i = 0; i < group; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i);
    const __m256 code = codes_of(v, _mm256_set1_ps(offset), _mm256_set1_ps(factor), _mm256_set1_ps(kMostNibble));
    codes = _mm256_add_ps(codes, code);
    squares = _mm256_add_ps(squares, _mm256_mul_ps(code, code));
    products = _mm256_add_ps(products, _mm256_mul_ps(code, v));
  }
  const float count = static_cast<float>(group), sum_c = sum_of(codes), sum_cc = sum_of(squares);
  const float sum_cx = sum_of(products), spread = count * sum_cc - sum_c * sum_c;
  if (!(spread > 0.0f)) return {{0.0f, 0.0f}, -__builtin_inff()};
  const float scale = (count * sum_cx - sum_x * sum_c) / spread, min = (sum_x - scale * sum_c) / count;
  return {{scale, min}, scale * sum_cx + min * sum_x};
}

// Several ranges of codes are tried: the values' own, and ones that leave out a part at either end, so that there are
// more codes for the values between. The best line then gives new codes, which may have a better one.
Line best_line(const float* x, int64_t group) {
  constexpr float kLeftOut[] = {0.0f, 0.04f, 0.08f};  // of the range
  constexpr int kRepeats = 2;
  const Range range = range_of(x, group);
  const float width = range.most - range.least;
  if (!(width > 0.0f)) return {0.0f, range.least};
  __m256 total = _mm256_setzero_ps();
  for (int64_t i = 0; i < group; i += 8) total = _mm256_add_ps(total, _mm256_loadu_ps(x + i));
  const float sum_x = sum_of(total);
  Fit best{{width / kMostNibble, range.least}, -__builtin_inff()};
  const auto attempt = [&](float offset, float factor) {
    const Fit fit = fit_of(x, group, sum_x, offset, factor);
    if (fit.explained > best.explained) best = fit;
  };
  for (const float low : kLeftOut) {
    for (const float high : kLeftOut) attempt(range.least + low * width, kMostNibble / (width * (1 - low - high)));
  }
  for (int i = 0; i < kRepeats && best.line.scale > 0.0f; ++i) attempt(best.line.min, 1.0f / best.line.scale);
  return best.line;
}

// The codes of a group that are the nearest for its line.
void store_nibbles(const float* x, int64_t group, Line line, uint8_t* codes) {
  store_codes(x, group, line.min, line.scale == 0.0f ? 0.0f : 1.0f / line.scale, kMostNibble, 0.0f, codes);
}

float largest(const float* x, int64_t count) {
  float most = 0.0f;
  for (int64_t i = 0; i < count; ++i) most = __builtin_fabsf(x[i]) > most ? __builtin_fabsf(x[i]) : most;
  return most;
}

// Rounds factors to multiples of an fp16, which is returned: int8 times it.
uint16_t to_two_levels(float* factors, int64_t count) {
  const uint16_t super = to_half(largest(factors, count) / kMostByte);
  const float step = half_to_float(super), inverse = step == 0.0f ? 0.0f : 1.0f / step;
  for (int64_t i = 0; i < count; ++i) {
    const float whole = __builtin_rintf(factors[i] * inverse);
    factors[i] = whole > kMostByte ? kMostByte : whole < -kMostByte ? -kMostByte : whole;
  }
  return super;
}

}  // namespace

void quantize_row(const float* x, int64_t padded, const Format& format, const GroupedRow& out) {
  const int64_t group = format.group, groups = padded / group;
  if (format.codes == Codes::bytes) {
    for (int64_t i = 0; i < groups; ++i) {
      quantize_bytes(x + i * group, group, format.scales, out.codes + i * group, out.scales[i]);
    }
    return;
  }
  for (int64_t i = 0; i < groups; ++i) {
    const Line line = best_line(x + i * group, group);
    out.scales[i] = line.scale;
    out.mins[i] = line.min;
  }
  if (format.scales == Scales::by_column) {
    for (int64_t i = 0; i < groups; ++i) {
      out.scales[i] = rounded(out.scales[i], format.scales);
      out.mins[i] = rounded(out.mins[i], format.scales);
      store_nibbles(x + i * group, group, {out.scales[i], out.mins[i]}, out.codes + i * group);
    }
    return;
  }
  const int64_t together = kSuper / group;
  for (int64_t first = 0; first < groups; first += together) {
    const int64_t count = groups - first < together ? groups - first : together, super = first / together;
    out.super_scales[super] = to_two_levels(out.scales + first, count);
    out.super_mins[super] = to_two_levels(out.mins + first, count);
    for (int64_t i = first; i < first + count; ++i) {
      const float scale = half_to_float(out.super_scales[super]) * out.scales[i];
      const float min = half_to_float(out.super_mins[super]) * out.mins[i];
      store_nibbles(x + i * group, group, {scale, min}, out.codes + i * group);
    }
  }
}

}  // namespace penstock
