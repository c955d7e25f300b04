// The structs of the ops around a model's: the inputs of a step, and the choice of tokens. See ops.h for shapes.
#pragma once

#include <cstdint>

namespace penstock {

enum class Choosing : int32_t { greedy = 0, plain = 1, filtered = 2, top_k = 3 };  // a row's token; plain: no filter

enum class SampleStatus : int32_t { chosen = 0, not_finite = 1, all_banned = 2 };

// See runtime/sampling/watermark.py.
enum class Watermark : int32_t { none, green_list, gumbel };

// Changes to the logits of a row of the batch before its token is chosen, in this order: biases, penalties, bans.
// Arrays are indexed by the row of the batch. Penalties count the row's tokens afresh in every step.
struct LogitEdits {
  const float* repetition;  // 1: none
  const float* presence;
  const float* frequency;
  const int32_t* bias_count;
  const int32_t* bias_ids;  // [row][most_biases]
  const float* biases;      // [row][most_biases]
  const int32_t* ban_count;
  const int32_t* ban_ids;     // [row][most_bans]
  const int32_t* min_tokens;  // the bans hold while a row has fewer outputs
  const int32_t* prompt;      // tokens of the prompt
  const int32_t* token_ids;   // [row][most_tokens]: prompt, then outputs, then drafts
  int64_t most_biases, most_bans, most_tokens;
  const int32_t* mask_of;      // [row of logits]: the line of its mask, or -1; null: no row has a mask
  const uint32_t* mask_words;  // [line][mask_stride]: a bit for each token, set where it may be chosen
  int64_t mask_stride;
  uint64_t watermark_key;
  Watermark watermark;   // of all rows; `prompt` and `token_ids` are then those of every row
  uint32_t green_below;  // green tokens have hashes below this
  float green_bias;      // what is added to their logits
};

struct PackedLogprobs {  // [rows of logits][stride]
  int32_t* words;
  int64_t stride;
};

// The next token of each of `count` rows of logits, which hold raw values before and after. If drafts of a row of the
// batch are verified, several rows of logits belong to it. The arrays from `kind` to `logprobs` are indexed by the
// row of the batch, all else by the row of logits. `edits` and `packed` may be changed between runs.
struct SampleOp {
  const int64_t* count;
  const int32_t* rows;   // the row of the batch
  const int32_t* ahead;  // how many drafts lie between its outputs and this row of logits
  float* logits;         // [count][vocab]
  int64_t vocab;
  const int64_t* targets;  // or null: tokens that are given, and only scored
  const LogitEdits* edits;
  const Choosing* kind;
  const double* temperature;
  const int32_t* top_k;  // at most vocab; 0: off
  const double* top_p;
  const double* min_p;
  const double* top_n_sigma;  // 0: off
  const uint64_t* streams;  // of noise
  const int32_t* outputs;   // tokens so far
  const int32_t* logprobs;  // how many of the best, at most vocab; -1: none at all
  int64_t* tokens;
  SampleStatus* status;
  const PackedLogprobs* packed;
};

// Lines of `units`, which has one column for each sequence of a step.
enum UnitLine { kFirst, kLength, kContext, kBatchRow, kBefore, kLogits, kDrafts };

struct FillGroup {  // of one KV group: the batch's block tables, and what the model reads
  const int32_t* batch_tables;
  int64_t batch_stride;
  int64_t* tables;  // [sequences][stride]: the blocks of the step's tokens join
  int64_t stride;
  int64_t* context_lens;  // [sequences]
  int64_t* blocks;        // [tokens]
  int64_t* offsets;       // [tokens]
};

// The inputs of a step: the next tokens of each sequence, from what the batch holds of its row.
struct FillOp {
  const int64_t* sequences;
  int32_t* units;  // [lines][units_stride]; the contexts are filled in
  int64_t units_stride;
  const int32_t* batch_tokens;  // indexed by the row of the batch, as is `computed`
  int64_t tokens_stride;
  const int32_t* computed;
  int64_t* token_ids;  // [tokens]
  int64_t* positions;  // [tokens]
  const FillGroup* groups;
  int64_t group_count;
  int64_t block_size;
};

// Takes the tokens of a step into the batch. The drafts of a sequence that lie before the first one that was not
// sampled are accepted; the sampled token after them follows.
struct AdvanceOp {
  const int64_t* sequences;
  const int32_t* units;  // as in FillOp, contexts included
  int64_t units_stride;
  const int64_t* tokens;  // [rows of logits]: sampled
  int32_t* batch_tokens;  // indexed by the row of the batch, as are the counts
  int64_t tokens_stride;
  int32_t* computed;
  int32_t* outputs;
  int32_t* accepted;  // [rows of logits]: how many tokens a sequence gained, at its first row
};

}  // namespace penstock
