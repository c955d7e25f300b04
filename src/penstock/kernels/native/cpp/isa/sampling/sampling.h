// Samples a token for every row of logits. One thread samples a row, so that its token depends on that row alone.
//
// runtime/sampling/reference.py defines the tokens, runtime/sampling/noise.py the noise. Only the k best tokens are
// ever sorted. One pass over the logits and one over the tokens' hashes compute two numbers for every lane (16 tokens,
// 16 apart) of every block of 256 tokens:
//
// - the greatest logit: only lanes with a large one can hold the k best tokens;
// - the least hash. A token's score is log w + gumbel(hash) with the weight w = exp((logit - best) / T), and
//   gumbel(hash) <= -log u with u = (hash + 1/2) / 2^32. So no token of a lane scores more than log(greatest w / least
//   u). Once the score of one token is known, few lanes can hold a better one, and only their tokens are scored one by
//   one.
//
// top_p needs no sorted sum. The winner among all tokens is drawn first. It is kept if the tokens ahead of it
// hold less than top_p of the mass; if not, the winner among the tokens ahead of it is drawn next. Each check takes one
// more pass over the logits, except for the likeliest token, which top_p always keeps.

#include "logit_edits.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Sums of float32 weights have relative errors of a few 1e-6, from rounding in exponents, exponentials and sums. When a
// share is closer to top_p than this, it is computed again in float64.
constexpr double kShareUncertainty = 2e-5;
constexpr double kBoundSlack = 1e-4;  // relative slack of the lanes' bounds: exceeds the rounding of weights

// -- drawing -----------------------------------------------------------------------------------------------------

struct Draw {  // the sampling parameters of a row, and its noise
  double temperature, top_p, min_p, top_n_sigma;
  int64_t top_k;
  Noise noise;

  // The factor that turns logits into exponents of 2. It is never 0: at a very high temperature, -inf * 0 would be NaN.
  float scale() const { return std::max(static_cast<float>(kLog2E / temperature), 1e-30f); }
};

struct Contender {
  int64_t token;
  double score;

  // A lane or block with a lower bound than this holds no better token.
  float reach() const { return static_cast<float>(std::exp(score) * (1 - kBoundSlack) * 0x1p-32); }

  // Replaces this token by the other one if that scores higher. On equal scores this token stays.
  void challenge(int64_t other, double log_p, uint32_t hash) {
    // -log u is at most this, because u is at least that power of two. This saves two logarithms for most tokens.
    const double at_most = (std::countl_zero(hash) + 1) * 0.69314718055994531;
    if (log_p + at_most + 1e-9 < score) return;
    const double noisy = log_p + gumbel(hash);
    if (noisy > score) *this = {other, noisy};
  }
};

// Sets the bounds of the blocks that reach the floor, and of their lanes. Other blocks get 0; their lanes are not set.
void set_bounds(const RowSummary& row, const Draw& draw, float floor) {
  for (int64_t b = 0; b < row.blocks; ++b) {
    row.bounds[b] = 0;
    if (row.maxima[b] < floor) continue;
    const F16 weights = Fine::weights(sub(load(row.lanes + 16 * b), splat(row.top)), draw.scale());
    const F16 bounds = div(weights, add(draw.noise.least_hashes(b * kBlock), splat(0.5f)));
    store(row.lane_bounds + 16 * b, bounds);
    row.bounds[b] = largest(bounds);
  }
}

// Scores the tokens of a block that may beat the leader, have logits of at least `floor` and come before `border`.
void contest(const RowSummary& row, const Draw& draw, int64_t b, float floor, const Border& border, Contender& leader) {
  const float reach = leader.reach();
  for (int64_t lane = 16 * b; lane < 16 * (b + 1); ++lane) {
    if (row.lane_bounds[lane] < reach) continue;
    const int64_t first = b * kBlock + lane % 16;
    for (int64_t token = first; token < std::min(row.vocab, first + kBlock); token += 16) {
      const float value = row.logits[token];
      if (value < floor || !border.follows(value, token)) continue;
      leader.challenge(token, (value - static_cast<double>(row.top)) / draw.temperature, draw.noise.hash(token));
    }
  }
}

