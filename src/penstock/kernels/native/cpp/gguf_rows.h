// Rows of a GGUF tensor as integer codes with their scales, without loss, and as fp32.
#pragma once

#include <cstdint>

#include "pack.h"

namespace penstock {

// The meaning of a type's codes:
//   value = scale * (code - zero)          without mins
//   value = scale * (code - zero) + min    with mins
// `table[code]` stands for `code - zero` where there is a table. With one level, scale and min are stored in fp32. With
// two levels they are products in fp32 of an fp16 number for 256 values and an int8 number for a group. Computed in
// fp32, without fused operations, the values are those of gguf's Python package, bit for bit.
struct CodeTraits {
  int32_t bits;   // of a code: 2 to 8; 0 for types without codes
  int32_t group;  // values that share a scale: 16 or 32
  int32_t zero;
  bool mins, two_levels;
  const int8_t* table;                // 16 numbers, or null
  int64_t block_values, block_bytes;  // a row is a whole number of blocks
};

const CodeTraits& traits_of(Stored type);

// True if `type` is the number of a type with codes, k >= 0 is a whole number of its blocks, and they fit in row_bytes.
bool is_coded_row(int32_t type, int64_t k, int64_t row_bytes);

// The arrays that a row is written to. A type needs only those that its traits name.
struct CodedRow {
  uint8_t* codes;          // [k], one byte a value
  float* scales;           // one level: [k / group]
  float* mins;             // one level, mins: [k / group]
  int8_t* sub_scales;      // two levels: [k / group]
  int8_t* sub_mins;        // two levels, mins: [k / group]
  uint16_t* super_scales;  // two levels: fp16 [k / 256]
  uint16_t* super_mins;    // two levels, mins: fp16 [k / 256], with the sign changed since the file's min is subtracted
};

// Both need AVX2 and F16C. `row` is of any alignment; is_coded_row holds for it.
void decode_row(Stored type, const uint8_t* row, int64_t k, const CodedRow& out);
void dequantize_row(Stored type, const uint8_t* row, int64_t k, float* out);

}  // namespace penstock
