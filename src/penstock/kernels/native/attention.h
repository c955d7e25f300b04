// Attention over the paged cache, prefill and decode alike: queries of one sequence and the heads that share a KV head
// are rows of one tile.
//
// The positions of the cache are cut into segments at fixed places. A segment's result for a row (the largest score,
// the sum of the weights, the weighted sum of the values) depends on that row and the cache alone; the results are
// merged in order. So it makes no difference to a bit whether a tile goes through its segments in turn or several
// threads do, or how a prompt was cut into chunks.

namespace penstock::PENSTOCK_ISA {
namespace {

template <class T>
struct PageDot;
template <>
struct PageDot<float> {
  using Type = DotF32;
};
template <>
struct PageDot<uint16_t> {
  using Type = DotBf16;
};
template <>
struct PageDot<int8_t> {
  using Type = DotI8AsF32;
};

// What a tile has seen so far, or a segment of it: [rows].
struct Seen {
  float* maxima;
  float* weights;
  float* sums;  // [rows][head_dim]
};

// Queries of type T over pages of type Page; kTiles: multiplied by tile registers (see attention_amx.h).
template <class T, class Page, bool kTiles = false>
class AttentionTile {
  using Dot = typename PageDot<Page>::Type;
  static constexpr int64_t kPerWord = 4 / sizeof(Page);
  static constexpr bool kScaled = sizeof(Page) == 1;

 public:
  // Rows are `count` queries from `first` on, times the heads that share KV head `kv_head`.
  AttentionTile(const AttentionOp& op, Worker& worker, int64_t sequence, int64_t first, int64_t count, int64_t kv_head)
      : op_(op), group_(op.heads / op.kv_heads), rows_(count * group_), kv_head_(kv_head) {
    const int64_t start = op.query_start[sequence], length = op.query_start[sequence + 1] - start;
    position_ = op.context_lens[sequence] - length + first;
    begin_ = first_seen(position_);
    end_ = position_ + count;
    table_ = op.block_tables + sequence * op.table_stride;
    row_ = start + first;
    const int64_t dim = op.head_dim;
    const int64_t room = kTiles ? divide_up(rows_, 16) * 16 : rows_;  // of rows; those past the last are scratch
    const int64_t more = kTiles ? room * kSegment / 2 + 8 * dim : 0;
    auto* memory = reinterpret_cast<float*>(worker.own((room * (3 * dim + kSegment + 4) + more) * sizeof(float)));
    const auto take = [&](int64_t floats) {
      float* taken = memory;
      memory += floats;
      return taken;
    };
    query_ = take(room * dim);
    scores_ = take(room * kSegment);
    all_ = {take(room), take(room), take(room * dim)};
    one_ = {take(room), take(room), take(room * dim)};
    if constexpr (kTiles) {
      weights_ = reinterpret_cast<uint16_t*>(take(room * kSegment / 2));
      last_run_ = reinterpret_cast<uint16_t*>(take(8 * dim));
    }
    for (int64_t row = 0; row < rows_; ++row) {
      const T* q = static_cast<const T*>(op.query) + place(row);
      if constexpr (kTiles) {
        __builtin_memcpy(reinterpret_cast<T*>(query_) + row * dim, q, static_cast<size_t>(dim) * sizeof(T));
      } else {
        for (int64_t i = 0; i < dim; i += 16) store(query_ + row * dim + i, mul(load(q + i), splat(op.scale)));
      }
    }
  }

  // All segments in turn, into the output.
  void run() {
    clear_seen(all_);
    for (int64_t segment = begin_ / kSegment; segment * kSegment < end_; ++segment) {
      attend(segment, one_);
      merge(one_, all_, rows_);
    }
    write(all_);
  }

  // One segment, into a partial result.
  void run(int64_t segment, float* partial) {
    attend(segment, one_);
    const int64_t dim = op_.head_dim;
    for (int64_t row = 0; row < rows_; ++row) {
      float* to = partial + row * (dim + 2);
      for (int64_t i = 0; i < dim; i += 16) store(to + i, load(one_.sums + row * dim + i));
      to[dim] = one_.maxima[row];
      to[dim + 1] = one_.weights[row];
    }
  }

