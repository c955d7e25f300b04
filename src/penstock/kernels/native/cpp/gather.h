// Puts the columns of rows into another order, for weights whose columns have one of their own.
#pragma once

#include <algorithm>

#include "ops.h"
#include "team.h"

namespace penstock {

template <class T>
void gather_columns(const T* x, const int32_t* order, int64_t begin, int64_t end, T* out) {
  for (int64_t i = begin; i < end; ++i) out[i] = x[order[i]];
}

inline void gather(Worker& worker, const GatherOp& op) {
  constexpr int64_t kPiece = 1024;  // columns
  const int64_t pieces = (op.width + kPiece - 1) / kPiece;
  worker.for_each(*op.rows * pieces, 1, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t at = item / pieces * op.width, begin = item % pieces * kPiece;
      const int64_t end = std::min(begin + kPiece, op.width);
      if (op.dtype == Dtype::f32) {
        gather_columns(static_cast<const float*>(op.x) + at, op.order, begin, end, static_cast<float*>(op.out) + at);
      } else {
        gather_columns(static_cast<const uint16_t*>(op.x) + at, op.order, begin, end,
                       static_cast<uint16_t*>(op.out) + at);
      }
    }
  });
}

}  // namespace penstock
