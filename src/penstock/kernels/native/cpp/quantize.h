// Quantises rows of floats to grouped codes. Compiled once for all processors, for AVX2.
#pragma once

#include <cstdint>

#include "ops.h"

namespace penstock {

// A row of a grouped weight before it is packed: [padded k] codes, one a byte, with the format's zero added, and what
// each group or kSuper values have beside them.
struct GroupedRow {
  uint8_t* codes;
  float* scales;  // [groups]; for two levels the int8 that is stored, as is mins
  float* mins;
  uint16_t* super_scales;  // fp16, [supers]
  uint16_t* super_mins;
};

// `x` has `padded` values, all finite. Codes of bytes get a scale that makes the largest value of a group 127. Codes of
// four bits get the scale and the minimum for which the sum of squared errors is least, among those that a few ranges
// of codes lead to.
void quantize_row(const float* x, int64_t padded, const Format& format, const GroupedRow& out);

}  // namespace penstock
