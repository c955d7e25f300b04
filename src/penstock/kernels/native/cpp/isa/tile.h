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
// would evict each other from the L1 cache.) Integers also have scales for their products, and, if the weights are
// offset, starts of their sums (else null).
template <class Word>
struct WordRows {
  const Word* words;
  int64_t stride;         // words of a row
  const float* scales;    // [rows][spans]
  const int32_t* starts;  // [rows][starts_stride]: of each part of each group
  int64_t starts_stride;
  int64_t spans;  // scales per row: 1, except for int16

  // The rows from `row` on, the first of a panel.
  WordRows from(int64_t row) const {
    return {words + row * stride, stride, scales == nullptr ? nullptr : scales + row * spans,
            starts == nullptr ? nullptr : starts + row * starts_stride, starts_stride, spans};
  }
};

template <class Dot>
using Rows = WordRows<typename Dot::Word>;

// True if products of two lines are summed before they are widened.
template <class Dot>
concept AddsLines = requires { &Dot::add_lines; };

// True if sums of integers are scaled and added span by span.
template <class Dot>
concept HasSpans = requires { Dot::kSpanLines; };

template <class Dot>
inline int64_t words_along(const Matrix& weight) {
  return padded_k(weight) / Dot::kLineValues * Dot::kWords;
}

inline const uint8_t* block_lines(const Matrix& weight, int64_t block) {
  return weight.lines + block * kColumns * padded_k(weight) * bits_of(weight.scheme) / 8;
}

// The number of scales of a row of x.
template <class Dot>
inline int64_t spans_of(const Matrix& weight) {
  return HasSpans<Dot> ? divide_up(padded_k(weight), kSpan) : 1;
}

inline int64_t groups_of(const Matrix& weight) {
  return weight.scheme == Scheme::int4 ? divide_up(weight.k, weight.group) : 1;
}

// The number of parts of a group whose sums `Dot` can hold.
template <class Dot>
inline int64_t parts_of(const Matrix& weight) {
  if constexpr (Dot::kMostSummed == 0) return 1;
  else return weight.group % Dot::kMostSummed == 0 ? weight.group / Dot::kMostSummed : divide_up(weight.group, 32);
}

// Writes the result from rows' sums of a block, [rows][16]. A function pointer instead of a template argument, so that
// one tile serves all types of x and of the result.
struct Finish {
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

// The sums of blocks [begin, begin + count) between runs: [count][rows][16] words. For int4: scaled totals.
struct Kept {
  float* sums;
  int64_t begin, count, rows;

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

// The number of blocks of a tile with `rows` rows.
template <class Dot>
constexpr int64_t blocks_beside(int64_t rows) {
  const int64_t most = Dot::kTileSums / rows;
  return most < 1 ? 1 : most > kSums ? kSums : most;
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
  using Sum = std::conditional_t<Dot::kInteger, int32_t, float>;
  typename Dot::Vector sums[M][N];
  load_kept<Sum>(kept, row, block, sums);
  dot_run<Dot, M, N>(x.words + row * x.stride + run.first * Dot::kWords * M, run, sums);
  store_kept<Sum>(kept, row, block, sums);
}

// For bytes, whose products are summed in 16 bits, two lines at a time. The sums of more than two rows do not fit in
// the registers beside both lines, so they stay in the L1 cache.
template <class Dot, int M, int N>
inline void add_two_lines(const Run& run, const Rows<Dot>& x, int64_t row, int64_t block, const Kept& kept) {
  const auto* words = x.words + row * x.stride + run.first * M;
  const uint8_t *lines = run.lines, *ahead = run.ahead;
  typename Dot::Vector sums[M][N];
  constexpr bool kInRegisters = M * N <= Dot::kTileSums && M <= 2;
  if constexpr (kInRegisters) load_kept<int32_t>(kept, row, block, sums);
  const auto walk = [&](int64_t steps) __attribute__((always_inline)) {
    for (; steps > 0; steps -= 2, words += 2 * M, lines += 2 * kLineBytes) {
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        fetch(ahead + n * run.ahead_stride);
        fetch(ahead + run.ahead_step + n * run.ahead_stride);
        const uint8_t* line = lines + n * run.block_stride;
        const auto first = Dot::widen(line, 0), second = Dot::widen(line + kLineBytes, 0);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          if constexpr (kInRegisters) {
            sums[m][n] = Dot::add_lines(sums[m][n], words[m], first, words[M + m], second);
          } else {
            auto* const place = reinterpret_cast<int32_t*>(kept.of(row + m, block + n));
            store(place, Dot::add_lines(load(place), words[m], first, words[M + m], second));
          }
        }
      }
      ahead += 2 * run.ahead_step;
    }
  };
  walk_along<M>(run, ahead, walk);
  if constexpr (kInRegisters) store_kept<int32_t>(kept, row, block, sums);
}

