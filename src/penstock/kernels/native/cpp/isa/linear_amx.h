// x weight^T by tiles of 16 rows of x, 16 columns and 64 bytes along k. 16 lines of a packed weight in memory are a
// tile, so weights are loaded as they are. Only int4 is unpacked first, a block at a time.
//
// A row of a tile's product depends on that row alone, and tiles are added along k in one order: so a row's result does
// not depend on the number of rows. Sums of integers are exact with any instruction.

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int64_t kTileRows = 16, kTileBytes = 1024;
constexpr int64_t kAhead = 4;               // how many tiles of each block are prefetched ahead
constexpr int64_t kRowsInCache = 1 << 19;   // bytes of x that stay in the L2 cache for all blocks
constexpr int64_t kFewRows = 6;             // of x, with int4 weights: below this, vectors are faster than tiles

// -- tile registers: 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights -------------------------------------------

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};
};

// The shapes of tiles with `along` bytes of x along k: 64, or less for a shorter group of int4 weights.
constexpr TileShapes tile_shapes(int along) {
  TileShapes shapes;
  for (int i = 0; i < 8; ++i) {
    shapes.bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? along : 64);
    shapes.rows[i] = static_cast<uint8_t>(i == 6 || i == 7 ? along / 4 : kTileRows);
  }
  return shapes;
}

constexpr TileShapes kWholeTiles = tile_shapes(64), kHalfTiles = tile_shapes(32);

// Configures the tile registers during its lifetime. Not kept between ops: oneDNN sets other shapes on this thread.
class TilesInUse {
 public:
  explicit TilesInUse(const TileShapes& shapes) { _tile_loadconfig(&shapes); }
  ~TilesInUse() { _tile_release(); }
  TilesInUse(const TilesInUse&) = delete;
  TilesInUse& operator=(const TilesInUse&) = delete;
};

// GCC 12 does not know that a tile load reads memory: this forces earlier writes to be done before it.
inline void settle() { asm volatile("" ::: "memory"); }

// -- x as tiles ---------------------------------------------------------------------------------------------------

// Rows of x, [row / 16][k tile][16][along] bytes. Rows past the last are undefined, and so are their unused results.
struct TileRows {
  const uint8_t* tiles;
  const float* scales;  // of integers: [rows]
  int64_t along;        // bytes of a tile's row
  int64_t count;        // of tiles along k

  const uint8_t* of(int64_t row) const { return tiles + row / kTileRows * stride(); }
  int64_t stride() const { return count * kTileRows * along; }
};

inline void copy_bf16(const uint16_t* x, int64_t k, uint16_t* out, int64_t padded) {
  for (int64_t i = 0; i < padded; i += 16) store(out + i, i < k ? load_part(x + i, k - i) : zero_f());
}

// Dot: the order of integers; not used for bf16. `memory` and `source`: see `prepare`.
template <class Dot, class T>
TileRows prepare_tiles(Worker& worker, const LinearOp& op, int64_t rows, int64_t along, std::byte* memory,
                       const int32_t* source = nullptr) {
  const bool integers = op.weight.scheme != Scheme::bf16;
  const int64_t k = op.weight.k, padded = padded_k(op.weight);
  const int64_t bytes = integers ? padded : padded * 2;
  auto* tiles = reinterpret_cast<uint8_t*>(memory);
  auto* scales = reinterpret_cast<float*>(tiles + divide_up(rows, kTileRows) * kTileRows * bytes);
  const TileRows x{tiles, scales, along, bytes / along};
  auto* row_bytes = reinterpret_cast<uint8_t*>(worker.own(static_cast<size_t>(bytes)));
  worker.for_each(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = source == nullptr ? row : source[row];
      if (at < 0) continue;
      const T* from = static_cast<const T*>(op.x) + at * k;
      if constexpr (sizeof(T) == 2) {
        if (!integers) copy_bf16(from, k, reinterpret_cast<uint16_t*>(row_bytes), padded);
      }
      if (integers) scales[row] = quantize_row<Dot>(from, k, reinterpret_cast<int8_t*>(row_bytes), padded);
      uint8_t* to = tiles + row / kTileRows * x.stride() + row % kTileRows * along;
      for (int64_t tile = 0; tile < x.count; ++tile) {
        __builtin_memcpy(to + tile * kTileRows * along, row_bytes + tile * along, static_cast<size_t>(along));
      }
    }
  });
  settle();
  return x;
}

// -- writing sums ---------------------------------------------------------------------------------------------------

