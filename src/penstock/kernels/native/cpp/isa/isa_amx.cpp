// The ops that AMX's tiles of bf16 and int8 compute faster than AVX512, which computes the others.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <type_traits>
#include <utility>

#include "isa.h"
#include "ops.h"
#include "team.h"

#define PENSTOCK_ISA amx
#define PENSTOCK_NARROWS_TO_BF16
#include "vec_avx512.h"

#include "math.h"
#include "tile.h"
#include "product.h"
#include "linear.h"
#include "amx/tiles.h"
#include "amx/weights.h"
#include "amx/linear.h"
#include "moe.h"
#include "amx/moe.h"
#include "attention_lines.h"
#include "attention_many.h"
#include "amx/attention.h"
#include "attention.h"
#include "attention_items.h"

namespace penstock {
namespace amx {
namespace {

void attention_by_tiles(Worker& worker, const AttentionOp& op) {
  if (op.dtype != Dtype::bf16 || op.page_dtype != Dtype::bf16) return kAvx512.attention(worker, op);
  attention_as<uint16_t, SegmentTiles>(worker, op);
}

}  // namespace
}  // namespace amx

constinit const Isa kAmx = {"amx",
                            by_avx512<EmbeddingOp, &Isa::embedding>,
                            by_avx512<NormOp, &Isa::norm>,
                            amx::linear_by_tiles,
                            by_avx512<RotationOp, &Isa::rotation>,
                            by_avx512<CacheOp, &Isa::cache>,
                            amx::attention_by_tiles,
                            by_avx512<SampleOp, &Isa::sample>,
                            by_avx512<RouteOp, &Isa::route>,
                            amx::experts_by_tiles,
                            by_avx512<RecurrenceOp, &Isa::recurrence>,
                            by_avx512<GateOp, &Isa::gate>,
                            by_avx512<LatentOp, &Isa::latent>,
                            amx::tiles_shared_bytes,
                            amx::experts_tiles_shared_bytes};

}  // namespace penstock
