// Packing, compiled once for all processors: for AVX2, and without fused operations, so that it gives the bits of
// packing.py.
#include "pack.h"

#include <immintrin.h>

#include <cmath>
#include <cstdlib>
#include <cstring>

namespace penstock {
namespace {

constexpr int64_t kOctet = 8;  // rows that are packed together: half of a block's columns
constexpr float kMostSummed = 126.0f;  // see packing.py, as for the next constants
constexpr double kLeastScale = 0x1p-126;
constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;

int64_t values_per_line(Scheme scheme) {
  return 32 / bits_of(scheme);
}

// -- a row to fp32, padded with zeros ----------------------------------------------------------------------------

void widen(const uint8_t* row, Stored stored, int64_t k, int64_t padded, float* out) {
  int64_t i = 0;
  if (stored == Stored::f32) {
    std::memcpy(out, row, k * sizeof(float));
    i = k;
  } else {
    for (; i + 8 <= k; i += 8) {
      const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * i));
      const __m256 wide = stored == Stored::bf16
                              ? _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16))
                              : _mm256_cvtph_ps(eight);
      _mm256_storeu_ps(out + i, wide);
    }
    for (; i < k; ++i) {
      uint16_t bits;
      std::memcpy(&bits, row + 2 * i, sizeof bits);
      out[i] = stored == Stored::bf16 ? __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16) : _cvtsh_ss(bits);
    }
  }
  for (; i < padded; ++i) out[i] = 0.0f;
}

// -- fp32 to a scheme's words ------------------------------------------------------------------------------------

void to_bf16(const float* x, int64_t padded, uint16_t* out) {
  for (int64_t i = 0; i < padded; ++i) {
    const auto bits = __builtin_bit_cast(uint32_t, x[i]);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // ties to even
    out[i] = static_cast<uint16_t>((bits & kMagnitude) > kInfinity ? 0x7fc0 : rounded);
  }
}

// The bits of the largest magnitude. NaN ranks above infinity, and infinity above all numbers.
int32_t largest_bits(const float* x, int64_t count) {
  int32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t bits = __builtin_bit_cast(int32_t, x[i]) & kMagnitude;
    most = bits > most ? bits : most;
  }
  return most;
}

// 32 values, divided or multiplied by `by`, rounded to the nearest (ties to even), within [low, 127], as bytes.
template <bool kDivide>
__m256i to_bytes(const float* x, __m256 by, __m256i low) {
  __m256i rounded[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 v = _mm256_loadu_ps(x + 8 * i);
    rounded[i] = _mm256_max_epi32(_mm256_cvtps_epi32(kDivide ? _mm256_div_ps(v, by) : _mm256_mul_ps(v, by)), low);
  }
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(rounded[0], rounded[1]),
                                           _mm256_packs_epi32(rounded[2], rounded[3]));
  // The packs work on halves of a register: this puts the dwords back in order.
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// The largest sum of positive values, or of negative ones, among four values that AVX2 sums in 16 bits. Of every eight
// these are the first two of each half, and the last two of each half.
float largest_sum(const float* x, int64_t padded) {
  __m128 most = _mm_setzero_ps();
  for (int64_t i = 0; i < padded; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i), zero = _mm256_setzero_ps();
    const __m256 pairs = _mm256_hadd_ps(_mm256_max_ps(v, zero), _mm256_max_ps(_mm256_sub_ps(zero, v), zero));
    most = _mm_max_ps(_mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)), most);
  }
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

int32_t sum_of_bytes(const uint8_t* bytes, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += static_cast<int8_t>(bytes[i]);
  return sum;
}

// Returns the scale (see packing.py), which is not finite if a value is not.
float to_int8(const float* x, int64_t padded, uint8_t* out) {
  const float most = __builtin_bit_cast(float, largest_bits(x, padded)) / 127.0f;
  const float room = largest_sum(x, padded) / kMostSummed, scale = room > most ? room : most;
  const __m256 divisor = _mm256_set1_ps(scale < 1e-30f ? 1e-30f : scale);
  for (int64_t i = 0; i < padded; i += 32) {
    const __m256i bytes = to_bytes<true>(x + i, divisor, _mm256_set1_epi32(-128));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), bytes);
  }
  return scale;
}

