// Sampling: a token of every row of logits, one row to a thread, so that a row's token depends on that row alone.
//
// runtime/sampling/reference.py defines the tokens, runtime/sampling/noise.py the noise. Nothing is sorted but the few best, and
// what is needed is taken of every lane (16 tokens, 16 apart) of every block of 256 tokens, in a pass over the logits and
// one over the tokens' hashes:
//
// - the greatest logit: enough to find the few best among few lanes;
// - the least hash. A token's score is log w + gumbel(hash) with the weight w = exp((logit - best) / T), and
//   gumbel(hash) <= -log u with u = (hash + 1/2) / 2^32. So no token of a lane scores more than log(greatest w / least
//   u), and once one token's score is known, few lanes are left in which a better one can be: only there are tokens
//   looked at one by one.
//
// A share of the mass (top_p) is never summed over sorted tokens: the winner among all tokens is drawn, and kept if
// the tokens ahead of it hold less than the share; if not, the winner among those ahead of it is next. Unless the winner
// is the likeliest token, which is kept whatever the share, this takes one more pass over the logits.

#include "survey.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Sums of weights in float32 may be off by a few 1e-6: the exponents' rounding, the exponential's and the sum's. Nearer
// to the border, a share is decided again in float64.
constexpr double kShareUncertainty = 2e-5;
constexpr double kBoundSlack = 1e-4;  // of the blocks' bounds, relative: more than the weights' rounding

// -- drawing -----------------------------------------------------------------------------------------------------

struct Contender {
  int64_t token;
  double score;

  // Lanes of lower bounds hold no better one.
  float reach() const { return static_cast<float>(std::exp(score) * (1 - kBoundSlack) * 0x1p-32); }

  // Whether a token of that log p and hash does better: equal scores go to whoever was there first.
  void challenge(int64_t other, double log_p, uint32_t hash) {
    // -log u is at most this, as u is at least a power of two: two logarithms less for nearly all.
    const double at_most = (std::countl_zero(hash) + 1) * 0.69314718055994531;
    if (log_p + at_most + 1e-9 < score) return;
    const double noisy = log_p + gumbel(hash);
    if (noisy > score) *this = {other, noisy};
  }
};

// Of the blocks that reach the floor; the others' are 0, and their lanes' are not set.
void set_bounds(const Row& row, const Draw& draw, float floor) {
  for (int64_t b = 0; b < row.blocks; ++b) {
    row.bounds[b] = 0;
    if (row.maxima[b] < floor) continue;
    const F16 weights = Fine::weights(sub(load(row.lanes + 16 * b), splat(row.top)), draw.scale());
    const F16 bounds = div(weights, add(draw.noise.least_hashes(b * kBlock), splat(0.5f)));
    store(row.lane_bounds + 16 * b, bounds);
    row.bounds[b] = largest(bounds);
  }
}

