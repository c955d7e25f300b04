// x weight^T with packed weights. A sum runs along k in one order, whatever the number of rows: that makes a row's
// result independent of its neighbours. See docs/kernels.md.

namespace penstock::PENSTOCK_ISA {
namespace {

// Rows of x as words. Of integers also what their products are to be scaled with, and, where the weights are offset,
// what a sum starts from (null otherwise).
template <class Dot>
struct Rows {
  const typename Dot::Word* words;
  int64_t stride;
  const float* scales;    // [rows]
  const int32_t* starts;  // [rows][groups]
};

template <class Dot>
inline int64_t words_along(const Matrix& weight) {
  return padded_k(weight) / Dot::kLineValues * Dot::kWords;
}

inline int64_t groups_of(const Matrix& weight) {
  return weight.scheme == Scheme::int4 ? divide_up(weight.k, weight.group) : 1;
}

// -- what becomes of a sum ---------------------------------------------------------------------------------------

// Puts 16 columns of one row, block `block` of the weight's, where they belong.
template <class T, class Out>
void write(const LinearOp& op, int64_t row, int64_t block, F16 y) {
  if (op.bias != nullptr) y = add(y, load(static_cast<const float*>(op.bias) + block * kColumns));
  if (op.epilogue != Epilogue::none) {
    float both[24] = {};
    store(both, y);
    const int64_t width = op.weight.n / 2, column = block * 8;
    y = gated(op.epilogue, load(both), load(both + 8));
    store_part(static_cast<Out*>(op.out) + row * width + column, y, width - column < 8 ? width - column : 8);
    return;
  }
  const int64_t width = op.weight.n, column = block * kColumns;
  const int64_t at = row * width + column, count = width - column;
  if (op.residual != nullptr) y = add(y, load_part(static_cast<const T*>(op.residual) + at, count));
  store_part(static_cast<Out*>(op.out) + at, y, count);
}

// A call, not a template argument: there is one tile for all types of x and the result.
struct Finish {
  const LinearOp& op;
  void (*write)(const LinearOp& op, int64_t row, int64_t block, F16 y);

  void operator()(int64_t row, int64_t block, F16 y) const { write(op, row, block, y); }
};

// -- M rows by N blocks -----------------------------------------------------------------------------------------

template <class Dot, int M, int N>
[[gnu::always_inline]] inline void start(typename Dot::Vector (&sums)[M][N], const int32_t* starts, int64_t groups) {
  if constexpr (Dot::kOffset == 0) {
    clear(sums, Dot::zero());
  } else {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sums[m][n] = splat(starts[m * groups]);
    }
  }
}

// Lines of `weight` from block `block` on: `Dot` may read them widened (one word a line).
template <class Dot, int M, int N>
inline void tile(const Matrix& weight, const uint8_t* lines, int64_t block_stride, int64_t steps_per_group,
                 int64_t groups, const Rows<Dot>& x, int64_t row, int64_t block, const Finish& finish) {
  using Vector = typename Dot::Vector;
  const typename Dot::Word* words = x.words + row * x.stride;
  Vector sums[M][N];
  if constexpr (Dot::kInteger) {
    if (weight.scheme == Scheme::int4) {
      F16 totals[M][N];
      clear(totals, zero_f());
      for (int64_t group = 0; group < groups; ++group) {
        start<Dot>(sums, x.starts + row * groups + group, groups);
        dot<Dot, M, N>(words, x.stride, lines, kLineBytes, block_stride, steps_per_group, sums);
        words += steps_per_group * Dot::kWords;
        lines += steps_per_group * kLineBytes;
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
          const F16 scale = load_half(weight.group_scales + ((block + n) * groups + group) * kColumns);
#pragma GCC unroll 16
          for (int m = 0; m < M; ++m) totals[m][n] = fma(to_float(sums[m][n]), scale, totals[m][n]);
        }
      }
      for (int m = 0; m < M; ++m) {
        for (int n = 0; n < N; ++n) finish(row + m, block + n, mul(totals[m][n], splat(x.scales[row + m])));
      }
      return;
    }
  }
  start<Dot>(sums, x.starts + row, 1);
  dot<Dot, M, N>(words, x.stride, lines, kLineBytes, block_stride, steps_per_group * groups, sums);
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      if constexpr (Dot::kInteger) {
        const F16 scale = load(weight.column_scales + (block + n) * kColumns);
        finish(row + m, block + n, mul(to_float(sums[m][n]), mul(scale, splat(x.scales[row + m]))));
      } else {
        finish(row + m, block + n, sums[m][n]);
      }
    }
  }
}

