// x weight^T by tiles of bf16: of 16 rows of x or fewer, 16 columns and 32 values along k. 16 lines of a packed weight of
// bf16 are a tile, and codes become such tiles right before they are multiplied.
//
// A row of a tile's product depends on that row alone, and tiles are added along k in one order: so a row's result does
// not depend on the number of rows.

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int64_t kRowsInCache = 896 << 10;   // bytes of x that stay in the L2 cache for all blocks
constexpr int64_t kBuffersInCache = 1 << 20;  // bytes of the tiles of two pairs of blocks
constexpr int64_t kRowTiles = 3;              // tiles of rows that are multiplied together, by two blocks
constexpr int64_t kFewRowTiles = 4;           // the same, by one block

// -- x as tiles ---------------------------------------------------------------------------------------------------

// Rows of x as bf16, a tile of rows after the other: [k / 32][height][32]. Rows past the last are undefined, and so are
// their unused results.
struct TileRows {
  const uint8_t* tiles;
  int64_t count;   // of tiles along k
  int64_t height;  // rows of a tile

  // The rows from `row` on, the first of a tile.
  const uint8_t* of(int64_t row) const { return tiles + row * count * kLineBytes; }
  int64_t tile_bytes() const { return height * kLineBytes; }
};

// The place of a row, and its row of x: -1 if it is unused.
struct TileRow {
  int64_t first;   // of its tile
  int64_t height;  // of its tile
  int64_t source;
};

inline int64_t tiles_along(const Matrix& weight) { return padded_k(weight) / kTileValues; }

// Two vectors of values as bf16, the first 16 first.
[[gnu::always_inline]] inline __m512i narrow(F16 first, F16 second) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
}

// `count` values, and zeros after them.
[[gnu::always_inline]] inline void put_dense(const uint16_t* x, int64_t count, uint8_t* out) {
  const auto present = count >= kTileValues ? ~__mmask32{0} : (__mmask32{1} << (count < 0 ? 0 : count)) - 1;
  _mm512_storeu_si512(out, _mm512_maskz_loadu_epi16(present, x));
}

// The same in the order and of the size that codes need.
template <class T>
[[gnu::always_inline]] inline void put_for_codes(const T* x, int64_t count, uint8_t* out) {
  static constexpr auto kOrder = [] {
    std::array<uint16_t, kTileValues> order{};
    for (int i = 0; i < kTileValues; ++i) order[i] = static_cast<uint16_t>(i / 8 * 8 + kOrderOfCodes[i % 8]);
    return order;
  }();
  const F16 factor = splat(kFactorOfX);
  const __m512i values = narrow(mul(load_part(x, count), factor), mul(load_part(x + 16, count - 16), factor));
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(_mm512_loadu_si512(kOrder.data()), values));
}

// Converts rows of x in `memory`, which the threads share, or if there are few in each thread's own. place(row): the
// row's TileRow.
template <class T, class F>
TileRows prepare_tiles(Worker& worker, const LinearOp& op, int64_t rows, int64_t height, std::byte* memory,
                       const F& place) {
  const bool alone = rows * worker.count() <= kRowsAlone, codes = op.weight.format.scheme == Scheme::grouped;
  const int64_t k = op.weight.k, count = tiles_along(op.weight);
  if (alone) memory = worker.own(static_cast<size_t>(rows * count * kLineBytes), 1);
  auto* tiles = reinterpret_cast<uint8_t*>(memory);
  const auto convert = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const TileRow at = place(row);
      if (at.source < 0) continue;
      const T* x = static_cast<const T*>(op.x) + at.source * k;
      uint8_t* out = tiles + (at.first * count + row - at.first) * kLineBytes;
      const int64_t step = at.height * kLineBytes;
      for (int64_t i = 0; i < count * kTileValues; i += kTileValues, out += step) {
        if constexpr (sizeof(T) == 2) {
          if (!codes) {
            put_dense(x + i, k - i, out);
            continue;
          }
        }
        put_for_codes(x + i, k - i, out);
      }
    }
  };
  if (alone) convert(0, rows);
  else worker.for_each(rows, 4, convert);
  settle();
  return {tiles, count, height};
}

