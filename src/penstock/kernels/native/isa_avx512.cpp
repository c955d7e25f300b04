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
#include "product.h"
#include "linear.h"
#include "moe.h"
#include "elementwise.h"
#include "attention_lines.h"
#include "attention.h"
#include "sampling.h"

namespace penstock {

const Isa kAvx512 = {"avx512",         avx512::embedding, avx512::norm,      avx512::linear,
                     avx512::rotation, avx512::cache,     avx512::attention, avx512::sample,
                     avx512::route,    avx512::experts,   avx512::linear_shared_bytes,
                     avx512::experts_shared_bytes};

}  // namespace penstock
