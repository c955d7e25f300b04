// Packing, compiled once for all processors, for AVX2.
#include "pack.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "gguf_rows.h"
#include "quantize.h"

namespace penstock {
namespace {

constexpr int64_t kOctet = 8;  // rows that are packed together: half of a block's columns
constexpr double kLeastScale = 0x1p-126;
// Scales by column: the limit of values, for products that fit in fp32, and the least power of two of a column.
constexpr double kMostByColumn = 0x1p64, kLeastPower = 0x1p-126;
constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;

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

// Returns the scale, or NaN if a value is not finite. It is the least power of two for which the products of kSpan
// values can be summed in 32 bits: in a row of x and in a row of a weight the root of the sum of their squares is at most
// kMostNorm. Rounding adds 8 at most: 46308^2 < 2^31.
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

// -- codes to words ----------------------------------------------------------------------------------------------

// Eight codes of four bits become four bytes: the first four are the low nibbles.
void to_nibbles(const uint8_t* codes, int64_t padded, uint8_t* out) {
  for (int64_t i = 0; i < padded; i += 8, out += 4) {
    uint32_t low, high;
    std::memcpy(&low, codes + i, 4);
    std::memcpy(&high, codes + i + 4, 4);
    low |= high << 4;
    std::memcpy(out, &low, 4);
  }
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

bool is_finite(float x) { return (__builtin_bit_cast(int32_t, x) & kMagnitude) < kInfinity; }

// True if the format has a place for all that a type's codes and factors are. Scales by column hold any, rounded.
bool holds(const Format& format, const CodeTraits& traits) {
  const bool codes = format.codes == Codes::bytes ||
                     (traits.bits <= 4 && (format.codes == Codes::nibbles
                                               ? traits.table == nullptr && traits.zero == format.zero
                                               : traits.table == table_of(format.codes)));
  return codes && traits.group % format.group == 0 && (format.mins != 0 || !traits.mins) &&
         (traits.two_levels ? format.scales != Scales::f16 : format.scales != Scales::two_levels);
}

class RowPacker {
 public:
  explicit RowPacker(const PackJob& job)
      : job_(job),
        format_(job.weight.format),
        k_(job.weight.k),
        padded_(padded_k(job.weight)),
        word_bytes_(padded_ * bits_of(format_) / 8),
        groups_(format_.scheme == Scheme::grouped ? padded_ / format_.group : 0),
        supers_(format_.scheme == Scheme::grouped ? (padded_ + kSuper - 1) / kSuper : 0),
        half_(job.gated ? job.weight.n / 2 : job.weight.n),
        as_stored_(padded_ == k_ && ((format_.scheme == Scheme::bf16 && job.stored == Stored::bf16) ||
                                     (format_.scheme == Scheme::f32 && job.stored == Stored::f32))),
        recodes_(job.stored == Stored::coded || (job.stored > Stored::f16 && holds(format_, traits_of(job.stored)))),
        wide_(padded_),
        words_(kOctet * word_bytes_),
        codes_(groups_ == 0 ? 0 : padded_),
        scales_(groups_),
        mins_(groups_),
        sub_scales_(groups_),
        sub_mins_(groups_),
        super_scales_(supers_),
        super_mins_(supers_) {}

  int64_t run() {
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
  // Packs rows that go to the same half of the same block. Returns how many cannot be packed.
  int64_t pack_octet(int64_t row, int64_t count) {
    const int64_t within = row % half_, octet = within / kOctet;
    const int64_t block = job_.gated ? octet : octet / 2;
    const int64_t column = (job_.gated ? row / half_ : octet % 2) * kOctet + within % kOctet;
    const uint8_t* rows[kOctet];
    int64_t bad = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* source = static_cast<const uint8_t*>(job_.rows) + (row - job_.first + i) * job_.row_stride;
      uint8_t* words = words_.data() + i * word_bytes_;
      rows[i] = as_stored_ ? source : words;
      if (!as_stored_) bad += !convert(source, block, column + i, words);
    }
    auto* lines = const_cast<uint8_t*>(job_.weight.lines);
    place(rows, count, word_bytes_ / 4, lines + block * word_bytes_ * kColumns + column * 4);
    return bad;
  }

  // Converts a row to words. False if it cannot be packed.
  bool convert(const uint8_t* source, int64_t block, int64_t column, uint8_t* words) {
    if (format_.scheme == Scheme::grouped) return convert_grouped(source, block, column, words);
    widen_stored(source);
    switch (format_.scheme) {
      case Scheme::f32:
        std::memcpy(words, wide_.data(), padded_ * sizeof(float));
        return true;
      case Scheme::bf16:
        to_bf16(wide_.data(), padded_, reinterpret_cast<uint16_t*>(words));
        return true;
      default:
        const_cast<float*>(job_.weight.column_scales)[block * kColumns + column] =
            to_int16(wide_.data(), padded_, words);
        return true;
    }
  }

  void widen_stored(const uint8_t* source) {
    if (job_.stored <= Stored::f16) return widen(source, job_.stored, k_, padded_, wide_.data());
    dequantize_row(job_.stored, source, k_, wide_.data());
    std::fill(wide_.begin() + k_, wide_.end(), 0.0f);
  }

  bool convert_grouped(const uint8_t* source, int64_t block, int64_t column, uint8_t* words) {
    if (!recodes_) {
      widen_stored(source);
      if (largest_bits(wide_.data(), padded_) >= kInfinity) return false;
      const GroupedRow row{codes_.data(), scales_.data(), mins_.data(), super_scales_.data(), super_mins_.data()};
      quantize_row(wide_.data(), padded_, format_, row);
    } else {
      job_.stored == Stored::coded ? copy_codes(source) : recode(source);
    }
    if (format_.codes == Codes::bytes) std::memcpy(words, codes_.data(), padded_);
    else to_nibbles(codes_.data(), padded_, words);
    return put_factors(block, column);
  }

  void copy_codes(const uint8_t* source) {
    const size_t bytes = groups_ * sizeof(float);
    std::memcpy(codes_.data(), source, k_);
    std::memcpy(scales_.data(), source + k_, bytes);
    if (format_.mins != 0) std::memcpy(mins_.data(), source + k_ + bytes, bytes);
  }

  // Expresses the codes of a file in the weight's format.
  void recode(const uint8_t* source) {
    const CodeTraits& traits = traits_of(job_.stored);
    for (auto* factors : {&scales_, &mins_}) std::fill(factors->begin(), factors->end(), 0.0f);
    std::fill(sub_mins_.begin(), sub_mins_.end(), 0);
    std::fill(super_mins_.begin(), super_mins_.end(), 0);
    decode_row(job_.stored, source, k_,
               {codes_.data(), scales_.data(), mins_.data(), sub_scales_.data(), sub_mins_.data(),
                super_scales_.data(), super_mins_.data()});
    if (format_.codes == Codes::bytes) {
      for (int64_t i = 0; i < k_; ++i) {
        const int value = traits.table == nullptr ? codes_[i] - traits.zero : traits.table[codes_[i]];
        codes_[i] = static_cast<uint8_t>(value + format_.zero);
      }
    }
    const int64_t groups = k_ / traits.group, finer = traits.group / format_.group;
    if (traits.two_levels) {
      for (int64_t i = 0; i < groups; ++i) {
        scales_[i] = sub_scales_[i];
        mins_[i] = sub_mins_[i];
      }
      if (format_.scales != Scales::two_levels) {
        for (int64_t i = 0; i < groups; ++i) {
          scales_[i] *= _cvtsh_ss(super_scales_[i * traits.group / kSuper]);
          mins_[i] *= _cvtsh_ss(super_mins_[i * traits.group / kSuper]);
        }
      }
    }
    for (int64_t i = groups - 1; finer > 1 && i >= 0; --i) {  // from the end, in place
      for (int64_t part = finer - 1; part >= 0; --part) {
        scales_[i * finer + part] = scales_[i];
        mins_[i * finer + part] = mins_[i];
      }
    }
  }

  // Writes the factors of the row's groups. False if one is not finite, or not exact as it is stored. Those by column
  // are rounded.
  bool put_factors(int64_t block, int64_t column) {
    bool good = format_.scales != Scales::by_column || divide_by_power(block, column);
    good &= put(job_.weight.scales, scales_, block, column);
    if (job_.weight.mins != nullptr) good &= put(job_.weight.mins, mins_, block, column);
    if (format_.scales != Scales::two_levels) return good;
    good &= put_super(job_.weight.super_scales, super_scales_, block, column);
    if (job_.weight.mins != nullptr) good &= put_super(job_.weight.super_mins, super_mins_, block, column);
    return good;
  }

  // Divides the factors by the power of two that brings the largest value of any code to [2^13, 2^14). False if a value
  // is too large.
  bool divide_by_power(int64_t block, int64_t column) {
    const int8_t* table = table_of(format_.codes);
    const int most_code = format_.codes == Codes::bytes ? 255 : 15;
    const int low = table == nullptr ? -format_.zero : *std::min_element(table, table + 16);
    const int high = table == nullptr ? most_code - format_.zero : *std::max_element(table, table + 16);
    double largest = 0.0;
    for (int64_t i = 0; i < groups_; ++i) {
      const double scale = scales_[i], min = format_.mins == 0 ? 0.0 : mins_[i];
      largest = std::max({largest, std::abs(scale * low + min), std::abs(scale * high + min)});
    }
    double power = 1.0;
    if (largest > 0.0) power = std::max(std::ldexp(1.0, std::ilogb(largest) - 13), kLeastPower);
    const_cast<float*>(job_.weight.column_scales)[block * kColumns + column] = static_cast<float>(power) / kByColumn;
    for (auto* factors : {&scales_, &mins_}) {
      for (float& factor : *factors) factor = static_cast<float>(factor / power);
    }
    return largest < kMostByColumn;
  }

  bool put(const void* target, const std::vector<float>& factors, int64_t block, int64_t column) const {
    bool good = true;
    for (int64_t i = 0; i < groups_; ++i) {
      const int64_t at = (block * groups_ + i) * kColumns + column;
      good &= is_finite(factors[i]);
      if (format_.scales == Scales::f16 || format_.scales == Scales::by_column) {
        const uint16_t half = _cvtss_sh(factors[i], _MM_FROUND_TO_NEAREST_INT);
        static_cast<uint16_t*>(const_cast<void*>(target))[at] = half;
        good &= format_.scales == Scales::by_column || _cvtsh_ss(half) == factors[i];
      } else if (format_.scales == Scales::f32) {
        static_cast<float*>(const_cast<void*>(target))[at] = factors[i];
      } else {
        static_cast<int8_t*>(const_cast<void*>(target))[at] = static_cast<int8_t>(factors[i]);
      }
    }
    return good;
  }

  bool put_super(const uint16_t* target, const std::vector<uint16_t>& factors, int64_t block, int64_t column) const {
    bool good = true;
    for (int64_t i = 0; i < supers_; ++i) {
      const_cast<uint16_t*>(target)[(block * supers_ + i) * kColumns + column] = factors[i];
      good &= (factors[i] & 0x7c00) != 0x7c00;
    }
    return good;
  }

  const PackJob& job_;
  const Format& format_;
  const int64_t k_, padded_, word_bytes_, groups_, supers_, half_;
  const bool as_stored_;
  const bool recodes_;  // whether codes of a file stay as they are
  std::vector<float> wide_;
  std::vector<uint8_t> words_, codes_;
  std::vector<float> scales_, mins_;
  std::vector<int8_t> sub_scales_, sub_mins_;
  std::vector<uint16_t> super_scales_, super_mins_;
};

// True if the rows of a job are of a type that its weight can be packed from, and have all their bytes.
bool is_whole(const PackJob& job) {
  if (job.stored <= Stored::f16) return true;
  const int64_t k = job.weight.k;
  if (job.stored != Stored::coded) return is_coded_row(static_cast<int32_t>(job.stored), k, job.row_stride);
  const Format& format = job.weight.format;
  const int64_t factors = padded_k(job.weight) / format.group * (format.mins != 0 ? 2 : 1);
  return format.scheme == Scheme::grouped && format.scales != Scales::two_levels && job.row_stride >= k + 4 * factors;
}

}  // namespace

int64_t pack_rows(const PackJob& job) {
  if (!is_whole(job)) return -2;
  try {
    return RowPacker(job).run();
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

}  // namespace penstock
