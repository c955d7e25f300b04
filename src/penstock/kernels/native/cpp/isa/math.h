// Functions that the kernels share. Included once per instruction set, after its vectors (see isa_*.cpp).
//
// max and min return the second operand if one is NaN, so the order of operands matters.

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

constexpr double kLog2E = 1.4426950408889634;

constexpr float kLeastAligned = 1e-30f;  // smaller values count as 0

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// e^x to about 1e-7, relative; 0 below -87.7, infinity above 88.4. After Cephes' expf (S. Moshier).
inline F16 exponential(F16 x) {
  x = min(splat(89.0f), max(splat(-88.0f), x));
  const F16 n = round(mul(x, splat(static_cast<float>(kLog2E))));
  F16 r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F16 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = add(fma(mul(r, r), p, r), splat(1.0f));
  return mul(p, power_of_two(n));
}

// 2^(x scale) for x <= 0; 0 below 2^-126.5. `terms`: a polynomial that is 2^r for |r| <= 1/2, its highest power first.
template <size_t N>
[[gnu::always_inline]] inline F16 power_below_one(F16 x, float scale, const float (&terms)[N]) {
  // Adding 1.5 2^23 leaves no bits for a fraction; n + 127, at the sum's end, is the exponent of 2^n.
  constexpr float kRounding = 12582912.0f + 127.0f;
  x = max(splat(-127.0f / scale), x);
  const F16 shifted = fma(x, splat(scale), splat(kRounding));
  const F16 r = fma(x, splat(scale), sub(splat(kRounding), shifted));
  F16 p = splat(terms[0]);
  for (size_t i = 1; i < N; ++i) p = fma(p, r, splat(terms[i]));
  return mul(p, to_exponent(shifted));
}

inline F16 sigmoid(F16 x) { return div(splat(1.0f), add(splat(1.0f), exponential(sub(zero_f(), x)))); }

// tanh(x) to about 1e-7, relative. After Cephes' tanhf (S. Moshier).
inline F16 hyperbolic_tangent(F16 x) {
  const F16 far = absolute(x), square = mul(x, x);
  F16 p = splat(-5.70498872745e-3f);
  p = fma(p, square, splat(2.06390887954e-2f));
  p = fma(p, square, splat(-5.37397155531e-2f));
  p = fma(p, square, splat(1.33314422036e-1f));
  p = fma(p, square, splat(-3.33332819422e-1f));
  const F16 near = fma(mul(p, square), x, x);
  const F16 e = exponential(add(far, far));
  const F16 rest = sub(splat(1.0f), div(splat(2.0f), add(e, splat(1.0f))));
  const F16 below = where_greater(splat(0.625f), far, near);
  const F16 above = where_greater(far, splat(0.62499994f), rest);
  // One of the two is 0. Both are 0 if x is NaN, and x * 0 brings the NaN back.
  return fma(x, splat(0.0f), add(below, sub(where_greater(x, zero_f(), above), where_greater(zero_f(), x, above))));
}

inline F16 capped(F16 x, float cap) {
  return mul(hyperbolic_tangent(mul(x, splat(1.0f / cap))), splat(cap));
}

// The error function to about 1e-7. A rational function, as in Eigen and XLA.
inline F16 error_function(F16 x) {
  x = min(splat(4.0f), max(splat(-4.0f), x));
  const F16 square = mul(x, x);
  F16 p = splat(-2.72614225801306e-10f);
  p = fma(p, square, splat(2.77068142495902e-08f));
  p = fma(p, square, splat(-2.10102402082508e-06f));
  p = fma(p, square, splat(-5.69250639462346e-05f));
  p = fma(p, square, splat(-7.34990630326855e-04f));
  p = fma(p, square, splat(-2.95459980854025e-03f));
  p = fma(p, square, splat(-1.60960333262415e-02f));
  F16 q = splat(-1.45660718464996e-05f);
  q = fma(q, square, splat(-2.13374055278905e-04f));
  q = fma(q, square, splat(-1.68282697438203e-03f));
  q = fma(q, square, splat(-7.37332916720468e-03f));
  q = fma(q, square, splat(-1.42647390514189e-02f));
  return div(mul(x, p), q);
}

