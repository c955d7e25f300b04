// Rows of words times blocks of packed weights, tile by tile.
//
// A sum runs along k in one order, whatever the number of rows: that makes a row's result independent of its
// neighbours. Sums of integers are exact anyway.

namespace penstock::PENSTOCK_ISA {
namespace {

// Rows of x as words. Of integers also what their products are to be scaled with, and, where the weights are offset,
// what the sums start from (null otherwise).
template <class Word>
struct WordRows {
  const Word* words;
  int64_t stride;
  const float* scales;    // [rows]
  const int32_t* starts;  // [rows][starts_stride]: of each part of each group
  int64_t starts_stride;

  WordRows from(int64_t row) const {
    return {words + row * stride, stride, scales == nullptr ? nullptr : scales + row,
            starts == nullptr ? nullptr : starts + row * starts_stride, starts_stride};
  }
};

template <class Dot>
using Rows = WordRows<typename Dot::Word>;

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

// What becomes of 16 columns of a row, of block `block`. A call, not a template argument: there is one tile for all
// types of x and the result.
struct Finish {
  const LinearOp& op;
  void (*write)(const LinearOp& op, int64_t row, int64_t block, F16 y);

  void operator()(int64_t row, int64_t block, F16 y) const { write(op, row, block, y); }
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

// The sums of blocks [begin, begin + count), from run to run: [rows][count][16] words. Of int4: scaled totals.
struct Kept {
  float* sums;
  int64_t begin, count;

  float* of(int64_t row, int64_t block) const { return sums + (row * count + block - begin) * kColumns; }
};

// How many blocks a tile of so many rows has.
template <class Dot>
constexpr int64_t blocks_beside(int64_t rows) {
  const int64_t most = Dot::kTileSums / rows;
  return most < 1 ? 1 : most > kSums ? kSums : most;
}

// The products along a run. With one row the processor sees by itself where lines come from.
template <class Dot, int M, int N>
[[gnu::always_inline]] inline void dot_run(const typename Dot::Word* x, int64_t x_stride, const Run& run,
                                           typename Dot::Vector (&sums)[M][N]) {
  const uint8_t *lines = run.lines, *ahead = run.ahead;
  for (int64_t step = 0; step < run.steps; ++step, x += Dot::kWords, lines += kLineBytes, ahead += run.ahead_step) {
    if constexpr (M > kAheadRows) {
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) fetch(ahead + n * run.ahead_stride);
    }
    dot_line<Dot, M, N>(x, x_stride, lines, run.block_stride, sums);
  }
}

template <class Dot, int M, int N>
inline void add_products(const Matrix&, const Run& run, const Rows<Dot>& x, int64_t row, int64_t block,
                         const Kept& kept) {
  using Sum = std::conditional_t<Dot::kInteger, int32_t, float>;
  typename Dot::Vector sums[M][N];
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) sums[m][n] = load(reinterpret_cast<const Sum*>(kept.of(row + m, block + n)));
  }
  dot_run<Dot, M, N>(x.words + row * x.stride + run.first * Dot::kWords, x.stride, run, sums);
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) store(reinterpret_cast<Sum*>(kept.of(row + m, block + n)), sums[m][n]);
  }
}

// The sums of one group after the other, of which each is scaled before it is added.
template <class Dot, int M, int N, bool Parts>
inline void add_groups(const Matrix& weight, const Run& run, const Rows<Dot>& x, int64_t row,
                       int64_t block, const Kept& kept) {
  const int64_t groups = groups_of(weight), parts = parts_of<Dot>(weight);
  const int64_t per_group = weight.group / Dot::kLineValues, begin = run.first / per_group;
  const auto* words = x.words + row * x.stride + run.first * Dot::kWords;
  const int32_t* starts = x.starts + row * x.starts_stride + begin * parts;
  Run part = run;
  part.steps = per_group / parts;
  const auto sum_part = [&](typename Dot::Vector(&sums)[M][N]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sums[m][n] = splat(starts[m * x.starts_stride]);
    }
    dot_run<Dot, M, N>(words, x.stride, part, sums);
    words += part.steps * Dot::kWords;
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
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) totals[m][n] = load(kept.of(row + m, block + n));
  }
  for (int64_t group = begin; group < begin + run.steps / per_group; ++group) {
    I16 sums[M][N];
    if constexpr (Parts) {
      clear(sums, zero_i());
      for (int64_t i = 0; i < parts; ++i) {
        I16 more[M][N];
        sum_part(more);
        for (int m = 0; m < M; ++m) {
          for (int n = 0; n < N; ++n) sums[m][n] = add(sums[m][n], more[m][n]);
        }
      }
    } else {
      sum_part(sums);
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      const F16 scale = load_half(weight.group_scales + ((block + n) * groups + group) * kColumns);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) totals[m][n] = fma(to_float(sums[m][n]), scale, totals[m][n]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) store(kept.of(row + m, block + n), totals[m][n]);
  }
}

template <class Dot, int M, int N>
inline void tile(const Matrix& weight, const Run& run, const Rows<Dot>& x, int64_t row, int64_t block,
                 const Kept& kept) {
  if constexpr (Dot::kGrouped) {
    if (parts_of<Dot>(weight) == 1) {
      add_groups<Dot, M, N, false>(weight, run, x, row, block, kept);
    } else {
      add_groups<Dot, M, N, true>(weight, run, x, row, block, kept);
    }
  } else {
    add_products<Dot, M, N>(weight, run, x, row, block, kept);
  }
}

