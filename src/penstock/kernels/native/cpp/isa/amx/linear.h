// x weight^T by tiles of 16 rows of x, 16 columns and up to 64 bytes along k. 16 lines of a packed weight in memory are
// a tile, so weights are loaded as they are. Only codes of four bits are unpacked first, a block at a time.
//
// A row of a tile's product depends on that row alone, and tiles are added along k in one order: so a row's result does
// not depend on the number of rows. Sums of integers are exact with any instruction.

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int64_t kTileRows = 16, kTileBytes = 1024;
constexpr int64_t kAhead = 4;               // how many tiles of each block are prefetched ahead
constexpr int64_t kRowsInCache = 1 << 19;   // bytes of x that stay in the L2 cache for all blocks
constexpr int64_t kFewRows = 6;             // of x, with grouped weights: below this, vectors are faster than tiles

// -- tile registers: 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights -------------------------------------------

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};
};

// The shapes of tiles with `along` bytes of x along k: 64, or a span of a grouped weight.
constexpr TileShapes tile_shapes(int along) {
  TileShapes shapes;
  for (int i = 0; i < 8; ++i) {
    shapes.bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? along : 64);
    shapes.rows[i] = static_cast<uint8_t>(i == 6 || i == 7 ? along / 4 : kTileRows);
  }
  return shapes;
}

constexpr TileShapes kWholeTiles = tile_shapes(64), kHalfTiles = tile_shapes(32), kQuarterTiles = tile_shapes(16);

inline const TileShapes& shapes_for(int64_t along) {
  return along == 64 ? kWholeTiles : along == 32 ? kHalfTiles : kQuarterTiles;
}

// Configures the tile registers during its lifetime. Not kept between ops: oneDNN sets other shapes on this thread.
class TilesInUse {
 public:
  explicit TilesInUse(const TileShapes& shapes) { _tile_loadconfig(&shapes); }
  ~TilesInUse() { _tile_release(); }
  TilesInUse(const TilesInUse&) = delete;
  TilesInUse& operator=(const TilesInUse&) = delete;
};

// GCC 12 does not treat a tile load as a read of memory: this forces earlier writes to be done before it.
inline void settle() { asm volatile("" ::: "memory"); }

// -- x as tiles ---------------------------------------------------------------------------------------------------

// Rows of x, [row / 16][k tile][16][along] bytes. Rows past the last are undefined, and so are their unused results.
struct TileRows {
  const uint8_t* tiles;
  float* factors;       // of integers: [row / 16][count][scale, start, sum][16], of a tile's values along k
  int64_t along;        // bytes of a tile's row
  int64_t count;        // of tiles along k

  const uint8_t* of(int64_t row) const { return tiles + row / kTileRows * stride(); }
  int64_t stride() const { return count * kTileRows * along; }
  // The rows from `row` on, a multiple of 16.
  TileRows from(int64_t row) const { return {of(row), factors_of(row), along, count}; }
  float* factors_of(int64_t row) const { return factors + row * 3 * count; }
};

inline void copy_bf16(const uint16_t* x, int64_t k, uint16_t* out, int64_t padded) {
  for (int64_t i = 0; i < padded; i += 16) store(out + i, i < k ? load_part(x + i, k - i) : zero_f());
}

// The bytes of x in a row of a tile.
inline int64_t tile_bytes_along(const Matrix& weight) {
  return weight.format.scheme == Scheme::grouped ? span_of(weight) : 64;
}

