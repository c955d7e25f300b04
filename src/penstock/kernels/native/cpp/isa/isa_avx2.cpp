// Every op, for processors with AVX2, FMA and F16C.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "isa.h"
#include "ops.h"
#include "team.h"
#include "vec_avx2.h"

#define PENSTOCK_ISA avx2
#include "math.h"
#include "tile.h"
#include "product.h"
#include "linear.h"
#include "moe.h"
#include "elementwise.h"
#include "recurrence.h"
#include "attention_lines.h"
#include "attention_many.h"
#include "attention.h"
#include "attention_items.h"
#include "sampling/sampling.h"
#include "entries.h"

namespace penstock {

constinit const Isa kAvx2 = avx2::table("avx2");

}  // namespace penstock