// Writes two blocks of a row. With an epilogue their gates fill one vector and the other halves another.
template <class T, class Out>
void write_two(const LinearOp& op, int64_t row, int64_t block, F16 first, F16 second) {
  if (op.epilogue == Epilogue::none) {
    write<T, Out>(op, row, block, first);
    write<T, Out>(op, row, block + 1, second);
    return;
  }
  if (op.bias != nullptr) {
    const float* bias = static_cast<const float*>(op.bias) + block * kColumns;
    first = add(first, load(bias));
    second = add(second, load(bias + kColumns));
  }
  transpose_halves(first, second);
  const int64_t width = op.weight.n / 2, column = block * 8;
  store_part(static_cast<Out*>(op.out) + row * width + column, gated(op.epilogue, first, second), width - column);
}

struct TileFinish {
  const LinearOp& op;
  void (*one)(const LinearOp& op, int64_t row, int64_t block, F16 y);
  void (*two)(const LinearOp& op, int64_t row, int64_t block, F16 first, F16 second);
};

// -- bf16 and int8 --------------------------------------------------------------------------------------------------

struct Bf16Tiles {
  static void multiply_00() { _tile_dpbf16ps(0, 4, 6); }
  static void multiply_01() { _tile_dpbf16ps(1, 4, 7); }
  static void multiply_10() { _tile_dpbf16ps(2, 5, 6); }
  static void multiply_11() { _tile_dpbf16ps(3, 5, 7); }
  static F16 result(const Matrix&, int64_t, const float* sums, const float*, int64_t) { return load(sums); }
};

struct Int8Tiles {
  static void multiply_00() { _tile_dpbssd(0, 4, 6); }
  static void multiply_01() { _tile_dpbssd(1, 4, 7); }
  static void multiply_10() { _tile_dpbssd(2, 5, 6); }
  static void multiply_11() { _tile_dpbssd(3, 5, 7); }
  static F16 result(const Matrix& weight, int64_t block, const float* sums, const float* scales, int64_t row) {
    const F16 whole = to_float(load(reinterpret_cast<const int32_t*>(sums)));
    return mul(whole, mul(load(weight.column_scales + block * kColumns), splat(scales[row])));
  }
};

// R tiles of rows by N blocks, along all of k. `next`: lines to prefetch; null if they were read before.
template <class Kind, int R, int N>
void multiply_tiles(const TileRows& rows, const uint8_t* x, const uint8_t* lines, int64_t block_stride,
                    const uint8_t* next, float* sums) {
  _tile_zero(0);
  if constexpr (N > 1) _tile_zero(1);
  if constexpr (R > 1) _tile_zero(2);
  if constexpr (R > 1 && N > 1) _tile_zero(3);
  for (int64_t i = 0; i < rows.count; ++i, x += kTileBytes, lines += kTileBytes) {
    if (next != nullptr) {
      const int64_t left = rows.count - i - kAhead;
      const uint8_t* ahead = left > 0 ? lines + kAhead * kTileBytes : next - left * kTileBytes;
#pragma GCC unroll 16
      for (int64_t byte = 0; byte < kTileBytes; byte += kLineBytes) {
        _mm_prefetch(reinterpret_cast<const char*>(ahead + byte), _MM_HINT_T0);
        if constexpr (N > 1) _mm_prefetch(reinterpret_cast<const char*>(ahead + block_stride + byte), _MM_HINT_T0);
      }
    }
    _tile_loadd(4, x, kLineBytes);
    _tile_loadd(6, lines, kLineBytes);
    Kind::multiply_00();
    if constexpr (N > 1) {
      _tile_loadd(7, lines + block_stride, kLineBytes);
      Kind::multiply_01();
    }
    if constexpr (R > 1) {
      _tile_loadd(5, x + rows.stride(), kLineBytes);
      Kind::multiply_10();
      if constexpr (N > 1) Kind::multiply_11();
    }
  }
  _tile_stored(0, sums, kLineBytes);
  if constexpr (N > 1) _tile_stored(1, sums + 256, kLineBytes);
  if constexpr (R > 1) _tile_stored(2, sums + 512, kLineBytes);
  if constexpr (R > 1 && N > 1) _tile_stored(3, sums + 768, kLineBytes);
}

template <class Kind, int R, int N>
void tiles_of_rows(const Matrix& weight, const TileRows& x, const uint8_t* lines, int64_t block_stride,
                   const uint8_t* next, int64_t row, int64_t rows, int64_t block, const TileFinish& finish) {
  alignas(64) float sums[4 * 256];
  multiply_tiles<Kind, R, N>(x, x.of(row), lines, block_stride, next, sums);
  const int64_t count = rows - row < R * kTileRows ? rows - row : R * kTileRows;
  for (int64_t m = 0; m < count; ++m) {
    const float* from = sums + m / kTileRows * 512 + m % kTileRows * kColumns;
    const F16 y = Kind::result(weight, block, from, x.scales, row + m);
    if constexpr (N == 2) {
      finish.two(finish.op, row + m, block, y, Kind::result(weight, block + 1, from + 256, x.scales, row + m));
    } else {
      finish.one(finish.op, row + m, block, y);
    }
  }
}

