// A tile: some rows of words times some blocks of packed weights, along a run of lines.
//
// A sum runs along k in one order for any number of rows, so a row's result does not depend on its neighbours. Sums of
// integers are exact.

namespace penstock::PENSTOCK_ISA {
namespace {

// The most rows that `Dot` multiplies together.
template <class Dot>
consteval int64_t panel_rows() {
  if constexpr (requires { Dot::kPanelRows; }) return Dot::kPanelRows;
  else return kPanelRows;
}

// The words along k of a run.
template <class Dot>
consteval int64_t run_words() {
  if constexpr (requires { Dot::kRunWords; }) return Dot::kRunWords;
  else return kRunWords;
}

// The division of rows of x into panels that are multiplied together: as few as possible, of heights that differ by at
// most one.
struct Panels {
  int64_t count;
  int64_t low;   // rows of a panel
  int64_t tall;  // how many panels, the first ones, have one row more

  Panels(int64_t rows, int64_t most)
      : count(divide_up(rows, most)), low(count == 0 ? 0 : rows / count), tall(count == 0 ? 0 : rows % count) {}

  template <class Dot>
  static Panels of(int64_t rows) {
    return {rows, panel_rows<Dot>()};
  }

  int64_t highest() const { return low + (tall != 0); }
  int64_t first_row(int64_t panel) const { return panel * low + (panel < tall ? panel : tall); }
  // How many of the first `panels` have the greatest height.
  int64_t highest_of(int64_t panels) const { return tall == 0 || panels < tall ? panels : tall; }
  int64_t of_row(int64_t row) const {
    const int64_t panel = row / (low + 1);
    return panel < tall ? panel : tall + (row - tall * (low + 1)) / low;
  }
};

// Rows of x as words, [panel][word][height]: words that a tile multiplies next lie together. (Rows a power of two apart
// would evict each other from the L1 cache.)
//
// Rows of integers are divided into spans along k, which have a scale. For grouped weights a span also has a start,
// which subtracts the weights' zero from its sum of products, and the scaled sum of its values and of those before it in
// the weights' group: a minimum is multiplied with that of the group's last span.
template <class Word>
struct WordRows {
  const Word* words;
  int64_t stride;        // words of a row
  const float* factors;  // int16: scales, [row][span]; grouped: [panel][span][scale, start, sum][height]
  int64_t spans;
  int64_t factor_stride;  // factors of a row

  // The rows from `row` on, the first of a panel.
  WordRows from(int64_t row) const {
    return {words + row * stride, stride, factors + row * factor_stride, spans, factor_stride};
  }
};

template <class Dot>
using Rows = WordRows<typename Dot::Word>;

// True if a weight's codes are grouped.
template <class Dot>
concept Grouped = requires { Dot::kCentre; };

// True if sums of integers are scaled and added span by span.
template <class Dot>
concept HasSpans = requires { Dot::kSpanLines; };

template <class Dot>
inline int64_t words_along(const Matrix& weight) {
  return padded_k(weight) / Dot::kLineValues * Dot::kWords;
}

inline const uint8_t* block_lines(const Matrix& weight, int64_t block) {
  return weight.lines + block * kColumns * padded_k(weight) * bits_of(weight.format) / 8;
}

// Values along k whose products are summed as integers: of a grouped weight those that share a scale, and whose factors
// in x do.
inline int64_t span_of(const Matrix& weight) {
  if (weight.format.scheme != Scheme::grouped) return kSpan;
  return weight.format.group < kGroupOfX ? weight.format.group : kGroupOfX;
}

inline int64_t spans_of(const Matrix& weight) { return divide_up(padded_k(weight), span_of(weight)); }

inline int64_t groups_of(const Matrix& weight) { return padded_k(weight) / weight.format.group; }

// Walks along the scales or the minima of consecutive blocks, a group at a time. Those by column are not multiplied by
// the column's power of two.
class GroupFactors {
 public:
  // `factors` may be null if they are not read. `super`: the second level, if there is one.
  GroupFactors(const Matrix& weight, const void* factors, const uint16_t* super, int64_t block, int64_t group)
      : scales_(weight.format.scales) {
    if (factors == nullptr) return;
    const int64_t groups = groups_of(weight);
    step_ = kColumns * bytes_of(scales_);
    stride_ = groups * step_;
    at_ = static_cast<const std::byte*>(factors) + block * stride_ + group * step_;
    if (scales_ != Scales::two_levels) return;
    together_ = kSuper / weight.format.group;
    left_ = together_ - group % together_;
    super_stride_ = divide_up(groups, together_) * kColumns;
    super_ = super + block * super_stride_ + group / together_ * kColumns;
  }