// Returns the token with the greatest log p + noise among those that reach `floor` and come before `border`. The best
// token always qualifies.
int64_t winner(const RowSummary& row, const Draw& draw, float floor, const Border& border) {
  Contender leader{row.best, gumbel(draw.noise.hash(row.best))};
  const float least = std::max(floor, border.value);
  int64_t first = row.best / kBlock;
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (row.bounds[b] > row.bounds[first] && row.maxima[b] >= least) first = b;
  }
  contest(row, draw, first, floor, border, leader);
  float reach = leader.reach();
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (row.bounds[b] < reach || row.maxima[b] < least || b == first) continue;
    contest(row, draw, b, floor, border, leader);
    reach = leader.reach();
  }
  return leader.token;
}

// The least float32 that is not below `exact`.
float least_reaching(double exact) {
  if (!(exact >= -kLargest)) return -kInfinity;
  const auto floor = static_cast<float>(exact);
  return floor < exact ? std::nextafter(floor, kInfinity) : floor;
}

// The least float32 logit that min_p keeps: its probability is at least min_p times the best token's.
float min_p_floor(const RowSummary& row, const Draw& draw) {
  return least_reaching(row.top + draw.temperature * std::log(draw.min_p));
}

// The least float32 logit that top_n_sigma keeps; -inf if it is off. Banned tokens, whose logits are -inf, do not count.
float sigma_floor(const RowSummary& row, const Draw& draw) {
  if (draw.top_n_sigma <= 0) return -kInfinity;
  double counts[16] = {}, sums[16] = {}, squares[16] = {};  // of each lane: of logits less the best one
  for (int64_t b = 0; b < row.blocks; ++b) {
    const float* x = row.block(b);
    for (int64_t i = 0; i < kBlock; i += 16) {
      for (int64_t lane = 0; lane < 16; ++lane) {
        const double below = x[i + lane] > -kInfinity ? x[i + lane] - static_cast<double>(row.top) : 0;
        counts[lane] += x[i + lane] > -kInfinity ? 1 : 0;
        sums[lane] += below;
        squares[lane] += below * below;
      }
    }
  }
  double count = 0, sum = 0, square = 0;
  for (int64_t lane = 0; lane < 16; ++lane) {
    count += counts[lane];
    sum += sums[lane];
    square += squares[lane];
  }
  const double variance = square / count - sum / count * (sum / count);
  return least_reaching(row.top - draw.top_n_sigma * std::sqrt(std::max(variance, 0.0)));
}

int64_t count_reaching(const RowSummary& row, float floor) {
  int64_t count = 0;
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (row.maxima[b] < floor) continue;
    for (int64_t i = b * kBlock; i < std::min(row.vocab, (b + 1) * kBlock); ++i) count += row.logits[i] >= floor;
  }
  return count;
}

// A logit below which top_p keeps no token.
//
// A kept token has less than top_p of the mass ahead of it, so it and the tokens behind it hold more than 1 - top_p.
// These are at most `vocab` tokens, each no heavier than the kept one, so its weight exceeds (1 - top_p) mass / vocab.
// The mass is at least the best token's weight, 1.
float top_p_floor(const RowSummary& row, const Draw& draw) {
  const double log_weight = std::log((1 - draw.top_p) / static_cast<double>(row.vocab));
  const double floor = row.top + draw.temperature * (log_weight - 0.001);  // lower by more than rounding
  return floor >= -kLargest ? static_cast<float>(floor) : -kInfinity;
}

