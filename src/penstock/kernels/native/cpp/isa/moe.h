// A mixture of experts: the choice of a token's experts, and the weighted sum of their outputs.
//
// Rows of x are sorted by expert, so each expert's matrices are multiplied with its own rows only, and matrices of
// unused experts are not read. A row of a product does not depend on its neighbours (linear.h), and a token's outputs
// are added in the order of its slots: so its result does not depend on the batch.

namespace penstock::PENSTOCK_ISA {
namespace {

// -- routing ------------------------------------------------------------------------------------------------------

// Finds the `slots` largest logits of a row, in order, the first among equals: their `experts` and values `best`. NaN
// is never larger, so the choice is valid for any values of the row.
inline void choose(const float* logits, int64_t count, int64_t slots, int64_t* experts, float* best) {
  int64_t held = 0;
  for (int64_t expert = 0; expert < count; ++expert) {
    const float logit = logits[expert];
    if (held == slots && !(logit > best[slots - 1])) continue;
    int64_t at = held < slots ? held++ : slots - 1;
    for (; at > 0 && logit > best[at - 1]; --at) {
      best[at] = best[at - 1];
      experts[at] = experts[at - 1];
    }
    best[at] = logit;
    experts[at] = expert;
  }
}

// e^(logit - most). Returns the sum, which is NaN if a logit is.
inline float exponentials(const float* x, int64_t count, float most, float* out) {
  F16 total = zero_f();
  for (int64_t i = 0; i < count; i += 16) {
    const F16 each = within(exponential(sub(load_part(x + i, count - i), splat(most))), zero_f(), 0, count - i);
    total = add(total, each);
    if (out != nullptr) store_part(out + i, each, count - i);
  }
  return sum(total);
}

// Takes experts outside the best groups out of the choice.
inline void keep_groups(const RouteOp& op, float* scores, int64_t* order, float* best) {
  const int64_t size = op.count / op.groups;
  float* of_group = best + op.slots;
  for (int64_t group = 0; group < op.groups; ++group) {
    const float* from = scores + group * size;
    float first = -kInfinity, second = -kInfinity;
    for (int64_t i = 0; i < size; ++i) {
      if (from[i] > first) {
        second = first;
        first = from[i];
      } else if (from[i] > second) {
        second = from[i];
      }
    }
    of_group[group] = op.by_pairs ? first + second : first;
  }
  choose(of_group, op.groups, op.kept, order, of_group + op.groups);
  for (int64_t group = 0; group < op.groups; ++group) {
    if (std::find(order, order + op.kept, group) != order + op.kept) continue;
    for (int64_t i = 0; i < size; ++i) scores[group * size + i] = -kInfinity;
  }
}

// A row's experts by scores that are not simply its logits.
inline void route_by_scores(const RouteOp& op, const float* logits, int64_t* experts, float* weights, float* scores,
                            int64_t* order, float* best) {
  float* chosen_by = scores + op.count + 16;
  if (op.sigmoid) {
    for (int64_t i = 0; i < op.count; i += 16) {
      store_part(scores + i, sigmoid(load_part(logits + i, op.count - i)), op.count - i);
    }
  } else {
    float most = -kInfinity;
    for (int64_t i = 0; i < op.count; ++i) most = logits[i] > most ? logits[i] : most;
    const float total = exponentials(logits, op.count, most, scores);
    for (int64_t i = 0; i < op.count; ++i) scores[i] /= total;
  }
  float poison = 0.0f;
  for (int64_t i = 0; i < op.count; ++i) {
    chosen_by[i] = op.bias == nullptr ? scores[i] : scores[i] + op.bias[i];
    poison += scores[i] * 0.0f;
  }
  if (op.groups > 1) keep_groups(op, chosen_by, order, best);
  choose(chosen_by, op.count, op.slots, experts, best);
  float total = poison;
  for (int64_t slot = 0; slot < op.slots; ++slot) total += weights[slot] = scores[experts[slot]];
  for (int64_t slot = 0; slot < op.slots; ++slot) {
    weights[slot] = (op.normalize ? weights[slot] / total : weights[slot] + poison) * op.scale;
    if (op.scales != nullptr) weights[slot] *= op.scales[experts[slot]];
  }
}

[[maybe_unused]] void route(Worker& worker, const RouteOp& op) {
  if (op.sigmoid || op.bias != nullptr || op.scales != nullptr || op.groups > 1 || op.scale != 1.0f) {
    const auto floats = static_cast<size_t>(2 * (op.count + 16) + op.slots + 2 * op.groups);
    auto* order = reinterpret_cast<int64_t*>(
        worker.own(static_cast<size_t>(op.groups) * sizeof(int64_t) + floats * sizeof(float)));
    auto* scores = reinterpret_cast<float*>(order + op.groups);
    worker.for_each(*op.rows, 8, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        route_by_scores(op, op.logits + row * op.count, op.experts + row * op.slots, op.weights + row * op.slots,
                        scores, order, scores + 2 * (op.count + 16));
      }
    });
    return;
  }
  auto* best = reinterpret_cast<float*>(worker.own(static_cast<size_t>(op.slots) * sizeof(float)));
  worker.for_each(*op.rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* logits = op.logits + row * op.count;
      float* weights = op.weights + row * op.slots;
      choose(logits, op.count, op.slots, op.experts + row * op.slots, best);
      float total = exponentials(logits, op.count, best[0], nullptr);
      const float chosen = exponentials(best, op.slots, best[0], weights);
      if (op.normalize) total = chosen + total * 0.0f;  // keeps NaN
      for (int64_t slot = 0; slot < op.slots; ++slot) weights[slot] /= total;
    }
  });
}