// N blocks, rows [begin, end).
template <class Kind, int N>
void tiles_of_blocks(const Matrix& weight, const TileRows& x, int64_t begin, int64_t end, int64_t block,
                     const TileFinish& finish) {
  const int64_t block_stride = x.count * kTileBytes;
  const uint8_t* lines = weight.lines + block * block_stride;
  const uint8_t* next = begin == 0 ? lines + N * block_stride : nullptr;
  for (int64_t row = begin; row < end; row += 2 * kTileRows, next = nullptr) {
    if (end - row > kTileRows) {
      tiles_of_rows<Kind, 2, N>(weight, x, lines, block_stride, next, row, end, block, finish);
    } else {
      tiles_of_rows<Kind, 1, N>(weight, x, lines, block_stride, next, row, end, block, finish);
    }
  }
}

// -- int4 -----------------------------------------------------------------------------------------------------------

// Two lines of int8 for each line of a block: the low nibbles, then the high ones, all times 16.
inline void unpack_nibbles(const uint8_t* lines, int64_t count, uint8_t* out) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xf0f0f0f0u));
  for (int64_t i = 0; i < count; ++i, lines += kLineBytes, out += 2 * kLineBytes) {
    _mm_prefetch(reinterpret_cast<const char*>(lines + 2 * kAhead * kTileBytes), _MM_HINT_T0);
    const __m512i nibbles = _mm512_loadu_si512(lines);
    _mm512_storeu_si512(out, _mm512_and_si512(_mm512_slli_epi32(nibbles, 4), high));
    _mm512_storeu_si512(out + kLineBytes, _mm512_and_si512(nibbles, high));
  }
}

// One tile of rows by a block, where each group's sums have a scale. Two groups are in flight, in tiles of their own:
// one is multiplied while the other's sums are read from memory.
class GroupTiles {
 public:
  GroupTiles(const Matrix& weight, const TileRows& x, const uint8_t* lines, int64_t block)
      : groups_(groups_of(weight)),
        per_group_(weight.group / x.along),
        along_(x.along),
        lines_(lines),
        scales_(weight.group_scales + block * groups_ * kColumns) {}

  void run(const uint8_t* x, F16 (&totals)[kTileRows]) {
#pragma GCC unroll 16
    for (int m = 0; m < kTileRows; ++m) totals[m] = zero_f();
    multiply_even(x, 0);
    for (int64_t group = 0; group < groups_; group += 2) {
      if (group + 1 < groups_) multiply_odd(x, group + 1);
      add_group(even_, group, totals);
      if (group + 2 < groups_) multiply_even(x, group + 2);
      if (group + 1 < groups_) add_group(odd_, group + 1, totals);
    }
  }

 private:
  void multiply_even(const uint8_t* x, int64_t group) {
    const int64_t first = group * per_group_, x_bytes = kTileRows * along_, bytes = kColumns * along_;
    _tile_zero(0);
    for (int64_t i = first; i < first + per_group_; ++i) {
      _tile_loadd(4, x + i * x_bytes, along_);
      _tile_loadd(6, lines_ + i * bytes, kLineBytes);
      _tile_dpbssd(0, 4, 6);
    }
    _tile_stored(0, even_, kLineBytes);
  }

  void multiply_odd(const uint8_t* x, int64_t group) {
    const int64_t first = group * per_group_, x_bytes = kTileRows * along_, bytes = kColumns * along_;
    _tile_zero(1);
    for (int64_t i = first; i < first + per_group_; ++i) {
      _tile_loadd(5, x + i * x_bytes, along_);
      _tile_loadd(7, lines_ + i * bytes, kLineBytes);
      _tile_dpbssd(1, 5, 7);
    }
    _tile_stored(1, odd_, kLineBytes);
  }

  [[gnu::always_inline]] inline void add_group(const int32_t* sums, int64_t group, F16 (&totals)[kTileRows]) const {
    const F16 scale = load_half(scales_ + group * kColumns);
#pragma GCC unroll 16
    for (int m = 0; m < kTileRows; ++m) totals[m] = fma(to_float(load(sums + m * kColumns)), scale, totals[m]);
  }

  int64_t groups_, per_group_, along_;
  const uint8_t* lines_;
  const uint16_t* scales_;
  alignas(64) int32_t even_[256];
  alignas(64) int32_t odd_[256];
};