// -- products -----------------------------------------------------------------------------------------------------

// Rows of one product.
struct TileProduct {
  const LinearOp& op;
  TileRows x;
  int64_t rows;
  ResultWriter finish;

  // Writes a tile of sums: of the rows from `row` on, and a block.
  void write(int64_t row, int64_t block, const float* sums) const {
    finish(row, rows - row < x.height ? rows - row : x.height, block, sums);
  }
};

// Adds the products of R tiles of rows and N tiles of weights, in sums[n * kRowTiles + r]. between<i>() comes after the
// i-th. A tile of rows that two blocks use one after the other is loaded once.
template <int R, int N, class F>
[[gnu::always_inline]] inline void multiply_tiles(const uint8_t* x, int64_t x_stride, const uint8_t* weights,
                                                  int64_t weight_stride, const F& between) {
  each<N>([&]<int n>() __attribute__((always_inline)) {
    _tile_loadd(7, weights + n * weight_stride, kLineBytes);
    each<R>([&]<int i>() __attribute__((always_inline)) {
      constexpr int r = n % 2 == 0 ? i : R - 1 - i;
      if constexpr (i > 0 || n == 0) _tile_loadd(6, x + r * x_stride, kLineBytes);
      add_product<n * kRowTiles + r>();
      between.template operator()<n * R + i>();
    });
  });
}

// Sums of N blocks that are written while the next ones are computed: right after they are stored, loads would wait.
template <int N>
class LateSums {
 public:
  explicit LateSums(const TileProduct& product) : product_(product) {}

  // Takes over the tile registers, whose rows begin with `row`. All that was here is written.
  template <int R>
  [[gnu::always_inline]] void take(int64_t row, int64_t block) {
    each<N>([&]<int n>() __attribute__((always_inline)) {
      each<R>([&]<int r>() __attribute__((always_inline)) { store_sum<n * kRowTiles + r>(sums_[n * kRowTiles + r]); });
    });
    settle();
    row_ = row, block_ = block, row_tiles_ = R, left_ = N * R;
  }

  bool any() const { return left_ > 0; }

  void write_next() {
    const int64_t n = --left_ / row_tiles_, r = left_ % row_tiles_;
    product_.write(row_ + r * product_.x.height, block_ + n, sums_[n * kRowTiles + r]);
  }

  void write_all() {
    while (any()) write_next();
  }

 private:
  const TileProduct& product_;
  int64_t row_ = 0, block_ = 0, row_tiles_ = 1, left_ = 0;
  alignas(64) float sums_[2 * kRowTiles][kTileRows * kColumns];
};

// Memory for tiles of weights between their making and their last use.
struct TileRing {
  uint8_t* tiles;
  int64_t capacity;  // of tiles
  int64_t lead;      // tiles that are made ahead

  uint8_t* end() const { return tiles + capacity * kTileBytes; }
  uint8_t* past(uint8_t* tile) const { return tile + kTileBytes == end() ? tiles : tile + kTileBytes; }
};

// A ring in the L1 cache, for tiles that are used once.
constexpr int64_t kRingTiles = 8, kRingLead = 3;