// -- rows in order of their experts -------------------------------------------------------------------------------

// Tokens [begin, end) of a step, sorted by expert. The arrays lie in memory that the threads share.
struct Groups {
  int32_t* active;    // experts that some token chose
  int32_t* first;     // the first row of each of these
  int32_t* counts;    // and its number of rows
  int32_t* position;  // [tokens][slots]: the token's row for the slot's expert; -1 if that is not held here
  int32_t* source;    // [rows]: the token; -1 for an unused row
  int32_t* itself;    // [rows]: the row itself; -1 for an unused row
  int64_t* totals;    // the numbers of active experts, of rows, and of used rows

  int64_t experts() const { return totals[0]; }
  int64_t rows() const { return totals[1]; }
  int64_t used() const { return totals[2]; }
};

// `next`: scratch, a number for each expert. padded(count): how many rows an expert with `count` tokens takes.
template <class F>
void group(const ExpertsOp& op, int64_t begin, int64_t end, const F& padded, const Groups& groups, int32_t* next) {
  const int64_t slots = (end - begin) * op.slots;
  const int64_t* chosen = op.chosen + begin * op.slots;
  const auto held = [&](int64_t slot) {
    const int64_t expert = chosen[slot] - op.first;
    return expert >= 0 && expert < op.held ? expert : -1;
  };
  for (int64_t expert = 0; expert < op.held; ++expert) next[expert] = 0;
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (held(slot) >= 0) ++next[held(slot)];
  }
  int64_t active = 0, row = 0, used = 0;
  for (int64_t expert = 0; expert < op.held; ++expert) {
    const int32_t count = next[expert];
    if (count == 0) continue;
    groups.active[active] = static_cast<int32_t>(expert);
    groups.first[active] = next[expert] = static_cast<int32_t>(row);
    groups.counts[active++] = count;
    used += count;
    const int64_t last = row + padded(count);
    for (int64_t i = 0; i < count; ++i, ++row) groups.itself[row] = static_cast<int32_t>(row);
    for (; row < last; ++row) groups.source[row] = groups.itself[row] = -1;
  }
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t expert = held(slot);
    groups.position[slot] = expert < 0 ? -1 : next[expert]++;
    if (expert >= 0) groups.source[groups.position[slot]] = static_cast<int32_t>(begin + slot / op.slots);
  }
  groups.totals[0] = active;
  groups.totals[1] = row;
  groups.totals[2] = used;
}

// -- memory -------------------------------------------------------------------------------------------------------

// The average number of rows per expert that are multiplied at once: enough to pay for reading its matrices, while
// scratch does not grow with the step.
constexpr int64_t kRowsOfExpert = 64;

// The shared memory for tokens that are multiplied at once. Regions are 64-byte aligned.
struct ExpertsMemory {
  int64_t tokens;  // at once
  size_t group, weighed, words, inner, inner_words, bytes;

  // `most_rows`: the most rows multiplied together. An expert is padded by fewer rows than that.
  ExpertsMemory(const ExpertsOp& op, int64_t most_rows) {
    const int64_t most = divide_up(kRowsOfExpert * op.held, op.slots);
    tokens = *op.rows < most ? *op.rows : most;
    const int64_t slots = tokens * op.slots;
    const int64_t rows = slots + (most_rows - 1) * (slots < op.held ? slots : op.held);
    size_t end = 0;
    const auto take = [&](int64_t size) {
      const size_t start = end;
      end += static_cast<size_t>(divide_up(size, kLineBytes) * kLineBytes);
      return start;
    };
    group = take(3 * 8 + 4 * (4 * op.held + slots + 2 * rows));
    rows_ = rows;
    const int64_t size = op.dtype == Dtype::f32 ? 4 : 2;
    weighed = take(op.weigh_inputs ? rows * op.gate_up.k * size : 0);
    // The rows' words, and after the product the experts' outputs.
    const int64_t in = words_bytes(op.gate_up, rows), out = rows * op.down.n * 4;
    words = take(in > out ? in : out);
    inner = take(rows * op.down.k * size);
    inner_words = take(words_bytes(op.down, rows));
    bytes = end;
  }

