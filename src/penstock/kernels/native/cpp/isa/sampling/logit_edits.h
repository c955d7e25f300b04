// The edits of a row's logits before its token is chosen: biases, penalties over its tokens, bans, a watermark, and the
// mask of a grammar (see LogitEdits in step_ops.h).

#include "row_summary.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// A hash table of a row's distinct tokens and how often each is among its outputs. A row uses a small part of the
// vocabulary.
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
    uint64_t at = (static_cast<uint32_t>(token) * 0x9e3779b1u >> 8) & mask_;
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

// The edits of one row of logits. Its row of the batch has `outputs` output tokens before it, drafts included.
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

  // How many tokens penalties may change; repeated tokens count every time.
  int64_t seen() const { return penalises() ? (repetition != 1 ? prompt : 0) + outputs : 0; }

  // How many logits are saved before they are edited.
  int64_t saved() const { return bias_count + seen() + ban_count; }
  // Memory for saved logits and token counts.
  size_t room() const { return TokenCounts::bytes(seen()) + saved() * sizeof(float); }
  size_t bytes() const { return any() ? room() : 0; }

  TokenCounts count(std::byte* memory) const {
    TokenCounts counts(seen(), memory);
    if (!penalises()) return counts;
    for (int64_t i = 0; repetition != 1 && i < prompt; ++i) counts.add(tokens[i], 0);
    for (int64_t i = prompt; i < prompt + outputs; ++i) counts.add(tokens[i], 1);
    return counts;
  }

  // Calls body(token) for every token whose logit is edited, for some tokens several times.
  template <class Body>
  void for_each(const TokenCounts& counts, Body&& body) const {
    for (int64_t i = 0; i < bias_count; ++i) body(bias_ids[i]);
    counts.for_each([&](const TokenCounts::Entry& entry) { body(entry.token); });
    for (int64_t i = 0; i < ban_count; ++i) body(ban_ids[i]);
  }

  // Products of two float32 are exact in float64, so they are rounded once, as in NumPy, and cannot become an FMA.
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

// The watermark of a row: what its next token's hashes depend on.
struct RowWatermark {
  bool green = false, noisy = false;  // whether green tokens are raised; whether `noise` replaces that of the row
  Noise noise{0, 0};

  RowWatermark() = default;
  RowWatermark(const LogitEdits& all, const RowEdits& row) {
    if (all.watermark == Watermark::none) return;
    const int64_t size = all.watermark == Watermark::gumbel ? 4 : 1, outputs = row.outputs;
    if (outputs < size) return;
    const int32_t* first = row.tokens + row.prompt;
    const int32_t* context = first + outputs - size;
    green = all.watermark == Watermark::green_list;
    noisy = !green && !repeats(first, context, size);
    uint64_t stream = all.watermark_key;
    for (int64_t i = 0; i + 1 < size; ++i) stream = noise_key(stream, context[i]);
    noise = Noise(stream, context[size - 1]);
  }

  void raise(const LogitEdits& all, int64_t vocab, float* logits) const {
    for (int64_t i = 0; i < vocab; ++i) logits[i] += noise.hash(i) < all.green_below ? all.green_bias : 0.0f;
  }

 private:
  // True when the same tokens as in the context come before it in the output.
  static bool repeats(const int32_t* first, const int32_t* context, int64_t size) {
    for (const int32_t* at = first; at < context; ++at) {
      if (std::equal(at, at + size, context)) return true;
    }
    return false;
  }
};

// The mask of a row of logits, or null.
const uint32_t* mask_of(const LogitEdits& edits, int64_t index) {
  const int64_t line = edits.mask_of == nullptr ? -1 : edits.mask_of[index];
  return line < 0 ? nullptr : edits.mask_words + line * edits.mask_stride;
}

// Copies a row of logits, with -inf for the tokens that its mask leaves out.
void apply_mask(const uint32_t* mask, const float* logits, int64_t vocab, float* masked) {
  for (int64_t first = 0; first < vocab; first += 32) {
    const uint32_t word = mask[first / 32];
    const int64_t count = std::min<int64_t>(32, vocab - first);
    if (word == 0) {
      std::fill_n(masked + first, count, -kInfinity);
    } else if (word == ~0u) {
      std::copy_n(logits + first, count, masked + first);
    } else {
      for (int64_t i = 0; i < count; ++i) masked[first + i] = word >> i & 1 ? logits[first + i] : -kInfinity;
    }
  }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