// True when the tokens ahead of `border` hold top_p of the mass or more, computed in float64.
bool outside_exactly(const RowSummary& row, const Draw& draw, const Border& border) {
  double ahead = 0, all = 0;
  for (int64_t b = 0; b < row.blocks; ++b) {
    double block_ahead = 0, block_all = 0;
    for (int64_t token = b * kBlock; token < std::min(row.vocab, (b + 1) * kBlock); ++token) {
      const float value = row.logits[token];
      const double weight = std::exp((value - static_cast<double>(row.top)) / draw.temperature);
      block_all += weight;
      if (border.follows(value, token)) block_ahead += weight;
    }
    ahead += block_ahead;
    all += block_all;
  }
  return ahead >= draw.top_p * all;
}

struct Masses {
  double ahead, all;  // of the tokens ahead of a border (its own token is not ahead), and of all tokens
};

// The masses of a block in which exactly the tokens with logits above `limit` are ahead.
template <class Weights>
Masses block_masses(const float* x, float limit, float reference, float scale) {
  F16 ahead = zero_f(), all = zero_f();
  for (int64_t i = 0; i < kBlock; i += 16) {
    const F16 logits = load(x + i), weights = Weights::weights(sub(logits, splat(reference)), scale);
    ahead = add(ahead, where_greater(logits, splat(limit), weights));
    all = add(all, weights);
  }
  return {sum(ahead), sum(all)};
}

// The masses of the block that holds the border's token: equal logits before that token are ahead too.
template <class Weights>
Masses own_block_masses(const float* x, int64_t place, float reference, float scale) {
  float ahead[kBlock];
  for (int64_t i = 0; i < place; ++i) ahead[i] = x[i] >= x[place] ? x[i] : -kInfinity;
  for (int64_t i = place; i < kBlock; ++i) ahead[i] = x[i] > x[place] ? x[i] : -kInfinity;
  return {block_mass<Weights>(ahead, reference, scale), block_mass<Weights>(x, reference, scale)};
}

template <class Weights>
Masses masses(const RowSummary& row, const Draw& draw, const Border& border) {
  const int64_t own = border.token / kBlock;
  const float scale = draw.scale(), below = std::nextafter(border.value, -kInfinity);
  Masses total{0, 0};
  for (int64_t b = 0; b < row.blocks; ++b) {
    const float* x = row.block(b);
    const Masses here = row.maxima[b] < border.value ? Masses{0, block_mass<Weights>(x, row.top, scale)}
                        : b == own ? own_block_masses<Weights>(x, border.token % kBlock, row.top, scale)
                                   : block_masses<Weights>(x, b < own ? below : border.value, row.top, scale);
    total.ahead += here.ahead;
    total.all += here.all;
  }
  return total;
}

enum class Verdict { inside, outside, undecided };

// Decides whether top_p keeps the border's token, unless weights of this precision leave it undecided.
template <class Weights>
Verdict judge(const RowSummary& row, const Draw& draw, const Border& border) {
  const Masses total = masses<Weights>(row, draw, border);
  // outside: ahead >= top_p (ahead + behind)
  const double ahead = (1 - draw.top_p) * total.ahead, behind = draw.top_p * (total.all - total.ahead);
  const double uncertainty = kShareUncertainty * total.all;
  if (ahead / Weights::kExcess > behind + uncertainty) return Verdict::outside;
  if (ahead + uncertainty < behind / Weights::kExcess) return Verdict::inside;
  return Verdict::undecided;
}

// True when top_p does not keep the border's token.
bool outside(const RowSummary& row, const Draw& draw, const Border& border) {
  Verdict verdict = judge<Coarse>(row, draw, border);
  if (verdict == Verdict::undecided) verdict = judge<Fine>(row, draw, border);
  return verdict == Verdict::undecided ? outside_exactly(row, draw, border) : verdict == Verdict::outside;
}