// `memory` and `source`: see `prepare`.
template <class T>
TileRows prepare_tiles(Worker& worker, const LinearOp& op, int64_t rows, std::byte* memory,
                       const int32_t* source = nullptr) {
  const bool integers = op.weight.format.scheme == Scheme::grouped;
  const int64_t k = op.weight.k, padded = padded_k(op.weight), along = tile_bytes_along(op.weight);
  const int64_t bytes = integers ? padded : padded * 2, count = bytes / along;
  const int64_t all_rows = divide_up(rows, kTileRows) * kTileRows;
  auto* tiles = reinterpret_cast<uint8_t*>(memory);
  const TileRows x{tiles, reinterpret_cast<float*>(tiles + all_rows * bytes), along, count};
  auto* row_bytes = reinterpret_cast<uint8_t*>(worker.own(static_cast<size_t>(bytes)));
  worker.for_each(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = source == nullptr ? row : source[row];
      if (at < 0) continue;
      const T* from = static_cast<const T*>(op.x) + at * k;
      if constexpr (sizeof(T) == 2) {
        if (!integers) copy_bf16(from, k, reinterpret_cast<uint16_t*>(row_bytes), padded);
      }
      if (integers) {
        quantize_groups<DotBytes>(from, op.weight, reinterpret_cast<int8_t*>(row_bytes),
                                  {x.factors_of(row / kTileRows * kTileRows) + row % kTileRows, kTileRows});
      }
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
  if (!is_gated(op.epilogue)) {
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
  const int64_t column = block * 8, left = op.weight.n / 2 - column;
  store_part(static_cast<Out*>(op.out) + row * op.stride + column, gated(op.epilogue, first, second), left);
}

struct TileFinish {
  const LinearOp& op;
  void (*one)(const LinearOp& op, int64_t row, int64_t block, F16 y);
  void (*two)(const LinearOp& op, int64_t row, int64_t block, F16 first, F16 second);
};

// -- bf16 -----------------------------------------------------------------------------------------------------------

// R tiles of rows by N blocks, along all of k. `next`: lines to prefetch; null if they were read before.
template <int R, int N>
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
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N > 1) {
      _tile_loadd(7, lines + block_stride, kLineBytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (R > 1) {
      _tile_loadd(5, x + rows.stride(), kLineBytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (N > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, kLineBytes);
  if constexpr (N > 1) _tile_stored(1, sums + 256, kLineBytes);
  if constexpr (R > 1) _tile_stored(2, sums + 512, kLineBytes);
  if constexpr (R > 1 && N > 1) _tile_stored(3, sums + 768, kLineBytes);
}

template <int R, int N>
void tiles_of_rows(const TileRows& x, const uint8_t* lines, int64_t block_stride,
                   const uint8_t* next, int64_t row, int64_t rows, int64_t block, const TileFinish& finish) {
  alignas(64) float sums[4 * 256];
  multiply_tiles<R, N>(x, x.of(row), lines, block_stride, next, sums);
  const int64_t count = rows - row < R * kTileRows ? rows - row : R * kTileRows;
  for (int64_t m = 0; m < count; ++m) {
    const float* from = sums + m / kTileRows * 512 + m % kTileRows * kColumns;
    if constexpr (N == 2) {
      finish.two(finish.op, row + m, block, load(from), load(from + 256));
    } else {
      finish.one(finish.op, row + m, block, load(from));
    }
  }
}

// N blocks, rows [begin, end).
template <int N>
void tiles_of_blocks(const TileRows& x, const uint8_t* weight_lines, int64_t begin, int64_t end, int64_t block,
                     const TileFinish& finish) {
  const int64_t block_stride = x.count * kTileBytes;
  const uint8_t* lines = weight_lines + block * block_stride;
  const uint8_t* next = begin == 0 ? lines + N * block_stride : nullptr;
  for (int64_t row = begin; row < end; row += 2 * kTileRows, next = nullptr) {
    if (end - row > kTileRows) {
      tiles_of_rows<2, N>(x, lines, block_stride, next, row, end, block, finish);
    } else {
      tiles_of_rows<1, N>(x, lines, block_stride, next, row, end, block, finish);
    }
  }
}

// -- grouped --------------------------------------------------------------------------------------------------------

// Lines of bytes for the lines of a block: codes of four bits give two each.
template <class Dot>
void unpack_codes(const uint8_t* lines, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i, lines += kLineBytes) {
    _mm_prefetch(reinterpret_cast<const char*>(lines + 2 * kAhead * kTileBytes), _MM_HINT_T0);
    for (int word = 0; word < Dot::kWords; ++word, out += kLineBytes) _mm512_storeu_si512(out, Dot::widen(lines, word));
  }
}

// The block's lines of bytes: as they are in memory, or unpacked into memory of the worker.
inline const uint8_t* byte_lines(Worker& worker, const Matrix& weight, int64_t block) {
  const uint8_t* lines = block_lines(weight, block);
  if (weight.format.codes == Codes::bytes) return lines;
  const int64_t padded = padded_k(weight);
  auto* out = reinterpret_cast<uint8_t*>(worker.own(static_cast<size_t>(padded * kColumns)));
  by_format(weight.format, [&]<class Dot>() {
    if constexpr (Grouped<Dot>) unpack_codes<Dot>(lines, padded / Dot::kLineValues, out);
  });
  settle();
  return out;
}

// One tile of rows by a block, a span along k at a time. Two spans are in flight, in tiles of their own: one is
// multiplied while the other's sums are read from memory.
class GroupTiles {
 public:
  GroupTiles(const Matrix& weight, const TileRows& x, const uint8_t* lines, int64_t block)
      : weight_(weight), x_(x), lines_(lines), block_(block) {}

  void run(int64_t row, F16 (&totals)[kTileRows]) {
    const uint8_t* x = x_.of(row);
    const float* factors = x_.factors_of(row);
    GroupFactors scales = scales_of(weight_, block_, 0), mins = mins_of(weight_, block_, 0);
    const int64_t per_group = weight_.format.group / x_.along;
    const auto add_span = [&](const int32_t* sums, int64_t span) __attribute__((always_inline)) {
      add(sums, factors + span * 3 * kTileRows, scales, mins, totals);
      if ((span + 1) % per_group != 0) return;
      scales.next();
      if (weight_.mins != nullptr) mins.next();
    };
#pragma GCC unroll 16
    for (int m = 0; m < kTileRows; ++m) totals[m] = zero_f();
    multiply_even(x, 0);
    for (int64_t span = 0; span < x_.count; span += 2) {
      if (span + 1 < x_.count) multiply_odd(x, span + 1);
      add_span(even_, span);
      if (span + 2 < x_.count) multiply_even(x, span + 2);
      if (span + 1 < x_.count) add_span(odd_, span + 1);
    }
  }

 private:
  void multiply_even(const uint8_t* x, int64_t span) {
    const uint8_t* lines = lines_of(span);
    _tile_zero(0);
    _tile_loadd(4, x + span * kTileRows * x_.along, x_.along);
    _tile_loadd(6, lines, kLineBytes);
    _tile_dpbsud(0, 4, 6);
    _tile_stored(0, even_, kLineBytes);
  }

  void multiply_odd(const uint8_t* x, int64_t span) {
    const uint8_t* lines = lines_of(span);
    _tile_zero(1);
    _tile_loadd(5, x + span * kTileRows * x_.along, x_.along);
    _tile_loadd(7, lines, kLineBytes);
    _tile_dpbsud(1, 5, 7);
    _tile_stored(1, odd_, kLineBytes);
  }

  const uint8_t* lines_of(int64_t span) const {
    const int64_t bytes = kColumns * x_.along;
    const uint8_t* lines = lines_ + span * bytes;
    for (int64_t i = 0; i < bytes; i += kLineBytes) {
      _mm_prefetch(reinterpret_cast<const char*>(lines + kAhead * kTileBytes + i), _MM_HINT_T0);
    }
    return lines;
  }

  [[gnu::always_inline]] inline void add(const int32_t* sums, const float* factors, const GroupFactors& scales,
                                         const GroupFactors& mins, F16 (&totals)[kTileRows]) const {
    const auto* starts = reinterpret_cast<const int32_t*>(factors + kTileRows);
    const F16 scale = scales(0);
#pragma GCC unroll 16
    for (int m = 0; m < kTileRows; ++m) {
      const F16 sum = to_float(amx::add(load(sums + m * kColumns), splat(starts[m])));
      totals[m] = fma(sum, mul(scale, splat(factors[m])), totals[m]);
    }
    if (weight_.mins == nullptr) return;
    const F16 min = mins(0);
#pragma GCC unroll 16
    for (int m = 0; m < kTileRows; ++m) totals[m] = fma(min, splat(factors[2 * kTileRows + m]), totals[m]);
  }

  const Matrix& weight_;
  const TileRows& x_;
  const uint8_t* lines_;
  const int64_t block_;
  alignas(64) int32_t even_[256];
  alignas(64) int32_t odd_[256];
};

// A block, rows [begin, end).
inline void tiles_of_groups(Worker& worker, const Matrix& weight, const TileRows& x, int64_t begin, int64_t end,
                            int64_t block, const TileFinish& finish) {
  GroupTiles tiles(weight, x, byte_lines(worker, weight, block), block);
  for (int64_t row = begin; row < end; row += kTileRows) {
    F16 totals[kTileRows];
    tiles.run(row, totals);
    for (int64_t m = 0; m < kTileRows && row + m < end; ++m) finish.one(finish.op, row + m, block, totals[m]);
  }
}

// -- the op ---------------------------------------------------------------------------------------------------------

// Blocks [begin, end) of all rows.
inline void tiles_of_piece(Worker& worker, const TileRows& x, int64_t rows, int64_t begin, int64_t end,
                           const TileFinish& finish) {
  const Matrix& weight = finish.op.weight;
  int64_t at_once = kRowsInCache / (x.count * x.along) / (2 * kTileRows) * (2 * kTileRows);
  at_once = at_once < 2 * kTileRows ? 2 * kTileRows : at_once;
  for (int64_t first = 0; first < rows; first += at_once) {
    const int64_t last = first + at_once < rows ? first + at_once : rows;
    for (int64_t block = begin; block < end;) {
      if (weight.format.scheme == Scheme::grouped) {
        tiles_of_groups(worker, weight, x, first, last, block++, finish);
        continue;
      }
      if (block + 1 < end) tiles_of_blocks<2>(x, weight.lines, first, last, block, finish);
      else tiles_of_blocks<1>(x, weight.lines, first, last, block, finish);
      block += 2;
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
  const TileRows x = prepare_tiles<T>(worker, op, rows, worker.shared());
  const TileFinish finish = tile_finish<T>(op);
  const TilesInUse tiles(shapes_for(x.along));
  const int64_t blocks = divide_up(weight.n, kColumns);
  int64_t grain = blocks / (8 * worker.count()) / 2 * 2;
  grain = grain < 2 ? 2 : grain > 16 ? 16 : grain;
  worker.for_each(blocks, grain,
                  [&](int64_t begin, int64_t end) { tiles_of_piece(worker, x, rows, begin, end, finish); });
}

// Vectors multiply fp32, which tiles would round, int16, which tiles cannot multiply, and few rows with grouped weights,
// whose sums are the same either way.
inline bool through_registers(const Matrix& weight, Dtype dtype, int64_t rows) {
  const Scheme scheme = weight.format.scheme;
  if (scheme == Scheme::grouped) return rows < kFewRows;
  return scheme == Scheme::f32 || scheme == Scheme::int16 || (scheme == Scheme::bf16 && dtype == Dtype::f32);
}

void linear_by_tiles(Worker& worker, const LinearOp& op) {
  const int64_t rows = *op.rows;
  if (rows == 0) return;
  if (op.heads > 1 || through_registers(op.weight, op.dtype, rows)) return kAvx512.linear(worker, op);
  if (op.dtype == Dtype::f32) return multiply_by_tiles<float>(worker, op, rows);
  multiply_by_tiles<uint16_t>(worker, op, rows);
}

// Includes the rows that fill the last tile. A value takes at most 2 bytes.
size_t tiles_shared_bytes(const LinearOp& op) {
  return kAvx512.linear_shared_bytes(op) + kTileRows * padded_k(op.weight) * 2;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
