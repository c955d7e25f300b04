// Finds the rows that hold neither NaN nor infinity: no exponent of all ones. It compares integers, which any compiler
// vectorises.
#pragma once

#include <algorithm>

#include "ops.h"
#include "team.h"

namespace penstock {

template <class Bits>
bool finite_row(const Bits* x, int64_t width, Bits ones) {
  Bits most = 0;
  for (int64_t i = 0; i < width; ++i) most = std::max<Bits>(most, x[i] & ones);
  return most != ones;
}

inline void finite(Worker& worker, const FiniteOp& op) {
  worker.for_each(*op.rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = i * op.width;
      op.finite[i] = op.dtype == Dtype::f32
                         ? finite_row<int32_t>(static_cast<const int32_t*>(op.x) + at, op.width, 0x7f800000)
                         : finite_row<int16_t>(static_cast<const int16_t*>(op.x) + at, op.width, 0x7f80);
    }
  });
}

}  // namespace penstock
