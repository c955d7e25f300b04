// Attention over the paged cache, for prefill and decode. The rows of a tile are queries of one sequence, times the
// heads that share a KV head.
//
// The positions of a context are divided into segments at fixed places. A segment's result for a row (the largest
// score, the sum of weights, the weighted sum of values) depends only on that row and the cache, and results are merged
// in order. So the bits are the same whether one thread or several compute the segments, and however a prompt was
// divided into chunks.

namespace penstock::PENSTOCK_ISA {
namespace {

// The results of a tile's rows so far, or for one segment.
struct Seen {
  float* maxima;
  float* weights;
  float* sums;  // [rows][head_dim]
};

// Attention over pages of type Page. Tiles: if given, multiplies bf16 queries by tile registers (see amx/attention.h).
template <class Page, class Tiles = void>
class AttentionTile {
  static constexpr bool kTiles = !std::is_void_v<Tiles>;
  using Dot = typename PageDots<Page>::Dot;
  static constexpr bool kScaled = Dot::kInteger;
  using Query = std::conditional_t<kTiles, uint16_t, typename Dot::Piece>;
  static constexpr bool kUnscaled = std::is_same_v<Query, uint16_t>;  // bf16 queries as they are: scores are scaled
  using Weight = Query;
  using Word = typename Dot::Word;
  static constexpr int64_t kWordValues = Factors<Dot>::kWordValues;

 public:
  // Begins a tile: `heads` KV heads from `kv_head` on, each with `count` queries from `first` on, times the heads that
  // share the KV head.
  AttentionTile(const AttentionOp& op, Worker& worker, int64_t sequence, int64_t first, int64_t count, int64_t kv_head,
                int64_t heads)
      : op_(op), group_(op.heads / op.kv_heads), rows_(count * group_), kv_head_(kv_head) {
    const int64_t start = op.query_start[sequence], length = op.query_start[sequence + 1] - start;
    position_ = op.context_lens[sequence] - length + first;
    begin_ = first_seen(position_);
    length_ = op.context_lens[sequence];
    end_ = seen_before(position_ + count - 1);
    table_ = op.block_tables + sequence * op.table_stride;
    row_ = start + first;
    const int64_t dim = op.head_dim;
    runs_.heads = heads;
    runs_.head_stride = op.head_stride;
    runs_.key_stride = op.block_size * 4;
    runs_.dim = dim;
    runs_.value_dim = op.value_dim;
    runs_.copied = nullptr;
    stride_ = kTiles && rows_ > 16 ? divide_up(rows_, 16) * 16 : rows_;
    const int64_t room = heads * stride_;
    const int64_t words = kTiles ? 8 * dim : kAsTheyLie<Page> ? 0 : widened_words(dim);
    const int64_t copied =
        op.values == nullptr ? copied_runs() * kPositions * op.value_dim * static_cast<int64_t>(sizeof(Page)) / 4 : 0;
    const int64_t needed = room * (dim + 2 * op.value_dim + 2 * kRowStride) + 6 * (room + 15) + words + copied + 15;
    auto* memory = reinterpret_cast<float*>(worker.own(needed * sizeof(float)));
    const auto take = [&](int64_t floats) {
      float* taken = memory;
      memory += divide_up(floats, 16) * 16;
      return taken;
    };
    query_ = reinterpret_cast<Query*>(take(room * dim));
    scores_ = take(room * kRowStride);
    weights_ = reinterpret_cast<Weight*>(sizeof(Weight) == 4 ? scores_ : take(room * kRowStride / 2));
    query_scales_ = take(room);
    weight_scales_ = take(room);
    all_ = {take(room), take(room), take(room * op.value_dim)};
    one_ = {take(room), take(room), take(room * op.value_dim)};
    words_ = take(words);
    copied_ = reinterpret_cast<Page*>(take(copied));
  }

  // Computes all segments one after the other, into the output.
  void run() {
    put_queries();
    int64_t segment = begin_ / kSegment;
    // The first segment has nothing to be merged with, unless a row may not see it.
    const bool seen = op_.window == 0 || end_ <= (segment + 1) * kSegment;
    seen && op_.sinks == nullptr ? attend(segment++, all_) : start();
    for (; segment * kSegment < end_; ++segment) {
      attend(segment, one_);
      each_row([&](int64_t row) {
        merge(row, one_.maxima[row], one_.weights[row], one_.sums + row * op_.value_dim);
      });
    }
    write(all_);
  }