// Up to M rows from `row` on, all blocks: as many at a time as `Sums` vectors allow, at most `Blocks`.
template <class Dot, int Sums, int Blocks, int M>
inline void rows_by_blocks(const Matrix& weight, const uint8_t* lines, int64_t block_stride, int64_t steps_per_group,
                           int64_t groups, const Rows<Dot>& x, int64_t row, int64_t rows, int64_t begin, int64_t end,
                           const Finish& finish) {
  if constexpr (M > 1) {
    if (rows < M) {
      return rows_by_blocks<Dot, Sums, Blocks, M - 1>(weight, lines, block_stride, steps_per_group, groups, x, row,
                                                      rows, begin, end, finish);
    }
  }
  constexpr int N = Sums / M < Blocks ? Sums / M : Blocks;
  int64_t block = begin;
  for (; block + N <= end; block += N) {
    tile<Dot, M, N>(weight, lines + (block - begin) * block_stride, block_stride, steps_per_group, groups, x, row,
                    block, finish);
  }
  if constexpr (N > 1) {
    for (; block < end; ++block) {
      tile<Dot, M, 1>(weight, lines + (block - begin) * block_stride, block_stride, steps_per_group, groups, x, row,
                      block, finish);
    }
  }
}

// Blocks [begin, end) of all rows.
template <class Dot>
void blocks_of(Worker& worker, const Matrix& weight, const Rows<Dot>& x, int64_t rows, int64_t begin, int64_t end,
               const Finish& finish) {
  using Wide = typename Dot::Wide;
  const int64_t steps = x.stride / Dot::kWords;
  const int64_t groups = groups_of(weight);
  const int64_t per_group = steps / groups;
  const int64_t block_stride = steps * kLineBytes;
  const uint8_t* lines = weight.lines + begin * block_stride;
  if (rows < kWideRows) {
    for (int64_t row = 0; row < rows; row += kSums) {
      rows_by_blocks<Dot, kSums, kSums, kSums>(weight, lines, block_stride, per_group, groups, x, row, rows - row,
                                               begin, end, finish);
    }
    return;
  }
  // Lines are widened once for all rows. The order of the sums stays the same.
  const int64_t wide_stride = block_stride * Dot::kWords;
  auto* wide = reinterpret_cast<typename Dot::Word*>(worker.own(wide_stride * kWideBlocks));
  const Rows<Wide> same{x.words, x.stride, x.scales, x.starts};
  for (int64_t first = begin; first < end; first += kWideBlocks) {
    const int64_t last = first + kWideBlocks < end ? first + kWideBlocks : end;
    auto* out = wide;
    for (const uint8_t* line = lines; line < lines + (last - first) * block_stride; line += kLineBytes) {
      typename Dot::Vector vectors[Dot::kWords];
      Dot::widen(line, vectors);
      for (int word = 0; word < Dot::kWords; ++word, out += kColumns) store(out, vectors[word]);
    }
    for (int64_t row = 0; row < rows; row += Wide::kWideTileRows) {
      rows_by_blocks<Wide, Wide::kWideSums, kWideBlocks, Wide::kWideTileRows>(
          weight, reinterpret_cast<const uint8_t*>(wide), wide_stride, per_group * Dot::kWords, groups, same, row,
          rows - row, first, last, finish);
    }
    lines += (last - first) * block_stride;
  }
}

// -- x as words -------------------------------------------------------------------------------------------------

template <class T>
void widen_row(const T* x, int64_t k, float* words, int64_t stride) {
  for (int64_t i = 0; i < stride; i += 16) {
    store_part(words + i, i < k ? load_part(x + i, k - i) : zero_f(), stride - i);
  }
}

