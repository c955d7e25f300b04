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

// The shapes of the tile registers. 0 to 4 have full size: 16 rows of 64 bytes. The others are for products that add up
// 16 elements instead of 32: 5 is the left operand, half as wide; 6 and 7 are right operands, half as high.
constexpr TileShapes attention_shapes() {
  TileShapes shapes = tile_shapes(kTileRows);
  shapes.bytes[5] = 32;
  shapes.rows[6] = shapes.rows[7] = 8;
  return shapes;
}
constexpr TileShapes kAttentionTiles = attention_shapes();

// Writes the scores of 16 queries [16][dim] at the 16 positions of `keys`, and at those of `more_keys` unless it is
// null: scores[row * kRowStride + i], where i is 0 to 15 for `keys` and 16 to 31 for `more_keys`. `line_stride` is the
// distance in bytes between lines of keys, where a line has two elements of each position.
inline void score_tiles(const uint16_t* query, int64_t dim, const uint16_t* keys, const uint16_t* more_keys,
                        int64_t line_stride, float* scores) {
  const int64_t row_bytes = dim * 2;
  settle();  // forces the compiler to finish writing the queries before the tiles are loaded: see linear_amx.h
  _tile_zero(0);
  _tile_zero(1);
  const auto* lines = reinterpret_cast<const uint8_t*>(keys);
  const auto* more = reinterpret_cast<const uint8_t*>(more_keys);
  int64_t i = 0;
  for (; i + 32 <= dim; i += 32) {
    _tile_loadd(2, query + i, row_bytes);
    _tile_loadd(3, lines + i / 2 * line_stride, line_stride);
    _tile_dpbf16ps(0, 2, 3);
    if (more != nullptr) {
      _tile_loadd(4, more + i / 2 * line_stride, line_stride);
      _tile_dpbf16ps(1, 2, 4);
    }
  }
  if (i < dim) {
    _tile_loadd(5, query + i, row_bytes);
    _tile_loadd(6, lines + i / 2 * line_stride, line_stride);
    _tile_dpbf16ps(0, 5, 6);
    if (more != nullptr) {
      _tile_loadd(7, more + i / 2 * line_stride, line_stride);
      _tile_dpbf16ps(1, 5, 7);
    }
  }
  _tile_stored(0, scores, kRowStride * 4);
  if (more != nullptr) _tile_stored(1, scores + 16, kRowStride * 4);
}

// Writes sums [16][dim] = weights times values. `runs` are the values of `count` runs; column 16 * i + j of the weights
// [16][kRowStride] belongs to position j of run i.
inline void sum_tiles(const uint16_t* weights, const uint16_t* const* runs, int64_t count, int64_t dim, float* sums) {
  const int64_t stride = dim * 4;  // bytes of a line of values (bf16 pairs), and of a row of sums (floats)
  int64_t column = 0;
  settle();  // as above, for the weights
  for (; column + 64 <= dim; column += 64) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t* lines = runs[i] + column * 2;
      _tile_loadd(5, weights + i * 16, kRowStride * 2);
      _tile_loadd(6, lines, stride);
      _tile_dpbf16ps(0, 5, 6);
      _tile_loadd(7, lines + 32, stride);
      _tile_dpbf16ps(1, 5, 7);
      _tile_loadd(6, lines + 64, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(7, lines + 96, stride);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums + column, stride);
    _tile_stored(1, sums + column + 16, stride);
    _tile_stored(2, sums + column + 32, stride);
    _tile_stored(3, sums + column + 48, stride);
  }
  for (; column < dim; column += 16) {
    _tile_zero(0);
    for (int64_t i = 0; i < count; ++i) {
      _tile_loadd(5, weights + i * 16, kRowStride * 2);
      _tile_loadd(6, runs[i] + column * 2, stride);
      _tile_dpbf16ps(0, 5, 6);
    }
    _tile_stored(0, sums + column, stride);
  }
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

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