  // Partial results, `stride` floats apart, into the output.
  void merge_partials(const float* partial, int64_t stride, int64_t count) {
    const int64_t dim = op_.head_dim;
    clear_seen(all_);
    for (int64_t k = 0; k < count; ++k, partial += stride) {
      for (int64_t row = 0; row < rows_; ++row) {
        const float* from = partial + row * (dim + 2);
        for (int64_t i = 0; i < dim; i += 16) store(one_.sums + row * dim + i, load(from + i));
        one_.maxima[row] = from[dim];
        one_.weights[row] = from[dim + 1];
      }
      merge(one_, all_, rows_);
    }
    write(all_);
  }

 private:
  int64_t first_seen(int64_t position) const {
    return op_.window != 0 && position >= op_.window ? position - op_.window + 1 : 0;
  }

  int64_t place(int64_t row) const {
    return ((row_ + row / group_) * op_.heads + kv_head_ * group_ + row % group_) * op_.head_dim;
  }

  const Page* page(const void* pages, int64_t position) const {
    return static_cast<const Page*>(pages) + table_[position / op_.block_size] * op_.block_stride +
           kv_head_ * op_.head_stride;
  }

  // One float for each token of a head's page.
  const float* scales(const Page* head) const {
    return reinterpret_cast<const float*>(head + op_.block_size * op_.head_dim);
  }

  void clear_seen(Seen& seen) {
    for (int64_t row = 0; row < rows_; ++row) {
      seen.maxima[row] = -kInfinity;
      seen.weights[row] = 0.0f;
    }
    for (int64_t i = 0; i < rows_ * op_.head_dim; i += 16) store(seen.sums + i, zero_f());
  }

  // Calls f<M>(row) for the tile's rows, M at a time as far as they go.
  template <int M, class F>
  static void by_rows(int64_t row, int64_t rows, const F& f) {
    for (; row + M <= rows; row += M) f.template operator()<M>(row);
    if constexpr (M > 1) by_rows<M - 1>(row, rows, f);
  }

  void attend(int64_t segment, Seen& seen) {
    const int64_t origin = segment * kSegment;
    const int64_t begin = (begin_ > origin ? begin_ - origin : 0) / 16 * 16;  // within the segment
    const int64_t end = end_ - origin < kSegment ? end_ - origin : kSegment;
    if constexpr (kTiles) {
      score_by_tiles(origin, begin, end);
    } else {
      score(origin, begin, end);
    }
    for (int64_t row = 0; row < rows_; ++row) weigh(row, origin, begin, end, seen);
    if constexpr (kTiles) {
      sum_values_by_tiles(origin, begin, end, seen.sums);
    } else {
      for (int64_t i = 0; i < rows_ * op_.head_dim; i += 16) store(seen.sums + i, zero_f());
      sum_values(origin, begin, end, seen.sums);
    }
  }

  // Where 16 positions begin, within a page's lines of keys or of values.
  const Page* keys_at(int64_t position) const {
    return page(op_.keys, position) + position % op_.block_size * kPerWord;
  }
  const Page* values_at(int64_t position) const {
    return page(op_.values, position) + position % op_.block_size * op_.head_dim;
  }

  void score_by_tiles(int64_t origin, int64_t begin, int64_t end) {
    const int64_t dim = op_.head_dim;
    for (int64_t at = begin; at < end; at += 32) {
      const Page* keys = keys_at(origin + at);
      const Page* more = at + 16 < end ? keys_at(origin + at + 16) : nullptr;
      for (int64_t row = 0; row < rows_; row += 16) {
        score_tiles(reinterpret_cast<const T*>(query_) + row * dim, dim, keys, more, op_.block_size * 4,
                    scores_ + row * kSegment + at);
      }
    }
  }

  void sum_values_by_tiles(int64_t origin, int64_t begin, int64_t end, float* sums) {
    const Page* runs[kSegment / 16];
    int64_t count = 0;
    for (int64_t at = begin; at < end; at += 16) runs[count++] = values_at(origin + at);
    if (end % 16 != 0) {
      copy_values(runs[count - 1], end % 16, op_.head_dim, last_run_);
      runs[count - 1] = last_run_;
    }
    for (int64_t row = 0; row < rows_; row += 16) {
      sum_tiles(weights_ + row * kSegment + begin, runs, count, op_.head_dim, sums + row * op_.head_dim);
    }
  }

