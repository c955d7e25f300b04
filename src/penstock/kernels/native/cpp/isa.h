// The functions that are compiled for each instruction set.
#pragma once

#include <cstddef>

#include "ops.h"
#include "team.h"

namespace penstock {

struct Isa {
  const char* name;
  void (*embedding)(Worker&, const EmbeddingOp&);
  void (*norm)(Worker&, const NormOp&);
  void (*linear)(Worker&, const LinearOp&);
  void (*rotation)(Worker&, const RotationOp&);
  void (*cache)(Worker&, const CacheOp&);
  void (*attention)(Worker&, const AttentionOp&);
  void (*sample)(Worker&, const SampleOp&);
  void (*route)(Worker&, const RouteOp&);
  void (*experts)(Worker&, const ExpertsOp&);
  void (*recurrence)(Worker&, const RecurrenceOp&);
  void (*gate)(Worker&, const GateOp&);
  void (*latent)(Worker&, const LatentOp&);
  size_t (*linear_shared_bytes)(const LinearOp&);
  size_t (*experts_shared_bytes)(const ExpertsOp&);
};

extern const Isa kAvx2;
extern const Isa kAvx512;
extern const Isa kAvx512Bf16;
extern const Isa kAmx;

// Functions for the table of an instruction set that leaves an op to AVX512. The tables are constants: code that builds
// one when the library is loaded could use instructions that the processor lacks.
template <class Op, void (*Isa::*kFunction)(Worker&, const Op&)>
static void by_avx512(Worker& worker, const Op& op) {
  (kAvx512.*kFunction)(worker, op);
}

template <class Op, size_t (*Isa::*kFunction)(const Op&)>
static size_t bytes_by_avx512(const Op& op) {
  return (kAvx512.*kFunction)(op);
}

}  // namespace penstock