// Multiplies rows [first, last) with blocks [begin, end), N blocks at a time by up to kMost tiles of rows. Meanwhile
// `tiles` makes the tiles of later blocks in the ring, or prefetches their lines: kUnit tiles at a time, evenly over all
// rows.
template <int N, int kMost, int kUnit, class Tiles>
[[gnu::noinline]] void multiply_blocks(const TileProduct& product, int64_t first, int64_t last, int64_t begin,
                                       int64_t end, const Tiles& first_tiles, const TileRing& ring) {
  constexpr bool kLate = N > 1;  // with one block, which few rows have, a call in the loop would cost as much
  Tiles tiles = first_tiles;     // in registers
  const TileRows x = product.x;
  const int64_t count = x.count, height = x.height, most_rows = kMost * height;
  const int64_t passes = divide_up(last - first, most_rows), x_stride = height * count * kLineBytes;
  LateSums<N> late(product);
  const int64_t apart = count / (N * kMost) + 1;  // steps between two tiles that are written
  const uint8_t* weights = Tiles::kInPlace ? block_lines(product.op.weight, begin) : ring.tiles;
  uint8_t* made = ring.tiles;
  int64_t left = (end - begin) * count;
  if constexpr (!Tiles::kInPlace) {
    for (int64_t i = 0; i < ring.lead && left > 0; ++i, --left, made = ring.past(made)) tiles.put(made);
  }
  for (int64_t block = begin; block < end; block += N) {
    int64_t due = 0;
    for (int64_t row = first; row < last; row += most_rows) {
      for_rows<kMost>(divide_up(last - row, height), [&]<int R>() __attribute__((always_inline)) {
        each<N>([&]<int n>() { each<R>([&]<int r>() { zero_sum<n * kRowTiles + r>(); }); });
        const uint8_t *rows = x.of(row), *at = weights;
        for (int64_t i = 0, write_at = apart; i < count; ++i, rows += x.tile_bytes()) {
          settle();
          if (kLate && i == write_at) {
            write_at += apart;
            if (late.any()) late.write_next();
          }
          due += N;
          if (due >= passes * kUnit && left > 0) {
            due -= passes * kUnit;
            left -= kUnit;
            multiply_tiles<R, N>(rows, x_stride, at, count * kTileBytes, [&]<int done>() __attribute__((always_inline)) {
              each<4>([&]<int kQuarter>() __attribute__((always_inline)) {
                if constexpr (kQuarter * R * N / 4 == done) tiles.template put_quarter<kQuarter>(made);
              });
            });
            if constexpr (!Tiles::kInPlace) made = ring.past(made);
          } else {
            multiply_tiles<R, N>(rows, x_stride, at, count * kTileBytes, []<int>() {});
          }
          at += kTileBytes;
          if (!Tiles::kInPlace && at == ring.end()) at = ring.tiles;
        }
        if (kLate) late.write_all();
        late.template take<R>(row, block);
        if (!kLate) late.write_all();
      });
    }
    weights += N * count * kTileBytes;
    if (!Tiles::kInPlace) weights = ring.tiles + (weights - ring.tiles) % (ring.capacity * kTileBytes);
  }
  late.write_all();
}

// Blocks [begin, end) of bf16. `next`: lines that this thread probably reads next.
template <int N, int kMost>
void lines_of_piece(const TileProduct& product, int64_t first, int64_t last, int64_t begin, int64_t end,
                    const uint8_t* next) {
  if (begin == end) return;
  const auto multiply = [&]<int kUnit>() {
    const LineTiles<kUnit> tiles(block_lines(product.op.weight, begin + N), (end - begin - N) * product.x.count, next);
    multiply_blocks<N, kMost, kUnit>(product, first, last, begin, end, tiles, TileRing{});
  };
  if (last - first <= kMost * product.x.height) multiply.template operator()<N>();  // in one pass
  else multiply.template operator()<1>();
}

// Blocks [begin, end) of codes.
template <class Tiles>
void codes_of_piece(Worker& worker, const TileProduct& product, int64_t first, int64_t last, int64_t begin,
                    int64_t end) {
  const Matrix& weight = product.op.weight;
  const int64_t few = kFewRowTiles * product.x.height, of_pair = 2 * product.x.count;
  const bool ring_only = last - first <= few || 2 * of_pair * kTileBytes > kBuffersInCache;
  const int64_t pairs = ring_only ? begin : begin + (end - begin) / 2 * 2;
  const int64_t capacity = ring_only || 2 * of_pair < kRingTiles ? kRingTiles : 2 * of_pair;
  auto* memory = reinterpret_cast<uint8_t*>(worker.own(static_cast<size_t>(capacity * kTileBytes)));
  if (pairs > begin) {
    multiply_blocks<2, kRowTiles, 1>(product, first, last, begin, pairs, Tiles(weight, begin),
                                     {memory, 2 * of_pair, of_pair});
  }
  const TileRing ring{memory, kRingTiles, kRingLead};
  if (last - first <= few) {
    if (pairs < end) multiply_blocks<1, kFewRowTiles, 1>(product, first, last, pairs, end, Tiles(weight, pairs), ring);
    return;
  }
  for (int64_t block = pairs; block < end; ++block) {
    for (int64_t row = first; row < last; row += few) {
      const int64_t past = row + few < last ? row + few : last;
      multiply_blocks<1, kFewRowTiles, 1>(product, row, past, block, block + 1, Tiles(weight, block), ring);
    }
  }
}

