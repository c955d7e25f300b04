// Every op, for processors with AVX512 and its VNNI.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "isa.h"
#include "ops.h"
#include "team.h"

#define PENSTOCK_ISA avx512
#include "vec_avx512.h"

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

constinit const Isa kAvx512 = avx512::table("avx512");

}  // namespace penstock
