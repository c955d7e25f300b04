// Elementwise ops: embedding, norm, rotary positions, and the storing of keys and values.

namespace penstock::PENSTOCK_ISA {
namespace {

// -- embedding ---------------------------------------------------------------------------------------------------

inline float bf16_to_float(uint16_t x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16); }

// Unpacks a column of a block of codes. The product is rounded before the minimum is added, as in llama.cpp.
inline void unpack_codes(const Matrix& weight, int64_t block, int64_t column, float* out) {
  const Format& format = weight.format;
  const uint8_t* lines = block_lines(weight, block);
  const int8_t* table = table_of(format.codes);
  const float power = weight.column_scales == nullptr ? 1.0f : weight.column_scales[block * kColumns + column] * kByColumn;
  for (int64_t begin = 0, padded = padded_k(weight); begin < padded; begin += format.group) {
    float scales[16], mins[16] = {};
    store(scales, scales_of(weight, block, begin / format.group)(0));
    if (weight.mins != nullptr) store(mins, mins_of(weight, block, begin / format.group)(0));
    for (int64_t i = begin; i < begin + format.group && i < padded; ++i) {
      int code;
      if (format.codes == Codes::bytes) {
        code = lines[i / 4 * kLineBytes + column * 4 + i % 4] - format.zero;
      } else {
        const int both = lines[i / 8 * kLineBytes + column * 4 + i % 4], place = i % 8 < 4 ? both & 15 : both >> 4;
        code = table == nullptr ? place - format.zero : table[place];
      }
      const float product = static_cast<float>(code) * scales[column];
      out[i] = (weight.mins == nullptr ? product : product + mins[column]) * power;
    }
  }
}

// Unpacks row `n` of a weight to floats at `out`.
inline void unpack_row(const Matrix& weight, int64_t n, float* out) {
  const int64_t padded = padded_k(weight), block = n / kColumns, column = n % kColumns;
  const uint8_t* lines;
  const auto word = [&](int64_t line) { return reinterpret_cast<const uint32_t*>(lines + line * kLineBytes)[column]; };
  switch (weight.format.scheme) {
    case Scheme::f32:
      lines = weight.lines + block * padded * kLineBytes;
      for (int64_t i = 0; i < padded; ++i) out[i] = __builtin_bit_cast(float, word(i));
      return;
    case Scheme::bf16:
      lines = weight.lines + block * padded / 2 * kLineBytes;
      for (int64_t i = 0; i < padded / 2; ++i) {
        out[2 * i] = bf16_to_float(static_cast<uint16_t>(word(i)));
        out[2 * i + 1] = bf16_to_float(static_cast<uint16_t>(word(i) >> 16));
      }
      return;
    case Scheme::int16:
      lines = weight.lines + block * padded / 2 * kLineBytes;
      for (int64_t i = 0; i < padded; ++i) {
        out[i] = static_cast<int16_t>(word(i / 2) >> (16 * (i % 2))) * weight.column_scales[n];
      }
      return;
    case Scheme::grouped:
      unpack_codes(weight, block, column, out);
  }
}

template <class T>
void embedding_as(Worker& worker, const EmbeddingOp& op) {
  const int64_t width = op.table.k;
  auto* row = reinterpret_cast<float*>(worker.own((padded_k(op.table) + 16) * sizeof(float)));
  worker.for_each(*op.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t own = op.ids[i] - op.first;
      if (own >= 0 && own < op.table.n) {
        unpack_row(op.table, own, row);
      } else {
        __builtin_memset(row, 0, width * sizeof(float));
      }
      for (int64_t j = 0; j < width; j += 16) {
        store_part(static_cast<T*>(op.out) + i * width + j, mul(load_part(row + j, width - j), splat(op.scale)),
                   width - j);
      }
    }
  });
}

void embedding(Worker& worker, const EmbeddingOp& op) {
  if (op.dtype == Dtype::f32) return embedding_as<float>(worker, op);
  embedding_as<uint16_t>(worker, op);
}

