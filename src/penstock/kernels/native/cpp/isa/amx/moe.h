// A mixture of experts by tiles. An expert's rows begin at a tile boundary.

namespace penstock::PENSTOCK_ISA {
namespace {

struct ByTiles {
  static constexpr int64_t kMostRows = kTileRows;
  static int64_t padded(int64_t rows) { return divide_up(rows, kTileRows) * kTileRows; }

  template <class T>
  static void multiply(Worker& worker, const LinearOp& op, const Groups& groups, const int32_t* source,
                       std::byte* memory) {
    const TileRows x = prepare_tiles<T>(worker, op, groups.rows(), memory, source);
    const TilesInUse tiles(shapes_for(x.along));
    const auto piece = [&](const LinearOp& mine, int64_t row, int64_t rows, int64_t begin, int64_t end,
                           const uint8_t*) {
      tiles_of_piece(worker, x.from(row), rows, begin, end, tile_finish<T>(mine));
    };
    each_expert(worker, op, groups, piece);
  }
};

// Chooses vectors or tiles as linear_by_tiles does. The rows of each expert are not counted yet, so an even
// distribution is assumed.
void experts_by_tiles(Worker& worker, const ExpertsOp& op) {
  const int64_t rows = *op.rows * op.slots / std::max<int64_t>(op.held, 1);
  if (through_registers(op.gate_up, op.dtype, rows) || through_registers(op.down, op.dtype, rows)) {
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
