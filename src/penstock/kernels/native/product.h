// Rows of words times blocks of packed weights, tile by tile.
//
// A sum runs along k in one order, whatever the number of rows: that makes a row's result independent of its
// neighbours. Sums of integers are exact anyway.

namespace penstock::PENSTOCK_ISA {
namespace {

// How many rows `Dot` multiplies together, at most.
template <class Dot>
consteval int64_t panel_rows() {
  if constexpr (requires { Dot::kPanelRows; }) return Dot::kPanelRows;
  else return kPanelRows;
}

// Rows of x are multiplied together in panels: as few as there can be, and of about the same height.
struct Panels {
  int64_t count;
  int64_t low;   // rows of a panel;
  int64_t tall;  // so many, the first ones, have one more

  Panels(int64_t rows, int64_t most)
      : count(divide_up(rows, most)), low(count == 0 ? 0 : rows / count), tall(count == 0 ? 0 : rows % count) {}

  template <class Dot>
  static Panels of(int64_t rows) {
    return {rows, panel_rows<Dot>()};
  }

  int64_t highest() const { return low + (tall != 0); }
  int64_t first_row(int64_t panel) const { return panel * low + (panel < tall ? panel : tall); }
  // Of the first `panels`, those of the greatest height.
  int64_t highest_of(int64_t panels) const { return tall == 0 || panels < tall ? panels : tall; }
  int64_t of_row(int64_t row) const {
    const int64_t panel = row / (low + 1);
    return panel < tall ? panel : tall + (row - tall * (low + 1)) / low;
  }
};

// Rows of x as words, [panel][word][height]: what a tile multiplies next lies together. Rows a power of two apart would
// be in one another's way in the first cache. Of integers also what their products are to be scaled with, and, where
// the weights are offset, what the sums start from (null otherwise).
template <class Word>
struct WordRows {
  const Word* words;
  int64_t stride;         // words of a row
  const float* scales;    // [rows]
  const int32_t* starts;  // [rows][starts_stride]: of each part of each group
  int64_t starts_stride;

  // From the first row of a panel on.
  WordRows from(int64_t row) const {
    return {words + row * stride, stride, scales == nullptr ? nullptr : scales + row,
            starts == nullptr ? nullptr : starts + row * starts_stride, starts_stride};
  }
};

template <class Dot>
using Rows = WordRows<typename Dot::Word>;

// Whether products of two lines are summed before they are widened.
template <class Dot>
concept AddsLines = requires { &Dot::add_lines; };

template <class Dot>
inline int64_t words_along(const Matrix& weight) {
  return padded_k(weight) / Dot::kLineValues * Dot::kWords;
}

inline int64_t groups_of(const Matrix& weight) {
  return weight.scheme == Scheme::int4 ? divide_up(weight.k, weight.group) : 1;
}

// Into how many parts a group is cut, so that `Dot` can hold their sums.
template <class Dot>
inline int64_t parts_of(const Matrix& weight) {
  if constexpr (Dot::kMostSummed == 0) return 1;
  else return weight.group % Dot::kMostSummed == 0 ? weight.group / Dot::kMostSummed : divide_up(weight.group, 32);
}

// What becomes of rows' sums of block `block`, [rows][16]. A call, not a template argument: there is one tile for all
// types of x and the result.
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
  // What is to be fetched meanwhile for the run that comes next: of each block `ahead_step` bytes a step.
  const uint8_t* ahead;
  int64_t ahead_stride, ahead_step;

  Run past(int64_t blocks) const {
    Run later = *this;
    later.lines += blocks * block_stride;
    later.ahead += blocks * ahead_stride;
    return later;
  }
};

// The sums of blocks [begin, begin + count), from run to run: [count][rows][16] words. Of int4: scaled totals.
struct Kept {
  float* sums;
  int64_t begin, count, rows;

  float* of(int64_t row, int64_t block) const { return sums + ((block - begin) * rows + row) * kColumns; }
};

// A tile's sums, between the registers and where they are kept. `Sum`: what they are, int32_t or float.
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

// How many blocks a tile of so many rows has.
template <class Dot>
constexpr int64_t blocks_beside(int64_t rows) {
  const int64_t most = Dot::kTileSums / rows;
  return most < 1 ? 1 : most > kSums ? kSums : most;
}

// The products of a panel along a run.
template <class Dot, int M, int N>
[[gnu::always_inline]] inline void dot_run(const typename Dot::Word* x, const Run& run,
                                           typename Dot::Vector (&sums)[M][N]) {
  const uint8_t *lines = run.lines, *ahead = run.ahead;
  for (int64_t step = 0; step < run.steps; ++step, x += M * Dot::kWords, lines += kLineBytes, ahead += run.ahead_step) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) fetch(ahead + n * run.ahead_stride);
    dot_line<Dot, M, N>(x, 1, M, lines, run.block_stride, sums);
  }
}

