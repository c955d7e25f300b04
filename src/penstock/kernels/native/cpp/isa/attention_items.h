// The items of an attention op, divided among threads: each is a tile of attention.h, for some of the KV heads.

namespace penstock::PENSTOCK_ISA {
namespace {

// The number of KV heads computed together, for `items` items: as many as leave work for every thread.
inline int64_t heads_together(const AttentionOp& op, const Worker& worker, int64_t items) {
  const int64_t pieces = divide_up(4 * worker.count(), items < 1 ? 1 : items);
  const int64_t heads = op.kv_heads / (pieces < op.kv_heads ? pieces : op.kv_heads);
  return heads < kMostHeads ? heads : kMostHeads;
}

template <class Page, class Tiles = void>
void attention_as(Worker& worker, const AttentionOp& op) {
  using Tile = AttentionTile<Page, Tiles>;
  const int64_t group = op.heads / op.kv_heads, size = group * (op.value_dim + 2);
  // Calls f(item, first, heads) for all of `count` items and KV heads, some heads at a time.
  const auto share = [&](int64_t count, const auto& f) {
    const int64_t together = heads_together(op, worker, count), pieces = divide_up(op.kv_heads, together);
    worker.for_each(count * pieces, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i % pieces * together, left = op.kv_heads - first;
        f(i / pieces, first, left < together ? left : together);
      }
    });
  };
  share(*op.item_count, [&](int64_t i, int64_t first, int64_t heads) {
    const AttentionItem& item = op.items[i];
    if (item.segment >= 0) {
      Tile tile(op, worker, item.sequence, item.first, item.count, first, heads);
      return tile.run(item.segment, op.partials + (item.partial * op.kv_heads + first) * size);
    }
    // A prompt has so many rows that a single head is enough work.
    const int64_t together = item.count > 1 ? 1 : heads;
    for (int64_t head = first; head < first + heads; head += together) {
      Tile tile(op, worker, item.sequence, item.first, item.count, head, together);
      tile.run();
    }
  });
  if (*op.merge_count == 0) return;
  share(*op.merge_count, [&](int64_t i, int64_t first, int64_t heads) {
    const AttentionMerge& merge = op.merges[i];
    Tile tile(op, worker, merge.sequence, 0, 1, first, heads);
    tile.merge_partials(op.partials + (merge.partial * op.kv_heads + first) * size, size * op.kv_heads, merge.count);
  });
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
