// Attention's two products by vectors: queries times keys, and weights times values. Sums of floats run in one order, along
// head_dim and along positions. Sums over int8 pages are exact integers. See attention_many.h for many rows.

namespace penstock::PENSTOCK_ISA {
namespace {

// The ways to multiply a page's lines, packed and widened.
template <class Page>
struct PageDots {
  using Dot = DotF32;
  using Wide = DotF32;
};
template <>
struct PageDots<uint16_t> {
  using Dot = DotBf16;
  using Wide = std::conditional_t<std::is_same_v<DotBf16::Word, float>, DotF32, DotBf16>;
};
template <>
struct PageDots<int8_t> {
  using Dot = DotPage8;
  using Wide = DotPairs;
};

constexpr int64_t kMostHeads = 8;  // that are computed together: their scores stay in the L1 and L2 caches

constexpr int64_t kPositions = 16;  // a run: positions whose keys and values are read together

// The stride of rows of scores and weights. Rows a power of two apart would evict each other from the L1 cache.
constexpr int64_t kRowStride = kSegment + 32;

// Over int8 pages, queries and weights are integers up to this, times a row's scale: they fit in 16 bits, and the sum
// of kSegment products with 127 stays below 2^31.
constexpr float kLevels = 32767.0f;
static_assert(32767 * 127 * kSegment < int64_t{1} << 31);

// The addresses of a run's keys and values, for the first of the KV heads that are computed together.
template <class Page>
struct PageRun {
  const Page* keys;           // the first line; a line has all positions of the page
  const Page* values;         // [kPositions / values of a line] lines of head_dim
  const float* key_scales;    // [kPositions], of int8 pages
  const float* value_scales;  // likewise
};

// The runs of a segment that some row sees. Only the first `positions` are written; the rest is undefined.
template <class Page>
struct PageRuns {
  PageRun<Page> all[kSegment / kPositions];
  int64_t count, positions;
  int64_t heads, head_stride;  // the number of KV heads, and their stride in elements
  int64_t key_stride;          // of lines, in bytes
  int64_t dim, value_dim;
  Page* copied;  // memory for the values of kRunsTogether runs, to be copied from their keys; nullptr: they are in place

  const uint8_t* keys(int64_t run, int64_t head) const { return bytes(all[run].keys, head); }
  const uint8_t* values(int64_t run, int64_t head) const { return bytes(all[run].values, head); }
  const float* key_scales(int64_t run, int64_t head) const {
    return reinterpret_cast<const float*>(bytes(all[run].key_scales, head));
  }
  const float* value_scales(int64_t run, int64_t head) const {
    return reinterpret_cast<const float*>(bytes(all[run].value_scales, head));
  }

  // The lines of a run's values that are fully written. Unwritten integers have the weight 0.
  template <class Dot>
  int64_t lines(int64_t run) const {
    const int64_t written = positions - run * kPositions;
    return (Dot::kInteger || written > kPositions ? kPositions : written) / Dot::kLineValues;
  }

 private:
  const uint8_t* bytes(const void* first, int64_t head) const {
    return static_cast<const uint8_t*>(first) + head * head_stride * static_cast<int64_t>(sizeof(Page));
  }
};

// Rows of queries or weights, as words of `Dot`.
template <class Dot>
struct Factors {
  static constexpr int64_t kWordValues = Dot::kLineValues / Dot::kWords;
  const typename Dot::Word* words;
  int64_t stride;       // in words
  const float* scales;  // [rows], of integers

  Factors from(int64_t row, int64_t value = 0) const {
    return {words + row * stride + value / kWordValues, stride, scales + row};
  }
};

// The stride of rows of weights, in words. Loops get it as a constant: if it is a variable, GCC keeps an offset for each
// row, and loads those that do not fit in registers again in every step.
template <class Dot>
constexpr int64_t kWeightStride = kRowStride / Factors<Dot>::kWordValues;

// Calls f<N>(i) for [i, end), N or N - 1 at a time, to leave as few as possible at the end.
template <int N, class F>
inline void in_groups(int64_t i, int64_t end, const F& f) {
  if constexpr (N == 1) {
    for (; i < end; ++i) f.template operator()<1>(i);
  } else {
    for (; i + N <= end && (end - i) % N != 0; i += N - 1) f.template operator()<N - 1>(i);
    for (; i + N <= end; i += N) f.template operator()<N>(i);
    in_groups<N - 1>(i, end, f);
  }
}

// `dot` for N blocks of lines at any addresses. The hardware prefetcher stops at the end of a page, so each line that
// is read prefetches one of `ahead`.
template <class Dot, int M, int N>
[[gnu::always_inline]] inline void dot_pages(const typename Dot::Word* x, int64_t x_stride,
                                             const uint8_t* const (&lines)[N], const uint8_t* const (&ahead)[N],
                                             int64_t line_stride, int64_t steps, typename Dot::Vector (&sums)[M][N]) {
  for (int64_t at = 0; at < steps * line_stride; at += line_stride) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) fetch(ahead[n] + at);
#pragma GCC unroll 16
    for (int word = 0; word < Dot::kWords; ++word) {
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        const auto values = Dot::widen(lines[n] + at, word);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) sums[m][n] = Dot::multiply_add(sums[m][n], x[m * x_stride + word], values);
      }
    }
    x += Dot::kWords;
  }
}