  // Computes one segment, into a partial result.
  void run(int64_t segment, float* partial) {
    put_queries();
    attend(segment, one_);
    const int64_t dim = op_.value_dim;
    each_row([&](int64_t row) {
      for (int64_t i = 0; i < dim; i += 16) store(partial + i, load(one_.sums + row * dim + i));
      partial[dim] = one_.maxima[row];
      partial[dim + 1] = one_.weights[row];
      partial += dim + 2;
    });
  }

  // Merges partial results, `stride` floats apart, into the output.
  void merge_partials(const float* partial, int64_t stride, int64_t count) {
    const int64_t dim = op_.value_dim;
    start();
    for (int64_t k = 0; k < count; ++k, partial += stride) {
      const float* from = partial;
      each_row([&](int64_t row) {
        merge(row, from[dim], from[dim + 1], from);
        from += dim + 2;
      });
    }
    write(all_);
  }

 private:
  int64_t first_seen(int64_t position) const {
    if (op_.chunked) return position / op_.window * op_.window;
    return op_.window != 0 && position >= op_.window ? position - op_.window + 1 : 0;
  }

  // The end of the positions that a query sees.
  int64_t seen_before(int64_t position) const {
    if (!op_.bidirectional) return position + 1;
    return op_.window != 0 && position + op_.window < length_ ? position + op_.window : length_;
  }

  // The queries of all heads, one head after the other.
  template <class F>
  void each_row(const F& f) const {
    for (int64_t first = 0; first < runs_.heads * stride_; first += stride_) {
      for (int64_t row = first; row < first + rows_; ++row) f(row);
    }
  }

  // Converts queries for their products.
  void put_queries() {
    each_row([&](int64_t row) { put_query(row); });
  }

  void put_query(int64_t row) {
    const int64_t dim = op_.head_dim, from = place(row) * dim;
    const auto* bf16 = static_cast<const uint16_t*>(op_.query) + from;
    Query* out = query_ + row * dim;
    if constexpr (kUnscaled) {
      __builtin_memcpy(out, bf16, static_cast<size_t>(dim) * sizeof(Query));
    } else {
      const auto* floats = static_cast<const float*>(op_.query) + from;
      if constexpr (kScaled) {
        float* query = words_;  // multiplied by the matrix that the keys in int8 pages are multiplied by
        op_.dtype == Dtype::f32 ? spread(floats, dim, query) : spread(bf16, dim, query);
        const float levels = dim > kSegment ? kLevels / static_cast<float>(dim) * kSegment : kLevels;
        const Quantizer quantizer(query, dim, levels);
        for (int64_t i = 0; i < dim; i += 16) Dot::put(out + i, quantizer(load(query + i)));
        query_scales_[row] = quantizer.scale * op_.scale / static_cast<float>(spread_order(dim));
      } else {
        for (int64_t i = 0; i < dim; i += 16) {
          store(out + i, mul(op_.dtype == Dtype::f32 ? load(floats + i) : load(bf16 + i), splat(op_.scale)));
        }
      }
    }
  }

  int64_t query_of(int64_t row) const { return row % stride_ / group_; }
  int64_t head_of(int64_t row) const { return (kv_head_ + row / stride_) * group_ + row % stride_ % group_; }
  int64_t place(int64_t row) const { return (row_ + query_of(row)) * op_.heads + head_of(row); }

  // The positions [begin, end) within a segment.
  void find_runs(int64_t origin, int64_t begin, int64_t end) {
    const int64_t size = op_.block_size, dim = op_.head_dim;
    const auto* pages = static_cast<const Page*>(op_.values == nullptr ? op_.keys : op_.values);
    runs_.count = 0;
    runs_.positions = end - begin;
    for (int64_t position = origin + begin; position < origin + end; position += kPositions) {
      const int64_t inside = position % size;
      const int64_t head = table_[position / size] * op_.block_stride + kv_head_ * op_.head_stride;
      const Page* keys = static_cast<const Page*>(op_.keys) + head;
      const Page* values = pages + head;
      const auto scales = [&](const Page* page) { return reinterpret_cast<const float*>(page + size * dim) + inside; };
      runs_.all[runs_.count++] = {keys + inside * Dot::kLineValues, values + inside * dim, scales(keys),
                                  scales(values)};
    }
    if constexpr (!kScaled) {
      if (op_.values == nullptr) place_copies();
    }
  }