// `row`: the panel's first.
template <class Dot, int M, int N>
inline void add_products(const Matrix&, const Run& run, const Rows<Dot>& x, int64_t row, int64_t block,
                         const Kept& kept) {
  using Sum = std::conditional_t<Dot::kInteger, int32_t, float>;
  typename Dot::Vector sums[M][N];
  load_kept<Sum>(kept, row, block, sums);
  dot_run<Dot, M, N>(x.words + row * x.stride + run.first * Dot::kWords * M, run, sums);
  store_kept<Sum>(kept, row, block, sums);
}

// Of bytes whose products are summed in 16 bits, two lines at a time. The sums of more rows than two would not find room
// in the registers beside both lines: they stay in the first cache.
template <class Dot, int M, int N>
inline void add_two_lines(const Run& run, const Rows<Dot>& x, int64_t row, int64_t block, const Kept& kept) {
  const auto* words = x.words + row * x.stride + run.first * M;
  const uint8_t *lines = run.lines, *ahead = run.ahead;
  typename Dot::Vector sums[M][N];
  constexpr bool kInRegisters = M * N <= Dot::kTileSums && M <= 2;
  if constexpr (kInRegisters) load_kept<int32_t>(kept, row, block, sums);
  for (int64_t step = 0; step < run.steps; step += 2, words += 2 * M, lines += 2 * kLineBytes) {
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
  if constexpr (kInRegisters) store_kept<int32_t>(kept, row, block, sums);
}

// The sums of one group after the other, of which each is scaled before it is added. Inlined, its sums do not all find
// room in the registers.
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
  } else {
    add_products<Dot, M, N>(weight, run, x, row, block, kept);
  }
}

// Rows [row, end), in panels of M, and `count` blocks from `begin` on. Goes on in `run` with what is to be fetched.
template <class Dot, int M>
void panels_by_blocks(const Matrix& weight, Run& run, const Rows<Dot>& x, int64_t row, int64_t end, int64_t begin,
                      int64_t count, const Kept& kept) {
  constexpr int N = blocks_beside<Dot>(M);
  for (; row < end; row += M, run.ahead += run.steps * run.ahead_step) {
    Run at = run;
    int64_t block = begin;
    for (; block + N <= begin + count; block += N, at = at.past(N)) tile<Dot, M, N>(weight, at, x, row, block, kept);
    if constexpr (N > 1) {
      for (; block < begin + count; ++block, at = at.past(1)) tile<Dot, M, 1>(weight, at, x, row, block, kept);
    }
  }
}

// Lines of a run as one word each: exact.
template <class Dot>
Run widened(const Run& run, int64_t blocks, typename Dot::Word* out) {
  Run wide = run;
  wide.lines = reinterpret_cast<const uint8_t*>(out);
  wide.block_stride = run.steps * Dot::kWords * kLineBytes;
  wide.first = run.first * Dot::kWords;
  wide.steps = run.steps * Dot::kWords;
  wide.ahead_step = divide_up(run.ahead_step, Dot::kWords);
  for (int64_t block = 0; block < blocks; ++block) {
    const uint8_t* line = run.lines + block * run.block_stride;
    for (int64_t step = 0; step < run.steps; ++step, line += kLineBytes) {
#pragma GCC unroll 16
      for (int word = 0; word < Dot::kWords; ++word, out += kColumns) store(out, Dot::widen(line, word));
    }
  }
  return wide;
}

template <class Dot>
void start_sums(const Matrix& weight, const Rows<Dot>& x, const Kept& kept) {
  for (int64_t block = kept.begin; block < kept.begin + kept.count; ++block) {
    for (int64_t row = 0; row < kept.rows; ++row) {
      if constexpr (AddsLines<Dot>) {
        store(reinterpret_cast<int32_t*>(kept.of(row, block)), Dot::start(load(weight.column_sums + block * kColumns)));
      } else if constexpr (Dot::kOffset != 0 && !Dot::kGrouped) {
        store(reinterpret_cast<int32_t*>(kept.of(row, block)), splat(x.starts[row * x.starts_stride]));
      } else {
        store(kept.of(row, block), zero_f());
      }
    }
  }
}

// `first`: which row of all the first is.
template <class Dot>
void finish_sums(const Matrix& weight, const Rows<Dot>& x, int64_t first, const Kept& kept, const Finish& finish) {
  for (int64_t block = kept.begin; block < kept.begin + kept.count; ++block) {
    float* sums = kept.of(0, block);
    if constexpr (Dot::kGrouped) {
      for (int64_t row = 0; row < kept.rows; ++row) {
        store(sums + row * kColumns, mul(load(sums + row * kColumns), splat(x.scales[row])));
      }
    } else if constexpr (Dot::kInteger) {
      const F16 scales = load(weight.column_scales + block * kColumns);
      for (int64_t row = 0; row < kept.rows; ++row) {
        const I16 whole = load(reinterpret_cast<const int32_t*>(sums + row * kColumns));
        store(sums + row * kColumns, mul(to_float(whole), mul(scales, splat(x.scales[row]))));
      }
    }
    finish(first, kept.rows, block, sums);
  }
}

// Some panels that follow one another: `high` of M rows, then `low` of one less.
struct PanelRange {
  int64_t high, low;
};