template <class Page, class Vector, int M, int N>
inline void put_scores(const Vector (&sums)[M][N], const float* query_scales, const PageRuns<Page>& runs, int64_t run,
                       int64_t head, float* scores) {
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      float* to = scores + m * kRowStride + (run + n) * kPositions;
      if constexpr (PageDots<Page>::Dot::kInteger) {
        store(to, mul(to_float(sums[m][n]), mul(load(runs.key_scales(run + n, head)), splat(query_scales[m]))));
      } else {
        store(to, sums[m][n]);
      }
    }
  }
}

// Scores [M][kRowStride] of M rows of queries at N runs.
template <class Page, int M, int N, class Dot>
void score_few(const Factors<Dot>& query, const PageRuns<Page>& runs, int64_t run, int64_t head, float* scores) {
  const uint8_t *lines[N], *ahead[N];
  for (int n = 0; n < N; ++n) {
    const int64_t next = run + n + 2 * N;
    lines[n] = runs.keys(run + n, head);
    ahead[n] = next < runs.count ? runs.keys(next, head) : runs.values((next - runs.count) % runs.count, head);
    if constexpr (Dot::kInteger) {
      fetch(reinterpret_cast<const uint8_t*>(runs.key_scales(next < runs.count ? next : run, head)));
      fetch(reinterpret_cast<const uint8_t*>(runs.value_scales(run + n, head)));
    }
  }
  typename Dot::Vector sums[M][N];
  clear(sums, Dot::zero());
  dot_pages<Dot, M, N>(query.words, query.stride, lines, ahead, runs.key_stride, runs.dim / Dot::kLineValues, sums);
  put_scores(sums, query.scales, runs, run, head, scores);
}

constexpr int64_t kRunsTogether = 2;  // runs whose values are added before a sum is stored

template <class Dot>
using Sum = std::conditional_t<Dot::kInteger, int32_t, float>;

// Some runs of a head's values, and the next runs, which are prefetched meanwhile.
template <class Dot>
struct ValueRuns {
  const uint8_t* lines[kRunsTogether];
  const uint8_t* ahead[kRunsTogether];
  int64_t steps[kRunsTogether];  // fully written lines
  int64_t count, line_stride;

  template <class Page>
  ValueRuns(const PageRuns<Page>& runs, int64_t first, int64_t head)
      : count(runs.count - first < kRunsTogether ? runs.count - first : kRunsTogether), line_stride(runs.value_dim * 4) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t run = first + i, next = run + count;
      lines[i] = runs.values(run, head);
      ahead[i] = runs.values(next < runs.count ? next : run, head);
      steps[i] = runs.template lines<Dot>(run);
    }
  }
};

// Adds the values of some runs, for M rows of weights and N blocks of 16 columns.
template <int M, int N, class Dot>
[[gnu::always_inline]] inline void sum_blocks(const Factors<Dot>& weights, const ValueRuns<Dot>& runs, int64_t dim,
                                              int64_t column, Sum<Dot>* sums) {
  constexpr int64_t kWords = kPositions / Factors<Dot>::kWordValues;
  typename Dot::Vector tile[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) tile[m][n] = load(sums + m * dim + column + n * 16);
  }
  const auto* words = weights.words;
  for (int64_t run = 0; run < runs.count; ++run, words += kWords) {
    const uint8_t *lines[N], *ahead[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      lines[n] = runs.lines[run] + (column + n * 16) * 4;
      ahead[n] = runs.ahead[run] + (column + n * 16) * 4;
    }
    const int64_t steps = Dot::kInteger ? kPositions / Dot::kLineValues : runs.steps[run];
    dot_pages<Dot, M, N>(words, kWeightStride<Dot>, lines, ahead, runs.line_stride, steps, tile);
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) store(sums + m * dim + column + n * 16, tile[m][n]);
  }
}

// The same for all of `dim` columns.
template <int M, class Dot>
void sum_rows(const Factors<Dot>& weights, const ValueRuns<Dot>& runs, int64_t dim, Sum<Dot>* sums) {
  in_groups<kSums / M>(0, dim / 16, [&]<int N>(int64_t block) __attribute__((always_inline)) {
    sum_blocks<M, N>(weights, runs, dim, block * 16, sums);
  });
}

