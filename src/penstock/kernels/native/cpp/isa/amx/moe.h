// A mixture of experts by tiles. An expert's rows begin with a tile.

namespace penstock::PENSTOCK_ISA {
namespace {

struct ByTiles {
  static constexpr int64_t kMostRows = kTileRows;
  static int64_t padded(int64_t rows) { return padded_rows(rows); }

  template <class T>
  static void multiply(Worker& worker, const LinearOp& op, const Groups& groups, const int32_t* source,
                       std::byte* memory) {
    const TileRows x = prepare_tiles<T>(worker, op, groups.rows(), kTileRows, memory, [&](int64_t row) {
      const int64_t i = std::upper_bound(groups.first, groups.first + groups.experts(), row) - groups.first - 1;
      const int64_t first = groups.first[i], height = tile_height(groups.counts[i]);
      return TileRow{first + (row - first) / height * height, height, source[row]};
    });
    const auto piece = [&](const LinearOp& mine, int64_t row, int64_t rows, int64_t begin, int64_t end,
                           const uint8_t* next) {
      const int64_t height = tile_height(rows);
      const TilesInUse tiles(kShapes[height - 1]);
      const TileProduct product{mine, {x.of(row), x.count, height}, rows, {mine, written<T>(mine)}};
      const int64_t together = rows_together(product.x, rows);
      for (int64_t first = 0; first < rows; first += together) {
        const int64_t last = first + together < rows ? first + together : rows;
        tiles_of_piece(worker, product, first, last, begin, end, last < rows ? block_lines(mine.weight, begin) : next);
      }
    };
    each_expert(worker, op, groups, piece);
  }
};

// Chooses vectors or tiles as linear_by_tiles does.
void experts_by_tiles(Worker& worker, const ExpertsOp& op) {
  if (through_registers(op.gate_up, op.dtype) || through_registers(op.down, op.dtype)) {
    return kAvx512.experts(worker, op);
  }
  if (op.dtype == Dtype::f32) return experts_by<ByTiles, float>(worker, op);
  experts_by<ByTiles, uint16_t>(worker, op);
}

size_t experts_tiles_shared_bytes(const ExpertsOp& op) {
  return std::max(ExpertsMemory(op, kTileRows).bytes, kAvx512.experts_shared_bytes(op));
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
