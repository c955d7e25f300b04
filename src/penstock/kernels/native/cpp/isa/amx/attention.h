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

constexpr auto kAttentionShapes = for_all_heights(attention_shapes);

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

// -- int8 pages ---------------------------------------------------------------------------------------------------

// The products of many rows of a head with int8 pages. Queries and weights are integers of 16 bits, which are two planes
// of bytes: 256 * (signed high byte) + (unsigned low byte). Keys are tiles as they lie. Sums are exact, so their bits are
// those of vectors.
class IntegerTiles {
 public:
  // Whether whole tiles fill a head's keys.
  static bool fit(int64_t dim) { return dim % kLineBytes == 0; }

  // The bytes of `memory`.
  static int64_t bytes(int64_t rows, int64_t dim, int64_t value_dim) {
    const int64_t planes = 2 * divide_up(rows, kTileRows) * kTileRows * (dim > kRowStride ? dim : kRowStride);
    return 4 * kTileBytes + planes + kSegment * value_dim;
  }

  IntegerTiles(const PageRuns<int8_t>& runs, int64_t head, int64_t rows, float* memory)
      : runs_(runs),
        head_(head),
        rows_(rows),
        padded_(divide_up(rows, kTileRows) * kTileRows),
        sums_(reinterpret_cast<int32_t*>(memory)),
        planes_(reinterpret_cast<uint8_t*>(memory) + 4 * kTileBytes),
        tiles_(kShapes[kTileRows - 1]) {}

  // Scores [rows][kRowStride] of queries [rows][dim].
  void score(const int16_t* query, const float* query_scales, float* scores) {
    const int64_t dim = runs_.dim;
    split(query, dim, dim);
    in_groups<2>(0, runs_.count, [&]<int N>(int64_t run) {
      const uint8_t* keys[N];
      F16 key_scales[N];
      for (int n = 0; n < N; ++n) {
        keys[n] = runs_.keys(run + n, head_);
        key_scales[n] = load(runs_.key_scales(run + n, head_));
      }
      each_tile([&](int64_t row, int64_t count) {
        multiply<N>(planes_ + row * dim, dim, dim, keys, runs_.key_stride, 16 * runs_.key_stride);
        for (int64_t m = 0; m < count; ++m) {
          float* to = scores + (row + m) * kRowStride + run * kPositions;
          const F16 scale = splat(query_scales[row + m]);
          for (int n = 0; n < N; ++n) store(to + n * kPositions, mul(sum(n, m), mul(key_scales[n], scale)));
        }
      });
    });
  }

  // Sums [rows][value_dim] of the values times weights [rows][kRowStride].
  void sum(const int16_t* weights, const float* weight_scales, float* sums) {
    const int64_t dim = runs_.value_dim, width = divide_up(runs_.count * kPositions, kLineBytes) * kLineBytes;
    split(weights, kRowStride, width);
    uint8_t* const values = planes_ + 2 * padded_ * width;
    copy_values(values, width);
    in_groups<2>(0, dim / 16, [&]<int N>(int64_t block) {
      const uint8_t* columns[N];
      for (int n = 0; n < N; ++n) columns[n] = values + (block + n) * kLineBytes;
      each_tile([&](int64_t row, int64_t count) {
        multiply<N>(planes_ + row * width, width, width, columns, dim * 4, 16 * dim * 4);
        for (int64_t m = 0; m < count; ++m) {
          float* to = sums + (row + m) * dim + block * 16;
          for (int n = 0; n < N; ++n) store(to + n * 16, mul(sum(n, m), splat(weight_scales[row + m])));
        }
      });
    });
  }

 private:
  // Calls f(first row, rows) for each tile of rows.
  template <class F>
  void each_tile(const F& f) const {
    for (int64_t row = 0; row < rows_; row += kTileRows) f(row, rows_ - row < kTileRows ? rows_ - row : kTileRows);
  }

  // Writes the planes of the rows' first `width` integers, [low, high][row][width], in the order of values: words hold
  // the first and third of four, then the second and fourth.
  void split(const int16_t* words, int64_t stride, int64_t width) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 2, 6, 8, 12, 10, 14, 1, 5, 3, 7, 9, 13, 11, 15));
    const int64_t high = padded_ * width;
    for (int64_t row = 0; row < rows_; ++row) {
      uint8_t* out = planes_ + row * width;
      for (int64_t i = 0; i < width; i += 16) {
        __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + row * stride + i));
        bytes = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(bytes, order), 0xd8);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_castsi256_si128(bytes));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + high + i), _mm256_extracti128_si256(bytes, 1));
      }
    }
  }

  // Copies the runs' values, [position / 4][value_dim][4], one after the other, with zeros up to `width` positions.
  void copy_values(uint8_t* out, int64_t width) const {
    const int64_t bytes = kPositions * runs_.value_dim;
    for (int64_t run = 0; run < runs_.count; ++run, out += bytes) {
      __builtin_memcpy(out, runs_.values(run, head_), static_cast<size_t>(bytes));
    }
    __builtin_memset(out, 0, static_cast<size_t>((width / kPositions - runs_.count) * bytes));
  }

  // A tile of rows of both planes, `width` bytes along what is summed, times N tiles of columns.
  template <int N>
  void multiply(const uint8_t* low, int64_t stride, int64_t width, const uint8_t* const* columns, int64_t line_stride,
                int64_t step) {
    const uint8_t* high = low + padded_ * width;
    settle();  // the planes are written
    each<2 * N>([]<int n>() { zero_sum<n>(); });
    for (int64_t i = 0, at = 0; i < width; i += kLineBytes, at += step) {
      _tile_loadd(4, low + i, stride);
      _tile_loadd(5, high + i, stride);
      _tile_loadd(7, columns[0] + at, line_stride);
      _tile_dpbusd(0, 4, 7);
      _tile_dpbssd(1, 5, 7);
      if constexpr (N > 1) {
        _tile_loadd(7, columns[1] + at, line_stride);
        _tile_dpbusd(2, 4, 7);
        _tile_dpbssd(3, 5, 7);
      }
    }
    each<2 * N>([&]<int n>() __attribute__((always_inline)) {
      store_sum<n>(reinterpret_cast<float*>(sums_ + n * kTileRows * kColumns));
    });
    settle();
  }

  // The sums of a row and the n-th tile of columns.
  F16 sum(int n, int64_t row) const {
    const int32_t* low = sums_ + (2 * n * kTileRows + row) * kColumns;
    return to_float(amx::add(load(low), mul(load(low + kTileRows * kColumns), splat(256))));
  }

  const PageRuns<int8_t>& runs_;
  int64_t head_, rows_, padded_;
  int32_t* sums_;  // [N][low, high][kTileRows][kColumns]
  uint8_t* planes_;
  TilesInUse tiles_;
};

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