  // Those of the n-th block.
  [[gnu::always_inline]] F16 operator()(int64_t n) const {
    const std::byte* at = at_ + n * stride_;
    if (scales_ == Scales::f32) return load(reinterpret_cast<const float*>(at));
    if (scales_ != Scales::two_levels) return load_half(reinterpret_cast<const uint16_t*>(at));
    return mul(load_half(super_ + n * super_stride_), load(reinterpret_cast<const int8_t*>(at)));
  }

  void next() {
    at_ += step_;
    if (scales_ == Scales::two_levels && --left_ == 0) {
      left_ = together_;
      super_ += kColumns;
    }
  }

 private:
  Scales scales_;
  const std::byte* at_ = nullptr;
  const uint16_t* super_ = nullptr;
  int64_t step_ = 0, stride_ = 0, super_stride_ = 0;
  int64_t together_ = 1, left_ = 1;  // groups that share a second level, and those until the next one
};

inline GroupFactors scales_of(const Matrix& weight, int64_t block, int64_t group) {
  return {weight, weight.scales, weight.super_scales, block, group};
}

inline GroupFactors mins_of(const Matrix& weight, int64_t block, int64_t group) {
  return {weight, weight.mins, weight.super_mins, block, group};
}

// Writes the result from rows' sums of a block, [rows][16]. A function pointer instead of a template argument, so that
// one tile serves all types of x and of the result.
struct ResultWriter {
  const LinearOp& op;
  void (*write)(const LinearOp& op, int64_t row, int64_t rows, int64_t block, const float* sums);

  void operator()(int64_t row, int64_t rows, int64_t block, const float* sums) const {
    write(op, row, rows, block, sums);
  }
};

// Lines [first, first + steps) along k of some blocks.
struct Run {
  const uint8_t* lines;  // the first block's
  int64_t block_stride;  // bytes
  int64_t first, steps;
  // Memory to prefetch for the next run: `ahead_step` bytes of each block per step.
  const uint8_t* ahead;
  int64_t ahead_stride, ahead_step;
  // With one row, the last `tail` steps prefetch from `then` on instead.
  int64_t tail = 0;
  const uint8_t* then = nullptr;

  Run past(int64_t blocks) const {
    Run later = *this;
    later.lines += blocks * block_stride;
    later.ahead += blocks * ahead_stride;
    return later;
  }
};

// The sums of blocks [begin, begin + count) between runs: [count][rows][16] floats.
struct Kept {
  float* sums;
  int64_t begin, count, rows;
  int64_t first_row;              // of the product
  bool fresh = true;              // during the first run: there are no sums yet
  const ResultWriter* finish = nullptr;  // during the last run: what to do with sums instead of keeping them

  float* of(int64_t row, int64_t block) const { return sums + ((block - begin) * rows + row) * kColumns; }
};

// Move a tile's sums between registers and memory. `Sum`: int32_t or float.
template <class Sum, int M, int N, class Vector>
[[gnu::always_inline]] inline void load_kept(const Kept& kept, int64_t row, int64_t block, Vector (&sums)[M][N]) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) sums[m][n] = load(reinterpret_cast<const Sum*>(kept.of(row + m, block + n)));
  }
}