// -- norm --------------------------------------------------------------------------------------------------------

// The factor that scales x to a root mean square of 1.
template <class T>
inline F16 norm_scale(const T* x, int64_t width, float eps) {
  F16 squares = zero_f();
  for (int64_t i = 0; i < width; i += 16) {
    const F16 v = load_part(x + i, width - i);
    squares = fma(v, v, squares);
  }
  return splat(1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(width) + eps));
}

// Multiplies x by the scale and by weight + offset.
template <class T>
inline void apply_norm(const T* x, const T* weight, T* out, int64_t width, F16 scale, float offset) {
  for (int64_t i = 0; i < width; i += 16) {
    const F16 factor = add(load_part(weight + i, width - i), splat(offset));
    store_part(out + i, mul(mul(load_part(x + i, width - i), scale), factor), width - i);
  }
}

// LayerNorm: subtracts the mean, scales to a variance of 1, multiplies by weight + offset and adds the bias if any.
// kWhole: the width is a multiple of 16.
template <bool kWhole, class T>
inline void normalize_centered(const T* x, const T* weight, const T* bias, T* out, int64_t width, float eps,
                               float offset) {
  const auto part = [width](const T* values, int64_t i) {
    if constexpr (kWhole) return load(values + i);
    else return load_part(values + i, width - i);
  };
  F16 total = zero_f(), squares = zero_f();
  for (int64_t i = 0; i < width; i += 16) total = add(total, part(x, i));
  const F16 mean = splat(sum(total) / static_cast<float>(width));
  for (int64_t i = 0; i < width; i += 16) {
    F16 v = sub(part(x, i), mean);
    if constexpr (!kWhole) v = within(v, zero_f(), 0, width - i);
    squares = fma(v, v, squares);
  }
  const F16 scale = splat(1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(width) + eps));
  for (int64_t i = 0; i < width; i += 16) {
    F16 y = mul(mul(sub(part(x, i), mean), scale), add(part(weight, i), splat(offset)));
    if (bias != nullptr) y = add(y, part(bias, i));
    if constexpr (kWhole) store(out + i, y);
    else store_part(out + i, y, width - i);
  }
}

template <class T>
void norm_as(Worker& worker, const NormOp& op) {
  const int64_t width = op.width;
  const auto *weight = static_cast<const T*>(op.weight), *bias = static_cast<const T*>(op.bias);
  const F16 scale = splat(op.scale);
  worker.for_each(*op.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(op.x) + row * width;
      if (op.residual != nullptr) {
        const T* residual = static_cast<const T*>(op.residual) + row * width;
        T* sums = static_cast<T*>(op.sum) + row * width;
        for (int64_t i = 0; i < width; i += 16) {
          const int64_t left = width - i;
          store_part(sums + i, mul(add(load_part(x + i, left), load_part(residual + i, left)), scale), left);
        }
        x = sums;
      }
      T* normed = static_cast<T*>(op.normed) + row * width;
      if (op.centered) {
        const auto normalize = width % 16 == 0 ? normalize_centered<true, T> : normalize_centered<false, T>;
        normalize(x, weight, bias, normed, width, op.eps, op.offset);
      } else {
        apply_norm(x, weight, normed, width, norm_scale(x, width, op.eps), op.offset);
      }
    }
  });
}

void norm(Worker& worker, const NormOp& op) {
  if (op.dtype == Dtype::f32) return norm_as<float>(worker, op);
  norm_as<uint16_t>(worker, op);
}

// -- rotary positions, and the cache -----------------------------------------------------------------------------

