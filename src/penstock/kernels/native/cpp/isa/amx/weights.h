// Tiles of weights as bf16: codes of grouped weights are converted, lines of bf16 stay where they are.
//
// A code becomes bf16 through fp16, whose bits shifted right by 3 are those of a bf16 2^112 times smaller. For this the
// scales of a column are stored relative to a power of two, so that no weight is 2^14 or more (Scales::by_column). Of the
// factor 2^112, 2^64 is in x, so that no product is too small for fp32, and the rest in the column's scale.

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr float kFactorOfX = 0x1p64f;
constexpr int64_t kCodesAhead = 8192;  // bytes that codes are prefetched ahead

// The order of each 8 values along k in tiles of codes: pairs of values lie in one word of codes.
constexpr int kOrderOfCodes[8] = {0, 2, 1, 3, 4, 6, 5, 7};

// Each of 16 fp16 twice: for the two values of each column in a line.
[[gnu::always_inline]] inline __m512h for_pairs(const uint16_t* factors) {
  alignas(64) static constexpr uint16_t kTwice[32] = {0, 0, 1, 1, 2,  2,  3,  3,  4,  4,  5,  5,  6,  6,  7,  7,
                                                      8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15};
  const __m512i sixteen = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(factors)));
  return _mm512_castsi512_ph(_mm512_permutexvar_epi16(_mm512_loadu_si512(kTwice), sixteen));
}

// To the nearest bf16, ties away from zero, times 2^-112. Numbers that are too small for fp16 become 0.
[[gnu::always_inline]] inline __m512i as_bf16(__m512h values) {
  const __m512i shifted = _mm512_mulhrs_epi16(_mm512_castph_si512(values), _mm512_set1_epi16(1 << 12));
  return _mm512_and_si512(shifted, _mm512_set1_epi16(static_cast<int16_t>(0x8fff)));
}

[[gnu::always_inline]] inline __m512i shift_pairs_right(__m512i words, int bits) {  // vpsrlw has one port, this two
  return _mm512_mulhi_epu16(words, _mm512_set1_epi16(static_cast<int16_t>(1 << (16 - bits))));
}

// The codes of consecutive blocks as tiles of bf16: 16 lines for 32 values along k. kSixteens: groups have 16 values.
template <Codes kCodes, bool kMins, bool kSixteens>
class CodeTiles {
  static constexpr bool kTable = kCodes != Codes::bytes && kCodes != Codes::nibbles;
  static constexpr int kLines = kCodes == Codes::bytes ? 8 : 4;  // of codes for a tile
  static constexpr int kNibble = 16;  // added to codes of four bits: their bits then lie in fp16's mantissa

 public:
  static constexpr bool kInPlace = false;

  CodeTiles(const Matrix& weight, int64_t block)
      : codes_(block_lines(weight, block)), per_group_(weight.format.group / kTileValues), left_(per_group_) {
    const int64_t factors = block * groups_of(weight) * kColumns;
    scales_ = static_cast<const uint16_t*>(weight.scales) + factors;
    if constexpr (kMins) mins_ = static_cast<const uint16_t*>(weight.mins) + factors;
    if constexpr (kTable) {
      alignas(64) _Float16 values[32];
      for (int i = 0; i < 32; ++i) values[i] = static_cast<_Float16>(table_of(kCodes)[i % 16]);
      table_ = _mm512_loadu_si512(values);
    } else {
      const int zero = weight.format.zero + (kCodes == Codes::nibbles ? kNibble : 0);
      zero_ = _mm512_set1_ph(static_cast<_Float16>(zero));
    }
  }

  // Writes four lines of the next tile. The quarters follow one another.
  template <int kQuarter>
  [[gnu::always_inline]] void put_quarter(uint8_t* tile) {
    if constexpr (kQuarter == 0 || (kSixteens && kQuarter == 2)) take_factors();
    constexpr int kOwn = kLines / 4;
    const uint8_t* codes = codes_ + kQuarter * kOwn * kLineBytes;
    uint8_t* out = tile + kQuarter * 4 * kLineBytes;
#pragma GCC unroll 2
    for (int i = 0; i < kOwn; ++i, codes += kLineBytes, out += 4 / kOwn * kLineBytes) {
      fetch(codes + kCodesAhead);
      put_line(_mm512_loadu_si512(codes), out);
    }
    if constexpr (kQuarter == 3) codes_ += kLines * kLineBytes;
  }

  [[gnu::always_inline]] void put(uint8_t* tile) {
    each<4>([&]<int kQuarter>() __attribute__((always_inline)) { put_quarter<kQuarter>(tile); });
  }

 private:
  [[gnu::always_inline]] void take_factors() {
    if constexpr (!kSixteens) {
      if (left_ == 0) advance(), left_ = per_group_;
      --left_;
    }
    scale_ = for_pairs(scales_);
    if constexpr (kTable) {
      if constexpr (kMins) start_ = for_pairs(mins_);
    } else if constexpr (kMins) {
      start_ = _mm512_fnmadd_ph(zero_, scale_, for_pairs(mins_));
    } else {
      start_ = _mm512_fnmadd_ph(zero_, scale_, _mm512_setzero_ph());
    }
    if constexpr (kSixteens) advance();
  }