inline F16 gelu_tanh(F16 x) {
  // 0.5 (1 + tanh(u)) is sigmoid(2u)
  const F16 cube = mul(mul(x, x), x);
  const F16 u = mul(splat(1.5957691216057308f), fma(splat(0.044715f), cube, x));
  return mul(x, sigmoid(u));
}

inline F16 gelu(F16 x) {
  const F16 half = mul(x, splat(0.5f));
  return fma(half, error_function(mul(x, splat(0.70710678118654752f))), half);
}

// An epilogue that is not gated.
inline F16 activated(Epilogue epilogue, F16 x) {
  switch (epilogue) {
    case Epilogue::silu:
      return mul(x, sigmoid(x));
    case Epilogue::gelu_tanh:
      return gelu_tanh(x);
    case Epilogue::gelu:
      return gelu(x);
    case Epilogue::relu:
      return max(zero_f(), x);
    case Epilogue::relu_squared: {
      const F16 positive = max(zero_f(), x);
      return mul(positive, positive);
    }
    default:
      return x;
  }
}

inline F16 gated(Epilogue epilogue, F16 gate, F16 other) {
  if (epilogue == Epilogue::silu_and_mul) return mul(mul(gate, sigmoid(gate)), other);
  if (epilogue == Epilogue::gelu_tanh_and_mul) return mul(gelu_tanh(gate), other);
  if (epilogue == Epilogue::gelu_and_mul) return mul(gelu(gate), other);
  gate = min(splat(7.0f), gate);
  other = min(splat(7.0f), max(splat(-7.0f), other));
  return mul(mul(gate, sigmoid(mul(gate, splat(1.702f)))), add(other, splat(1.0f)));
}

// The largest magnitude of a row that will be quantised.
struct Extent {
  F16 most = zero_f(), check = zero_f();

  void see(F16 v) {
    most = max(most, absolute(v));
    check = fma(v, zero_f(), check);  // NaN if a value is infinite or NaN
  }
};

// Quantises a row: its values become whole multiples of the scale, at most `most_of_all`.
struct Quantizer {
  float scale;
  F16 inverse;

  explicit Quantizer(const Extent& extent, float most_of_all = 127.0f)
      : scale(largest_or_nan(add(extent.most, extent.check)) / most_of_all),
        inverse(splat(scale > 0.0f ? 1.0f / scale : 0.0f)) {}

  template <class T>
  Quantizer(const T* x, int64_t count, float most_of_all = 127.0f) : Quantizer(extent_of(x, count), most_of_all) {}

  // For values whose products are summed exactly. The scale is a power of two (see packing.py), so a bf16 value that is
  // not small beside the others becomes an integer without error.
  template <class T>
  static Quantizer aligned(const T* x, int64_t count) {
    const Extent extent = extent_of(x, count);
    const float most = largest(extent.most), check = sum(extent.check);
    if (!(most >= kLeastAligned)) return Quantizer(check, 0.0f);
    const F16 factor = splat(1.0f / most);
    F16 squares = zero_f();
    for (int64_t i = 0; i < count; i += 16) {
      const F16 v = mul(load_part(x + i, count - i), factor);
      squares = fma(v, v, squares);
    }
    constexpr auto kByMost = static_cast<float>(1.0 / kMostInt16);
    const float norm = std::sqrt(sum(squares)) / static_cast<float>(kMostNorm);
    // The next power of two.
    const float room = most * (norm > kByMost ? norm : kByMost);
    const uint32_t bits = (__builtin_bit_cast(uint32_t, room) + 0x7fffff) & 0x7f800000;
    const float scale = __builtin_bit_cast(float, bits);
    return Quantizer(scale + check, 1.0f / scale);
  }

  I16 operator()(F16 x) const { return to_int(mul(x, inverse)); }

 private:
  Quantizer(float scale, float inverse) : scale(scale), inverse(splat(inverse)) {}

  template <class T>
  static Extent extent_of(const T* x, int64_t count) {
    Extent extent;
    for (int64_t i = 0; i < count; i += 16) extent.see(load_part(x + i, count - i));
    return extent;
  }
};

// The order of the Hadamard matrix that `spread` multiplies by: the largest power of two that divides `count`.
inline int64_t spread_order(int64_t count) { return count & -count; }