  Groups groups(const ExpertsOp& op, std::byte* shared) const {
    auto* totals = reinterpret_cast<int64_t*>(shared + group);
    auto* experts = reinterpret_cast<int32_t*>(totals + 3);
    int32_t *position = experts + 4 * op.held, *source = position + tokens * op.slots;
    return {experts, experts + op.held, experts + 2 * op.held, position, source, source + rows_, totals};
  }

  static int64_t words_bytes(const Matrix& weight, int64_t rows) { return rows * (padded_k(weight) + 1) * 4; }

 private:
  int64_t rows_;
};

// -- products -----------------------------------------------------------------------------------------------------

// The matrix of one expert. Each begins with a block of its own.
inline Matrix of_expert(const Matrix& weight, int64_t expert) {
  Matrix mine = weight;
  const int64_t blocks = expert * divide_up(weight.n, kColumns), padded = padded_k(weight);
  mine.lines = block_lines(weight, blocks);
  if (weight.column_scales != nullptr) mine.column_scales += blocks * kColumns;
  if (weight.format.scheme != Scheme::grouped) return mine;
  const int64_t groups = blocks * groups_of(weight) * kColumns * bytes_of(weight.format.scales);
  mine.scales = static_cast<const std::byte*>(weight.scales) + groups;
  if (weight.mins != nullptr) mine.mins = static_cast<const std::byte*>(weight.mins) + groups;
  const int64_t supers = blocks * divide_up(padded, kSuper) * kColumns;
  if (weight.super_scales != nullptr) mine.super_scales += supers;
  if (weight.super_mins != nullptr) mine.super_mins += supers;
  return mine;
}

// Shares all blocks of all active experts among the threads: body(op of an expert, its first row, rows, begin, end,
// lines that are probably next).
template <class Body>
void each_expert(Worker& worker, const LinearOp& op, const Groups& groups, Body&& body) {
  const int64_t blocks = divide_up(op.weight.n, kColumns), items = groups.experts() * blocks;
  worker.for_share(items, grain_of(items, worker.count()), [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t i = begin / blocks, first = begin % blocks;
      const int64_t last = first + end - begin < blocks ? first + end - begin : blocks;
      LinearOp mine = op;
      mine.weight = of_expert(op.weight, groups.active[i]);
      if (op.bias != nullptr) mine.bias = static_cast<const float*>(op.bias) + groups.active[i] * blocks * kColumns;
      const int64_t size = op.out_dtype == Dtype::f32 ? 4 : 2;
      mine.out = static_cast<std::byte*>(op.out) + groups.first[i] * op.stride * size;
      const bool more = last < blocks, other = i + 1 < groups.experts();
      const Matrix next = more || !other ? mine.weight : of_expert(op.weight, groups.active[i + 1]);
      body(mine, groups.first[i], groups.counts[i], first, last, block_lines(next, more ? last : 0));
      begin += last - first;
    }
  });
}

struct ByWords {
  static constexpr int64_t kMostRows = 1;
  static int64_t padded(int64_t rows) { return rows; }

  // Multiplies the rows `source` of `op.x` with the matrices of their experts. `memory` is for words.
  template <class T>
  static void multiply(Worker& worker, const LinearOp& op, const Groups& groups, const int32_t* source,
                       std::byte* memory) {
    by_format(op.weight.format, [&]<class Dot>() { multiply_words<Dot, T>(worker, op, groups, source, memory); });
  }

 protected:
  template <class Dot, class T>
  static void multiply_words(Worker& worker, const LinearOp& op, const Groups& groups, const int32_t* source,
                       std::byte* memory) {
    const Rows<Dot> x = prepare<Dot, T>(worker, op, groups.rows(), memory, [&](int64_t row) {
      const int64_t i = std::upper_bound(groups.first, groups.first + groups.experts(), row) - groups.first - 1;
      return PanelRow::of(Panels::of<Dot>(groups.counts[i]), groups.first[i], row, source[row]);
    });
    const auto piece = [&](const LinearOp& mine, int64_t row, int64_t rows, int64_t begin, int64_t end,
                           const uint8_t* next) {
      const ResultWriter finish{mine, written<T>(mine)};
      for (int64_t group = 0, count = row_groups(rows); group < count; ++group) {
        const uint8_t* following = group + 1 < count ? block_lines(mine.weight, begin) : next;
        blocks_of<Dot>(worker, mine.weight, x.from(row), rows, group, begin, end, following, finish);
      }
    };
    each_expert(worker, op, groups, piece);
  }
};

