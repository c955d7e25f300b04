// Layers with a state: gated delta nets and Mamba 2 (see kernels/recurrence.py), and the gate of attention's output.

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr float kUnitEps = 1e-6f;  // UNIT_EPS of kernels/recurrence.py

struct Unit {  // some tokens of a sequence
  int64_t first, length;
  bool begins;  // the first one is the sequence's
  float* state;

  Unit(const RecurrenceOp& op, int64_t i) {
    const auto line = [&](UnitLine which) -> int64_t { return op.units[which * op.units_stride + i]; };
    first = line(kFirst);
    length = line(kLength);
    begins = line(kContext) == length;
    state = op.states + line(kBatchRow) * op.state_stride;
  }
};

struct RecurrenceSizes {
  int64_t keys, values, channels, inputs, matrices;

  explicit RecurrenceSizes(const RecurrenceOp& op)
      : keys(op.key_heads * op.key_dim),
        values(op.heads * op.value_dim),
        channels(2 * keys + values),
        inputs(channels + values),
        matrices(values * op.key_dim) {}
};

inline F16 silu(F16 x) { return mul(x, sigmoid(x)); }

inline float softplus(float x) {
  return x > 20.0f ? x : static_cast<float>(std::log(1.0 + std::exp(static_cast<double>(x))));
}

// Convolves the channels [begin, end) of a unit, writes their SiLU to `mixed`, and keeps the last inputs for the next
// unit.
template <class T>
void convolve(const RecurrenceOp& op, const RecurrenceSizes& size, const Unit& unit, int64_t begin, int64_t end,
              float* mixed) {
  const int64_t before = op.taps - 1;
  float* kept = unit.state + size.matrices;
  const T* inputs = static_cast<const T*>(op.inputs) + unit.first * size.inputs;
  for (int64_t c = begin; c < end; c += 16) {
    const int64_t count = end - c;
    const auto given = [&](int64_t t) {
      if (t >= 0) return load_part(inputs + t * size.inputs + c, count);
      return unit.begins ? zero_f() : load_part(kept + (t + before) * size.channels + c, count);
    };
    for (int64_t t = 0; t < unit.length; ++t) {
      F16 sum = op.conv_bias == nullptr ? zero_f() : load_part(op.conv_bias + c, count);
      for (int64_t tap = 0; tap < op.taps; ++tap) {
        sum = fma(given(t - before + tap), load_part(op.conv + tap * size.channels + c, count), sum);
      }
      store_part(mixed + (unit.first + t) * size.channels + c, silu(sum), count);
    }
    for (int64_t i = 0; i < before; ++i) {  // in this order no value is needed after it was overwritten
      store_part(kept + i * size.channels + c, given(unit.length - before + i), count);
    }
  }
}

// Writes x times a factor, or with `unit` its unit vector times the factor.
inline void scaled(const float* x, int64_t count, bool unit, float factor, float* out) {
  if (unit) {
    F16 squares = zero_f();
    for (int64_t i = 0; i < count; i += 16) {
      const F16 v = load_part(x + i, count - i);
      squares = fma(v, v, squares);
    }
    factor /= __builtin_sqrtf(sum(squares) + kUnitEps);
  }
  for (int64_t i = 0; i < count; i += 16) store_part(out + i, mul(load_part(x + i, count - i), splat(factor)), count - i);
}

// A head's matrix lies in panels of 16 columns, one behind the other, so that memory is read in order and the second pass
// over a panel finds it in the nearest cache. The last panel may be narrower.
constexpr int64_t kPanel = 16;
// Elements that are fetched ahead while a panel is updated: the next panel of a head of 128 keys, and no address with the
// last 12 bits of a store.
constexpr int64_t kAhead = 128 * kPanel + 512;
constexpr int kChains = 4;  // sums that are not waited for: row i belongs to the sum i % kChains

// One token of one head.
struct HeadStep {
  const float *query, *key, *value;
  float* read;
  float decay, scale, skip;
  bool delta;
  int64_t keys, values;  // sizes of the head's matrix, which has a row for each element of a key

  // Calls body(row, sum) for all rows, and returns the total of the sums.
  template <class Body>
  [[gnu::always_inline]] F16 sum_rows(const Body& body) const {
    F16 sums[kChains];
    for (F16& each : sums) each = zero_f();
    int64_t i = 0;
    for (; i + kChains <= keys; i += kChains) {
#pragma GCC unroll 8
      for (int chain = 0; chain < kChains; ++chain) sums[chain] = body(i + chain, sums[chain]);
    }
    for (int chain = 0; i < keys; ++i, ++chain) sums[chain] = body(i, sums[chain]);
    for (int chain = 1; chain < kChains; ++chain) sums[0] = add(sums[0], sums[chain]);
    return sums[0];
  }

  // Updates a panel of `width` columns from `column` on, and reads it.
  [[gnu::always_inline]] void update(float* panel, int64_t column, int64_t width) const {
    const F16 given = load_part(value + column, width);
    F16 added = given;
    if (delta) {
      const F16 found = sum_rows([&](int64_t i, F16 sum) {
        return fma(load_part(panel + i * width, width), splat(key[i]), sum);
      });
      added = sub(added, mul(splat(decay), found));
    }
    added = mul(added, splat(scale));
    const F16 seen = sum_rows([&](int64_t i, F16 sum) {
      float* row = panel + i * width;
      __builtin_prefetch(row + kAhead, 0, 2);
      const F16 updated = fma(splat(key[i]), added, mul(load_part(row, width), splat(decay)));
      store_part(row, updated, width);
      return fma(updated, splat(query[i]), sum);
    });
    store_part(read + column, fma(given, splat(skip), seen), width);
  }