// Sums one span after the other. Each sum is scaled by x's scale and added to the totals. Not inlined: see add_groups.
template <class Dot, int M, int N>
[[gnu::noinline]] void add_spans(const Run& run, const Rows<Dot>& x, int64_t row, int64_t block, const Kept& kept) {
  const auto* words = x.words + row * x.stride + run.first * M;
  const float* scales = x.scales + row * x.spans + run.first / Dot::kSpanLines;
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

// Sums one group after the other. Each sum is scaled before it is added. Not inlined, since GCC would then keep some
// sums in memory.
template <class Dot, int M, int N>
[[gnu::noinline]] void add_groups(const Matrix& weight, const Run& run, const Rows<Dot>& x, int64_t row, int64_t block,
                                  const Kept& kept) {
  const int64_t groups = groups_of(weight), parts = parts_of<Dot>(weight);
  const int64_t per_group = weight.group / Dot::kLineValues, begin = run.first / per_group;
  const auto* words = x.words + row * x.stride + run.first * Dot::kWords * M;
  const int32_t* starts = x.starts + row * x.starts_stride + begin * parts;
  Run part = run;
  part.steps = per_group / parts;
  const auto sum_part = [&](typename Dot::Vector(&sums)[M][N]) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sums[m][n] = splat(starts[m * x.starts_stride]);
    }
    dot_run<Dot, M, N>(words, part, sums);
    words += part.steps * Dot::kWords * M;
    part.lines += part.steps * kLineBytes;
    part.ahead += part.steps * part.ahead_step;
    ++starts;
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sums[m][n] = Dot::whole(sums[m][n]);
    }
  };
  F16 totals[M][N];
  load_kept<float>(kept, row, block, totals);
  for (int64_t group = begin; group < begin + run.steps / per_group; ++group) {
    I16 sums[M][N];
    sum_part(sums);
    for (int64_t i = 1; i < parts; ++i) {
      I16 more[M][N];
      sum_part(more);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) sums[m][n] = add(sums[m][n], more[m][n]);
      }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      const F16 scale = load_half(weight.group_scales + ((block + n) * groups + group) * kColumns);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) totals[m][n] = fma(to_float(sums[m][n]), scale, totals[m][n]);
    }
  }
  store_kept<float>(kept, row, block, totals);
}

template <class Dot, int M, int N>
inline void tile(const Matrix& weight, const Run& run, const Rows<Dot>& x, int64_t row, int64_t block,
                 const Kept& kept) {
  if constexpr (Dot::kGrouped) {
    add_groups<Dot, M, N>(weight, run, x, row, block, kept);
  } else if constexpr (AddsLines<Dot>) {
    add_two_lines<Dot, M, N>(run, x, row, block, kept);
  } else if constexpr (HasSpans<Dot>) {
    add_spans<Dot, M, N>(run, x, row, block, kept);
  } else {
    add_products<Dot, M, N>(weight, run, x, row, block, kept);
  }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