template <class Dot, int M>
void panels_along(const Matrix& weight, Run run, const Rows<Dot>& x, const PanelRange& panels, int64_t begin,
                  int64_t count, const Kept& kept) {
  run.ahead_step = divide_up(run.ahead_step, panels.high + panels.low);
  const int64_t high_rows = panels.high * M;
  panels_by_blocks<Dot, M>(weight, run, x, 0, high_rows, begin, count, kept);
  if constexpr (M > (panel_rows<Dot>() + 1) / 2) {  // of two panels or more none is lower
    panels_by_blocks<Dot, M - 1>(weight, run, x, high_rows, kept.rows, begin, count, kept);
  }
}

// The blocks and rows that are kept, along a run: a few blocks at a time, whose lines stay in the first cache while all
// rows pass by, and those of the next come from memory meanwhile.
template <class Dot, int M>
void blocks_along(const Matrix& weight, Run run, const Rows<Dot>& x, const PanelRange& panels, const uint8_t* next_run,
                  const Kept& kept, typename Dot::Word* wide) {
  using Wide = typename Dot::Wide;
  constexpr bool kWidens = !std::is_same_v<Dot, Wide> && M > kPanelRows - kWideHeights;
  const int64_t at_once = wide == nullptr ? blocks_beside<Dot>(M) : blocks_beside<Wide>(M);
  const int64_t end = kept.begin + kept.count;
  for (int64_t block = kept.begin; block < end; block += at_once, run = run.past(at_once)) {
    const int64_t count = end - block < at_once ? end - block : at_once;
    run.ahead = block + at_once < end ? run.lines + at_once * run.block_stride : next_run;
    if constexpr (kWidens) {
      if (wide != nullptr) {
        panels_along<Wide, M>(weight, widened<Dot>(run, count, wide), x, panels, block, count, kept);
        continue;
      }
    }
    panels_along<Dot, M>(weight, run, x, panels, block, count, kept);
  }
}

// How many groups of rows are multiplied one after the other: a run of a group's words stays in the second cache.
inline int64_t row_groups(int64_t rows) {
  const int64_t groups = (rows + kRowsTogether / 2) / kRowsTogether;
  return groups < 1 ? 1 : groups;
}

// Blocks [begin, end) of the rows of a group, run by run.
template <class Dot>
void blocks_of(Worker& worker, const Matrix& weight, const Rows<Dot>& x, int64_t rows, int64_t group, int64_t begin,
               int64_t end, const Finish& finish) {
  const bool wide = !std::is_same_v<Dot, typename Dot::Wide> && rows >= kWideRows;
  const int64_t steps = x.stride / Dot::kWords, block_stride = steps * kLineBytes;
  const Panels panels = Panels::of<Dot>(rows);
  const int64_t together = divide_up(panels.count, row_groups(rows)), first_panel = group * together;
  const int64_t last_panel = first_panel + together < panels.count ? first_panel + together : panels.count;
  if (first_panel >= last_panel) return;
  const int64_t high = panels.highest_of(last_panel) - panels.highest_of(first_panel);
  const PanelRange range{high, last_panel - first_panel - high};
  const int64_t row = panels.first_row(first_panel), row_count = panels.first_row(last_panel) - row;
  // A run is of whole groups of values. One panel needs no runs.
  const int64_t unit = Dot::kGrouped ? weight.group / Dot::kLineValues : 1;
  const int64_t run_steps = panels.count == 1 ? steps : divide_up(kRunWords / Dot::kWords, unit) * unit;
  const int64_t height = panels.highest();
  const int64_t room = wide ? run_steps * Dot::kWords * kColumns * blocks_beside<typename Dot::Wide>(height) : 0;
  auto* own = reinterpret_cast<float*>(worker.own((room + row_count * (end - begin) * kColumns) * sizeof(float)));
  auto* words = wide ? reinterpret_cast<typename Dot::Word*>(own) : nullptr;
  const uint8_t* lines = weight.lines + begin * block_stride;
  // What this thread will take next if all are as fast; behind the last piece nothing.
  const int64_t later = begin + (end - begin) * worker.count();
  const uint8_t* next_piece = later < divide_up(weight.n, kColumns) ? weight.lines + later * block_stride : lines;
  const Rows<Dot> from = x.from(row);
  const Kept kept{own + room, begin, end - begin, row_count};
  start_sums<Dot>(weight, from, kept);
  for (int64_t first = 0; first < steps; first += run_steps) {
    const bool last = steps - first <= run_steps;
    const int64_t count = last ? steps - first : run_steps;
    const uint8_t* next = last ? next_piece : lines + (first + run_steps) * kLineBytes;
    const Run run{lines + first * kLineBytes, block_stride, first, count, nullptr, block_stride, kLineBytes};
    for_rows<panel_rows<Dot>()>(height, [&]<int M>() { blocks_along<Dot, M>(weight, run, from, range, next, kept, words); });
  }
  finish_sums<Dot>(weight, from, row, kept, finish);
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
