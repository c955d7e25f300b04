// Attention's two products for many rows of a head: larger tiles multiply a page's lines, which are widened first unless
// they can be multiplied as they lie. The bits are those of attention_lines.h.
//
// The functions are not inlined, since GCC would then keep some sums in memory.

namespace penstock::PENSTOCK_ISA {
namespace {

// The number of blocks of 16 columns that many rows multiply at once.
template <class Wide>
constexpr int wide_blocks() {
  return Wide::kTileSums > kPanelRows ? Wide::kTileSums / kPanelRows : 1;
}

// True if many rows multiply lines as they lie: widening would only copy them.
template <class Page>
constexpr bool kAsTheyLie = std::is_same_v<typename PageDots<Page>::Dot, typename PageDots<Page>::Wide>;

// From this many rows on, larger tiles are faster. Never, if they would have no more blocks, and nothing to widen.
template <class Page>
constexpr int64_t kManyRows = !kAsTheyLie<Page> ? 48 : wide_blocks<typename PageDots<Page>::Wide>() > 1 ? 24 : INT64_MAX;

// score_lines for one head, on lines as they lie.
template <class Page, class Dot>
[[gnu::noinline]] void score_many(const Factors<Dot>& query, int64_t rows, const PageRuns<Page>& runs, int64_t head,
                                 float* scores) {
  in_groups<wide_blocks<Dot>()>(0, runs.count, [&]<int N>(int64_t run) {
    const uint8_t *lines[N], *ahead[N];
    for (int n = 0; n < N; ++n) {
      lines[n] = runs.keys(run + n, head);
      ahead[n] = runs.keys(run + n + N < runs.count ? run + n + N : run + n, head);
    }
    in_groups<kPanelRows>(0, rows, [&]<int M>(int64_t row) {
      typename Dot::Vector sums[M][N];
      clear(sums, Dot::zero());
      dot_pages<Dot, M, N>(query.from(row).words, query.stride, lines, ahead, runs.key_stride,
                           runs.dim / Dot::kLineValues, sums);
      put_scores(sums, query.scales + row, runs, run, head, scores + row * kRowStride);
    });
  });
}

// sum_lines for one head, on lines as they lie.
template <class Page, class Dot>
[[gnu::noinline]] void sum_many(const Factors<Dot>& weights, int64_t rows, const PageRuns<Page>& runs, int64_t head,
                               float* sums) {
  const int64_t dim = runs.value_dim;
  in_groups<wide_blocks<Dot>()>(0, dim / 16, [&]<int N>(int64_t block) {
    in_groups<kPanelRows>(0, rows, [&]<int M>(int64_t row) {
      typename Dot::Vector tile[M][N];
      clear(tile, Dot::zero());
      const auto* words = weights.from(row).words;
      for (int64_t run = 0; run < runs.count; ++run, words += kPositions / weights.kWordValues) {
        const uint8_t *lines[N], *ahead[N];
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
          lines[n] = runs.values(run, head) + (block + n) * kLineBytes;
          ahead[n] = lines[n] + N * kLineBytes;
        }
        dot_pages<Dot, M, N>(words, kWeightStride<Dot>, lines, ahead, dim * 4, runs.template lines<Dot>(run), tile);
      }
      for (int m = 0; m < M; ++m) {
        for (int n = 0; n < N; ++n) store(sums + (row + m) * dim + (block + n) * 16, tile[m][n]);
      }
    });
  });
  sum_last(weights, rows, runs, head, sums);
}

// The most words that the widened lines of a segment take.
inline int64_t widened_words(int64_t dim) { return wide_blocks<DotF32>() * 16 * (dim > kSegment ? dim : kSegment); }

template <class Dot>
inline typename Dot::Word* widen_lines(const uint8_t* lines, const uint8_t* ahead, int64_t stride, int64_t steps,
                                       typename Dot::Word* out) {
  for (int64_t at = 0; at < steps * stride; at += stride) {
    fetch(ahead + at);
#pragma GCC unroll 16
    for (int word = 0; word < Dot::kWords; ++word, out += 16) store(out, Dot::widen(lines + at, word));
  }
  return out;
}

// score_lines for one head, on widened lines. `wide`: memory for widened_words.
template <class Page, class Dot>
[[gnu::noinline]] void score_widened(const Factors<Dot>& query, int64_t rows, const PageRuns<Page>& runs, int64_t head,
                                    typename Dot::Word* wide, float* scores) {
  using Wide = typename PageDots<Page>::Wide;
  const int64_t words = runs.dim / query.kWordValues;
  in_groups<wide_blocks<Wide>()>(0, runs.count, [&]<int N>(int64_t run) {
    for (int n = 0; n < N; ++n) {
      const int64_t next = run + n + N < runs.count ? run + n + N : run + n;
      widen_lines<Dot>(runs.keys(run + n, head), runs.keys(next, head), runs.key_stride, runs.dim / Dot::kLineValues,
                       wide + n * words * 16);
    }
    in_groups<kPanelRows>(0, rows, [&]<int M>(int64_t row) {
      typename Dot::Vector sums[M][N];
      clear(sums, Dot::zero());
      dot<Wide, M, N>(query.from(row).words, query.stride, reinterpret_cast<const uint8_t*>(wide), kLineBytes,
                      words * kLineBytes, words, sums);
      put_scores(sums, query.scales + row, runs, run, head, scores + row * kRowStride);
    });
  });
}

// sum_lines for one head, on widened lines. `wide`: memory for widened_words.
template <class Page, class Dot>
[[gnu::noinline]] void sum_widened(const Factors<Dot>& weights, int64_t rows, const PageRuns<Page>& runs, int64_t head,
                                  typename Dot::Word* wide, float* sums) {
  using Wide = typename PageDots<Page>::Wide;
  const int64_t dim = runs.value_dim, most = runs.count * kPositions / weights.kWordValues;
  const int64_t steps = Dot::kInteger ? most : runs.positions;
  in_groups<wide_blocks<Wide>()>(0, dim / 16, [&]<int N>(int64_t block) {
    for (int n = 0; n < N; ++n) {
      const int64_t at = (block + n) * kLineBytes, next = block + n + N < dim / 16 ? at + N * kLineBytes : at;
      auto* out = wide + n * most * 16;
      for (int64_t run = 0; run < runs.count; ++run) {
        const uint8_t* lines = runs.values(run, head);
        out = widen_lines<Dot>(lines + at, lines + next, dim * 4, kPositions / Dot::kLineValues, out);
      }
    }
    in_groups<kPanelRows>(0, rows, [&]<int M>(int64_t row) {
      typename Dot::Vector tile[M][N];
      clear(tile, Dot::zero());
      dot<Wide, M, N>(weights.from(row).words, kWeightStride<Dot>, reinterpret_cast<const uint8_t*>(wide), kLineBytes,
                      most * kLineBytes, steps, tile);
      for (int m = 0; m < M; ++m) {
        for (int n = 0; n < N; ++n) {
          float* to = sums + (row + m) * dim + (block + n) * 16;
          if constexpr (Dot::kInteger) {
            store(to, mul(to_float(tile[m][n]), splat(weights.scales[row + m])));
          } else {
            store(to, tile[m][n]);
          }
        }
      }
    });
  });
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