// `rows` rows from `row` on, M at most, and all blocks that are kept.
template <class Dot, int M>
inline void rows_by_blocks(const Matrix& weight, Run run, const Rows<Dot>& x, int64_t row, int64_t rows,
                           const Kept& kept) {
  if constexpr (M > 1) {
    if (rows < M) return rows_by_blocks<Dot, M - 1>(weight, run, x, row, rows, kept);
  }
  constexpr int N = blocks_beside<Dot>(M);
  const int64_t end = kept.begin + kept.count;
  int64_t block = kept.begin;
  for (; block + N <= end; block += N, run = run.past(N)) tile<Dot, M, N>(weight, run, x, row, block, kept);
  if constexpr (N > 1) {
    for (; block < end; ++block, run = run.past(1)) tile<Dot, M, 1>(weight, run, x, row, block, kept);
  }
}

// All rows, in tiles of about the same height.
template <class Dot>
void all_rows(const Matrix& weight, Run run, const Rows<Dot>& x, int64_t rows, const Kept& kept) {
  int64_t tiles = divide_up(rows, Dot::kTileRows);
  run.ahead_step = divide_up(run.ahead_step, tiles);
  for (int64_t row = 0; row < rows; --tiles, run.ahead += run.steps * run.ahead_step) {
    const int64_t count = divide_up(rows - row, tiles);
    rows_by_blocks<Dot, Dot::kTileRows>(weight, run, x, row, count, kept);
    row += count;
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
void start_sums(const Rows<Dot>& x, int64_t rows, const Kept& kept) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t block = kept.begin; block < kept.begin + kept.count; ++block) {
      if constexpr (Dot::kOffset != 0 && !Dot::kGrouped) {
        store(reinterpret_cast<int32_t*>(kept.of(row, block)), splat(x.starts[row * x.starts_stride]));
      } else {
        store(kept.of(row, block), zero_f());
      }
    }
  }
}

template <class Dot>
void finish_sums(const Matrix& weight, const Rows<Dot>& x, int64_t rows, const Kept& kept,
                 const Finish& finish) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t block = kept.begin; block < kept.begin + kept.count; ++block) {
      const float* sums = kept.of(row, block);
      if constexpr (Dot::kGrouped) {
        finish(row, block, mul(load(sums), splat(x.scales[row])));
      } else if constexpr (Dot::kInteger) {
        const F16 scale = mul(load(weight.column_scales + block * kColumns), splat(x.scales[row]));
        finish(row, block, mul(to_float(load(reinterpret_cast<const int32_t*>(sums))), scale));
      } else {
        finish(row, block, load(sums));
      }
    }
  }
}

// Blocks [begin, end) of all rows, a few blocks at a time and of them a run along k: its lines stay in the first
// cache while all rows pass by, and those of the next come from memory meanwhile.
template <class Dot>
void blocks_of(Worker& worker, const Matrix& weight, const Rows<Dot>& x, int64_t rows, int64_t begin,
               int64_t end, const Finish& finish) {
  using Wide = typename Dot::Wide;
  const bool wide = !std::is_same_v<Dot, Wide> && rows >= kWideRows;
  const int64_t tiles = divide_up(rows, wide ? Wide::kTileRows : Dot::kTileRows);
  const int64_t at_once = wide ? blocks_beside<Wide>(rows / tiles) : blocks_beside<Dot>(rows / tiles);
  const int64_t steps = x.stride / Dot::kWords, block_stride = steps * kLineBytes;
  // A run is of whole groups. One tile of rows needs no runs.
  const int64_t unit = Dot::kGrouped ? weight.group / Dot::kLineValues : 1;
  const int64_t run_steps = tiles == 1 ? steps : divide_up(kRunWords / Dot::kWords, unit) * unit;
  const int64_t room = wide ? run_steps * Dot::kWords * kColumns * at_once : 0;
  auto* own = reinterpret_cast<float*>(worker.own((room + rows * at_once * kColumns) * sizeof(float)));
  for (int64_t block = begin; block < end; block += at_once) {
    const uint8_t* lines = weight.lines + block * block_stride;
    const Kept kept{own + room, block, end - block < at_once ? end - block : at_once};
    start_sums<Dot>(x, rows, kept);
    for (int64_t first = 0; first < steps; first += run_steps) {
      const bool last = steps - first <= run_steps;
      const uint8_t* next = lines + (last ? at_once * block_stride : (first + run_steps) * kLineBytes);
      const int64_t count = last ? steps - first : run_steps;
      const Run run{lines + first * kLineBytes, block_stride, first, count, next, block_stride, kLineBytes};
      if (wide) {
        auto* words = reinterpret_cast<typename Dot::Word*>(own);
        all_rows<Wide>(weight, widened<Dot>(run, kept.count, words), x, rows, kept);
      } else {
        all_rows<Dot>(weight, run, x, rows, kept);
      }
    }
    finish_sums<Dot>(weight, x, rows, kept, finish);
  }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
