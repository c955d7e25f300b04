// The parts of sampling.h: a row's noise, the summary of its blocks of tokens, sums of weights, and the k best tokens.

#include "glibc.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int64_t kBlock = 256;  // tokens; their logits fit in the L1 cache
constexpr float kLargest = 3.4028234663852886e38f;

inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// at(stream, index) of noise.py
inline uint64_t noise_key(uint64_t stream, int64_t index) {
  return mix64(stream + (static_cast<uint64_t>(index) + 1) * 0x9e3779b97f4a7c15u);
}

struct Noise {
  uint32_t k0, k1;

  Noise(uint64_t stream, int64_t index) {
    const uint64_t key = noise_key(stream, index);
    k0 = static_cast<uint32_t>(key);
    k1 = static_cast<uint32_t>(key >> 32);
  }

  uint32_t hash(int64_t token) const {
    uint32_t x = static_cast<uint32_t>(token) ^ k0;
    x = (x ^ (x >> 17)) * kFactors[0];
    x ^= k1;
    x = (x ^ (x >> 11)) * kFactors[1];
    x = (x ^ (x >> 15)) * kFactors[2];
    return x ^ (x >> 14);
  }

  // Lower bounds of the hashes in each lane of the block that begins with token `first`, up to float32 rounding.
  F16 least_hashes(int64_t first) const {
    // Tokens of a block differ only in their last 8 bits, which x >> 17 drops. Within a lane, the upper four of these
    // bits take all 16 values. Their order does not matter, so each product is the previous one plus a constant.
    const uint32_t x = static_cast<uint32_t>(first) ^ k0;
    const I16 same = repeat((x ^ (x >> 17)) & ~0xf0u);
    I16 product = mul(exclusive_or(same, load(kLanes)), repeat(kFactors[0])), least = splat(-1);
    for (int i = 0; i < kBlock / 16; ++i) {
      I16 y = exclusive_or(product, repeat(k1));
      y = mul(exclusive_or(y, shift_right<11>(y)), repeat(kFactors[1]));
      y = mul(exclusive_or(y, shift_right<15>(y)), repeat(kFactors[2]));
      least = min_unsigned(least, y);
      product = add(product, repeat(16 * kFactors[0]));
    }
    // y ^ (y >> 14) >= y - (y >> 14). Without its last bit y has no sign.
    return mul(to_float(shift_right<1>(least)), splat(2 * (1 - 0x1p-14f)));
  }

 private:
  static constexpr uint32_t kFactors[] = {0xed5ad4bb, 0xac4c1b51, 0x31848bab};
  static constexpr int32_t kLanes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

  static I16 repeat(uint32_t x) { return splat(static_cast<int32_t>(x)); }
};

inline double gumbel(uint32_t hash) { return -std::log(-std::log1p(-((hash + 0.5) * 0x1p-32))); }

struct Border {  // a position in the ranking: best logit first, equal logits by ascending token
  float value;
  int64_t token;

  // True when the other token comes before this one in the ranking.
  bool follows(float other, int64_t other_token) const {
    return other > value || (other == value && other_token < token);
  }
};

// A row of logits and a summary of each block of it. The last block is padded with -inf.
//
// A lane of a block is 16 tokens, 16 apart.
struct RowSummary {
  const float* logits;
  int64_t vocab, blocks;
  float* lanes;          // [blocks][16], each lane's greatest logit
  float* lane_bounds;    // [blocks][16], weight of that logit / (the lane's least hash + 1/2)
  float* maxima;         // [blocks], the greatest of `lanes`
  float* bounds;         // [blocks], the greatest of `lane_bounds`
  float* tail;           // [kBlock], a padded copy of the last block
  uint64_t* candidates;  // [vocab], scratch: rank keys while the k best are selected
  float top;             // the greatest logit
  int64_t best;          // its token; of equal logits the lowest

  const float* block(int64_t b) const { return b == blocks - 1 ? tail : logits + b * kBlock; }

  static size_t bytes(int64_t vocab) {
    return (divide_up(vocab, kBlock) * (2 * 16 + 2) + kBlock) * sizeof(float) + vocab * sizeof(uint64_t);
  }

  RowSummary(const float* logits, int64_t vocab, std::byte* memory)
      : logits(logits), vocab(vocab), blocks(divide_up(vocab, kBlock)), top(-kInfinity), best(0) {
    lanes = reinterpret_cast<float*>(memory);
    lane_bounds = lanes + 16 * blocks;
    maxima = lane_bounds + 16 * blocks;
    bounds = maxima + blocks;
    tail = bounds + blocks;
    candidates = reinterpret_cast<uint64_t*>(tail + kBlock);
  }
};

// Computes 2^(x scale) for x <= 0 with a relative error of about 3e-6; 0 below 2^-126.5. The polynomial is minimax and
// has as few terms as kShareUncertainty in sampling.h allows.
struct Fine {
  static constexpr double kExcess = 1;

  static F16 weights(F16 x, float scale) {
    constexpr float kTerms[] = {9.570102207e-3f, 5.591785908e-2f, 2.402474433e-1f, 6.931217909e-1f, 9.999992847e-1f};
    return power_below_one(x, scale, kTerms);
  }
};

