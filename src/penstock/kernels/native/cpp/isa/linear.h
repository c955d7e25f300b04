// x weight^T with packed weights: rows of x are converted to words and multiplied, and sums are written. See
// docs/kernels.md.

namespace penstock::PENSTOCK_ISA {
namespace {

// -- writing sums ------------------------------------------------------------------------------------------------

// Writes 16 columns of one row, those of the weight's block `block`.
template <class T, class Out>
void write(const LinearOp& op, int64_t row, int64_t block, F16 y) {
  if (op.bias != nullptr) y = add(y, load(static_cast<const float*>(op.bias) + block * kColumns));
  if (is_gated(op.epilogue)) {
    float both[24] = {};
    store(both, y);
    const int64_t width = op.weight.n / 2, column = block * 8;
    y = gated(op.epilogue, load(both), load(both + 8));
    store_part(static_cast<Out*>(op.out) + row * width + column, y, width - column < 8 ? width - column : 8);
    return;
  }
  const int64_t width = op.weight.n, column = block * kColumns;
  const int64_t at = row * width + column, count = width - column;
  if (op.scale != 1.0f) y = mul(y, splat(op.scale));
  if (op.epilogue != Epilogue::none) y = activated(op.epilogue, y);
  if (op.softcap != 0.0f) y = capped(y, op.softcap);
  if (op.residual != nullptr) y = add(y, load_part(static_cast<const T*>(op.residual) + at, count));
  store_part(static_cast<Out*>(op.out) + at, y, count);
}

// The same for [rows][16] sums. With an epilogue, the gates of two rows fill one vector and the other halves another.
template <class T, class Out>
void write_rows(const LinearOp& op, int64_t row, int64_t rows, int64_t block, const float* sums) {
  const int64_t last = row + rows;
  if (is_gated(op.epilogue)) {
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

// Quantises a row with a scale for each span.
template <class Dot, class T>
void quantize_spans(const T* x, int64_t k, typename Dot::Piece* pieces, int64_t padded, float* scales) {
  for (int64_t start = 0; start < padded; start += kSpan) {
    const int64_t count = k - start < kSpan ? k - start : kSpan, room = padded - start < kSpan ? padded - start : kSpan;
    const Quantizer quantize = Quantizer::aligned(x + start, count);
    *scales++ = quantize_values<Dot>(quantize, x + start, count, pieces + start, room);
  }
}

// Where the factors of a row's spans go (see WordRows).
struct RowFactors {
  float* at;
  int64_t height;  // rows that lie side by side

  void put(int64_t span, float scale, int32_t start, float sum) const {
    float* const to = at + span * 3 * height;
    to[0] = scale;
    to[height] = __builtin_bit_cast(float, start);
    to[2 * height] = sum;
  }
};

// Quantises a row for a grouped weight, with a scale for every kGroupOfX values.
template <class Dot, class T>
void quantize_groups(const T* x, const Matrix& weight, int8_t* pieces, const RowFactors& out) {
  const int64_t padded = padded_k(weight), halves = kGroupOfX / span_of(weight);
  const auto zero = static_cast<uint32_t>(weight.format.zero - Dot::kCentre);
  int64_t span = 0;
  for (int64_t i = 0; i < padded; i += kGroupOfX) {
    const int64_t left = weight.k - i;
    const F16 values[2] = {load_part(x + i, left), load_part(x + i + 16, left - 16)};
    Extent extent;
    extent.see(values[0]);
    extent.see(values[1]);
    const Quantizer quantize(extent);
    uint32_t sums[2];  // without a sign, since those of a NaN overflow
    for (int half = 0; half < 2; ++half) {
      const I16 whole = quantize(values[half]);
      DotBytes::put(pieces + i + 16 * half, whole);
      sums[half] = static_cast<uint32_t>(sum(whole));
    }
    if (halves == 1) sums[0] += sums[1];
    for (int64_t half = 0; half < halves; ++half, ++span) {
      const float sum = quantize.scale * static_cast<float>(static_cast<int32_t>(sums[half]));
      out.put(span, quantize.scale, static_cast<int32_t>(0 - zero * sums[half]), sum);
    }
  }
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
  const int64_t spans = Dot::kInteger ? spans_of(op.weight) : 0, factor_stride = Grouped<Dot> ? 3 * spans : spans;
  auto* factors = reinterpret_cast<float*>(words + rows * stride);
  auto* scattered = reinterpret_cast<Word*>(worker.own(static_cast<size_t>(stride) * sizeof(Word)));
  const auto put_row = [&](int64_t row) {
    const auto [panel, height, source] = place(row);
    Word* to = words + panel * stride + row - panel;
    Word* together = height == 1 ? to : scattered;
    const T* x = static_cast<const T*>(op.x) + source * k;
    if constexpr (Grouped<Dot>) {
      quantize_groups<Dot>(x, op.weight, reinterpret_cast<int8_t*>(together),
                           {factors + panel * factor_stride + row - panel, height});
    } else if constexpr (Dot::kInteger) {
      quantize_spans<Dot>(x, k, reinterpret_cast<typename Dot::Piece*>(together), padded, factors + row * spans);
    } else {
      widen_row(x, k, together, stride);
    }
    if (height == 1) return;
    for (int64_t i = 0; i < stride; ++i) to[i * height] = together[i];
  };
  worker.for_each(rows, kPanelRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) put_row(row);
  });
  return {words, stride, factors, spans, factor_stride};
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

// Calls f<Dot>() with the way to multiply a weight's lines.
template <class F>
inline void by_format(const Format& format, const F& f) {
  switch (format.scheme) {
    case Scheme::f32:
      return f.template operator()<DotF32>();
    case Scheme::bf16:
      return f.template operator()<DotBf16>();
    case Scheme::int16:
      return f.template operator()<DotInt16>();
    case Scheme::grouped:
      break;
  }
  switch (format.codes) {
    case Codes::bytes:
      return f.template operator()<DotBytes>();
    case Codes::nibbles:
      return f.template operator()<DotNibbles>();
    case Codes::iq4:
      return f.template operator()<DotTable<Codes::iq4>>();
    case Codes::mxfp4:
      return f.template operator()<DotTable<Codes::mxfp4>>();
  }
}

template <class T>
void linear_as(Worker& worker, const LinearOp& op) {
  by_format(op.weight.format, [&]<class Dot>() { multiply<Dot, T>(worker, op); });
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
