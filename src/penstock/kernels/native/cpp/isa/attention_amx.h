// Attention's two products by tiles, for bf16 queries over bf16 pages. A page's lines in memory are tiles: keys are 16
// positions by 32 (or the last 16) of head_dim, values 16 positions by 16 columns.
//
// Weights are rounded to bf16. A row's result depends on that row alone, and positions that it does not see have the
// weight 0: so neither the rows beside it nor the bounds of tiles change a bit.

namespace penstock::PENSTOCK_ISA {
namespace {

// Tile registers: 0 to 4 whole (sums, rows and lines), 5 half as wide and 6 and 7 half as high, for 16 along k.
constexpr TileShapes attention_shapes() {
  TileShapes shapes = tile_shapes(64);
  shapes.bytes[5] = 32;
  shapes.rows[6] = shapes.rows[7] = 8;
  return shapes;
}
constexpr TileShapes kAttentionTiles = attention_shapes();

// Scores of 16 rows of queries [16][dim], at 16 positions each of one or two runs of keys; `line_stride` in bytes.
inline void score_tiles(const uint16_t* query, int64_t dim, const uint16_t* keys, const uint16_t* more_keys,
                        int64_t line_stride, float* scores) {
  const int64_t row_bytes = dim * 2;
  settle();
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

// Sums [16][dim] of the values at `count` runs of 16 positions, times 16 rows of weights [16][kRowStride].
inline void sum_tiles(const uint16_t* weights, const uint16_t* const* runs, int64_t count, int64_t dim, float* sums) {
  const int64_t stride = dim * 4;  // of lines and of sums, in bytes
  int64_t column = 0;
  settle();
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

// Copies a run of 16 positions whose first `count` are written; the others become 0.
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
