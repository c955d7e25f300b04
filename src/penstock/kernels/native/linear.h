// x weight^T with packed weights: rows of x become words, and sums the result. See docs/kernels.md.

namespace penstock::PENSTOCK_ISA {
namespace {

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

// What the sums of a row start from, by group and part.
template <class Dot>
void start_row(const typename Dot::Piece* pieces, int64_t padded, int64_t parts, int32_t* starts) {
  const int64_t each = padded / parts;
  for (int64_t part = 0; part < parts; ++part) starts[part] = Dot::start(pieces + part * each, each);
}

// In `memory`, which the threads share. `source`: which row of x each row is, none where negative; null: they are all.
template <class Dot, class T>
Rows<Dot> prepare(Worker& worker, const LinearOp& op, int64_t rows, std::byte* memory,
                  const int32_t* source = nullptr) {
  const int64_t stride = words_along<Dot>(op.weight);
  const auto* x = static_cast<const T*>(op.x);
  if constexpr (!Dot::kInteger && sizeof(T) == 4) {
    if (source == nullptr && stride == op.weight.k) return {x, stride, nullptr, nullptr, 0};
  }
  auto* words = reinterpret_cast<typename Dot::Word*>(memory);
  auto* scales = reinterpret_cast<float*>(words + rows * stride);
  auto* starts = reinterpret_cast<int32_t*>(scales + rows);
  const int64_t parts = groups_of(op.weight) * parts_of<Dot>(op.weight);
  worker.for_each(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t from = source == nullptr ? row : source[row];
      if (from < 0) continue;
      if constexpr (Dot::kInteger) {
        auto* pieces = reinterpret_cast<typename Dot::Piece*>(words + row * stride);
        const int64_t padded = padded_k(op.weight);
        scales[row] = quantize_row<Dot>(x + from * op.weight.k, op.weight.k, pieces, padded);
        if constexpr (Dot::kOffset != 0) start_row<Dot>(pieces, padded, parts, starts + row * parts);
      } else {
        widen_row(x + from * op.weight.k, op.weight.k, words + row * stride, stride);
      }
    }
  });
  return {words, stride, Dot::kInteger ? scales : nullptr, Dot::kOffset == 0 ? nullptr : starts, parts};
}

// Blocks that a thread takes at once. Several pieces a thread even out what disturbs one of them; a piece is wide
// enough for the widest tile.
inline int64_t grain_of(int64_t blocks, int64_t threads) {
  if (blocks < kSums * threads) return 1;
  const int64_t grain = blocks / (8 * threads);
  return grain < kSums ? kSums : grain > 16 ? 16 : grain / kSums * kSums;
}

template <class Dot, class T, class Out>
void multiply(Worker& worker, const LinearOp& op) {
  const int64_t rows = *op.rows;
  if (rows == 0) return;
  const Rows<Dot> x = prepare<Dot, T>(worker, op, rows, worker.shared());
  const Finish finish{op, write<T, Out>};
  const int64_t blocks = divide_up(op.weight.n, kColumns);
  worker.for_each(blocks, grain_of(blocks, worker.count()), [&](int64_t begin, int64_t end) {
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
