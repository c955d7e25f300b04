// x weight^T with packed weights: rows of x are converted to words and multiplied, and sums are written. See
// docs/kernels.md.

namespace penstock::PENSTOCK_ISA {
namespace {

// -- writing sums ------------------------------------------------------------------------------------------------

// Writes 16 columns of one row, those of the weight's block `block`.
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

// The same for [rows][16] sums. With an epilogue, the gates of two rows fill one vector and the other halves another.
template <class T, class Out>
void write_rows(const LinearOp& op, int64_t row, int64_t rows, int64_t block, const float* sums) {
  const int64_t last = row + rows;
  if (op.epilogue != Epilogue::none) {
    const F16 bias = op.bias == nullptr ? zero_f() : load(static_cast<const float*>(op.bias) + block * kColumns);
    const int64_t width = op.weight.n / 2, column = block * 8, count = width - column < 8 ? width - column : 8;
    for (; row + 2 <= last; row += 2, sums += 2 * kColumns) {
      F16 gates = load(sums), others = load(sums + kColumns);
      if (op.bias != nullptr) gates = add(gates, bias), others = add(others, bias);
      transpose_halves(gates, others);
      alignas(64) Out both[16];
      store(both, gated(op.epilogue, gates, others));
      Out* out = static_cast<Out*>(op.out) + row * width + column;
      __builtin_memcpy(out, both, static_cast<size_t>(count) * sizeof(Out));
      __builtin_memcpy(out + width, both + 8, static_cast<size_t>(count) * sizeof(Out));
    }
  }
  for (; row < last; ++row, sums += kColumns) write<T, Out>(op, row, block, load(sums));
}

// write_rows for the type of the result: x's, or fp32.
template <class T>
auto written(const LinearOp& op) {
  return op.out_dtype == op.dtype ? write_rows<T, T> : write_rows<T, float>;
}

// -- x as words -------------------------------------------------------------------------------------------------

template <class T>
void widen_row(const T* x, int64_t k, float* words, int64_t stride) {
  for (int64_t i = 0; i < stride; i += 16) {
    store_part(words + i, i < k ? load_part(x + i, k - i) : zero_f(), stride - i);
  }
}

// Quantises `k` values of x into `pieces`, with zeros up to `padded`, a multiple of 16. Returns their scale.
template <class Dot, class T>
float quantize_values(const Quantizer& quantize, const T* x, int64_t k, typename Dot::Piece* pieces, int64_t padded) {
  for (int64_t i = 0; i < padded; i += 16) {
    Dot::put(pieces + i, i < k ? quantize(load_part(x + i, k - i)) : zero_i());
  }
  return quantize.scale;
}

template <class Dot, class T>
float quantize_row(const T* x, int64_t k, typename Dot::Piece* pieces, int64_t padded) {
  return quantize_values<Dot>(Quantizer(x, k), x, k, pieces, padded);
}

// Quantises a row with a scale for each span.
template <class Dot, class T>
void quantize_spans(const T* x, int64_t k, typename Dot::Piece* pieces, int64_t padded, float* scales) {
  for (int64_t start = 0; start < padded; start += kSpan) {
    const int64_t count = k - start < kSpan ? k - start : kSpan, room = padded - start < kSpan ? padded - start : kSpan;
    const Quantizer quantize = Quantizer::aligned(x + start, count);
    *scales++ = quantize_values<Dot>(quantize, x + start, count, pieces + start, room);
  }
}

// The starts of a row's sums, by group and part.
template <class Dot>
void start_row(const typename Dot::Piece* pieces, int64_t padded, int64_t parts, int32_t* starts) {
  const int64_t each = padded / parts;
  for (int64_t part = 0; part < parts; ++part) starts[part] = Dot::start(pieces + part * each, each);
}

// The place of a row's words, and its row of x.
struct PanelRow {
  int64_t panel;   // the first row of its panel
  int64_t height;  // of the panel
  int64_t source;  // the row of x

