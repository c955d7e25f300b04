// Packs rows of a weight, which are read from a file.
#pragma once

#include <cstdint>

#include "ops.h"

namespace penstock {

// The types of tensors in files. From q4_0 on they are types of GGUF in blocks (see gguf_rows.h).
enum class Stored : int32_t {
  f32 = 0,
  bf16 = 1,
  f16 = 2,
  q4_0 = 3,
  q4_1 = 4,
  q5_0 = 5,
  q5_1 = 6,
  q8_0 = 7,
  q2_k = 8,
  q3_k = 9,
  q4_k = 10,
  q5_k = 11,
  q6_k = 12,
  iq4_nl = 13,
  iq4_xs = 14,
  mxfp4 = 15,
};

// Some rows of a weight [n, k], and the packed weight that they go to (see `Scheme` in ops.h). If n or k is padded, the
// last block of 16 columns must be zero beforehand.
struct PackJob {
  const void* rows;  // [count][k], dense; of any alignment
  uint8_t* lines;
  float* column_scales;
  int32_t* column_sums;
  uint16_t* group_scales;
  int64_t first, count;  // the rows of the weight
  int64_t n, k;
  Scheme scheme;
  int32_t group;
  Stored stored;
  int32_t gated;  // rows from n / 2 on are the half that is gated: they fill the last 8 columns of the blocks
};

// Values are rounded to the nearest. int8 has a scale per row, int4 one per `group` values of a row, with the sign that
// makes the largest value -8. Returns -1 if memory is refused, else the number of rows that cannot be quantised since
// they hold an infinity or NaN. Several threads may call at once, each with rows of its own.
int64_t pack_rows(const PackJob& job);

}  // namespace penstock
