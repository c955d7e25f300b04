// Every op, for processors with AMX (tiles of bf16 and int8) beside AVX512.
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
#include "product.h"
#include "linear.h"
#include "linear_amx.h"
#include "moe.h"
#include "moe_amx.h"
#include "elementwise.h"
#include "attention_amx.h"
#include "attention_lines.h"
#include "attention.h"
#include "sampling.h"

namespace penstock {
namespace amx {
namespace {

void attention_by_tiles(Worker& worker, const AttentionOp& op) {
  if (op.dtype != Dtype::bf16 || op.page_dtype != Dtype::bf16) return attention(worker, op);
  const TilesInUse tiles(kAttentionTiles);
  attention_as<uint16_t, uint16_t, true>(worker, op);
}

}  // namespace
}  // namespace amx

const Isa kAmx = {"amx",         amx::embedding, amx::norm,      amx::linear_by_tiles,
                  amx::rotation, amx::cache,     amx::attention_by_tiles,
                  amx::sample,   amx::route,     amx::experts_by_tiles,
                  amx::tiles_shared_bytes, amx::experts_tiles_shared_bytes};

}  // namespace penstock
