// The products of bf16 that AVX512's BF16 computes twice as fast as AVX512 alone, and the ops that store many bf16, each
// vector with one instruction instead of eight. AVX512 computes the other ops.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "isa.h"
#include "ops.h"
#include "team.h"

#define PENSTOCK_ISA avx512_bf16
#define PENSTOCK_NARROWS_TO_BF16
#define PENSTOCK_MULTIPLIES_BF16
#include "vec_avx512.h"

#include "math.h"
#include "tile.h"
#include "product.h"
#include "linear.h"
#include "moe.h"
#include "elementwise.h"
#include "attention_lines.h"
#include "attention_many.h"
#include "attention.h"
#include "attention_items.h"

namespace penstock {
namespace avx512_bf16 {
namespace {

bool is_bf16(const Matrix& weight, Dtype x) { return weight.format.scheme == Scheme::bf16 && x == Dtype::bf16; }

void linear(Worker& worker, const LinearOp& op) {
  is_bf16(op.weight, op.dtype) ? multiply<DotBf16, uint16_t>(worker, op) : kAvx512.linear(worker, op);
}

struct ByPairs : ByWords {
  template <class T>
  static void multiply(Worker& worker, const LinearOp& op, const Groups& groups, const int32_t* source,
                       std::byte* memory) {
    multiply_words<DotBf16, T>(worker, op, groups, source, memory);
  }
};

void experts(Worker& worker, const ExpertsOp& op) {
  if (!is_bf16(op.gate_up, op.dtype) || !is_bf16(op.down, op.dtype)) return kAvx512.experts(worker, op);
  experts_by<ByPairs, uint16_t>(worker, op);
}

void attention(Worker& worker, const AttentionOp& op) {
  if (op.dtype != Dtype::bf16 || op.page_dtype != Dtype::bf16) return kAvx512.attention(worker, op);
  attention_as<uint16_t>(worker, op);
}

}  // namespace
}  // namespace avx512_bf16

constinit const Isa kAvx512Bf16 = {"avx512_bf16",
                                   avx512_bf16::embedding,
                                   avx512_bf16::norm,
                                   avx512_bf16::linear,
                                   avx512_bf16::rotation,
                                   avx512_bf16::cache,
                                   avx512_bf16::attention,
                                   by_avx512<SampleOp, &Isa::sample>,
                                   by_avx512<RouteOp, &Isa::route>,
                                   avx512_bf16::experts,
                                   by_avx512<RecurrenceOp, &Isa::recurrence>,
                                   by_avx512<GateOp, &Isa::gate>,
                                   avx512_bf16::latent,
                                   bytes_by_avx512<LinearOp, &Isa::linear_shared_bytes>,
                                   bytes_by_avx512<ExpertsOp, &Isa::experts_shared_bytes>};

}  // namespace penstock