// Rows [first, last) and blocks [begin, end) of a product.
inline void tiles_of_piece(Worker& worker, const TileProduct& product, int64_t first, int64_t last, int64_t begin,
                           int64_t end, const uint8_t* next) {
  const Matrix& weight = product.op.weight;
  if (weight.format.scheme == Scheme::grouped) {
    by_codes(weight.format, [&]<class Tiles>() { codes_of_piece<Tiles>(worker, product, first, last, begin, end); });
    return;
  }
  const int64_t pairs = begin + (end - begin) / 2 * 2;
  lines_of_piece<2, kRowTiles>(product, first, last, begin, pairs, pairs < end ? block_lines(weight, pairs) : next);
  lines_of_piece<1, kRowTiles>(product, first, last, pairs, end, next);
}

// -- the op -------------------------------------------------------------------------------------------------------

// The rows of x that are multiplied together, so that they stay in the L2 cache.
inline int64_t rows_together(const TileRows& x, int64_t rows) {
  const int64_t few = kFewRowTiles * x.height, whole = kRowTiles * kTileRows;
  if (rows <= few) return rows;
  const int64_t fit = kRowsInCache / (x.count * kLineBytes) / whole, groups = divide_up(rows, whole);
  return divide_up(groups, divide_up(groups, fit < 1 ? 1 : fit)) * whole;
}

template <class T>
void multiply_by_tiles(Worker& worker, const LinearOp& op) {
  const int64_t rows = *op.rows, height = tile_height(rows), padded = padded_rows(rows);
  // The rows of one head after those of another.
  const TileRows x = prepare_tiles<T>(worker, op, padded * op.heads, height, worker.shared(), [&](int64_t i) {
    const int64_t head = i / padded, row = i % padded;
    return TileRow{i / height * height, height, row < rows ? row * op.heads + head : -1};
  });
  const TilesInUse tiles(kShapes[height - 1]);
  const int64_t blocks = divide_up(op.weight.n, kColumns), of_head = divide_up(blocks, op.heads);
  const int64_t together = rows_together(x, rows), items = divide_up(rows, together) * blocks;
  worker.for_share(items, grain_of(items, worker.count()), [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row = begin / blocks * together, first = begin % blocks, head = first / of_head;
      const int64_t most = (head + 1) * of_head < blocks ? (head + 1) * of_head : blocks;
      const int64_t last = first + end - begin < most ? first + end - begin : most;
      const TileProduct product{op, {x.of(head * padded), x.count, height}, rows, {op, written<T>(op)}};
      tiles_of_piece(worker, product, row, row + together < rows ? row + together : rows, first, last,
                     block_lines(op.weight, last % blocks));
      begin += last - first;
    }
  });
}

// Vectors multiply fp32, which tiles would round, and int16, which tiles cannot multiply.
inline bool through_registers(const Matrix& weight, Dtype dtype) {
  const Scheme scheme = weight.format.scheme;
  return scheme == Scheme::f32 || scheme == Scheme::int16 || (scheme == Scheme::bf16 && dtype == Dtype::f32);
}

void linear_by_tiles(Worker& worker, const LinearOp& op) {
  if (*op.rows == 0) return;
  if (through_registers(op.weight, op.dtype)) return kAvx512.linear(worker, op);
  if (op.dtype == Dtype::f32) return multiply_by_tiles<float>(worker, op);
  multiply_by_tiles<uint16_t>(worker, op);
}

// Includes the rows that fill the last tile of each head. A value takes 2 bytes.
size_t tiles_shared_bytes(const LinearOp& op) {
  return kAvx512.linear_shared_bytes(op) + op.heads * kTileRows * padded_k(op.weight) * 2;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
