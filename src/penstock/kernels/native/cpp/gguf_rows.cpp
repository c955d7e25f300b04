// The blocks of GGUF's types, compiled once for all processors: for AVX2, and without fused operations. The layouts are
// those of llama.cpp's ggml-common.h.
#include "gguf_rows.h"

#include <immintrin.h>

#include <cstring>

namespace penstock {
namespace {

// -- parts of a block --------------------------------------------------------------------------------------------

// An fp16 number. All fields of a block are bytes: blocks have any alignment.
struct Half {
  uint8_t bytes[2];

  uint16_t bits() const { return static_cast<uint16_t>(bytes[0] | bytes[1] << 8); }
  uint16_t negated() const { return bits() ^ 0x8000; }
  float value() const { return _cvtsh_ss(bits()); }
};

uint32_t word(const uint8_t* bytes) {
  uint32_t out;
  std::memcpy(&out, bytes, sizeof out);
  return out;
}

__m256i load32(const uint8_t* bytes) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)); }

void store32(uint8_t* out, __m256i bytes) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes); }

// `kBits` bits of each byte, from bit `shift` on. The shift is of 16 bits; the mask drops the neighbour's bits.
template <int kBits>
__m256i field(__m256i bytes, int shift) {
  const __m256i shifted = _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(shift));
  return _mm256_and_si256(shifted, _mm256_set1_epi8((1 << kBits) - 1));
}

// 32 values of 4 bits: the low halves of 16 bytes, then the high halves.
__m256i nibbles(const uint8_t* bytes) {
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(low, 4), low), _mm256_set1_epi8(15));
}

// Adds 16 to each code whose bit is set: bit i is of value i.
__m256i with_fifth_bits(__m256i codes, const uint8_t* bits) {
  const __m256i one_of_eight = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int32_t>(word(bits))), byte_of);
  const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, one_of_eight), one_of_eight);
  return _mm256_or_si256(codes, _mm256_and_si256(set, _mm256_set1_epi8(16)));
}

__m256i high_bits(__m256i codes, int shift) { return _mm256_slli_epi16(codes, shift); }

// -- blocks of 32 values with one level --------------------------------------------------------------------------
// decode() writes block i of a row.

template <int kZero, const int8_t* kTable>
struct BlockNibbles {
  Half d;
  uint8_t low[16];
  static constexpr CodeTraits kTraits{4, 32, kZero, false, false, kTable, 32, 18};

  void decode(int64_t i, const CodedRow& out) const {
    store32(out.codes + 32 * i, nibbles(low));
    out.scales[i] = d.value();
  }
};

using BlockQ4_0 = BlockNibbles<8, nullptr>;
using BlockIq4Nl = BlockNibbles<0, kIq4Table>;

struct BlockQ4_1 {
  Half d, min;
  uint8_t low[16];
  static constexpr CodeTraits kTraits{4, 32, 0, true, false, nullptr, 32, 20};

  void decode(int64_t i, const CodedRow& out) const {
    store32(out.codes + 32 * i, nibbles(low));
    out.scales[i] = d.value();
    out.mins[i] = min.value();
  }
};

struct BlockQ5_0 {
  Half d;
  uint8_t fifth[4], low[16];
  static constexpr CodeTraits kTraits{5, 32, 16, false, false, nullptr, 32, 22};

  void decode(int64_t i, const CodedRow& out) const {
    store32(out.codes + 32 * i, with_fifth_bits(nibbles(low), fifth));
    out.scales[i] = d.value();
  }
};

struct BlockQ5_1 {
  Half d, min;
  uint8_t fifth[4], low[16];
  static constexpr CodeTraits kTraits{5, 32, 0, true, false, nullptr, 32, 24};

  void decode(int64_t i, const CodedRow& out) const {
    store32(out.codes + 32 * i, with_fifth_bits(nibbles(low), fifth));
    out.scales[i] = d.value();
    out.mins[i] = min.value();
  }
};

struct BlockQ8_0 {
  Half d;
  uint8_t values[32];  // signed
  static constexpr CodeTraits kTraits{8, 32, 128, false, false, nullptr, 32, 34};

  void decode(int64_t i, const CodedRow& out) const {
    store32(out.codes + 32 * i, _mm256_xor_si256(load32(values), _mm256_set1_epi8(-128)));  // + 128
    out.scales[i] = d.value();
  }
};

struct BlockMxfp4 {
  uint8_t exponent;
  uint8_t low[16];
  static constexpr CodeTraits kTraits{4, 32, 0, false, false, kMxfp4Table, 32, 17};

  void decode(int64_t i, const CodedRow& out) const {
    store32(out.codes + 32 * i, nibbles(low));
    // 2^(exponent - 128): the table is doubled. The two least are subnormal.
    const uint32_t bits = exponent < 2 ? 0x200000u << exponent : (exponent - 1u) << 23;
    out.scales[i] = __builtin_bit_cast(float, bits);
  }
};

// -- blocks of 256 values with two levels ------------------------------------------------------------------------

struct BlockQ2K {
  uint8_t scales_mins[16];  // scales in the low halves
  uint8_t values[64];
  Half d, dmin;
  static constexpr CodeTraits kTraits{2, 16, 0, true, true, nullptr, 256, 84};