void rotation(Worker& worker, const RotationOp& op) {
  worker.for_each(*op.rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t width = 2 * op.half;
      float* cosines = op.out + row * (op.every == 0 ? width : 2 * width);
      const auto position = static_cast<float>(op.positions[row]);
      for (int64_t i = 0; i < op.half; ++i) {
        const float angle = position * op.frequencies[i], factor = op.frequencies[op.half + i];
        cosines[i] = std::cos(angle) * factor;
        cosines[op.half + i] = std::sin(angle) * factor;
      }
      if (op.every == 0) continue;
      const auto passed = static_cast<float>((op.positions[row] + op.first) / op.every);
      const float factor = 1.0f + op.temperature * std::log1p(passed);
      for (int64_t i = 0; i < width; ++i) cosines[width + i] = cosines[i] * factor;
    }
  });
}

// Rotates the halves of a head.
template <class T>
inline void turn(const T* head, int64_t dim, const float* rotation, T* out) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t left = half - i;
    const F16 a = load_part(head + i, left), b = load_part(head + half + i, left);
    const F16 cosine = load_part(rotation + i, left), sine = load_part(rotation + half + i, left);
    const F16 minus = sub(zero_f(), sine);
    store_part(out + i, fma(a, cosine, mul(b, minus)), left);
    store_part(out + half + i, fma(b, cosine, mul(a, sine)), left);
  }
}

// Norms one head, if there is a weight, and rotates its halves. `together`: the scale of all heads with `whole`.
template <class T>
inline void rotate(const T* head, const T* weight, const float* rotation, const CacheOp& op, F16 together, T* out,
                   float* scratch) {
  if (weight != nullptr) {
    T* normed = reinterpret_cast<T*>(scratch);
    const int64_t dim = op.head_dim;
    if (op.centered) {
      normalize_centered<false>(head, weight, static_cast<const T*>(nullptr), normed, dim, op.eps, op.offset);
    } else {
      apply_norm(head, weight, normed, dim, op.whole ? together : norm_scale(head, dim, op.eps), op.offset);
    }
    head = normed;
  }
  turn(head, op.head_dim, rotation, out);
}

// Stores a head's key or value of one token, at position `at` of its block, in the layout of pages.
template <class T>
inline void put_key(const T* key, int64_t dim, int64_t at, int64_t block_size, T* head) {
  constexpr int64_t p = 4 / sizeof(T);
  auto* to = reinterpret_cast<std::byte*>(head + at * p);
  for (int64_t i = 0; i < dim; i += p, to += block_size * 4) __builtin_memcpy(to, key + i, 4);
}

template <class T>
inline void put_value(const T* value, int64_t at, const CacheOp& op, T* head) {
  constexpr int64_t p = 4 / sizeof(T);
  T* to = head + at / p * op.head_dim * p + at % p;
  for (int64_t i = 0; i < op.head_dim; ++i, to += p) *to = value[i];
}

// The same as bytes, with the token's scale stored behind the head's page.
template <class T>
inline const int8_t* quantized(const T* x, int64_t at, const CacheOp& op, int8_t* out, int8_t* head) {
  const Quantizer quantize(x, op.head_dim);
  int32_t whole[16];
  for (int64_t i = 0; i < op.head_dim; i += 16) {
    store(whole, quantize(load(x + i)));
    for (int j = 0; j < 16; ++j) out[i + j] = static_cast<int8_t>(whole[j]);
  }
  reinterpret_cast<float*>(head + op.block_size * op.head_dim)[at] = quantize.scale;
  return out;
}