// Returns the scale, a power of two (see packing.py), or NaN if a value is not finite.
float to_int16(const float* x, int64_t padded, uint8_t* out) {
  const int32_t largest = largest_bits(x, padded);
  if (largest >= kInfinity) {
    std::memset(out, 0, 2 * padded);
    return __builtin_nanf("");
  }
  double largest_squares = 0.0;  // of a span, summed
  for (int64_t start = 0; start < padded; start += kSpan) {
    __m256d squares[2] = {_mm256_setzero_pd(), _mm256_setzero_pd()};
    for (int64_t i = start; i < padded && i < start + kSpan; i += 8) {
      const __m256 v = _mm256_loadu_ps(x + i);
      const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(v));
      const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
      squares[0] = _mm256_add_pd(squares[0], _mm256_mul_pd(low, low));
      squares[1] = _mm256_add_pd(squares[1], _mm256_mul_pd(high, high));
    }
    double four[4];
    _mm256_storeu_pd(four, _mm256_add_pd(squares[0], squares[1]));
    const double sum = four[0] + four[1] + four[2] + four[3];
    largest_squares = sum > largest_squares ? sum : largest_squares;
  }
  const auto most = __builtin_bit_cast(float, largest);
  const double by_norm = std::sqrt(largest_squares) / kMostNorm, by_most = most / kMostInt16;
  const double room = by_norm > by_most ? by_norm : by_most;
  int exponent;
  const double fraction = std::frexp(room > kLeastScale ? room : kLeastScale, &exponent);
  const auto scale = static_cast<float>(std::ldexp(1.0, fraction > 0.5 ? exponent : exponent - 1));
  const __m256 factor = _mm256_set1_ps(1.0f / scale);
  for (int64_t i = 0; i < padded; i += 16) {
    const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), factor));
    const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), factor));
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 2 * i), halves);
  }
  return most > 0.0f ? scale : 0.0f;
}

// A group's values, two per byte, the first in the lower half. Returns the scale as fp16.
uint16_t to_int4(const float* x, int32_t group, uint8_t* out) {
  const int32_t most = largest_bits(x, group);
  float largest = x[0];
  for (int32_t i = 0; i < group; ++i) {
    if ((__builtin_bit_cast(int32_t, x[i]) & kMagnitude) == most) {
      largest = x[i];
      break;
    }
  }
  const uint16_t scale = _cvtss_sh(largest / -8.0f + 0.0f, _MM_FROUND_TO_NEAREST_INT);
  const float wide = _cvtsh_ss(scale);
  const __m256 factor = _mm256_set1_ps(wide == 0.0f ? 0.0f : 1.0f / wide);
  for (int32_t i = 0; i < group; i += 32) {
    __m256i bytes = to_bytes<false>(x + i, factor, _mm256_set1_epi32(-8));
    bytes = _mm256_and_si256(_mm256_min_epi8(bytes, _mm256_set1_epi8(7)), _mm256_set1_epi8(15));
    const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));  // first + 16 * second
    const __m128i low = _mm256_castsi256_si128(pairs), high = _mm256_extracti128_si256(pairs, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i / 2), _mm_packus_epi16(low, high));
  }
  return scale;
}

// -- words to lines ----------------------------------------------------------------------------------------------

// Transposes eight rows of eight words into eight lines, which are kLineBytes apart.
void transpose(const uint8_t* const* rows, int64_t offset, uint8_t* out) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows[i] + offset));
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    auto* low = reinterpret_cast<float*>(out + i * kLineBytes);
    auto* high = reinterpret_cast<float*>(out + (i + 4) * kLineBytes);
    _mm256_storeu_ps(low, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(high, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}

// Writes `count` rows of words as columns of `out`.
void place(const uint8_t* const* rows, int64_t count, int64_t words, uint8_t* out) {
  int64_t word = 0;
  if (count == kOctet) {
    for (; word + 8 <= words; word += 8) transpose(rows, 4 * word, out + word * kLineBytes);
  }
  for (; word < words; ++word) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(out + word * kLineBytes + 4 * i, rows[i] + 4 * word, 4);
  }
}

