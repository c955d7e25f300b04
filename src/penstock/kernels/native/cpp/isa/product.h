// Products of rows of words with blocks of packed weights: the order of tiles, and what is prefetched meanwhile.

namespace penstock::PENSTOCK_ISA {
namespace {

// Rows [row, end), in panels of M, times `count` blocks from `begin` on. Advances `run.ahead`.
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

// Widens the lines of a run to one word per line, which is exact.
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

// Sets the sums that are added to in memory to zero.
inline void start_sums(const Kept& kept) {
  for (int64_t i = 0; i < kept.count * kept.rows; ++i) store(kept.sums + i * kColumns, zero_f());
}

// Consecutive panels: `high` of M rows, then `low` of M - 1.
struct PanelRange {
  int64_t high, low;
};

template <class Dot, int M>
void panels_along(const Matrix& weight, Run run, const Rows<Dot>& x, const PanelRange& panels, int64_t begin,
                  int64_t count, const Kept& kept) {
  run.ahead_step = divide_up(run.ahead_step, panels.high + panels.low);
  const int64_t high_rows = panels.high * M;
  panels_by_blocks<Dot, M>(weight, run, x, 0, high_rows, begin, count, kept);
  if constexpr (M > (panel_rows<Dot>() + 1) / 2) {  // with two panels or more, none is lower
    panels_by_blocks<Dot, M - 1>(weight, run, x, high_rows, kept.rows, begin, count, kept);
  }
}

// Multiplies along a run, for all kept blocks and rows. A few blocks at a time: their lines stay in the L1 cache for
// all rows, while the lines of the next blocks are prefetched.
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

// How many lines ahead of its stream one row prefetches.
constexpr int64_t kLinesAhead = 16;

// The blocks that one row reads side by side. Sums of integers have little latency to hide, so one stream is enough where
// the processor fetches one as fast as it reads several.
template <class Dot>
consteval int streams_of_a_row() {
  if constexpr (Grouped<Dot>) return kGroupedStreams;
  else if constexpr (Dot::kInteger) return kIntegerStreams;
  else return blocks_beside<Dot>(1);
}

// Multiplies one row, which reads each line once and takes less time to multiply than to read. It prefetches a little
// ahead in its own stream: the hardware prefetcher keeps more memory in flight than instructions can. But that has to
// detect a new stream first, so the last lines of one stream prefetch the first lines of the next.
template <class Dot, int N>
void stream_once(const Matrix& weight, const Run& run, const Rows<Dot>& x, int64_t block, const uint8_t* next,
                 const Kept& kept) {
  Run stream = run;
  stream.tail = run.steps < kLinesAhead ? run.steps : kLinesAhead;
  stream.ahead = run.lines + stream.tail * kLineBytes;
  stream.then = next;
  tile<Dot, 1, N>(weight, stream, x, 0, block, kept);
}

template <class Dot>
void blocks_once(const Matrix& weight, Run run, const Rows<Dot>& x, const uint8_t* next_piece, const Kept& kept) {
  constexpr int N = streams_of_a_row<Dot>();
  const int64_t end = kept.begin + kept.count;
  int64_t block = kept.begin;
  const auto behind = [&](int64_t blocks) {
    return block + blocks < end ? run.lines + blocks * run.block_stride : next_piece;
  };
  run.ahead = run.lines;
  for (; block + N <= end; block += N, run = run.past(N)) stream_once<Dot, N>(weight, run, x, block, behind(N), kept);
  if constexpr (N > 1) {
    for (; block < end; ++block, run = run.past(1)) stream_once<Dot, 1>(weight, run, x, block, behind(1), kept);
  }
}

// The number of groups of rows that are multiplied one after the other: a group's words of a run stay in the L2 cache.
inline int64_t row_groups(int64_t rows) {
  const int64_t groups = (rows + kRowsTogether / 2) / kRowsTogether;
  return groups < 1 ? 1 : groups;
}

// Lines that a run has a whole number of: those whose products share a scale.
template <class Dot>
int64_t run_unit(const Matrix& weight) {
  if constexpr (HasSpans<Dot>) return Dot::kSpanLines;
  else return Grouped<Dot> ? weight.format.group / Dot::kLineValues : 1;
}

// Multiplies a group of rows with blocks [begin, end), run by run. `next_piece`: lines that this thread probably reads
// next.
template <class Dot>
void blocks_of(Worker& worker, const Matrix& weight, const Rows<Dot>& x, int64_t rows, int64_t group, int64_t begin,
               int64_t end, const uint8_t* next_piece, const ResultWriter& finish) {
  const bool wide = !std::is_same_v<Dot, typename Dot::Wide> && rows >= kWideRows;
  const int64_t steps = x.stride / Dot::kWords, block_stride = steps * kLineBytes;
  const Panels panels = Panels::of<Dot>(rows);
  const int64_t together = divide_up(panels.count, row_groups(rows)), first_panel = group * together;
  const int64_t last_panel = first_panel + together < panels.count ? first_panel + together : panels.count;
  if (first_panel >= last_panel) return;
  const int64_t high = panels.highest_of(last_panel) - panels.highest_of(first_panel);
  const PanelRange range{high, last_panel - first_panel - high};
  const int64_t row = panels.first_row(first_panel), row_count = panels.first_row(last_panel) - row;
  // A run consists of whole groups of values, or spans. A single panel needs only one run. Runs are about equally long, so
  // that each prefetches all of the next.
  const int64_t runs = panels.count == 1 ? 1 : divide_up(x.stride, run_words<Dot>()), unit = run_unit<Dot>(weight);
  const int64_t run_steps = divide_up(divide_up(steps, runs), unit) * unit;
  const int64_t height = panels.highest();
  const int64_t wide_words = wide ? run_steps * Dot::kWords * kColumns * blocks_beside<typename Dot::Wide>(height) : 0;
  auto* own = reinterpret_cast<float*>(worker.own((wide_words + row_count * (end - begin) * kColumns) * sizeof(float)));
  auto* words = wide ? reinterpret_cast<typename Dot::Word*>(own) : nullptr;
  const uint8_t* lines = block_lines(weight, begin);
  const Rows<Dot> from = x.from(row);
  Kept kept{own + wide_words, begin, end - begin, row_count, row};
  if constexpr (HasSpans<Dot>) start_sums(kept);
  for (int64_t first = 0; first < steps; first += run_steps) {
    const bool last = steps - first <= run_steps;
    const int64_t count = last ? steps - first : run_steps;
    kept.fresh = first == 0;
    if (last && !HasSpans<Dot>) kept.finish = &finish;
    const uint8_t* next = last ? next_piece : lines + (first + run_steps) * kLineBytes;
    const Run run{lines + first * kLineBytes, block_stride, first, count, nullptr, block_stride, kLineBytes};
    for_rows<panel_rows<Dot>()>(height, [&]<int M>() {
      if constexpr (M == 1) return blocks_once<Dot>(weight, run, from, next, kept);
      else blocks_along<Dot, M>(weight, run, from, range, next, kept, words);
    });
  }
  if constexpr (HasSpans<Dot>) {
    for (int64_t block = begin; block < end; ++block) finish(row, row_count, block, kept.of(0, block));
  }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