// Draws from those of the tokens that reach `least` that top_p and min_p keep. With top_p, all tokens must reach it.
int64_t draw_token(const RowSummary& row, const Draw& draw, float least) {
  const float of_top_p = draw.top_p < 1 ? top_p_floor(row, draw) : -kInfinity;
  const float floor = std::max({least, min_p_floor(row, draw), of_top_p});
  set_bounds(row, draw, floor);
  Border border{-kInfinity, row.vocab};  // behind all tokens
  for (;;) {
    const int64_t token = winner(row, draw, floor, border);
    border = {row.logits[token], token};
    // The best token is always kept. top_p = 1 keeps all tokens, including those whose weight is 0.
    if (token == row.best || draw.top_p >= 1 || !outside(row, draw, border)) return token;
  }
}

// Draws from those of the k best tokens that top_p and min_p keep.
int64_t draw_top_k(const RowSummary& row, const Draw& draw, int64_t k) {
  // top_p needs the tokens in order.
  const uint64_t* ranked = draw.top_p < 1 ? best_ordered(row, k) : best_unordered(row, k);
  const auto token = [&](int64_t i) { return static_cast<int64_t>(static_cast<uint32_t>(ranked[i])); };
  const auto log_p = [&](int64_t i) {
    return (row.logits[token(i)] - static_cast<double>(row.top)) / draw.temperature;
  };
  double mass = 0;
  for (int64_t i = 0; draw.top_p < 1 && i < k; ++i) mass += std::exp(log_p(i));
  const double least = std::log(draw.min_p);
  double ahead = 0;
  Contender leader{row.best, gumbel(draw.noise.hash(row.best))};
  for (int64_t i = 0; i < k; ++i) {
    if (draw.top_p < 1) {
      if (i > 0 && ahead >= draw.top_p * mass) break;
      ahead += std::exp(log_p(i));
    }
    if (log_p(i) < least) continue;
    leader.challenge(token(i), log_p(i), draw.noise.hash(token(i)));
  }
  return leader.token;
}

// What top_n_sigma keeps are the best tokens, so before top_p, which takes its share of these, it is a top_k.
int64_t draw_filtered(const RowSummary& row, const Draw& draw) {
  const float least = sigma_floor(row, draw);
  if (least == -kInfinity) return draw.top_k > 0 ? draw_top_k(row, draw, draw.top_k) : draw_token(row, draw, least);
  if (draw.top_k == 0 && draw.top_p >= 1) return draw_token(row, draw, least);
  const int64_t reaching = count_reaching(row, least);
  return draw_top_k(row, draw, draw.top_k > 0 ? std::min(draw.top_k, reaching) : reaching);
}

// -- logprobs ----------------------------------------------------------------------------------------------------

// log(sum(exp(logits)))
double log_sum_exp(const RowSummary& row) {
  double total = 0;
  for (int64_t b = 0; b < row.blocks; ++b) total += block_mass<Fine>(row.block(b), row.top, kLog2E);
  return row.top + std::log(total);
}

// Packs the k best tokens and their logprobs after the first three words (layout: messages/logprobs.py).
void pack_best(const RowSummary& row, int64_t k, double normaliser, int32_t* words) {
  if (k == 0) return;
  const uint64_t* ranked = best_ordered(row, k);
  for (int64_t i = 0; i < k; ++i) {
    const auto token = static_cast<int32_t>(ranked[i]);
    words[3 + 2 * i] = token;
    words[4 + 2 * i] = __builtin_bit_cast(int32_t, static_cast<float>(row.logits[token] - normaliser));
  }
}

// Packs the first three words: the token, its logprob and its rank.
void pack_token(const RowSummary& row, int64_t token, double normaliser, int32_t* words) {
  const float chosen = row.logits[token];
  int32_t greater = 0;
  for (int64_t i = 0; i < row.vocab; ++i) greater += row.logits[i] > chosen;
  words[0] = static_cast<int32_t>(token);
  words[1] = __builtin_bit_cast(int32_t, static_cast<float>(chosen - normaliser));
  words[2] = 1 + greater;
}