// A block, rows [begin, end).
inline void tiles_of_int4(Worker& worker, const Matrix& weight, const TileRows& x, int64_t begin, int64_t end,
                          int64_t block, const TileFinish& finish) {
  const int64_t padded = padded_k(weight), count = padded / 8;
  auto* lines = reinterpret_cast<uint8_t*>(worker.own(static_cast<size_t>(padded * kColumns)));
  unpack_nibbles(weight.lines + block * count * kLineBytes, count, lines);
  settle();
  GroupTiles tiles(weight, x, lines, block);
  for (int64_t row = begin; row < end; row += kTileRows) {
    F16 totals[kTileRows];
    tiles.run(x.of(row), totals);
    // A sixteenth first, which is exact; the scale's sixteenth might not be.
    for (int64_t m = 0; m < kTileRows && row + m < end; ++m) {
      finish.one(finish.op, row + m, block, mul(mul(totals[m], splat(0.0625f)), splat(x.scales[row + m])));
    }
  }
}

// -- the op ---------------------------------------------------------------------------------------------------------

// The bytes of x in a row of a tile.
inline int64_t tile_bytes_along(const Matrix& weight) {
  return weight.scheme == Scheme::int4 && weight.group < 64 ? weight.group : 64;
}

// True if groups of an int4 weight are whole tiles.
inline bool fits_tiles(const Matrix& weight) { return weight.group == 32 || weight.group % 64 == 0; }

// Blocks [begin, end) of all rows.
inline void tiles_of_piece(Worker& worker, const TileRows& x, int64_t rows, int64_t begin, int64_t end,
                           const TileFinish& finish) {
  const Matrix& weight = finish.op.weight;
  int64_t at_once = kRowsInCache / (x.count * x.along) / (2 * kTileRows) * (2 * kTileRows);
  at_once = at_once < 2 * kTileRows ? 2 * kTileRows : at_once;
  for (int64_t first = 0; first < rows; first += at_once) {
    const int64_t last = first + at_once < rows ? first + at_once : rows;
    for (int64_t block = begin; block < end;) {
      if (weight.scheme == Scheme::int4) {
        tiles_of_int4(worker, weight, x, first, last, block++, finish);
      } else if (weight.scheme == Scheme::int8) {
        if (block + 1 < end) tiles_of_blocks<Int8Tiles, 2>(weight, x, first, last, block, finish);
        else tiles_of_blocks<Int8Tiles, 1>(weight, x, first, last, block, finish);
        block += 2;
      } else {
        if (block + 1 < end) tiles_of_blocks<Bf16Tiles, 2>(weight, x, first, last, block, finish);
        else tiles_of_blocks<Bf16Tiles, 1>(weight, x, first, last, block, finish);
        block += 2;
      }
    }
  }
}

// Chosen by the type of the result: x's, or fp32.
template <class T>
TileFinish tile_finish(const LinearOp& op) {
  if (op.out_dtype == op.dtype) return {op, write<T, T>, write_two<T, T>};
  return {op, write<T, float>, write_two<T, float>};
}

template <class T>
void multiply_by_tiles(Worker& worker, const LinearOp& op, int64_t rows) {
  const Matrix& weight = op.weight;
  const int64_t along = tile_bytes_along(weight);
  const TileRows x = weight.scheme == Scheme::int4
                         ? prepare_tiles<DotInt4, T>(worker, op, rows, along, worker.shared())
                         : prepare_tiles<DotInt8, T>(worker, op, rows, along, worker.shared());
  const TileFinish finish = tile_finish<T>(op);
  const TilesInUse tiles(along == 64 ? kWholeTiles : kHalfTiles);
  const int64_t blocks = divide_up(weight.n, kColumns);
  int64_t grain = blocks / (8 * worker.count()) / 2 * 2;
  grain = grain < 2 ? 2 : grain > 16 ? 16 : grain;
  worker.for_each(blocks, grain,
                  [&](int64_t begin, int64_t end) { tiles_of_piece(worker, x, rows, begin, end, finish); });
}

// Vectors multiply fp32, which tiles would round, int16, which tiles cannot multiply, and few rows of int4, whose sums
// are the same either way.
inline bool through_registers(const Matrix& weight, Dtype dtype, int64_t rows) {
  if (weight.scheme == Scheme::int4) return rows < kFewRows || !fits_tiles(weight);
  return weight.scheme == Scheme::f32 || weight.scheme == Scheme::int16 ||
         (weight.scheme == Scheme::bf16 && dtype == Dtype::f32);
}

void linear_by_tiles(Worker& worker, const LinearOp& op) {
  const int64_t rows = *op.rows;
  if (rows == 0) return;
  if (through_registers(op.weight, op.dtype, rows)) return kAvx512.linear(worker, op);
  if (op.dtype == Dtype::f32) return multiply_by_tiles<float>(worker, op, rows);
  multiply_by_tiles<uint16_t>(worker, op, rows);
}

// Includes the rows that fill the last tile. A value takes at most 2 bytes.
size_t tiles_shared_bytes(const LinearOp& op) {
  return kAvx512.linear_shared_bytes(op) + kTileRows * padded_k(op.weight) * 2;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