template <class Sum, int M, int N, class Vector>
[[gnu::always_inline]] inline void store_kept(const Kept& kept, int64_t row, int64_t block,
                                              const Vector (&sums)[M][N]) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) store(reinterpret_cast<Sum*>(kept.of(row + m, block + n)), sums[m][n]);
  }
}

// Begin and end a tile's sums, which no other run adds to at the same time.
template <int M, int N>
[[gnu::always_inline]] inline void begin_sums(const Kept& kept, int64_t row, int64_t block, F16 (&sums)[M][N]) {
  kept.fresh ? clear(sums, zero_f()) : load_kept<float>(kept, row, block, sums);
}

template <int M, int N>
[[gnu::always_inline]] inline void end_sums(const Kept& kept, int64_t row, int64_t block, const F16 (&sums)[M][N]) {
  if (kept.finish == nullptr) return store_kept<float>(kept, row, block, sums);
  alignas(64) float done[N][M * kColumns];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) store(done[n] + m * kColumns, sums[m][n]);
  }
  for (int n = 0; n < N; ++n) (*kept.finish)(kept.first_row + row, M, block + n, done[n]);
}

// The most blocks of a tile with several rows.
template <class Dot>
consteval int64_t most_blocks() {
  if constexpr (requires { Dot::kMostBlocks; }) return Dot::kMostBlocks;
  else return kSums;
}

// The number of blocks of a tile with `rows` rows.
template <class Dot>
constexpr int64_t blocks_beside(int64_t rows) {
  const int64_t most = rows == 1 ? kSums : most_blocks<Dot>(), fit = Dot::kTileSums / rows;
  return fit < 1 ? 1 : fit > most ? most : fit;
}

// Calls walk(steps) for all of a run. With one row, `ahead` changes before the tail.
template <int M, class F>
[[gnu::always_inline]] inline void walk_along(const Run& run, const uint8_t*& ahead, const F& walk) {
  if constexpr (M == 1) {
    walk(run.steps - run.tail);
    ahead = run.then;
    walk(run.tail);
  } else {
    walk(run.steps);
  }
}

// Adds the products of a panel along a run.
template <class Dot, int M, int N>
[[gnu::always_inline]] inline void dot_run(const typename Dot::Word* x, const Run& run,
                                           typename Dot::Vector (&sums)[M][N]) {
  const uint8_t *lines = run.lines, *ahead = run.ahead;
  const auto walk = [&](int64_t steps) __attribute__((always_inline)) {
    for (; steps > 0; --steps, x += M * Dot::kWords, lines += kLineBytes, ahead += run.ahead_step) {
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) fetch(ahead + n * run.ahead_stride);
      dot_line<Dot, M, N>(x, 1, M, lines, run.block_stride, sums);
    }
  };
  walk_along<M>(run, ahead, walk);
}

// `row`: the first of the panel.
template <class Dot, int M, int N>
inline void add_products(const Matrix&, const Run& run, const Rows<Dot>& x, int64_t row, int64_t block,
                         const Kept& kept) {
  typename Dot::Vector sums[M][N];
  begin_sums(kept, row, block, sums);
  dot_run<Dot, M, N>(x.words + row * x.stride + run.first * Dot::kWords * M, run, sums);
  end_sums(kept, row, block, sums);
}

// Sums one span after the other. Each sum is scaled by x's scale and added to the totals. Not inlined: see add_groups.
template <class Dot, int M, int N>
[[gnu::noinline]] void add_spans(const Run& run, const Rows<Dot>& x, int64_t row, int64_t block, const Kept& kept) {
  const auto* words = x.words + row * x.stride + run.first * M;
  const float* scales = x.factors + row * x.spans + run.first / Dot::kSpanLines;
  Run part = run;
  for (int64_t left = run.steps; left > 0; left -= part.steps, ++scales) {
    part.steps = left < Dot::kSpanLines ? left : Dot::kSpanLines;
    part.tail = left > part.steps ? 0 : run.tail < part.steps ? run.tail : part.steps;
    typename Dot::Vector sums[M][N];
    clear(sums, Dot::zero());
    dot_run<Dot, M, N>(words, part, sums);
    words += part.steps * M;
    part.lines += part.steps * kLineBytes;
    part.ahead += part.steps * part.ahead_step;
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const F16 scale = splat(scales[m * x.spans]);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        float* const place = kept.of(row + m, block + n);
        store(place, fma(to_float(sums[m][n]), scale, load(place)));
      }
    }
  }
}