// Adds the first `count` values of a line of floats, times their weights. Its other values are undefined and may be
// NaN; their weights are 0.
template <class Page, class Dot>
void sum_part(const Factors<Dot>& weights, int64_t rows, const Page* line, int64_t count, int64_t dim, float* sums) {
  constexpr int64_t kValues = Dot::kLineValues;
  for (int64_t column = 0; column < dim; column += 16) {
    alignas(64) Page copy[16 * kValues];
    for (int64_t i = 0; i < 16 * kValues; ++i) copy[i] = i % kValues < count ? line[column * kValues + i] : Page{};
    for (int64_t row = 0; row < rows; ++row) {
      F16 tile[1][1] = {{load(sums + row * dim + column)}};
      const uint8_t* const lines[1] = {reinterpret_cast<const uint8_t*>(copy)};
      dot_pages<Dot, 1, 1>(weights.from(row).words, 0, lines, lines, kLineBytes, 1, tile);
      store(sums + row * dim + column, tile[0][0]);
    }
  }
}

// Adds the values of the last line of a head if it is only partly written.
template <class Page, class Dot>
void sum_last(const Factors<Dot>& weights, int64_t rows, const PageRuns<Page>& runs, int64_t head, float* sums) {
  const int64_t part = runs.positions % Dot::kLineValues, whole = runs.positions - part, dim = runs.value_dim;
  if (part == 0) return;
  const auto* values = reinterpret_cast<const Page*>(runs.values(runs.count - 1, head));
  sum_part(weights.from(0, whole), rows, values + whole % kPositions * dim, part, dim, sums);
}

// Stores the first `dim` values of a run's keys as values lie: [kPositions / p][dim][p] instead of [dim / p][..][p], where
// p is how many elements 4 bytes hold. Keys' lines are `stride` bytes apart.
inline void keys_as_values(const float* keys, int64_t stride, int64_t dim, float* out) {
  for (int64_t i = 0; i < dim; ++i, keys += stride / 4) {
    for (int64_t position = 0; position < kPositions; ++position) out[position * dim + i] = keys[position];
  }
}

// Pairs of positions and of elements are squares of four values, which are transposed and put in their places.
inline void keys_as_values(const uint16_t* keys, int64_t stride, int64_t dim, uint16_t* out) {
  for (int64_t i = 0; i < dim; i += 16, keys += 8 * (stride / 2)) transpose_pairs(keys, stride, out + i * 2, dim * 4);
}

// Stores the first values of some runs' keys, of one head, as their values.
template <class Page>
void copy_keys(const PageRuns<Page>& runs, int64_t first, int64_t end, Page* out) {
  for (int64_t run = first; run < end; ++run, out += kPositions * runs.value_dim) {
    keys_as_values(runs.all[run].keys, runs.key_stride, runs.value_dim, out);
  }
}

// Scores [heads][rows][kRowStride] of queries [heads][rows] at all runs. Heads lie side by side in a page, so they are
// read together.
template <class Page, class Dot>
void score_lines(const Factors<Dot>& query, int64_t rows, const PageRuns<Page>& runs, float* scores) {
  for_rows<kSums>(rows, [&]<int M>() {
    in_groups<kSums / M>(0, runs.count, [&]<int N>(int64_t run) {
      for (int64_t head = 0; head < runs.heads; ++head) {
        in_groups<M>(head * rows, (head + 1) * rows, [&]<int R>(int64_t row) {
          score_few<Page, R, N>(query.from(row), runs, run, head, scores + row * kRowStride);
        });
      }
    });
  });
}

// Sums [heads][rows][dim] of all runs' values times the weights of [heads][rows].
template <class Page, class Dot>
void sum_lines(const Factors<Dot>& weights, int64_t rows, const PageRuns<Page>& runs, float* sums) {
  const int64_t dim = runs.value_dim;
  auto* totals = reinterpret_cast<Sum<Dot>*>(sums);
  for (int64_t i = 0; i < runs.heads * rows * dim; i += 16) store(totals + i, Dot::zero());
  for (int64_t first = 0; first < runs.count; first += kRunsTogether) {
    if constexpr (!Dot::kInteger) {
      const int64_t end = first + kRunsTogether < runs.count ? first + kRunsTogether : runs.count;
      if (runs.copied != nullptr) copy_keys(runs, first, end, runs.copied);
    }
    for (int64_t head = 0; head < runs.heads; ++head) {
      const ValueRuns<Dot> values(runs, first, head);
      in_groups<kSums>(head * rows, (head + 1) * rows, [&]<int M>(int64_t row) {
        sum_rows<M>(weights.from(row, first * kPositions), values, dim, totals + row * dim);
      });
    }
  }
  if constexpr (!Dot::kInteger) {
    for (int64_t head = 0; head < runs.heads; ++head) {
      sum_last(weights.from(head * rows), rows, runs, head, sums + head * rows * dim);
    }
  }
  if constexpr (Dot::kInteger) {
    for (int64_t row = 0; row < runs.heads * rows; ++row) {
      for (int64_t i = row * dim; i < (row + 1) * dim; i += 16) {
        store(sums + i, mul(to_float(load(totals + i)), splat(weights.scales[row])));
      }
    }
  }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