  void decode(int64_t i, const CodedRow& out) const {
    for (int j = 0; j < 8; ++j) {
      store32(out.codes + kSuper * i + 32 * j, field<2>(load32(values + j / 4 * 32), j % 4 * 2));
    }
    for (int j = 0; j < 16; ++j) {
      out.sub_scales[16 * i + j] = static_cast<int8_t>(scales_mins[j] & 15);
      out.sub_mins[16 * i + j] = static_cast<int8_t>(scales_mins[j] >> 4);
    }
    out.super_scales[i] = d.bits();
    out.super_mins[i] = dmin.negated();
  }
};

struct BlockQ3K {
  uint8_t third[32];  // bit j is of value j * 32 + the byte's index
  uint8_t low[64];
  uint8_t scales[12];  // 6 bits each: 4 bits in the first 8 bytes, 2 bits in the others
  Half d;
  static constexpr CodeTraits kTraits{3, 16, 4, false, true, nullptr, 256, 110};

  void decode(int64_t i, const CodedRow& out) const {
    const __m256i highs = load32(third);
    for (int j = 0; j < 8; ++j) {
      const __m256i two = field<2>(load32(low + j / 4 * 32), j % 4 * 2);
      const __m256i codes = _mm256_or_si256(two, high_bits(field<1>(highs, j), 2));
      store32(out.codes + kSuper * i + 32 * j, codes);
    }
    for (int j = 0; j < 16; ++j) {
      const int four = scales[j % 8] >> j / 8 * 4 & 15, two = scales[8 + j % 4] >> j / 4 * 2 & 3;
      out.sub_scales[16 * i + j] = static_cast<int8_t>((four | two << 4) - 32);
    }
    out.super_scales[i] = d.bits();
  }
};

// Eight scales and eight mins of 6 bits. The first four of each are in words 0 and 1, whose upper two bits with the
// halves of word 2 are the last four.
void decode_six_bits(const uint8_t* packed, int8_t* scales, int8_t* mins) {
  const uint32_t words[3] = {word(packed), word(packed + 4), word(packed + 8)};
  int8_t* const outs[2] = {scales, mins};
  for (int i = 0; i < 2; ++i) {
    const uint32_t first = words[i] & 0x3f3f3f3f;
    const uint32_t last = (words[2] >> 4 * i & 0x0f0f0f0f) | (words[i] >> 2 & 0x30303030);
    std::memcpy(outs[i], &first, 4);
    std::memcpy(outs[i] + 4, &last, 4);
  }
}

struct BlockQ4K {
  Half d, dmin;
  uint8_t scales_mins[12];
  uint8_t low[128];
  static constexpr CodeTraits kTraits{4, 32, 0, true, true, nullptr, 256, 144};

  void decode(int64_t i, const CodedRow& out) const {
    for (int j = 0; j < 8; ++j) {
      store32(out.codes + kSuper * i + 32 * j, field<4>(load32(low + j / 2 * 32), j % 2 * 4));
    }
    decode_six_bits(scales_mins, out.sub_scales + 8 * i, out.sub_mins + 8 * i);
    out.super_scales[i] = d.bits();
    out.super_mins[i] = dmin.negated();
  }
};

struct BlockQ5K {
  Half d, dmin;
  uint8_t scales_mins[12];
  uint8_t fifth[32];  // bit j is of value j * 32 + the byte's index
  uint8_t low[128];
  static constexpr CodeTraits kTraits{5, 32, 0, true, true, nullptr, 256, 176};

  void decode(int64_t i, const CodedRow& out) const {
    const __m256i highs = load32(fifth);
    for (int j = 0; j < 8; ++j) {
      const __m256i four = field<4>(load32(low + j / 2 * 32), j % 2 * 4);
      store32(out.codes + kSuper * i + 32 * j, _mm256_or_si256(four, high_bits(field<1>(highs, j), 4)));
    }
    decode_six_bits(scales_mins, out.sub_scales + 8 * i, out.sub_mins + 8 * i);
    out.super_scales[i] = d.bits();
    out.super_mins[i] = dmin.negated();
  }
};

struct BlockQ6K {
  uint8_t low[128], high[64];
  uint8_t scales[16];  // signed
  Half d;
  static constexpr CodeTraits kTraits{6, 16, 32, false, true, nullptr, 256, 210};

  void decode(int64_t i, const CodedRow& out) const {
    for (int j = 0; j < 8; ++j) {
      const __m256i four = field<4>(load32(low + j / 4 * 64 + j % 2 * 32), j % 4 / 2 * 4);
      const __m256i two = field<2>(load32(high + j / 4 * 32), j % 4 * 2);
      store32(out.codes + kSuper * i + 32 * j, _mm256_or_si256(four, high_bits(two, 4)));
    }
    std::memcpy(out.sub_scales + 16 * i, scales, 16);
    out.super_scales[i] = d.bits();
  }
};

struct BlockIq4Xs {
  Half d;
  uint8_t scales_high[2], scales_low[4];  // 6 bits each: 2 and 4
  uint8_t low[128];
  static constexpr CodeTraits kTraits{4, 32, 0, false, true, kIq4Table, 256, 136};