// -- the op ------------------------------------------------------------------------------------------------------

// Summarises a row and chooses its token. Returns false when `summarise` does.
bool choose(RowSummary& row, const Draw& draw, Choosing choosing, int64_t& token) {
  if (!summarise(row)) return false;
  token = choosing == Choosing::greedy ? row.best : draw_filtered(row, draw);
  return true;
}

// `memory` holds the summary of a row, then its copy if it has a mask or a watermark, then its edits.
SampleStatus sample_row(const SampleOp& op, int64_t index, std::byte* memory) {
  const int64_t id = op.rows[index], logprobs = op.logprobs[id], outputs = op.outputs[id] + op.ahead[index];
  const RowEdits edits(*op.edits, id, outputs);
  const uint32_t* mask = mask_of(*op.edits, index);
  const bool has_targets = op.targets != nullptr;
  const RowWatermark watermark = has_targets ? RowWatermark() : RowWatermark(*op.edits, edits);
  const Noise noise = watermark.noisy ? watermark.noise : Noise(op.streams[id], outputs);
  const Draw draw{op.temperature[id], op.top_p[id], op.min_p[id], op.top_n_sigma[id], op.top_k[id], noise};
  float* logits = op.logits + index * op.vocab;
  int32_t* words = op.packed->words + index * op.packed->stride;
  int64_t& token = op.tokens[index];
  token = 0;
  RowSummary row(logits, op.vocab, memory);
  const bool copied = mask != nullptr || watermark.green, edited = copied || edits.any();
  const bool summarised = has_targets || edited;
  const bool finite = summarised ? summarise(row) : choose(row, draw, op.kind[id], token);
  if (!finite) return SampleStatus::not_finite;
  double normaliser = 0;
  if (logprobs >= 0) {  // from the raw logits
    normaliser = log_sum_exp(row);
    pack_best(row, logprobs, normaliser, words);
  }
  if (has_targets) {
    token = op.targets[index];
  } else if (edited) {
    auto* masked = reinterpret_cast<float*>(memory + RowSummary::bytes(op.vocab));
    float* saved = masked + (copied ? divide_up(op.vocab, 16) * 16 : 0);
    const TokenCounts counts = edits.count(reinterpret_cast<std::byte*>(saved + edits.saved()));
    float* next = saved;
    edits.for_each(counts, [&](int64_t at) { *next++ = logits[at]; });
    edits.apply(counts, logits);
    if (copied) {
      if (mask == nullptr) std::copy_n(logits, op.vocab, masked);
      else apply_mask(mask, logits, op.vocab, masked);
      if (watermark.green) watermark.raise(*op.edits, op.vocab, masked);
      row.logits = masked;
    }
    const bool chosen = choose(row, draw, op.kind[id], token);
    row.logits = logits;
    next = saved;
    edits.for_each(counts, [&](int64_t at) { logits[at] = *next++; });
    if (!chosen) return SampleStatus::all_banned;
  }
  if (logprobs >= 0) pack_token(row, token, normaliser, words);
  return SampleStatus::chosen;
}

void sample(Worker& worker, const SampleOp& op) {
  size_t most = 0;
  for (int64_t i = 0; i < *op.count; ++i) {
    const RowEdits edits(*op.edits, op.rows[i], op.outputs[op.rows[i]] + op.ahead[i]);
    // A row's edits need memory for their counts even if it has none of them but a copy of its logits.
    const bool copied = mask_of(*op.edits, i) != nullptr || op.edits->watermark == Watermark::green_list;
    const size_t masked = copied ? divide_up(op.vocab, 16) * 16 * sizeof(float) : 0;
    most = std::max(most, masked == 0 ? edits.bytes() : masked + edits.room());
  }
  std::byte* memory = worker.own(RowSummary::bytes(op.vocab) + most);
  worker.for_each(*op.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) op.status[i] = sample_row(op, i, memory);
  });
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