// -- a job -------------------------------------------------------------------------------------------------------

class RowPacker {
 public:
  explicit RowPacker(const PackJob& job)
      : job_(job),
        padded_(padded_k(Matrix{nullptr, nullptr, nullptr, nullptr, job.n, job.k, job.scheme, job.group})),
        lines_(padded_ / values_per_line(job.scheme)),
        half_(job.gated ? job.n / 2 : job.n),
        as_stored_(padded_ == job.k && ((job.scheme == Scheme::bf16 && job.stored == Stored::bf16) ||
                                        (job.scheme == Scheme::f32 && job.stored == Stored::f32))),
        wide_(static_cast<float*>(std::malloc(padded_ * sizeof(float)))),
        words_(static_cast<uint8_t*>(std::malloc(kOctet * lines_ * 4))) {}
  ~RowPacker() {
    std::free(wide_);
    std::free(words_);
  }
  RowPacker(const RowPacker&) = delete;
  RowPacker& operator=(const RowPacker&) = delete;

  int64_t run() {
    if (wide_ == nullptr || words_ == nullptr) return -1;
    int64_t bad = 0;
    for (int64_t row = job_.first; row < job_.first + job_.count;) {
      const int64_t within = row % half_, left = job_.first + job_.count - row;
      int64_t count = kOctet - within % kOctet;  // to the end of the octet, of the half, and of the job
      if (count > half_ - within) count = half_ - within;
      if (count > left) count = left;
      bad += pack_octet(row, count);
      row += count;
    }
    return bad;
  }

 private:
  // Packs rows that go to the same half of the same block. Returns how many cannot be quantised.
  int64_t pack_octet(int64_t row, int64_t count) {
    const int64_t within = row % half_, octet = within / kOctet;
    const int64_t block = job_.gated ? octet : octet / 2;
    const int64_t column = (job_.gated ? row / half_ : octet % 2) * kOctet + within % kOctet;
    const int64_t size = job_.stored == Stored::f32 ? 4 : 2;
    const uint8_t* rows[kOctet];
    int64_t bad = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* source = static_cast<const uint8_t*>(job_.rows) + (row - job_.first + i) * job_.k * size;
      rows[i] = as_stored_ ? source : words_ + i * lines_ * 4;
      if (!as_stored_) bad += !convert(source, block, column + i, words_ + i * lines_ * 4);
    }
    place(rows, count, lines_, job_.lines + block * lines_ * kLineBytes + column * 4);
    return bad;
  }

  // Converts a row to words. False if it cannot be quantised.
  bool convert(const uint8_t* source, int64_t block, int64_t column, uint8_t* words) {
    widen(source, job_.stored, job_.k, padded_, wide_);
    switch (job_.scheme) {
      case Scheme::f32:
        std::memcpy(words, wide_, padded_ * sizeof(float));
        return true;
      case Scheme::bf16:
        to_bf16(wide_, padded_, reinterpret_cast<uint16_t*>(words));
        return true;
      case Scheme::int16:
        job_.column_scales[block * kColumns + column] = to_int16(wide_, padded_, words);
        return true;
      case Scheme::int8: {
        const float scale = to_int8(wide_, padded_, words);
        job_.column_scales[block * kColumns + column] = scale;
        job_.column_sums[block * kColumns + column] = sum_of_bytes(words, padded_);
        return (__builtin_bit_cast(int32_t, scale) & kMagnitude) < kInfinity;
      }
      case Scheme::int4:
        break;
    }
    const int64_t groups = padded_ / job_.group;
    bool finite = true;
    for (int64_t group = 0; group < groups; ++group) {
      const uint16_t scale = to_int4(wide_ + group * job_.group, job_.group, words + group * job_.group / 2);
      job_.group_scales[(block * groups + group) * kColumns + column] = scale;
      finite &= (scale & 0x7c00) != 0x7c00;
    }
    return finite;
  }

  const PackJob& job_;
  const int64_t padded_, lines_, half_;
  const bool as_stored_;
  float* const wide_;
  uint8_t* const words_;
};

}  // namespace

int64_t pack_rows(const PackJob& job) { return RowPacker(job).run(); }

}  // namespace penstock