  // The panel of `row`, among the rows from `first` on that are multiplied with the same weight.
  static PanelRow of(const Panels& panels, int64_t first, int64_t row, int64_t source) {
    const int64_t panel = panels.of_row(row - first), begin = panels.first_row(panel);
    return {first + begin, panels.first_row(panel + 1) - begin, source};
  }
};

// Converts rows to words in `memory`, which the threads share. place(row): the row's PanelRow.
template <class Dot, class T, class F>
Rows<Dot> prepare(Worker& worker, const LinearOp& op, int64_t rows, std::byte* memory, const F& place) {
  using Word = typename Dot::Word;
  const int64_t stride = words_along<Dot>(op.weight), k = op.weight.k, padded = padded_k(op.weight);
  auto* words = reinterpret_cast<Word*>(memory);
  auto* scales = reinterpret_cast<float*>(words + rows * stride);
  const int64_t spans = spans_of<Dot>(op.weight);
  auto* starts = reinterpret_cast<int32_t*>(scales + rows * spans);
  const int64_t parts = groups_of(op.weight) * parts_of<Dot>(op.weight);
  auto* scattered = reinterpret_cast<Word*>(worker.own(static_cast<size_t>(stride) * sizeof(Word)));
  const auto put_row = [&](int64_t row) {
    const auto [panel, height, source] = place(row);
    Word* to = words + panel * stride + row - panel;
    Word* together = height == 1 ? to : scattered;
    const T* x = static_cast<const T*>(op.x) + source * k;
    if constexpr (HasSpans<Dot>) {
      quantize_spans<Dot>(x, k, reinterpret_cast<typename Dot::Piece*>(together), padded, scales + row * spans);
    } else if constexpr (Dot::kInteger) {
      auto* pieces = reinterpret_cast<typename Dot::Piece*>(together);
      scales[row] = quantize_row<Dot>(x, k, pieces, padded);
      if constexpr (Dot::kOffset != 0) start_row<Dot>(pieces, padded, parts, starts + row * parts);
    } else {
      widen_row(x, k, together, stride);
    }
    if (height == 1) return;
    for (int64_t i = 0; i < stride; ++i) to[i * height] = together[i];
  };
  worker.for_each(rows, kPanelRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) put_row(row);
  });
  return {words, stride, Dot::kInteger ? scales : nullptr, Dot::kOffset == 0 ? nullptr : starts, parts, spans};
}

// The number of blocks that a thread takes at once. Several pieces per thread even out disturbances; a piece is wide
// enough for the widest tile.
inline int64_t grain_of(int64_t blocks, int64_t threads) {
  if (blocks < kSums * threads) return 1;
  const int64_t grain = blocks / (8 * threads);
  return grain < kSums ? kSums : grain > 16 ? 16 : grain / kSums * kSums;
}

template <class Dot, class T>
void multiply(Worker& worker, const LinearOp& op) {
  const int64_t rows = *op.rows;
  if (rows == 0) return;
  const Panels panels = Panels::of<Dot>(rows);
  const Rows<Dot> x = prepare<Dot, T>(worker, op, rows, worker.shared(),
                                      [&](int64_t row) { return PanelRow::of(panels, 0, row, row); });
  const Finish finish{op, written<T>(op)};
  const int64_t blocks = divide_up(op.weight.n, kColumns), items = row_groups(rows) * blocks;
  worker.for_share(items, grain_of(items, worker.count()), [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t group = begin / blocks, first = begin % blocks;
      const int64_t last = first + end - begin < blocks ? first + end - begin : blocks;
      const uint8_t* next = block_lines(op.weight, last % blocks);
      blocks_of<Dot>(worker, op.weight, x, rows, group, first, last, next, finish);
      begin += last - first;
    }
  });
}

template <class T>
void linear_as(Worker& worker, const LinearOp& op) {
  switch (op.weight.scheme) {
    case Scheme::f32:
      return multiply<DotF32, T>(worker, op);
    case Scheme::bf16:
      return multiply<DotBf16, T>(worker, op);
    case Scheme::int16:
      return multiply<DotInt16, T>(worker, op);
    case Scheme::int8:
      return multiply<DotInt8, T>(worker, op);
    case Scheme::int4:
      return multiply<DotInt4, T>(worker, op);
  }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
