// The ops that AMX's tiles of bf16 and int8 compute faster than AVX512, which computes the others.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "isa.h"
#include "ops.h"
#include "team.h"

#define PENSTOCK_ISA amx
#include "vec_avx512.h"

#include "math.h"
#include "tile.h"
#include "product.h"
#include "linear.h"
#include "linear_amx.h"
#include "moe.h"
#include "moe_amx.h"
#include "attention_lines.h"
#include "attention_amx.h"
#include "attention.h"

namespace penstock {
namespace amx {
namespace {

void attention_by_tiles(Worker& worker, const AttentionOp& op) {
  if (op.dtype != Dtype::bf16 || op.page_dtype != Dtype::bf16) return kAvx512.attention(worker, op);
  const TilesInUse tiles(kAttentionTiles);
  attention_as<uint16_t, true>(worker, op);
}

// An op that AVX512 computes as well. The table below is a constant: code that builds it when the library is loaded
// could use instructions that the processor lacks.
template <class Op, void (*Isa::*kFunction)(Worker&, const Op&)>
void by_avx512(Worker& worker, const Op& op) {
  (kAvx512.*kFunction)(worker, op);
}

}  // namespace
}  // namespace amx

constinit const Isa kAmx = {"amx",
                            amx::by_avx512<EmbeddingOp, &Isa::embedding>,
                            amx::by_avx512<NormOp, &Isa::norm>,
                            amx::linear_by_tiles,
                            amx::by_avx512<RotationOp, &Isa::rotation>,
                            amx::by_avx512<CacheOp, &Isa::cache>,
                            amx::attention_by_tiles,
                            amx::by_avx512<SampleOp, &Isa::sample>,
                            amx::by_avx512<RouteOp, &Isa::route>,
                            amx::experts_by_tiles,
                            amx::tiles_shared_bytes,
                            amx::experts_tiles_shared_bytes};

}  // namespace penstock