// Adds the products of the lines of a span, which is `kSteps` lines long.
template <class Dot, int kSteps, int M, int N>
[[gnu::always_inline]] inline void dot_span(const typename Dot::Word* x, const uint8_t* lines, const Run& run,
                                            const uint8_t* ahead, typename Dot::Vector (&sums)[M][N]) {
#pragma GCC unroll 16
  for (int step = 0; step < kSteps; ++step, x += M * Dot::kWords, lines += kLineBytes, ahead += run.ahead_step) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) fetch(ahead + n * run.ahead_stride);
    dot_line<Dot, M, N>(x, 1, M, lines, run.block_stride, sums);
  }
}

// Sums span after span as integers, scales each sum, and adds minima once a group. If inlined, GCC puts sums in memory.
template <class Dot, int M, int N>
[[gnu::noinline]] void add_groups(const Matrix& weight, const Run& run, const Rows<Dot>& x, int64_t row, int64_t block,
                                  const Kept& kept) {
  constexpr int kSteps = kGroupOfX / Dot::kLineValues;
  const int64_t span = span_of(weight), steps = span / Dot::kLineValues, per_group = weight.format.group / span;
  const int64_t begin = run.first / steps, end = begin + run.steps / steps, tail = end - run.tail / steps;
  const auto* words = x.words + row * x.stride + run.first * Dot::kWords * M;
  const float* factors = x.factors + row * x.factor_stride + begin * 3 * M;
  const uint8_t *lines = run.lines, *ahead = run.ahead;
  const bool has_mins = weight.mins != nullptr;
  GroupFactors scales = scales_of(weight, block, begin / per_group);
  GroupFactors mins = mins_of(weight, block, begin / per_group);
  F16 totals[M][N];
  begin_sums(kept, row, block, totals);
  for (int64_t i = begin, left = per_group; i < end; ++i, factors += 3 * M) {
    if (M == 1 && i == tail) ahead = run.then;
    const auto* starts = reinterpret_cast<const int32_t*>(factors + M);
    typename Dot::Vector sums[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sums[m][n] = Dot::begin(starts[m]);
    }
    if (steps == kSteps) dot_span<Dot, kSteps, M, N>(words, lines, run, ahead, sums);
    else dot_span<Dot, kSteps / 2, M, N>(words, lines, run, ahead, sums);
    words += steps * M * Dot::kWords;
    lines += steps * kLineBytes;
    ahead += steps * run.ahead_step;
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      const F16 scale = scales(n);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        totals[m][n] = fma(to_float(Dot::end(sums[m][n], starts[m])), mul(scale, splat(factors[m])), totals[m][n]);
      }
    }
    if (--left > 0) continue;
    left = per_group;
    scales.next();
    if (!has_mins) continue;
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      const F16 min = mins(n);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) totals[m][n] = fma(min, splat(factors[2 * M + m]), totals[m][n]);
    }
    mins.next();
  }
  end_sums(kept, row, block, totals);
}

template <class Dot, int M, int N>
inline void tile(const Matrix& weight, const Run& run, const Rows<Dot>& x, int64_t row, int64_t block,
                 const Kept& kept) {
  if constexpr (Grouped<Dot>) {
    add_groups<Dot, M, N>(weight, run, x, row, block, kept);
  } else if constexpr (HasSpans<Dot>) {
    add_spans<Dot, M, N>(run, x, row, block, kept);
  } else {
    add_products<Dot, M, N>(weight, run, x, row, block, kept);
  }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