// Lets those tokens of a block challenge the leader that may do better, are of at least `floor` and come before `border`.
void contest(const Row& row, const Draw& draw, int64_t b, float floor, const Place& border, Contender& leader) {
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

// The token of the greatest log p + noise among those of at least `floor` that come before `border`: the best token is
// always one.
int64_t winner(const Row& row, const Draw& draw, float floor, const Place& border) {
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

// The least float32 logit whose probability is min_p times the best one's.
float min_p_floor(const Row& row, const Draw& draw) {
  const double exact = row.top + draw.temperature * std::log(draw.min_p);
  if (!(exact >= -kLargest)) return -kInfinity;
  const auto floor = static_cast<float>(exact);
  return floor < exact ? std::nextafter(floor, kInfinity) : floor;
}

// A logit below which top_p keeps no token.
//
// A token kept has less than top_p of the mass ahead of it, so it and those behind it hold more than the rest,
// 1 - top_p. They are at most the vocabulary, each no heavier than it: its weight exceeds (1 - top_p) mass / vocab. And
// the mass is at least that of the best token, 1.
float top_p_floor(const Row& row, const Draw& draw) {
  const double log_weight = std::log((1 - draw.top_p) / static_cast<double>(row.vocab));
  const double floor = row.top + draw.temperature * (log_weight - 0.001);  // lower by more than rounding
  return floor >= -kLargest ? static_cast<float>(floor) : -kInfinity;
}

// Whether the tokens ahead of `border` hold the share top_p already, in float64.
bool outside_exactly(const Row& row, const Draw& draw, const Place& border) {
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
  double ahead, all;  // of a place; its own token is not ahead
};

// Those of a block of which the tokens of logits above `limit` are ahead.
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

// Those of the block that the border's token is in: equals before it are ahead.
template <class Weights>
Masses own_block_masses(const float* x, int64_t place, float reference, float scale) {
  float ahead[kBlock];
  for (int64_t i = 0; i < place; ++i) ahead[i] = x[i] >= x[place] ? x[i] : -kInfinity;
  for (int64_t i = place; i < kBlock; ++i) ahead[i] = x[i] > x[place] ? x[i] : -kInfinity;
  return {block_mass<Weights>(ahead, reference, scale), block_mass<Weights>(x, reference, scale)};
}

template <class Weights>
Masses masses(const Row& row, const Draw& draw, const Place& border) {
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

enum class Verdict { inside, outside, open };

// Whether the tokens ahead of `border` hold the share top_p already, if weights as coarse as these can tell.
template <class Weights>
Verdict judge(const Row& row, const Draw& draw, const Place& border) {
  const Masses total = masses<Weights>(row, draw, border);
  // That ahead >= top_p (ahead + behind).
  const double ahead = (1 - draw.top_p) * total.ahead, behind = draw.top_p * (total.all - total.ahead);
  const double uncertainty = kShareUncertainty * total.all;
  if (ahead / Weights::kExcess > behind + uncertainty) return Verdict::outside;
  if (ahead + uncertainty < behind / Weights::kExcess) return Verdict::inside;
  return Verdict::open;
}

bool outside(const Row& row, const Draw& draw, const Place& border) {
  Verdict verdict = judge<Coarse>(row, draw, border);
  if (verdict == Verdict::open) verdict = judge<Fine>(row, draw, border);
  return verdict == Verdict::open ? outside_exactly(row, draw, border) : verdict == Verdict::outside;
}

int64_t draw_token(const Row& row, const Draw& draw) {
  const float floor = std::max(min_p_floor(row, draw), draw.top_p < 1 ? top_p_floor(row, draw) : -kInfinity);
  set_bounds(row, draw, floor);
  Place border{-kInfinity, row.vocab};  // behind all
  for (;;) {
    const int64_t token = winner(row, draw, floor, border);
    border = {row.logits[token], token};
    // The best token is always kept, and a share of 1 keeps all, those of no weight included.
    if (token == row.best || draw.top_p >= 1 || !outside(row, draw, border)) return token;
  }
}

int64_t draw_of_top_k(const Row& row, const Draw& draw) {
  // Shares are of the tokens in order.
  const uint64_t* ranked = draw.top_p < 1 ? best_first(row, draw.top_k) : best_of(row, draw.top_k);
  const auto token = [&](int64_t i) { return static_cast<int64_t>(static_cast<uint32_t>(ranked[i])); };
  const auto log_p = [&](int64_t i) {
    return (row.logits[token(i)] - static_cast<double>(row.top)) / draw.temperature;
  };
  double mass = 0;
  for (int64_t i = 0; draw.top_p < 1 && i < draw.top_k; ++i) mass += std::exp(log_p(i));
  const double least = std::log(draw.min_p);
  double ahead = 0;
  Contender leader{row.best, gumbel(draw.noise.hash(row.best))};
  for (int64_t i = 0; i < draw.top_k; ++i) {
    if (draw.top_p < 1) {
      if (i > 0 && ahead >= draw.top_p * mass) break;
      ahead += std::exp(log_p(i));
    }
    if (log_p(i) < least) continue;
    leader.challenge(token(i), log_p(i), draw.noise.hash(token(i)));
  }
  return leader.token;
}

// -- logprobs ----------------------------------------------------------------------------------------------------

// log of the sum of exp(logits).
double log_sum_exp(const Row& row) {
  double total = 0;
  for (int64_t b = 0; b < row.blocks; ++b) total += block_mass<Fine>(row.block(b), row.top, kLog2E);
  return row.top + std::log(total);
}

// Packs a row as messages/logprobs.py lays it out, but for its token: the k best after the first three words.
void pack_best(const Row& row, int64_t k, double normaliser, int32_t* words) {
  if (k == 0) return;
  const uint64_t* ranked = best_first(row, k);
  for (int64_t i = 0; i < k; ++i) {
    const auto token = static_cast<int32_t>(ranked[i]);
    words[3 + 2 * i] = token;
    words[4 + 2 * i] = __builtin_bit_cast(int32_t, static_cast<float>(row.logits[token] - normaliser));
  }
}

void pack_token(const Row& row, int64_t token, double normaliser, int32_t* words) {
  const float chosen = row.logits[token];
  int32_t greater = 0;
  for (int64_t i = 0; i < row.vocab; ++i) greater += row.logits[i] > chosen;
  words[0] = static_cast<int32_t>(token);
  words[1] = __builtin_bit_cast(int32_t, static_cast<float>(chosen - normaliser));
  words[2] = 1 + greater;
}

// -- the op ------------------------------------------------------------------------------------------------------

// Surveys a row and chooses its token; false where its logits are not finite.
bool choose(Row& row, const Draw& draw, Choosing choosing, int64_t& token) {
  if (!survey(row)) return false;
  token = choosing == Choosing::greedy  ? row.best
          : choosing == Choosing::top_k ? draw_of_top_k(row, draw)
                                        : draw_token(row, draw);
  return true;
}

// The distinct tokens of a row and how often its outputs hold each: a hash table, as a row holds few of a vocabulary.
class TokenCounts {
 public:
  struct Entry {
    int32_t token, count;
  };

  static size_t bytes(int64_t tokens) { return entries_for(tokens) * sizeof(Entry); }

  TokenCounts(int64_t tokens, std::byte* memory)
      : entries_(reinterpret_cast<Entry*>(memory)), mask_(entries_for(tokens) - 1) {
    std::fill(entries_, entries_ + mask_ + 1, Entry{-1, 0});
  }

  void add(int32_t token, int32_t times) {
    uint64_t at = static_cast<uint32_t>(token) * 0x9e3779b1u & mask_;
    while (entries_[at].token != token && entries_[at].token >= 0) at = (at + 1) & mask_;
    entries_[at].token = token;
    entries_[at].count += times;
  }

  template <class Body>
  void for_each(Body&& body) const {
    for (uint64_t i = 0; i <= mask_; ++i) {
      if (entries_[i].token >= 0) body(entries_[i]);
    }
  }

 private:
  static uint64_t entries_for(int64_t tokens) { return std::bit_ceil(static_cast<uint64_t>(2 * tokens + 2)); }

  Entry* entries_;
  uint64_t mask_;
};

// The edits of one row of logits, which belongs to a row of the batch that has `outputs` outputs and drafts by then.
struct RowEdits {
  const float* biases;
  const int32_t *bias_ids, *ban_ids, *tokens;
  float repetition, presence, frequency;
  int64_t bias_count, ban_count, prompt, outputs;

  RowEdits(const LogitEdits& all, int64_t row, int64_t outputs)
      : biases(all.biases + row * all.most_biases),
        bias_ids(all.bias_ids + row * all.most_biases),
        ban_ids(all.ban_ids + row * all.most_bans),
        tokens(all.token_ids + row * all.most_tokens),
        repetition(all.repetition[row]),
        presence(all.presence[row]),
        frequency(all.frequency[row]),
        bias_count(all.bias_count[row]),
        ban_count(outputs < all.min_tokens[row] ? all.ban_count[row] : 0),
        prompt(all.prompt[row]),
        outputs(outputs) {}

  bool penalises() const { return repetition != 1 || presence != 0 || frequency != 0; }
  bool any() const { return penalises() || bias_count + ban_count > 0; }

  // Tokens that penalties may change, counted as often as they come.
  int64_t seen() const { return penalises() ? (repetition != 1 ? prompt : 0) + outputs : 0; }

  // Room for the logits that are edited, and for counting tokens.
  int64_t saved() const { return bias_count + seen() + ban_count; }
  size_t bytes() const { return any() ? TokenCounts::bytes(seen()) + saved() * sizeof(float) : 0; }

  TokenCounts count(std::byte* memory) const {
    TokenCounts counts(seen(), memory);
    if (!penalises()) return counts;
    for (int64_t i = 0; repetition != 1 && i < prompt; ++i) counts.add(tokens[i], 0);
    for (int64_t i = prompt; i < prompt + outputs; ++i) counts.add(tokens[i], 1);
    return counts;
  }

  // Calls body(token) for every token whose logit is edited; one may come several times.
  template <class Body>
  void for_each(const TokenCounts& counts, Body&& body) const {
    for (int64_t i = 0; i < bias_count; ++i) body(bias_ids[i]);
    counts.for_each([&](const TokenCounts::Entry& entry) { body(entry.token); });
    for (int64_t i = 0; i < ban_count; ++i) body(ban_ids[i]);
  }

  // Products are taken in float64, where they are exact: rounded as in NumPy, and not fused with a sum by a compiler.
  void apply(const TokenCounts& counts, float* logits) const {
    for (int64_t i = 0; i < bias_count; ++i) logits[bias_ids[i]] += biases[i];
    counts.for_each([&](const TokenCounts::Entry& entry) {
      float& value = logits[entry.token];
      if (repetition != 1) {
        value = value < 0 ? static_cast<float>(static_cast<double>(value) * repetition) : value / repetition;
      }
      const auto count = static_cast<float>(entry.count);
      value -= static_cast<float>(static_cast<double>(frequency) * count) + (count > 0 ? presence : 0.0f);
    });
    for (int64_t i = 0; i < ban_count; ++i) logits[ban_ids[i]] = -kInfinity;
  }
};

// `memory`: room for the survey of a row, then for its edits.
SampleStatus sample_row(const SampleOp& op, int64_t index, std::byte* memory) {
  const int64_t id = op.rows[index], wanted = op.logprobs[id], outputs = op.outputs[id] + op.ahead[index];
  const RowEdits edits(*op.edits, id, outputs);
  const Draw draw{op.temperature[id], op.top_p[id], op.min_p[id], op.top_k[id], Noise(op.streams[id], outputs)};
  float* logits = op.logits + index * op.vocab;
  int32_t* words = op.packed->words + index * op.packed->stride;
  int64_t& token = op.tokens[index];
  token = 0;
  Row row(logits, op.vocab, memory);
  const bool given = op.targets != nullptr, surveyed = given || edits.any();
  const bool finite = surveyed ? survey(row) : choose(row, draw, op.choosing[id], token);
  if (!finite) return SampleStatus::not_finite;
  double normaliser = 0;
  if (wanted >= 0) {  // of the raw logits
    normaliser = log_sum_exp(row);
    pack_best(row, wanted, normaliser, words);
  }
  if (given) {
    token = op.targets[index];
  } else if (edits.any()) {
    auto* saved = reinterpret_cast<float*>(memory + Row::bytes(op.vocab));
    const TokenCounts counts = edits.count(reinterpret_cast<std::byte*>(saved + edits.saved()));
    float* next = saved;
    edits.for_each(counts, [&](int64_t at) { *next++ = logits[at]; });
    edits.apply(counts, logits);
    const bool chosen = choose(row, draw, op.choosing[id], token);
    next = saved;
    edits.for_each(counts, [&](int64_t at) { logits[at] = *next++; });
    if (!chosen) return SampleStatus::all_banned;
  }
  if (wanted >= 0) pack_token(row, token, normaliser, words);
  return SampleStatus::chosen;
}

void sample(Worker& worker, const SampleOp& op) {
  size_t most = 0;
  for (int64_t i = 0; i < *op.count; ++i) {
    most = std::max(most, RowEdits(*op.edits, op.rows[i], op.outputs[op.rows[i]] + op.ahead[i]).bytes());
  }
  std::byte* memory = worker.own(Row::bytes(op.vocab) + most);
  worker.for_each(*op.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) op.status[i] = sample_row(op, i, memory);
  });
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