// -- the op -------------------------------------------------------------------------------------------------------

constexpr int64_t kPiece = 512;  // columns of a token that are summed at once

// Sums a token's outputs, the shared expert's output and the residual.
template <class T>
void add_up(Worker& worker, const ExpertsOp& op, int64_t first, int64_t tokens, const Groups& groups,
            const float* outputs) {
  const int64_t hidden = op.down.n, pieces = divide_up(hidden, kPiece);
  worker.for_each(tokens * pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t token = first + item / pieces, from = item % pieces * kPiece;
      const int64_t to = from + kPiece < hidden ? from + kPiece : hidden;
      const int32_t* position = groups.position + item / pieces * op.slots;
      const float* weights = op.weights + token * op.slots;
      const F16 gate = op.shared_gate == nullptr ? splat(1.0f) : sigmoid(splat(op.shared_gate[token]));
      for (int64_t i = from; i < to; i += 16) {
        const int64_t at = token * hidden + i, left = to - i;
        F16 total = zero_f();
        for (int64_t slot = 0; slot < op.slots; ++slot) {
          if (position[slot] < 0) continue;
          const F16 weight = splat(op.weigh_inputs ? 1.0f : weights[slot]);
          total = fma(load_part(outputs + position[slot] * hidden + i, left), weight, total);
        }
        if (op.shared != nullptr) total = fma(load_part(static_cast<const T*>(op.shared) + at, left), gate, total);
        if (op.residual != nullptr) total = add(total, load_part(static_cast<const T*>(op.residual) + at, left));
        store_part(static_cast<T*>(op.out) + at, total, left);
      }
    }
  });
}

// Multiplies the input of each slot of `tokens` tokens by the slot's weight, into rows in order of their experts.
template <class T>
void weigh(Worker& worker, const ExpertsOp& op, int64_t first, int64_t tokens, const Groups& groups, T* out) {
  const int64_t width = op.gate_up.k;
  worker.for_each(tokens * op.slots, 1, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      if (groups.position[slot] < 0) continue;
      const T* x = static_cast<const T*>(op.x) + (first + slot / op.slots) * width;
      T* row = out + groups.position[slot] * width;
      const F16 weight = splat(op.weights[first * op.slots + slot]);
      for (int64_t i = 0; i < width; i += 16) store_part(row + i, mul(load_part(x + i, width - i), weight), width - i);
    }
  });
}

// Product: multiplies rows with the matrices of their experts.
template <class Product, class T>
void experts_by(Worker& worker, const ExpertsOp& op) {
  if (*op.rows == 0) return;
  const ExpertsMemory memory(op, Product::kMostRows);
  std::byte* shared = worker.shared();
  const Groups groups = memory.groups(op, shared);
  const Dtype dtype = op.dtype;
  std::byte *words = shared + memory.words, *inner = shared + memory.inner;
  T* weighed = reinterpret_cast<T*>(shared + memory.weighed);
  const void* x = op.weigh_inputs ? weighed : op.x;
  const LinearOp up{nullptr, x, op.gate_up, op.gate_up_bias, nullptr, inner, op.epilogue,
                    dtype,   dtype, 1.0f,       0.0f, 1, op.down.k};
  const LinearOp down{nullptr, inner, op.down, op.down_bias, nullptr, words, Epilogue::none,
                      dtype,   Dtype::f32, 1.0f,  0.0f, 1, op.down.n};
  for (int64_t begin = 0; begin < *op.rows; begin += memory.tokens) {
    const int64_t end = begin + memory.tokens < *op.rows ? begin + memory.tokens : *op.rows;
    worker.for_each(1, 1, [&](int64_t, int64_t) {
      group(op, begin, end, Product::padded, groups, groups.counts + op.held);
      op.tally[0] = groups.experts() + (begin == 0 ? 0 : op.tally[0]);
      op.tally[1] = groups.used() + (begin == 0 ? 0 : op.tally[1]);
    });
    if (op.weigh_inputs) weigh<T>(worker, op, begin, end - begin, groups, weighed);
    Product::template multiply<T>(worker, up, groups, op.weigh_inputs ? groups.itself : groups.source, words);
    Product::template multiply<T>(worker, down, groups, groups.itself, shared + memory.inner_words);
    add_up<T>(worker, op, begin, end - begin, groups, reinterpret_cast<const float*>(words));
  }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