  // Gives the runs memory for their values. With few rows, sum_lines fills it, some runs at a time: a segment's keys and
  // all of its values would not fit in the L2 cache.
  void place_copies() {
    runs_.copied = copied_;
    for (int64_t i = 0; i < runs_.count; ++i) {
      runs_.all[i].values = copied_ + i % copied_runs() * kPositions * op_.value_dim;
    }
    if (!few_rows()) copy_keys(runs_, 0, runs_.count, copied_);
  }

  bool few_rows() const { return !kTiles && rows_ < kManyRows<Page>; }

  // Runs whose values are copied together, if they are the keys' first values.
  int64_t copied_runs() const { return few_rows() ? kRunsTogether : kSegment / kPositions; }

  // Begins the results of all segments: with nothing, or with the sink, whose value is zero.
  void start() {
    each_row([&](int64_t row) {
      all_.maxima[row] = op_.sinks == nullptr ? -kInfinity : op_.sinks[head_of(row)];
      all_.weights[row] = op_.sinks == nullptr ? 0.0f : 1.0f;
      for (int64_t i = 0; i < op_.value_dim; i += 16) store(all_.sums + row * op_.value_dim + i, zero_f());
    });
  }

  void attend(int64_t segment, Seen& seen) {
    const int64_t origin = segment * kSegment;
    const int64_t begin = (begin_ > origin ? begin_ - origin : 0) / kPositions * kPositions;  // within the segment
    const int64_t end = end_ - origin < kSegment ? end_ - origin : kSegment;
    find_runs(origin, begin, end);
    const auto weigh_all = [&] { each_row([&](int64_t row) { weigh(row, origin, begin, end, seen); }); };
    if constexpr (kTiles) {
      Tiles tiles(runs_, rows_, stride_);
      tiles.score(query_, scores_ + begin);
      weigh_all();
      tiles.sum(weights_ + begin, reinterpret_cast<Page*>(words_), seen.sums);
    } else {
      score(begin);
      weigh_all();
      sum_values(begin, seen.sums);
    }
  }

  void score(int64_t begin) {
    const Factors<Dot> query = {reinterpret_cast<const Word*>(query_), op_.head_dim / kWordValues, query_scales_};
    if (few_rows()) return score_lines(query, rows_, runs_, scores_ + begin);
    for (int64_t head = 0; head < runs_.heads; ++head) {
      const int64_t row = head * stride_;
      float* scores = scores_ + row * kRowStride + begin;
      if constexpr (kAsTheyLie<Page>) score_many(query.from(row), rows_, runs_, head, scores);
      else score_widened(query.from(row), rows_, runs_, head, reinterpret_cast<Word*>(words_), scores);
    }
  }

  void sum_values(int64_t begin, float* sums) {
    const auto* words = reinterpret_cast<const Word*>(weights_ + begin);
    const Factors<Dot> weights = {words, kWeightStride<Dot>, weight_scales_};
    if (few_rows()) return sum_lines(weights, rows_, runs_, sums);
    for (int64_t head = 0; head < runs_.heads; ++head) {
      const int64_t row = head * stride_;
      float* to = sums + row * op_.value_dim;
      if constexpr (kAsTheyLie<Page>) sum_many(weights.from(row), rows_, runs_, head, to);
      else sum_widened(weights.from(row), rows_, runs_, head, reinterpret_cast<Word*>(words_), to);
    }
  }