// Puts a row in order and returns its scale. `pieces`: room for `padded`, a multiple of 16.
template <class Dot, class T>
float quantize_row(const T* x, int64_t k, typename Dot::Piece* pieces, int64_t padded) {
  const Quantizer quantize(x, k);
  for (int64_t i = 0; i < padded; i += 16) {
    Dot::put(pieces + i, i < k ? quantize(load_part(x + i, k - i)) : zero_i());
  }
  return quantize.scale;
}

// What the sums of a row start from, by group.
template <class Dot>
void start_row(const typename Dot::Piece* pieces, int64_t padded, int64_t groups, int32_t* starts) {
  const int64_t per_group = padded / groups;
  for (int64_t group = 0; group < groups; ++group, pieces += per_group) {
    int32_t total = 0;
    for (int64_t i = 0; i < per_group; ++i) total += pieces[i];
    starts[group] = -Dot::kOffset * total;
  }
}

template <class Dot, class T>
Rows<Dot> prepare(Worker& worker, const LinearOp& op, int64_t rows) {
  const int64_t stride = words_along<Dot>(op.weight);
  const auto* x = static_cast<const T*>(op.x);
  if constexpr (!Dot::kInteger && sizeof(T) == 4) {
    if (stride == op.weight.k) return {x, stride, nullptr, nullptr};
  }
  auto* words = reinterpret_cast<typename Dot::Word*>(worker.shared());
  auto* scales = reinterpret_cast<float*>(words + rows * stride);
  auto* starts = reinterpret_cast<int32_t*>(scales + rows);
  const int64_t groups = groups_of(op.weight);
  worker.for_each(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if constexpr (Dot::kInteger) {
        auto* pieces = reinterpret_cast<typename Dot::Piece*>(words + row * stride);
        const int64_t padded = padded_k(op.weight);
        scales[row] = quantize_row<Dot>(x + row * op.weight.k, op.weight.k, pieces, padded);
        if constexpr (Dot::kOffset != 0) start_row<Dot>(pieces, padded, groups, starts + row * groups);
      } else {
        widen_row(x + row * op.weight.k, op.weight.k, words + row * stride, stride);
      }
    }
  });
  return {words, stride, scales, starts};
}

template <class Dot, class T, class Out>
void multiply(Worker& worker, const LinearOp& op) {
  const int64_t rows = *op.rows;
  if (rows == 0) return;
  const Rows<Dot> x = prepare<Dot, T>(worker, op, rows);
  const Finish finish{op, write<T, Out>};
  const int64_t blocks = divide_up(op.weight.n, kColumns);
  // Several pieces a thread even out what disturbs one of them; a piece is wide enough for the widest tile.
  int64_t grain = blocks / (8 * worker.count());
  grain = grain < kSums ? kSums : grain > 16 ? 16 : grain / kSums * kSums;
  if (blocks < kSums * worker.count()) grain = 1;
  worker.for_each(blocks, grain, [&](int64_t begin, int64_t end) {
    blocks_of<Dot>(worker, op.weight, x, rows, begin, end, finish);
  });
}

template <class T, class Out>
void linear_as(Worker& worker, const LinearOp& op) {
  switch (op.weight.scheme) {
    case Scheme::f32:
      return multiply<DotF32, T, Out>(worker, op);
    case Scheme::bf16:
      return multiply<DotBf16, T, Out>(worker, op);
    case Scheme::int8:
      return multiply<DotInt8, T, Out>(worker, op);
    case Scheme::int4:
      return multiply<DotInt4, T, Out>(worker, op);
  }
}

[[maybe_unused]] void linear(Worker& worker, const LinearOp& op) {
  if (op.dtype == Dtype::f32) return linear_as<float, float>(worker, op);
  if (op.out_dtype == Dtype::f32) return linear_as<uint16_t, float>(worker, op);
  linear_as<uint16_t, uint16_t>(worker, op);
}

// Bytes of shared memory that `prepare` uses at most. A word holds a value of x at least; where sums start from other
// than 0 it holds four, which leaves room for that.
size_t linear_shared_bytes(const LinearOp& op) { return *op.rows * (padded_k(op.weight) + 1) * 4; }

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
