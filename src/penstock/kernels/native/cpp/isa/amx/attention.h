// Computes the two matrix products of attention with AMX tiles, for bf16 queries and bf16 pages: scores = queries times
// keys, and sums = softmax weights times values.
//
// Pages store bf16 in pairs along the dimension that is summed over (VNNI), so that tiles are loaded from pages as they
// are. A run is 16 positions of a page:
//   keys    [head_dim / 2][16 positions][2 of head_dim]; a tile has 16 positions by 32 of head_dim, or by the last 16
//   values  [8 pairs of positions][head_dim][2 positions]; a tile has 16 positions by 16 of head_dim
//
// The softmax weights are rounded to bf16. Each row is computed independently, and a position that a row must not see
// has the weight 0. So a row's result is bit-identical with any other rows in its tile and with tiles that begin
// anywhere.

namespace penstock::PENSTOCK_ISA {
namespace {

// The shapes for tiles of `height` rows of queries. 0 to 3 are sums, 6 and 7 the operands of products that add up 32
// elements, and 4 and 5 those of products that add up 16.
constexpr TileShapes attention_shapes(int64_t height) {
  TileShapes shapes = tile_shapes(height);
  shapes.bytes[4] = kLineBytes / 2;
  shapes.rows[5] = kTileRows / 2;
  return shapes;
}

// For 1 to 16 rows. Constants, as kShapes.
constexpr auto kAttentionShapes = [] {
  std::array<TileShapes, kTileRows> shapes;
  for (int64_t i = 0; i < kTileRows; ++i) shapes[i] = attention_shapes(i + 1);
  return shapes;
}();

// Adds the product of tiles 4 and 5.
template <int kSum>
[[gnu::always_inline]] inline void add_half_product() {
  if constexpr (kSum == 0) _tile_dpbf16ps(0, 4, 5);
  if constexpr (kSum == 1) _tile_dpbf16ps(1, 4, 5);
  if constexpr (kSum == 2) _tile_dpbf16ps(2, 4, 5);
  if constexpr (kSum == 3) _tile_dpbf16ps(3, 4, 5);
}

constexpr int kTogether = 4;  // runs, and blocks of 16 columns of values

// Prefetches a segment's keys and values into the L2 cache while tiles multiply them. A head's keys or values in a run
// are one piece, too short for the hardware prefetcher. So lines of eight pieces are requested side by side, eight to
// sixteen pieces before they are read.
class PiecesAhead {
 public:
  // `row_tiles`: how many tiles of rows read a piece, one after the other.
  PiecesAhead(const PageRuns<uint16_t>& runs, int64_t row_tiles)
      : row_tiles_(row_tiles), lines_(runs.dim / 2), key_stride_(runs.key_stride) {
    in_groups<kTogether>(0, runs.count, [&]<int N>(int64_t run) {
      for (int64_t head = 0; head < runs.heads; ++head) {
        for (int n = 0; n < N; ++n) add(runs.keys(run + n, head));
      }
    });
    fill();
    keys_ = count_;
    for (int64_t head = 0; head < runs.heads && runs.copied == nullptr; ++head) {
      for (int64_t run = 0; run < runs.count; ++run) add(runs.values(run, head));
    }
    fill();
  }

  // A tile of rows reads the next eight lines. Inline assembly, as GCC 12 drops prefetches of other inline functions.
  [[gnu::always_inline]] void advance() {
    if (++reads_ < row_tiles_ || first_ >= count_) return;
    reads_ = 0;
    const uint8_t* const* pieces = pieces_ + first_;
    for (int64_t i = 0; i < kAhead; ++i) asm volatile("prefetcht1 %0" : : "m"(pieces[i][at_]));
    at_ += first_ < keys_ ? key_stride_ : kLineBytes;
    if (++line_ < lines_) return;
    line_ = at_ = 0;
    first_ += kAhead;
  }

 private:
  static constexpr int64_t kAhead = 8;

  void add(const uint8_t* piece) { pieces_[count_++] = piece; }

  // Repeats the last piece up to a whole number of eights.
  void fill() {
    while (count_ % kAhead != 0) add(pieces_[count_ - 1]);
  }