  void decode(int64_t i, const CodedRow& out) const {
    for (int j = 0; j < 8; ++j) {
      store32(out.codes + kSuper * i + 32 * j, nibbles(low + 16 * j));
      const int four = scales_low[j / 2] >> j % 2 * 4 & 15, two = scales_high[j / 4] >> j % 4 * 2 & 3;
      out.sub_scales[8 * i + j] = static_cast<int8_t>((four | two << 4) - 32);
    }
    out.super_scales[i] = d.bits();
  }
};

// -- rows --------------------------------------------------------------------------------------------------------

template <class Block>
const Block& block_of(const uint8_t* row, int64_t i) {
  static_assert(sizeof(Block) == Block::kTraits.block_bytes && alignof(Block) == 1);
  return *reinterpret_cast<const Block*>(row + i * Block::kTraits.block_bytes);
}

template <class Block>
void decode_blocks(const uint8_t* row, int64_t k, const CodedRow& out) {
  for (int64_t i = 0; i < k / Block::kTraits.block_values; ++i) block_of<Block>(row, i).decode(i, out);
}

// Eight codes as fp32 numbers, without their scale.
template <class Block>
__m256 unscaled(const uint8_t* codes) {
  constexpr const CodeTraits& traits = Block::kTraits;
  __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  if (traits.table != nullptr) {
    eight = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(traits.table)), eight);
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
  } else {
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_cvtepu8_epi32(eight), _mm256_set1_epi32(traits.zero)));
  }
}

template <class Block>
void dequantize_blocks(const uint8_t* row, int64_t k, float* out) {
  constexpr const CodeTraits& traits = Block::kTraits;
  uint8_t codes[kSuper];
  float scale, min;
  int8_t sub_scales[kSuper / 16], sub_mins[kSuper / 16];
  uint16_t super_scale, super_min;
  const CodedRow block{codes, &scale, &min, sub_scales, sub_mins, &super_scale, &super_min};
  for (int64_t start = 0; start < k; start += traits.block_values) {
    block_of<Block>(row, start / traits.block_values).decode(0, block);
    for (int64_t i = 0; i < traits.block_values; i += 8) {
      const int64_t group = i / traits.group;
      const float by = traits.two_levels ? _cvtsh_ss(super_scale) * sub_scales[group] : scale;
      __m256 values = _mm256_mul_ps(unscaled<Block>(codes + i), _mm256_set1_ps(by));
      if constexpr (traits.mins) {
        const float added = traits.two_levels ? _cvtsh_ss(super_min) * sub_mins[group] : min;
        values = _mm256_add_ps(values, _mm256_set1_ps(added));
      }
      _mm256_storeu_ps(out + start + i, values);
    }
  }
}

// -- types -------------------------------------------------------------------------------------------------------

struct TypeDecoder {
  CodeTraits traits;
  void (*decode)(const uint8_t* row, int64_t k, const CodedRow& out);
  void (*dequantize)(const uint8_t* row, int64_t k, float* out);
};

template <class Block>
constexpr TypeDecoder kDecoder{Block::kTraits, decode_blocks<Block>, dequantize_blocks<Block>};

constexpr TypeDecoder uncoded(int64_t bytes) {
  return {{0, 0, 0, false, false, nullptr, 1, bytes}, nullptr, nullptr};
}

constexpr TypeDecoder kDecoders[] = {  // in the order of Stored
    uncoded(4),        uncoded(2),        uncoded(2),        kDecoder<BlockQ4_0>, kDecoder<BlockQ4_1>,  kDecoder<BlockQ5_0>,
    kDecoder<BlockQ5_1>, kDecoder<BlockQ8_0>, kDecoder<BlockQ2K>,  kDecoder<BlockQ3K>,  kDecoder<BlockQ4K>,   kDecoder<BlockQ5K>,
    kDecoder<BlockQ6K>,  kDecoder<BlockIq4Nl>, kDecoder<BlockIq4Xs>, kDecoder<BlockMxfp4>,
};
constexpr int32_t kTypes = sizeof kDecoders / sizeof kDecoders[0];
static_assert(kTypes == static_cast<int32_t>(Stored::mxfp4) + 1);

const TypeDecoder& decoder_of(Stored type) { return kDecoders[static_cast<int32_t>(type)]; }

}  // namespace

const CodeTraits& traits_of(Stored type) { return decoder_of(type).traits; }

bool is_coded_row(int32_t type, int64_t k, int64_t row_bytes) {
  if (type < 0 || type >= kTypes || k < 0 || row_bytes < 0) return false;
  const CodeTraits& traits = kDecoders[type].traits;
  return traits.bits > 0 && k % traits.block_values == 0 && k / traits.block_values <= row_bytes / traits.block_bytes;
}

void decode_row(Stored type, const uint8_t* row, int64_t k, const CodedRow& out) { decoder_of(type).decode(row, k, out); }

void dequantize_row(Stored type, const uint8_t* row, int64_t k, float* out) { decoder_of(type).dequantize(row, k, out); }

}  // namespace penstock
