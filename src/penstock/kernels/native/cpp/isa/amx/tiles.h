// Tile registers: 0 to 5 hold sums, 6 rows of x, 7 a tile of weights. The intrinsics take literal numbers.

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int64_t kTileRows = 16, kTileBytes = 1024;
constexpr int64_t kTileValues = 32;  // along k, of bf16

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};
};

// The shapes for tiles of `height` rows of x.
constexpr TileShapes tile_shapes(int64_t height) {
  TileShapes shapes;
  for (int i = 0; i < 8; ++i) {
    shapes.bytes[i] = kLineBytes;
    shapes.rows[i] = static_cast<uint8_t>(i == 7 ? kTileRows : height);
  }
  return shapes;
}

// The shapes that shapes_of(height) gives for 1 to 16 rows. They are to be constants: GCC 12 treats a load of one as a read
// of its first 8 bytes.
constexpr std::array<TileShapes, kTileRows> for_all_heights(TileShapes (*shapes_of)(int64_t)) {
  std::array<TileShapes, kTileRows> shapes;
  for (int64_t i = 0; i < kTileRows; ++i) shapes[i] = shapes_of(i + 1);
  return shapes;
}

constexpr auto kShapes = for_all_heights(tile_shapes);

// The rows of a tile of x: a few rows fill a small one.
constexpr int64_t tile_height(int64_t rows) { return rows < kTileRows ? rows : kTileRows; }
// The rows with those that fill the last tile.
inline int64_t padded_rows(int64_t rows) { return divide_up(rows, tile_height(rows)) * tile_height(rows); }

// Configures the tile registers during its lifetime. Not kept between ops: oneDNN sets other shapes on this thread.
class TilesInUse {
 public:
  explicit TilesInUse(const TileShapes& shapes) { _tile_loadconfig(&shapes); }
  ~TilesInUse() { _tile_release(); }
  TilesInUse(const TilesInUse&) = delete;
  TilesInUse& operator=(const TilesInUse&) = delete;
};

// GCC 12 does not treat a tile load as a read of memory: this forces earlier writes to be done before it.
[[gnu::always_inline]] inline void settle() { asm volatile("" ::: "memory"); }

template <int kSum>
[[gnu::always_inline]] inline void zero_sum() {
  if constexpr (kSum == 0) _tile_zero(0);
  if constexpr (kSum == 1) _tile_zero(1);
  if constexpr (kSum == 2) _tile_zero(2);
  if constexpr (kSum == 3) _tile_zero(3);
  if constexpr (kSum == 4) _tile_zero(4);
  if constexpr (kSum == 5) _tile_zero(5);
}

// Adds the product of tiles 6 and 7.
template <int kSum>
[[gnu::always_inline]] inline void add_product() {
  if constexpr (kSum == 0) _tile_dpbf16ps(0, 6, 7);
  if constexpr (kSum == 1) _tile_dpbf16ps(1, 6, 7);
  if constexpr (kSum == 2) _tile_dpbf16ps(2, 6, 7);
  if constexpr (kSum == 3) _tile_dpbf16ps(3, 6, 7);
  if constexpr (kSum == 4) _tile_dpbf16ps(4, 6, 7);
  if constexpr (kSum == 5) _tile_dpbf16ps(5, 6, 7);
}

template <int kSum>
[[gnu::always_inline]] inline void store_sum(float* sums, int64_t stride = kLineBytes) {
  if constexpr (kSum == 0) _tile_stored(0, sums, stride);
  if constexpr (kSum == 1) _tile_stored(1, sums, stride);
  if constexpr (kSum == 2) _tile_stored(2, sums, stride);
  if constexpr (kSum == 3) _tile_stored(3, sums, stride);
  if constexpr (kSum == 4) _tile_stored(4, sums, stride);
  if constexpr (kSum == 5) _tile_stored(5, sums, stride);
}

// Calls f<i>() for i in [0, N).
template <int N, class F>
[[gnu::always_inline]] inline void each(const F& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (f.template operator()<i>(), ...);
  }(std::make_integer_sequence<int, N>());
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
