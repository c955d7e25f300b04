// Packs rows of a weight as they are read from a file.
#pragma once

#include <cstdint>

#include "ops.h"

namespace penstock {

enum class Stored : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

// Some rows of a weight [n, k], and the packed weight they go to, see `Scheme` in ops.h. Where n or k is padded, the
// last block of 16 columns holds zeros from the start.
struct PackJob {
  const void* rows;  // [count][k], dense; of any alignment
  uint8_t* lines;
  float* column_scales;
  int32_t* column_sums;
  uint16_t* group_scales;
  int64_t first, count;  // which rows of the weight these are
  int64_t n, k;
  Scheme scheme;
  int32_t group;
  Stored stored;
  int32_t gated;  // rows from n / 2 on are the half that is gated: they take the last 8 columns of the blocks
};

// Rounds to the nearest where the scheme is smaller than what is stored. int8: a scale for each row; int4: for each
// `group` values of a row, of the sign that lets the largest be -8. Returns -1 where memory is refused, else how many
// rows cannot be quantised: they hold an infinity or NaN. Any thread may call, each with rows of its own.
int64_t pack_rows(const PackJob& job);

}  // namespace penstock
