// Packs rows of a weight, which are read from a file.
#pragma once

#include <cstdint>

#include "ops.h"

namespace penstock {

// Element types of rows. From q4_0 to mxfp4 they are GGUF's blocks of codes (see gguf_rows.h).
enum class Stored : int32_t {
  f32 = 0,
  bf16 = 1,
  f16 = 2,
  q4_0 = 3,
  q4_1,
  q5_0,
  q5_1,
  q8_0,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  iq4_nl,
  iq4_xs,
  mxfp4,
  coded  // in the weight's format: a byte for each code, then fp32 scales and minima of its groups
};

// Some rows of a weight, and the packed weight that they go to. If n or k is padded, the last block of 16 columns must
// be zero beforehand.
struct PackJob {
  const void* rows;    // [count] rows of k values, of any alignment
  int64_t row_stride;  // bytes from one row to the next
  Matrix weight;       // its parts are written
  int64_t first, count;  // the rows of the weight
  Stored stored;
  int32_t gated;  // rows from n / 2 on are the half that is gated: they fill the last 8 columns of the blocks
};

// Codes that a file holds are packed without loss if the weight's format can hold them (see `format_of` in
// config/weights.py); scales by column are rounded to fp16. Other values are rounded to the nearest, and quantised as
// quantize.h describes.
//
// Returns -1 if memory is refused, -2 if k values of the type take more than row_stride bytes or part of a block, or if
// coded rows are for a weight that is not grouped, or whose scales have two levels, else
// the number of rows that cannot be packed: they hold an infinity or NaN, or a scale that the format cannot hold.
// Several threads may call at once, each with rows of its own.
int64_t pack_rows(const PackJob& job);

}  // namespace penstock