  void score(int64_t origin, int64_t begin, int64_t end) {
    const int64_t line_stride = op_.block_size * 4, dim = op_.head_dim;
    for (int64_t at = begin; at < end; at += 16) {
      const int64_t inside = (origin + at) % op_.block_size;
      const Page* head = page(op_.keys, origin + at);
      const Page* keys = head + inside * kPerWord;
      by_rows<kSums>(0, rows_, [&]<int M>(int64_t row) {
        F16 sums[M][1];
        clear(sums, zero_f());
        dot<Dot, M, 1>(query_ + row * dim, dim, reinterpret_cast<const uint8_t*>(keys), line_stride, 0,
                       dim / kPerWord, sums);
        for (int m = 0; m < M; ++m) {
          if constexpr (kScaled) sums[m][0] = mul(sums[m][0], load(scales(head) + inside));
          store(scores_ + (row + m) * kSegment + at, sums[m][0]);
        }
      });
    }
  }

  // Turns scores into weights: e^(score - largest score), 0 where the row does not see.
  void weigh(int64_t row, int64_t origin, int64_t begin, int64_t end, Seen& seen) {
    const int64_t position = position_ + row / group_;
    const int64_t from = first_seen(position) - origin, to = position + 1 - origin;
    float* scores = scores_ + row * kSegment;
    F16 most = splat(-kInfinity);
    for (int64_t at = begin; at < end; at += 16) {
      F16 score = load(scores + at);
      if constexpr (kTiles) score = mul(score, splat(op_.scale));
      const F16 visible = within(score, splat(-kInfinity), from - at, to - at);
      store(scores + at, visible);
      most = max(most, visible);
    }
    const float maximum = largest(most);
    F16 total = zero_f();
    const bool sees = from < end && to > begin;
    for (int64_t at = begin; at < end; at += 16) {
      F16 weight = sees ? exponential(sub(load(scores + at), splat(maximum))) : zero_f();
      total = add(total, weight);
      if constexpr (kScaled) {  // the values' scales join here; those of unwritten tokens may be anything
        const float* factors = scales(page(op_.values, origin + at)) + (origin + at) % op_.block_size;
        weight = within(mul(weight, load(factors)), zero_f(), from - at, to - at);
      }
      if constexpr (kTiles) {
        store(weights_ + row * kSegment + at, weight);
      } else {
        store(scores + at, weight);
      }
    }
    seen.maxima[row] = maximum;
    seen.weights[row] = sum(total);
  }

  void sum_values(int64_t origin, int64_t begin, int64_t end, float* sums) {
    const int64_t size = op_.block_size;
    for (int64_t at = begin; at < end;) {
      const int64_t inside = (origin + at) % size;
      const int64_t count = end - at < size - inside ? end - at : size - inside;
      const Page* values = page(op_.values, origin + at) + inside * op_.head_dim;
      add_values(scores_ + at, reinterpret_cast<const uint8_t*>(values), count / kPerWord, sums);
      if (count % kPerWord != 0) add_last_value(scores_ + at + count / kPerWord * kPerWord, values, count, sums);
      at += count;
    }
  }

  // Adds `steps` lines of values times their weights.
  void add_values(const float* weights, const uint8_t* lines, int64_t steps, float* sums) {
    const int64_t dim = op_.head_dim;
    by_rows<kSums>(0, rows_, [&]<int M>(int64_t row) {
      constexpr int N = kSums / M;
      const auto columns = [&]<int Blocks>(int64_t column) {
        F16 tile[M][Blocks];
        for (int m = 0; m < M; ++m) {
          for (int n = 0; n < Blocks; ++n) tile[m][n] = load(sums + (row + m) * dim + column + n * 16);
        }
        dot<Dot, M, Blocks>(weights + row * kSegment, kSegment, lines + column * 4, dim * 4, kLineBytes, steps, tile);
        for (int m = 0; m < M; ++m) {
          for (int n = 0; n < Blocks; ++n) store(sums + (row + m) * dim + column + n * 16, tile[m][n]);
        }
      };
      int64_t column = 0;
      for (; column + N * 16 <= dim; column += N * 16) columns.template operator()<N>(column);
      if constexpr (N > 1) {
        for (; column < dim; column += 16) columns.template operator()<1>(column);
      }
    });
  }