  // Turns scores into weights: e^(score - largest score), 0 where the row does not see.
  void weigh(int64_t row, int64_t origin, int64_t begin, int64_t end, Seen& seen) {
    // Of 2^r, |r| <= 1/2: minimax, as exact as fp32.
    constexpr float kTerms[] = {1.53458124e-4f, 1.33999309e-3f, 9.61848907e-3f, 5.55032864e-2f,
                                2.40226462e-1f, 6.93147182e-1f, 1.0f};
    const int64_t position = position_ + query_of(row), head = row / stride_;
    const int64_t from = first_seen(position) - origin, to = seen_before(position) - origin;
    const auto hides_some = [&](int64_t at) { return at < from || to < at + kPositions; };
    const bool capped_scores = op_.softcap != 0.0f;
    const float left = kUnscaled && !capped_scores ? op_.scale : 1.0f;  // what scores are still multiplied with
    float* scores = scores_ + row * kRowStride;
    Weight* weights = weights_ + row * kRowStride;
    F16 most = splat(-kInfinity);
    for (int64_t at = begin; at < end; at += kPositions) {
      F16 score = load(scores + at);
      if (capped_scores) score = capped(kUnscaled ? mul(score, splat(op_.scale)) : score, op_.softcap);
      if (hides_some(at)) score = within(score, splat(-kInfinity), from - at, to - at);
      if (capped_scores || hides_some(at)) store(scores + at, score);
      most = max(most, score);
    }
    const float maximum = largest(most);
    F16 total = zero_f();
    Extent extent;
    const bool sees = from < end && to > begin;
    for (int64_t at = begin; at < end; at += kPositions) {
      const F16 below = sub(load(scores + at), splat(maximum));
      F16 weight = sees ? power_below_one(below, left * static_cast<float>(kLog2E), kTerms) : zero_f();
      total = add(total, weight);
      if constexpr (kScaled) {  // times the values' scales, which are undefined for unwritten tokens
        weight = mul(weight, load(runs_.value_scales((at - begin) / kPositions, head)));
        if (hides_some(at)) weight = within(weight, zero_f(), from - at, to - at);
        extent.see(weight);
        store(scores + at, weight);
      } else {
        store(weights + at, weight);
      }
    }
    if constexpr (kScaled) {
      const Quantizer quantizer(extent, kLevels);
      for (int64_t at = begin; at < end; at += kPositions) Dot::put(weights + at, quantizer(load(scores + at)));
      weight_scales_[row] = quantizer.scale;
    }
    seen.maxima[row] = maximum * left;
    seen.weights[row] = sum(total);
  }

  // Merges a segment's result into a row's.
  void merge(int64_t row, float maximum, float weight, const float* sums) {
    if (weight == 0.0f) return;  // the row sees no position of this segment
    const int64_t dim = op_.value_dim;
    const float most = maximum > all_.maxima[row] ? maximum : all_.maxima[row];
    float lanes[16] = {all_.maxima[row] - most, maximum - most};
    store(lanes, exponential(load(lanes)));
    all_.weights[row] = all_.weights[row] * lanes[0] + weight * lanes[1];
    all_.maxima[row] = most;
    const F16 before = splat(lanes[0]), now = splat(lanes[1]);
    float* into = all_.sums + row * dim;
    for (int64_t i = 0; i < dim; i += 16) store(into + i, fma(load(into + i), before, mul(load(sums + i), now)));
  }

  void write(const Seen& seen) {
    each_row([&](int64_t row) {
      const int64_t dim = op_.value_dim, to = place(row) * dim;
      const F16 total = splat(seen.weights[row]);
      for (int64_t i = 0; i < dim; i += 16) {
        const F16 value = div(load(seen.sums + row * dim + i), total);
        if (op_.dtype == Dtype::f32) {
          store(static_cast<float*>(op_.out) + to + i, value);
        } else {
          store(static_cast<uint16_t*>(op_.out) + to + i, value);
        }
      }
    });
  }

  const AttentionOp& op_;
  int64_t group_;        // heads that share a KV head
  int64_t rows_;         // of a KV head
  int64_t stride_;       // rows from one KV head to the next
  int64_t kv_head_;      // the first
  int64_t position_;     // of the tile's first query
  int64_t length_;       // of the sequence
  int64_t begin_, end_;  // positions that any row sees
  int64_t row_;          // of the first query among the step's tokens
  const int64_t* table_;
  Query* query_;          // [rows][head_dim]: scaled floats, unscaled bf16, or integers in the order of words
  float* scores_;         // [rows][kRowStride]
  Weight* weights_;       // [rows][kRowStride]; floats replace the scores
  float* query_scales_;   // [rows], of integers
  float* weight_scales_;  // likewise
  Page* copied_;          // values that are the keys' first values
  float* words_;          // a spread query; widened lines; with tiles, the last positions' values if fewer than 16
  PageRuns<Page> runs_;   // of the current segment
  Seen all_, one_;
};

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