template <class T, class Page>
void cache_as(Worker& worker, const CacheOp& op) {
  const int64_t dim = op.head_dim, all = op.heads + 2 * op.kv_heads;
  auto* scratch = reinterpret_cast<float*>(worker.own(4 * (dim + 16) * sizeof(float)));
  T* key = reinterpret_cast<T*>(scratch + dim + 16);
  [[maybe_unused]] auto* bytes = reinterpret_cast<int8_t*>(scratch + 2 * (dim + 16));
  [[maybe_unused]] float* spread_key = scratch + 3 * (dim + 16);
  // Neighbouring tokens of a prompt share lines of a page, so a thread takes as many tokens as a line has.
  const int64_t share = *op.rows / (4 * worker.count()), grain = share < 1 ? 1 : share < 16 ? share : 16;
  worker.for_each(*op.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* heads = static_cast<const T*>(op.qkv) + row * all * dim;
      const T* weight = static_cast<const T*>(op.weight);
      const float* cos_sin = op.rotation + row * op.rotation_stride;
      T* query = static_cast<T*>(op.query) + row * op.heads * dim;
      F16 of_queries = zero_f(), of_keys = zero_f();
      if (op.whole) {
        of_queries = norm_scale(heads, op.heads * dim, op.eps);
        of_keys = norm_scale(heads + op.heads * dim, op.kv_heads * dim, op.eps);
      }
      for (int64_t head = 0; head < op.heads; ++head) {
        rotate(heads + head * dim, weight ? weight + head * dim : nullptr, cos_sin + op.query_rotation, op, of_queries,
               query + head * dim, scratch);
      }
      const int64_t page = op.blocks[row] * op.block_stride, at = op.offsets[row];
      for (int64_t head = 0; head < op.kv_heads; ++head) {
        const int64_t place = op.heads + head;
        rotate(heads + place * dim, weight ? weight + place * dim : nullptr, cos_sin, op, of_keys, key,
               scratch);
        const T* value = heads + (place + op.kv_heads) * dim;
        if (op.norm_values) {
          T* normed = reinterpret_cast<T*>(scratch);
          apply_norm(value, weight + (place + op.kv_heads) * dim, normed, dim, norm_scale(value, dim, op.eps), op.offset);
          value = normed;
        }
        Page* keys = static_cast<Page*>(op.keys) + page + head * op.head_stride;
        Page* values = static_cast<Page*>(op.values) + page + head * op.head_stride;
        if constexpr (sizeof(Page) == 1) {
          spread(key, dim, spread_key);
          put_key(quantized(spread_key, at, op, bytes, keys), dim, at, op.block_size, keys);
          put_value(quantized(value, at, op, bytes, values), at, op, values);
        } else {
          put_key(key, dim, at, op.block_size, keys);
          put_value(value, at, op, values);
        }
      }
    }
  });
}

template <class T>
void latent_as(Worker& worker, const LatentOp& op) {
  const int64_t dim = op.rank + op.rope;
  T* const key = reinterpret_cast<T*>(worker.own(static_cast<size_t>(dim) * sizeof(T)));
  const int64_t share = *op.rows / (4 * worker.count()), grain = share < 1 ? 1 : share < 16 ? share : 16;  // as `cache`
  worker.for_each(*op.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* cos_sin = op.rotation + row * op.rope;
      // A latent, or a head's part in the latents' space, and the rotated part behind it.
      const auto put = [&](const void* first, const void* second, int64_t place, T* out) {
        __builtin_memcpy(out, static_cast<const T*>(first) + place * op.rank, static_cast<size_t>(op.rank) * sizeof(T));
        turn(static_cast<const T*>(second) + place * op.rope, op.rope, cos_sin, out + op.rank);
      };
      for (int64_t place = row * op.heads; place < (row + 1) * op.heads; ++place) {
        put(op.absorbed, op.rotated, place, static_cast<T*>(op.query) + place * dim);
      }
      put(op.latent, op.key, row, key);
      put_key(key, dim, op.offsets[row], op.block_size, static_cast<T*>(op.pages) + op.blocks[row] * op.block_stride);
    }
  });
}

void latent(Worker& worker, const LatentOp& op) {
  op.dtype == Dtype::f32 ? latent_as<float>(worker, op) : latent_as<uint16_t>(worker, op);
}

void cache(Worker& worker, const CacheOp& op) {
  if (op.dtype == Dtype::f32) {
    return op.page_dtype == Dtype::i8 ? cache_as<float, int8_t>(worker, op) : cache_as<float, float>(worker, op);
  }
  op.page_dtype == Dtype::i8 ? cache_as<uint16_t, int8_t>(worker, op) : cache_as<uint16_t, uint16_t>(worker, op);
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
