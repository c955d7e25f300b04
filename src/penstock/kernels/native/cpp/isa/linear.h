// x weight^T with packed weights: rows of x are converted to words and multiplied, and sums are written. See
// docs/kernels.md.

namespace penstock::PENSTOCK_ISA {
namespace {

// -- writing sums ------------------------------------------------------------------------------------------------

// What sums of a block are multiplied with first: 1 unless columns have scales.
inline F16 column_scales_of(const Matrix& weight, int64_t block) {
  return weight.column_scales == nullptr ? splat(1.0f) : load(weight.column_scales + block * kColumns);
}

// Writes 16 columns of one row, those of the weight's block `block`.
template <class T, class Out>
void write(const LinearOp& op, int64_t row, int64_t block, F16 y) {
  if (op.bias != nullptr) y = add(y, load(static_cast<const float*>(op.bias) + block * kColumns));
  if (is_gated(op.epilogue)) {
    float both[24] = {};
    store(both, y);
    const int64_t column = block * 8, left = op.weight.n / 2 - column;
    y = gated(op.epilogue, load(both), load(both + 8));
    store_part(static_cast<Out*>(op.out) + row * op.stride + column, y, left < 8 ? left : 8);
    return;
  }
  const int64_t column = block * kColumns, at = row * op.stride + column, count = op.weight.n - column;
  if (op.scale != 1.0f) y = mul(y, splat(op.scale));
  if (op.epilogue != Epilogue::none) y = activated(op.epilogue, y);
  if (op.softcap != 0.0f) y = capped(y, op.softcap);
  if (op.residual != nullptr) y = add(y, load_part(static_cast<const T*>(op.residual) + at, count));
  store_part(static_cast<Out*>(op.out) + at, y, count);
}

// The same for whole blocks of columns that have no factor and no bound. Values that do not depend on the row are read
// once, before the loop: the compiler would read them again after each store.
template <class T, class Out, class F>
void write_whole(const LinearOp& op, int64_t row, int64_t rows, int64_t block, const float* sums, const F& activate) {
  const int64_t stride = op.stride, at = row * stride + block * kColumns, last = rows * stride;
  const auto* bias = static_cast<const float*>(op.bias);
  const auto* residual = static_cast<const T*>(op.residual);
  auto* out = static_cast<Out*>(op.out) + at;
  const F16 added = bias == nullptr ? zero_f() : load(bias + block * kColumns);
  const F16 scales = column_scales_of(op.weight, block);
  const bool scaled = op.weight.column_scales != nullptr;
  for (int64_t i = 0; i < last; i += stride, sums += kColumns) {
    F16 y = load(sums);
    if (scaled) y = mul(y, scales);
    if (bias != nullptr) y = add(y, added);
    y = activate(y);
    if (residual != nullptr) y = add(y, load(residual + at + i));
    store(out + i, y);
  }
}

// The same for [rows][16] sums. With an epilogue, the gates of two rows fill one vector and the other halves another.
template <class T, class Out>
void write_rows(const LinearOp& op, int64_t row, int64_t rows, int64_t block, const float* sums) {
  const int64_t last = row + rows;
  const F16 scales = column_scales_of(op.weight, block);
  if (is_gated(op.epilogue)) {
    const F16 bias = op.bias == nullptr ? zero_f() : load(static_cast<const float*>(op.bias) + block * kColumns);
    const int64_t column = block * 8, left = op.weight.n / 2 - column, count = left < 8 ? left : 8;
    for (; row + 2 <= last; row += 2, sums += 2 * kColumns) {
      F16 gates = mul(load(sums), scales), others = mul(load(sums + kColumns), scales);
      if (op.bias != nullptr) gates = add(gates, bias), others = add(others, bias);
      transpose_halves(gates, others);
      alignas(64) Out both[16];
      store(both, gated(op.epilogue, gates, others));
      Out* out = static_cast<Out*>(op.out) + row * op.stride + column;
      __builtin_memcpy(out, both, static_cast<size_t>(count) * sizeof(Out));
      __builtin_memcpy(out + op.stride, both + 8, static_cast<size_t>(count) * sizeof(Out));
    }
  } else if (op.scale == 1.0f && op.softcap == 0.0f && (block + 1) * kColumns <= op.weight.n) {
    const auto all = [&](const auto& activate) { write_whole<T, Out>(op, row, rows, block, sums, activate); };
    if (op.epilogue == Epilogue::none) return all([](F16 y) { return y; });
    if (op.epilogue == Epilogue::gelu) return all([](F16 y) { return gelu(y); });
    return all([epilogue = op.epilogue](F16 y) { return activated(epilogue, y); });
  }
  for (; row < last; ++row, sums += kColumns) write<T, Out>(op, row, block, mul(load(sums), scales));
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

// The places for the factors of a row's spans (see WordRows).
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
void quantize_groups(const T* x, const Matrix& weight, typename Dot::Piece* pieces, const RowFactors& out) {
  const int64_t padded = padded_k(weight), halves = kGroupOfX / span_of(weight);
  const int64_t per_group = weight.format.group / span_of(weight);
  const auto zero = static_cast<uint32_t>(weight.format.zero - Dot::kCentre);
  int64_t span = 0, place = 0;  // in the weights' group
  float group_sum = 0.0f;
  for (int64_t i = 0; i < padded; i += kGroupOfX) {
    const int64_t left = weight.k - i;
    const F16 values[2] = {load_part(x + i, left), load_part(x + i + 16, left - 16)};
    Extent extent;
    extent.see(values[0]);
    extent.see(values[1]);
    const Quantizer quantize(extent);
    const I16 whole[2] = {quantize(values[0]), quantize(values[1])};
    for (int half = 0; half < 2; ++half) Dot::put(pieces + i + 16 * half, whole[half]);
    uint32_t sums[2];  // without a sign, since those of a NaN overflow
    sums[0] = static_cast<uint32_t>(sum(halves == 1 ? add(whole[0], whole[1]) : whole[0]));
    if (halves != 1) sums[1] = static_cast<uint32_t>(sum(whole[1]));
    for (int64_t half = 0; half < halves; ++half, ++span) {
      const float sum = quantize.scale * static_cast<float>(static_cast<int32_t>(sums[half]));
      group_sum = place == 0 ? sum : group_sum + sum;
      place = place + 1 == per_group ? 0 : place + 1;
      out.put(span, quantize.scale, static_cast<int32_t>(0 - zero * sums[half]), group_sum);
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

// As long as the threads convert no more rows than this altogether, each of them converts all rows for itself: rows that
// another one converted would come from its caches, after a barrier.
constexpr int64_t kRowsAlone = 64;

// The bytes of converted rows. A word holds at least one value of x. For a grouped weight it holds four, and the rest is
// enough for what each span has beside them.
inline size_t prepared_bytes(const LinearOp& op, int64_t rows) { return rows * (padded_k(op.weight) + 1) * 4; }

// Converts rows to words: in `memory`, which the threads share, or if there are few in each thread's own.
// place(row): the row's PanelRow.
template <class Dot, class T, class F>
Rows<Dot> prepare(Worker& worker, const LinearOp& op, int64_t rows, std::byte* memory, const F& place) {
  const bool alone = rows * worker.count() <= kRowsAlone;
  if (alone) memory = worker.own(prepared_bytes(op, rows), 1);
  using Word = typename Dot::Word;
  constexpr int64_t kMost = panel_rows<Dot>();
  const int64_t stride = words_along<Dot>(op.weight), k = op.weight.k, padded = padded_k(op.weight);
  auto* words = reinterpret_cast<Word*>(memory);
  const int64_t spans = Dot::kInteger ? spans_of(op.weight) : 0, factor_stride = Grouped<Dot> ? 3 * spans : spans;
  auto* factors = reinterpret_cast<float*>(words + rows * stride);
  auto* apart = reinterpret_cast<Word*>(worker.own(static_cast<size_t>(kMost * stride) * sizeof(Word)));
  // Returns the words of a row, which may be x itself.
  const auto convert = [&](int64_t row, const PanelRow& at, Word* out) -> const Word* {
    const T* x = static_cast<const T*>(op.x) + at.source * k;
    if constexpr (Grouped<Dot>) {
      quantize_groups<Dot>(x, op.weight, reinterpret_cast<typename Dot::Piece*>(out),
                           {factors + at.panel * factor_stride + row - at.panel, at.height});
    } else if constexpr (Dot::kInteger) {
      quantize_spans<Dot>(x, k, reinterpret_cast<typename Dot::Piece*>(out), padded, factors + row * spans);
    } else if constexpr (std::is_same_v<typename Dot::Piece, T>) {  // as they are, with zeros behind them
      if (k == padded && at.height > 1) return reinterpret_cast<const Word*>(x);
      __builtin_memcpy(out, x, static_cast<size_t>(k) * sizeof(T));
      __builtin_memset(reinterpret_cast<T*>(out) + k, 0, static_cast<size_t>(padded - k) * sizeof(T));
    } else {
      widen_row(x, k, out, stride);
    }
    return out;
  };
  const auto convert_all = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const PanelRow first = place(row);
      if (first.panel != row) continue;  // the panel's first row puts all of them
      Word* const panel = words + row * stride;
      if (first.height == 1) {
        convert(row, first, panel);
        continue;
      }
      const Word* each[kMost];
      for (int64_t i = 0; i < first.height; ++i) each[i] = convert(row + i, place(row + i), apart + i * stride);
      for_rows<kMost>(first.height, [&]<int M>() { interleave<M>(each, stride, panel); });
    }
  };
  if (alone) convert_all(0, rows);
  else worker.for_each(rows, kMost, convert_all);
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
  // The rows of one head after those of another.
  const Rows<Dot> x = prepare<Dot, T>(worker, op, rows * op.heads, worker.shared(), [&](int64_t i) {
    const int64_t head = i / rows, row = i % rows;
    return PanelRow::of(panels, head * rows, i, row * op.heads + head);
  });
  const ResultWriter finish{op, written<T>(op)};
  const int64_t blocks = divide_up(op.weight.n, kColumns), items = row_groups(rows) * blocks;
  const int64_t of_head = divide_up(blocks, op.heads);
  worker.for_share(items, grain_of(items, worker.count()), [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t group = begin / blocks, first = begin % blocks, head = first / of_head;
      const int64_t most = (head + 1) * of_head < blocks ? (head + 1) * of_head : blocks;
      const int64_t last = first + end - begin < most ? first + end - begin : most;
      const uint8_t* next = block_lines(op.weight, last % blocks);
      blocks_of<Dot>(worker, op.weight, x.from(head * rows), rows, group, first, last, next, finish);
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
    case Codes::nf4:
      return f.template operator()<DotTable<Codes::nf4>>();
    case Codes::fp4:
      return f.template operator()<DotTable<Codes::fp4>>();
  }
}

template <class T>
void linear_as(Worker& worker, const LinearOp& op) {
  by_format(op.weight.format, [&]<class Dot>() { multiply<Dot, T>(worker, op); });
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