  int64_t row_tiles_, reads_ = 0;
  int64_t lines_, key_stride_;    // lines of a piece; from one line of keys to the next, in bytes
  int64_t count_ = 0, keys_ = 0;  // pieces, the first of which are keys
  int64_t first_ = 2 * kAhead;    // of the eight pieces that are requested
  int64_t line_ = 0, at_ = 0;     // the line of each that is next, and its place in bytes
  const uint8_t* pieces_[2 * kMostHeads * kSegment / kPositions];
};

// Writes the scores of a tile of queries [height][dim] at the positions of N runs: scores[row * kRowStride + position].
template <int N>
void score_tiles(const uint16_t* query, int64_t dim, const uint8_t* const* keys, int64_t key_stride,
                 PiecesAhead& ahead, float* scores) {
  const int64_t stride = dim * 2;
  settle();  // the queries are written
  each<N>([]<int n>() { zero_sum<n>(); });
  int64_t at = 0;  // in a query, in bytes
  for (; at + kLineBytes <= stride; at += kLineBytes) {
    _tile_loadd(6, reinterpret_cast<const uint8_t*>(query) + at, stride);
    each<N>([&]<int n>() __attribute__((always_inline)) {
      ahead.advance();
      ahead.advance();
      _tile_loadd(7, keys[n] + at / 4 * key_stride, key_stride);
      add_product<n>();
    });
  }
  if (at < stride) {
    _tile_loadd(4, reinterpret_cast<const uint8_t*>(query) + at, stride);
    each<N>([&]<int n>() __attribute__((always_inline)) {
      ahead.advance();
      _tile_loadd(5, keys[n] + at / 4 * key_stride, key_stride);
      add_half_product<n>();
    });
  }
  each<N>([&]<int n>() __attribute__((always_inline)) { store_sum<n>(scores + n * kPositions, kRowStride * 4); });
}

// Writes N blocks of columns of sums [height][dim] = weights times values. `runs` are the values of `count` runs, from
// the first of the columns on; column 16 * i + j of the weights [height][kRowStride] belongs to position j of run i.
template <int N>
void sum_tiles(const uint16_t* weights, const uint8_t* const* runs, int64_t count, int64_t column, int64_t dim,
               PiecesAhead& ahead, float* sums) {
  const int64_t stride = dim * 4;  // bytes of a line of values (bf16 pairs), and of a row of sums (floats)
  settle();  // the weights are written
  each<N>([]<int n>() { zero_sum<n>(); });
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* lines = runs[i] + column * 4;
    _tile_loadd(4, weights + i * kPositions, kRowStride * 2);
    each<N>([&]<int n>() __attribute__((always_inline)) {
      ahead.advance();
      _tile_loadd(5, lines + n * kLineBytes, stride);
      add_half_product<n>();
    });
  }
  each<N>([&]<int n>() __attribute__((always_inline)) { store_sum<n>(sums + column + n * 16, stride); });
}

// Copies the values of a run to `out`. Only the first `count` of its 16 positions have been written: the others are
// undefined, and `out` gets 0 for them.
inline void copy_values(const uint16_t* values, int64_t count, int64_t dim, uint16_t* out) {
  for (int64_t position = 0; position < 16; ++position) {
    for (int64_t i = 0; i < dim; ++i) {
      const int64_t at = (position / 2 * dim + i) * 2 + position % 2;
      out[at] = position < count ? values[at] : uint16_t{0};
    }
  }
}

// The products of a segment. Each head has `rows` rows; heads are `stride` rows apart.
class SegmentTiles {
 public:
  SegmentTiles(const PageRuns<uint16_t>& runs, int64_t rows, int64_t stride)
      : runs_(runs),
        stride_(stride),
        tiles_(kAttentionShapes[tile_height(rows) - 1]),
        ahead_(runs, divide_up(rows, kTileRows)) {}

  // Scores [heads][rows][kRowStride] of queries [heads][rows][dim].
  void score(const uint16_t* query, float* scores) {
    in_groups<kTogether>(0, runs_.count, [&]<int N>(int64_t run) {
      for (int64_t head = 0; head < runs_.heads; ++head) {
        const uint8_t* keys[N];
        for (int n = 0; n < N; ++n) keys[n] = runs_.keys(run + n, head);
        for (int64_t row = head * stride_; row < (head + 1) * stride_; row += kTileRows) {
          score_tiles<N>(query + row * runs_.dim, runs_.dim, keys, runs_.key_stride, ahead_,
                         scores + row * kRowStride + run * kPositions);
        }
      }
    });
  }

  // Sums [heads][rows][value_dim] of values times weights [heads][rows][kRowStride]. `last`: memory for a run's values.
  void sum(const uint16_t* weights, uint16_t* last, float* sums) {
    const int64_t dim = runs_.value_dim;
    for (int64_t head = 0; head < runs_.heads; ++head) {
      const uint8_t* values[kSegment / kPositions];
      for (int64_t run = 0; run < runs_.count; ++run) values[run] = runs_.values(run, head);
      if (const int64_t part = runs_.positions % kPositions; part != 0) {
        const uint8_t*& unfinished = values[runs_.count - 1];
        copy_values(reinterpret_cast<const uint16_t*>(unfinished), part, dim, last);
        unfinished = reinterpret_cast<const uint8_t*>(last);
      }
      for (int64_t row = head * stride_; row < (head + 1) * stride_; row += kTileRows) {
        in_groups<kTogether>(0, dim / 16, [&]<int N>(int64_t block) {
          sum_tiles<N>(weights + row * kRowStride, values, runs_.count, block * 16, dim, ahead_, sums + row * dim);
        });
      }
    }
  }

 private:
  const PageRuns<uint16_t>& runs_;
  int64_t stride_;
  TilesInUse tiles_;
  PiecesAhead ahead_;
};

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