  // A line of which only the first values are there: the others may be anything, even not a number.
  void add_last_value(const float* weights, const Page* values, int64_t count, float* sums) {
    const int64_t dim = op_.head_dim;
    const Page* line = values + count / kPerWord * kPerWord * dim;
    Page* copy = reinterpret_cast<Page*>(one_line_);
    for (int64_t column = 0; column < dim; column += 16) {
      for (int64_t i = 0; i < 16 * kPerWord; ++i) {
        copy[i] = i % kPerWord < count % kPerWord ? line[column * kPerWord + i] : Page{};
      }
      for (int64_t row = 0; row < rows_; ++row) {
        F16 tile[1][1] = {{load(sums + row * dim + column)}};
        float words[kPerWord] = {};
        for (int64_t i = 0; i < count % kPerWord; ++i) words[i] = weights[row * kSegment + i];
        dot<Dot, 1, 1>(words, 0, one_line_, 0, 0, 1, tile);
        store(sums + row * dim + column, tile[0][0]);
      }
    }
  }

  void merge(const Seen& from, Seen& into, int64_t rows) {
    const int64_t dim = op_.head_dim;
    for (int64_t row = 0; row < rows; ++row) {
      if (from.weights[row] == 0.0f) continue;  // saw nothing of this segment
      const float most = from.maxima[row] > into.maxima[row] ? from.maxima[row] : into.maxima[row];
      float lanes[16] = {into.maxima[row] - most, from.maxima[row] - most};
      store(lanes, exponential(load(lanes)));
      into.weights[row] = into.weights[row] * lanes[0] + from.weights[row] * lanes[1];
      into.maxima[row] = most;
      for (int64_t i = row * dim; i < (row + 1) * dim; i += 16) {
        store(into.sums + i, fma(load(into.sums + i), splat(lanes[0]), mul(load(from.sums + i), splat(lanes[1]))));
      }
    }
  }

  void write(const Seen& seen) {
    for (int64_t row = 0; row < rows_; ++row) {
      T* out = static_cast<T*>(op_.out) + place(row);
      const F16 total = splat(seen.weights[row]);
      for (int64_t i = 0; i < op_.head_dim; i += 16) {
        store(out + i, div(load(seen.sums + row * op_.head_dim + i), total));
      }
    }
  }

  const AttentionOp& op_;
  int64_t group_, rows_, kv_head_;
  int64_t position_;      // of the tile's first query
  int64_t begin_, end_;   // positions that any row sees
  int64_t row_;           // of the first query among the step's tokens
  const int64_t* table_;
  float* query_;   // [rows][head_dim], scaled; for tiles bf16, as they are
  float* scores_;  // [rows][kSegment]
  uint16_t* weights_;   // for tiles, bf16: [rows][kSegment]
  uint16_t* last_run_;  // for tiles: values of the last positions, if fewer than 16
  Seen all_, one_;
  alignas(64) uint8_t one_line_[kLineBytes];
};

template <class T, class Page, bool kTiles = false>
void attention_as(Worker& worker, const AttentionOp& op) {
  const int64_t group = op.heads / op.kv_heads, size = group * (op.head_dim + 2);
  worker.for_each(*op.item_count * op.kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const AttentionItem& item = op.items[i / op.kv_heads];
      const int64_t kv_head = i % op.kv_heads;
      AttentionTile<T, Page, kTiles> tile(op, worker, item.sequence, item.first, item.count, kv_head);
      if (item.segment < 0) {
        tile.run();
      } else {
        tile.run(item.segment, op.partials + (item.partial * op.kv_heads + kv_head) * size);
      }
    }
  });
  if (*op.merge_count == 0) return;
  worker.for_each(*op.merge_count * op.kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const AttentionMerge& merge = op.merges[i / op.kv_heads];
      const int64_t kv_head = i % op.kv_heads;
      AttentionTile<T, Page, kTiles> tile(op, worker, merge.sequence, 0, 1, kv_head);
      tile.merge_partials(op.partials + (merge.partial * op.kv_heads + kv_head) * size, size * op.kv_heads,
                          merge.count);
    }
  });
}

void attention(Worker& worker, const AttentionOp& op) {
  const bool bytes = op.page_dtype == Dtype::i8;
  if (op.dtype == Dtype::f32) {
    bytes ? attention_as<float, int8_t>(worker, op) : attention_as<float, float>(worker, op);
  } else {
    bytes ? attention_as<uint16_t, int8_t>(worker, op) : attention_as<uint16_t, uint16_t>(worker, op);
  }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