  void operator()(float* matrix) const {
    int64_t column = 0;
    for (; column + kPanel <= values; column += kPanel) update(matrix + column * keys, column, kPanel);
    if (column < values) update(matrix + column * keys, column, values - column);
  }
};

// Runs the tokens of a unit through one head.
inline void run_head(Worker& worker, const RecurrenceOp& op, const RecurrenceSizes& size, const Unit& unit,
                     int64_t head, const float* mixed, float* read) {
  const bool delta = op.skip == nullptr;
  const int64_t key_head = op.tiled ? head % op.key_heads : head / (op.heads / op.key_heads);
  const int64_t shared = key_head * op.key_dim, rates = delta ? 2 * op.heads : op.heads;
  auto* key = reinterpret_cast<float*>(worker.own(2 * (op.key_dim + 16) * sizeof(float)));
  float *query = key + op.key_dim + 16, *matrix = unit.state + head * op.key_dim * op.value_dim;
  if (unit.begins) __builtin_memset(matrix, 0, op.key_dim * op.value_dim * sizeof(float));
  const float length = delta ? 1.0f / __builtin_sqrtf(static_cast<float>(op.key_dim)) : 1.0f;
  for (int64_t t = unit.first; t < unit.first + unit.length; ++t) {
    const float *given = mixed + t * size.channels, *rate = op.rates + t * rates;
    scaled(given + shared, op.key_dim, delta, length, query);
    scaled(given + size.keys + shared, op.key_dim, delta, 1.0f, key);
    const float step = softplus(rate[rates - op.heads + head] + op.step_bias[head]);
    const float decay = static_cast<float>(std::exp(static_cast<double>(op.decay[head] * step)));
    const float scale = delta ? static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(rate[head])))) : step;
    const int64_t at = head * op.value_dim;
    HeadStep{query, key, given + 2 * size.keys + at, read + t * size.values + at, decay, scale,
             delta ? 0.0f : op.skip[head], delta, op.key_dim, op.value_dim}(matrix);
  }
}

// Norms the elements from `from` on that are normed together, and applies the gate: before the norm with a skip.
template <class T>
void finish(const RecurrenceOp& op, float* read, const T* gate, int64_t from, T* out) {
  const bool before = op.skip != nullptr;
  const int64_t width = op.norm_width;
  const float* weight = op.norm + from % op.norm_size;
  for (int64_t i = 0; before && i < width; i += 16) {
    store_part(read + i, mul(load_part(read + i, width - i), silu(load_part(gate + i, width - i))), width - i);
  }
  const F16 scale = norm_scale(read, width, op.eps);
  for (int64_t i = 0; i < width; i += 16) {
    const F16 normed = mul(mul(load_part(read + i, width - i), scale), load_part(weight + i, width - i));
    store_part(out + i, before ? normed : mul(normed, silu(load_part(gate + i, width - i))), width - i);
  }
}

constexpr int64_t kConvolved = 256;  // channels of an item of work

template <class T>
void recurrence_as(Worker& worker, const RecurrenceOp& op) {
  const RecurrenceSizes size(op);
  const int64_t units = *op.sequences, tokens = *op.rows, pieces = divide_up(size.channels, kConvolved);
  auto* mixed = reinterpret_cast<float*>(worker.shared());
  float* read = mixed + tokens * size.channels;
  worker.for_each(units * pieces, 1, [&](int64_t item, int64_t) {
    const int64_t begin = item % pieces * kConvolved, end = begin + kConvolved;
    convolve<T>(op, size, Unit(op, item / pieces), begin, end < size.channels ? end : size.channels, mixed);
  });
  worker.for_each(units * op.heads, 1, [&](int64_t item, int64_t) {
    run_head(worker, op, size, Unit(op, item / op.heads), item % op.heads, mixed, read);
  });
  const int64_t groups = size.values / op.norm_width;
  worker.for_each(tokens * groups, groups, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t token = item / groups, from = item % groups * op.norm_width;
      const T* gates = static_cast<const T*>(op.inputs) + token * size.inputs + size.channels;
      const int64_t at = token * size.values + from;
      finish(op, read + at, gates + from, from, static_cast<T*>(op.out) + at);
    }
  });
}

void recurrence(Worker& worker, const RecurrenceOp& op) {
  if (op.dtype == Dtype::f32) return recurrence_as<float>(worker, op);
  recurrence_as<uint16_t>(worker, op);
}

template <class T>
void gate_as(Worker& worker, const GateOp& op) {
  worker.for_each(*op.rows, 1, [&](int64_t row, int64_t) {
    const T *x = static_cast<const T*>(op.x) + row * op.width, *gate = static_cast<const T*>(op.gate) + row * op.width;
    T* out = static_cast<T*>(op.out) + row * op.width;
    for (int64_t i = 0; i < op.width; i += 16) {
      const int64_t left = op.width - i;
      const F16 factor = load_part(gate + i, left);
      store_part(out + i, mul(load_part(x + i, left), op.plain ? factor : sigmoid(factor)), left);
    }
  });
}

void gate(Worker& worker, const GateOp& op) {
  if (op.dtype == Dtype::f32) return gate_as<float>(worker, op);
  gate_as<uint16_t>(worker, op);
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
