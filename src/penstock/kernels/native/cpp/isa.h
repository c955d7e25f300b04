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
  size_t (*linear_shared_bytes)(const LinearOp&);
  size_t (*experts_shared_bytes)(const ExpertsOp&);
};

extern const Isa kAvx2;
extern const Isa kAvx512;
extern const Isa kAmx;

}  // namespace penstock