  [[gnu::always_inline]] void advance() {
    scales_ += kColumns;
    if constexpr (kMins) mins_ += kColumns;
  }

  // A line of codes: four values of each column, or eight of four bits.
  [[gnu::always_inline]] void put_line(__m512i words, uint8_t* out) const {
    if constexpr (kCodes == Codes::bytes) {
      put_values(_mm512_cvtepu16_ph(_mm512_and_si512(words, _mm512_set1_epi16(0xff))), out);
      put_values(_mm512_cvtepu16_ph(shift_pairs_right(words, 8)), out + kLineBytes);
    } else if constexpr (kCodes == Codes::nibbles) {
      put_nibbles(_mm512_slli_epi16(words, 6), out);
      put_nibbles(shift_pairs_right(words, 2), out + kLineBytes);
      put_nibbles(_mm512_slli_epi16(words, 2), out + 2 * kLineBytes);
      put_nibbles(shift_pairs_right(words, 6), out + 3 * kLineBytes);
    } else {
      put_places(words, out);
      put_places(shift_pairs_right(words, 8), out + kLineBytes);
      put_places(shift_pairs_right(words, 4), out + 2 * kLineBytes);
      put_places(shift_pairs_right(words, 12), out + 3 * kLineBytes);
    }
  }

  // Codes in bits 6 to 9 of each word. With the exponent of 16 these are the fp16 numbers 16 + code.
  [[gnu::always_inline]] void put_nibbles(__m512i words, uint8_t* out) const {
    const __m512i mask = _mm512_set1_epi16(15 << 6), sixteen = _mm512_set1_epi16(0x4c00);
    put_values(_mm512_castsi512_ph(_mm512_ternarylogic_epi32(words, mask, sixteen, 0xea)), out);  // (a & b) | c
  }

  // The lowest four bits are places in the table, which has every value twice, since a fifth bit is read.
  [[gnu::always_inline]] void put_places(__m512i words, uint8_t* out) const {
    put_values(_mm512_castsi512_ph(_mm512_permutexvar_epi16(words, table_)), out);
  }

  [[gnu::always_inline]] void put_values(__m512h codes, uint8_t* out) const {
    constexpr bool kAdds = kMins || !kTable;
    const __m512h values = kAdds ? _mm512_fmadd_ph(codes, scale_, start_) : _mm512_mul_ph(codes, scale_);
    _mm512_storeu_si512(out, as_bf16(values));
  }

  const uint8_t* codes_;
  const uint16_t *scales_, *mins_ = nullptr;
  int64_t per_group_, left_;  // tiles of a group, and those until the next one
  __m512i table_;
  __m512h zero_, scale_, start_;
};

// The lines of consecutive blocks of bf16, which are tiles as they lie. "Putting" a tile prefetches kTiles of them.
template <int kTiles>
class LineTiles {
 public:
  static constexpr bool kInPlace = true;

  // `lines` to be prefetched: `tiles` of them, then those at `next`.
  LineTiles(const uint8_t* lines, int64_t tiles, const uint8_t* next) : lines_(lines), left_(tiles), next_(next) {}

  template <int kQuarter>
  [[gnu::always_inline]] void put_quarter(uint8_t*) {
    constexpr int64_t kBytes = kTiles * kTileBytes / 4;
    const uint8_t* lines = lines_ + kQuarter * kBytes;
#pragma GCC unroll 16
    for (int64_t i = 0; i < kBytes; i += kLineBytes) fetch(lines + i);
    if constexpr (kQuarter == 3) {
      lines_ += kTiles * kTileBytes;
      if ((left_ -= kTiles) == 0) lines_ = next_;
    }
  }

 private:
  const uint8_t* lines_;
  int64_t left_;
  const uint8_t* next_;
};

// Calls f<CodeTiles<...>>() for the format of a grouped weight.
template <class F>
void by_codes(const Format& format, const F& f) {
  const auto with_codes = [&]<Codes kCodes>() {
    const auto with_mins = [&]<bool kMins>() {
      if (format.group < kTileValues) f.template operator()<CodeTiles<kCodes, kMins, true>>();
      else f.template operator()<CodeTiles<kCodes, kMins, false>>();
    };
    if (format.mins) with_mins.template operator()<true>();
    else with_mins.template operator()<false>();
  };
  switch (format.codes) {
    case Codes::bytes:
      return with_codes.template operator()<Codes::bytes>();
    case Codes::nibbles:
      return with_codes.template operator()<Codes::nibbles>();
    case Codes::iq4:
      return with_codes.template operator()<Codes::iq4>();
    case Codes::mxfp4:
      return with_codes.template operator()<Codes::mxfp4>();
    case Codes::nf4:
      return with_codes.template operator()<Codes::nf4>();
    case Codes::fp4:
      return with_codes.template operator()<Codes::fp4>();
  }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