// Computes 2^(x scale) in a third of the operations: between the exact value and kExcess times that, up to rounding. It
// interpolates linearly between powers of 2, by writing a scaled x into a float's bits. (1 + r) / 2^r <= 1.06148.
struct Coarse {
  static constexpr double kExcess = 1.0616;

  static F16 weights(F16 x, float scale) {
    return as_floats(to_int(max(zero_f(), fma(x, splat(0x1p23f * scale), splat(127 * 0x1p23f)))));
  }
};

// The sum of 2^((x - reference) scale) over a block.
template <class Weights>
inline float block_mass(const float* x, float reference, float scale) {
  F16 sums = zero_f();
  for (int64_t i = 0; i < kBlock; i += 16) {
    sums = add(sums, Weights::weights(sub(load(x + i), splat(reference)), scale));
  }
  return sum(sums);
}

// Fills in the lanes, maxima, top and best of a row in one pass over the logits. Returns false when a logit is NaN or
// +inf, or all are -inf.
bool summarise(RowSummary& row) {
  const int64_t last = (row.blocks - 1) * kBlock;
  for (int64_t i = 0; i < kBlock; ++i) row.tail[i] = last + i < row.vocab ? row.logits[last + i] : -kInfinity;
  F16 all_not_finite = zero_f();
  float top = -kInfinity;
  for (int64_t b = 0; b < row.blocks; ++b) {
    const float* x = row.block(b);
    F16 best = splat(-kInfinity), not_finite = zero_f();  // NaN once a NaN or +inf was seen
    for (int64_t i = 0; i < kBlock; i += 16) {
      const F16 v = load(x + i);
      best = max(best, v);
      not_finite = fma(max(splat(-kLargest), v), zero_f(), not_finite);
    }
    all_not_finite = add(all_not_finite, not_finite);
    store(row.lanes + 16 * b, best);
    row.maxima[b] = largest(best);
    top = std::max(top, row.maxima[b]);
  }
  row.top = top;
  const float flag = sum(all_not_finite);
  if (flag != flag || top == -kInfinity) return false;
  const int64_t b = std::find(row.maxima, row.maxima + row.blocks, top) - row.maxima;
  row.best = b * kBlock + (std::find(row.block(b), row.block(b) + kBlock, top) - row.block(b));
  return true;
}

// -- the k best --------------------------------------------------------------------------------------------------

// Returns a value that at least k of `values` reach, and at most k + k / 4 of them except for ties; 1 <= k <= count.
// Bisects the bits of floats, which order like integers. Each step only counts values, so no branch is mispredicted, as
// in a quickselect.
float floor_of_best(const float* values, int64_t count, int64_t k) {
  const auto value = [](int64_t key) {
    return __builtin_bit_cast(float, static_cast<int32_t>(key < 0 ? key ^ 0x7fffffff : key));
  };
  int64_t low = ~int64_t{0x7f800000}, high = 0x7f800000;  // -inf: all reach it; +inf: none does
  while (high - low > 1) {
    const int64_t middle = (low + high) >> 1;
    const float floor = value(middle);
    int32_t reached = 0;
    for (int64_t i = 0; i < count; ++i) reached += values[i] >= floor;
    if (reached < k) {
      high = middle;
      continue;
    }
    low = middle;
    if (reached <= k + k / 4) break;
  }
  return value(low);
}

// A key that sorts by descending logit, then by ascending token. Adding 0 gives -0 and 0 the same bits.
inline uint64_t rank_key(float value, int64_t token) {
  const auto bits = __builtin_bit_cast(uint32_t, value + 0.0f);
  const uint32_t falling = bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
  return static_cast<uint64_t>(falling) << 32 | static_cast<uint64_t>(token);
}

// Returns k rank keys in no order: their low halves are the k best tokens. 1 <= k <= vocab.
//
// The k best logits are at least any value that k of the blocks' maxima reach, or k of the lanes' maxima. With 4 k maxima
// or more, not many more than k logits reach that value.
uint64_t* best_unordered(const RowSummary& row, int64_t k) {
  const float floor = 4 * k <= row.blocks        ? floor_of_best(row.maxima, row.blocks, k)
                      : 4 * k <= 16 * row.blocks ? floor_of_best(row.lanes, 16 * row.blocks, k)
                                                 : floor_of_best(row.logits, row.vocab, k);
  int64_t count = 0;
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (row.maxima[b] < floor) continue;
    for (int64_t lane = 0; lane < 16; ++lane) {
      if (row.lanes[16 * b + lane] < floor) continue;
      for (int64_t i = lane; i < kBlock; i += 16) {
        const int64_t token = b * kBlock + i;
        if (token < row.vocab && row.logits[token] >= floor) {
          row.candidates[count++] = rank_key(row.logits[token], token);
        }
      }
    }
  }
  std::nth_element(row.candidates, row.candidates + k - 1, row.candidates + count);
  return row.candidates;
}

// Returns the same keys, best first.
const uint64_t* best_ordered(const RowSummary& row, int64_t k) {
  uint64_t* best = best_unordered(row, k);
  std::sort(best, best + k);
  return best;
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