// The signs of x in the sums of lanes i and i ^ kBit.
template <unsigned kBit>
struct LaneSigns {
  float signs[16];
  constexpr LaneSigns() : signs() {
    for (unsigned i = 0; i < 16; ++i) signs[i] = (i & kBit) == 0 ? 1.0f : -1.0f;
  }
};
template <unsigned kBit>
inline constexpr LaneSigns<kBit> kLaneSigns;

// Lanes i and i ^ kBit become their sum and their difference.
template <unsigned kBit>
inline F16 butterfly(F16 x) {
  return fma(x, load(kLaneSigns<kBit>.signs), exchange<kBit>(x));
}

inline void butterfly(F16& a, F16& b) {
  const F16 first = a;
  a = add(first, b);
  b = sub(first, b);
}

// Does the same for pieces of `size` elements, a power of two up to 16 N, in N registers.
template <int N, class T>
inline void spread_pieces(const T* x, int64_t count, int64_t size, float* out) {
  if constexpr (N > 1) {
    if (size < 16 * N) return spread_pieces<N / 2>(x, count, size, out);
  }
  for (int64_t i = 0; i < count; i += size) {
    F16 v[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) v[n] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load(x + i + n * 16)))));
#pragma GCC unroll 16
    for (int half = 1; half < N; half *= 2) {
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        if ((n & half) == 0) butterfly(v[n], v[n + half]);
      }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) store(out + i + n * 16, v[n]);
  }
}

// Multiplies each piece of x by a Hadamard matrix of +1 and -1 (Sylvester's), so that a large element is spread over
// its piece. A piece has spread_order(count) elements; `count` is a multiple of 16. The scalar product of two rows that
// are spread is spread_order(count) times that of the rows.
template <class T>
void spread(const T* x, int64_t count, float* out) {
  const int64_t order = spread_order(count);
  int64_t size = order < 16 * kSums ? order : 16 * kSums;
  spread_pieces<kSums>(x, count, size, out);
  for (; size < order; size *= 2) {
    for (int64_t begin = 0; begin < count; begin += 2 * size) {
      for (int64_t i = begin; i < begin + size; i += 16) {
        F16 a = load(out + i), b = load(out + i + size);
        butterfly(a, b);
        store(out + i, a);
        store(out + i + size, b);
      }
    }
  }
}

// Calls f<M>() with the largest M that is at most `rows`.
template <int M, class F>
inline void for_rows(int64_t rows, const F& f) {
  if constexpr (M > 1) {
    if (rows < M) return for_rows<M - 1>(rows, f);
  }
  f.template operator()<M>();
}

// Adds the products of a line to `sums`, for M rows of x (`x_stride` apart, their words `x_step`) and N blocks of 16
// columns (`block_stride` bytes apart). One word of weights at a time: all words of a line would not fit in the
// registers.
template <class Dot, int M, int N>
[[gnu::always_inline]] inline void dot_line(const typename Dot::Word* x, int64_t x_stride, int64_t x_step,
                                            const uint8_t* lines, int64_t block_stride,
                                            typename Dot::Vector (&sums)[M][N]) {
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    const uint8_t* line = lines + n * block_stride;
#pragma GCC unroll 16
    for (int word = 0; word < Dot::kWords; ++word) {
      const auto weights = Dot::widen(line, word);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        sums[m][n] = Dot::multiply_add(sums[m][n], x[m * x_stride + word * x_step], weights);
      }
    }
  }
}

// Adds the products along `steps` lines, in their order: a sum depends only on its own row and column.
template <class Dot, int M, int N>
[[gnu::always_inline]] inline void dot(const typename Dot::Word* x, int64_t x_stride, const uint8_t* lines,
                                       int64_t line_stride, int64_t block_stride, int64_t steps,
                                       typename Dot::Vector (&sums)[M][N]) {
  for (int64_t step = 0; step < steps; ++step, x += Dot::kWords, lines += line_stride) {
    dot_line<Dot, M, N>(x, x_stride, 1, lines, block_stride, sums);
  }
}

template <class Vector, int M, int N>
[[gnu::always_inline]] inline void clear(Vector (&sums)[M][N], Vector zero) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) sums[m][n] = zero;
  }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
