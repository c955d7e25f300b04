// The structs that Python passes, one per op. `native/structs.py` mirrors them field by field.
//
// Shapes are in elements. Sizes that vary by step (rows, sequences, items) are read through pointers, so that a
// recorded program can be run again after changing only these numbers. Matrices are row-major, and rows are dense
// unless a stride is given.
#pragma once

#include <cstdint>

namespace penstock {

enum class Dtype : int32_t { f32 = 0, bf16 = 1, i8 = 2 };  // i8: only for pages

// How a weight [n, k] is packed: in blocks of 16 output columns. A line of 64 bytes holds, for each of the 16 columns,
// the next 1 (f32), 2 (bf16, int16), 4 (int8) or 8 (int4) values along k. n and k are padded with zeros.
enum class Scheme : int32_t { f32 = 0, bf16 = 1, int8 = 2, int4 = 3, int16 = 4 };

enum class Epilogue : int32_t { none = 0, silu_and_mul = 1, gelu_tanh_and_mul = 2 };

enum class OpCode : int32_t {
  embedding = 0,
  norm,
  linear,
  rotation,
  cache,
  attention,
  sample,
  route,
  experts,
  next,
  accept,
  finite,
  count
};

struct Matrix {  // a packed weight
  const uint8_t* lines;
  const float* column_scales;    // int8, int16: [n]
  const int32_t* column_sums;    // int8: the sum of a column's bytes, [n]
  const uint16_t* group_scales;  // int4: fp16 [n / 16][k / group][16]
  int64_t n, k;
  Scheme scheme;
  int32_t group;  // int4: values along k that share a scale
};

struct EmbeddingOp {
  const int64_t* rows;
  const int64_t* ids;
  Matrix table;
  void* out;
  float scale;
  Dtype dtype;
  int64_t first;  // the token of the table's first row; tokens outside the table give zeros
};

struct NormOp {
  const int64_t* rows;
  const void* x;
  const void* residual;  // or null
  const void* weight;
  void* normed;
  void* sum;  // x + residual; null without a residual
  int64_t width;
  float eps, offset;
  Dtype dtype;
};

// out = x weight^T + bias, then either + residual, or with an epilogue activation(gate) * the other half: every block
// of 16 columns is then 8 of the gate and the 8 of the other half that belong to them.
struct LinearOp {
  const int64_t* rows;
  const void* x;
  Matrix weight;
  const void* bias;      // or null
  const void* residual;  // or null
  void* out;
  Epilogue epilogue;
  Dtype dtype;      // of x, bias, residual
  Dtype out_dtype;  // of out
};

// The `slots` largest of a token's logits, and their softmax over all logits, or with `normalize` over these alone.
struct RouteOp {
  const int64_t* rows;
  const float* logits;  // [rows][count]
  int64_t* experts;     // [rows][slots]
  float* weights;       // [rows][slots]
  int64_t count, slots;
  int32_t normalize;
};

// out = the sum of down(gated(gate_up(x))) of a token's experts, times their weights and in the order of its slots,
// + shared * sigmoid(shared_gate) + residual. Experts [first, first + held) are on this rank: their matrices lie one
// behind the other, and each begins with a block of its own.
struct ExpertsOp {
  const int64_t* rows;
  const void* x;
  const int64_t* chosen;  // [rows][slots]
  const float* weights;   // [rows][slots]
  Matrix gate_up;         // the first expert's, packed as for a LinearOp with an epilogue
  Matrix down;
  const void* shared;        // or null
  const float* shared_gate;  // [rows], or null
  const void* residual;     // or null
  void* out;
  int64_t* tally;  // [2]: how often matrices of an expert were read, and the rows they were multiplied with
  int64_t slots, first, held;
  Epilogue epilogue;
  Dtype dtype;
};

struct RotationOp {
  const int64_t* rows;
  const int64_t* positions;
  const float* frequencies;  // [half]
  float* out;                // [rows][2][half]: cosines, then sines
  int64_t half;
};

// Norms and rotates the query and key heads of a fused projection, and stores keys and values in the pages.
//
// A page's keys of one head are [head_dim / p][block_size][p], its values [block_size / p][head_dim][p], where p is how
// many elements 4 bytes hold: these are the lines that products read. In i8 pages, block_size floats follow for each
// head: the tokens' scales. Strides are in elements of the pages.
struct CacheOp {
  const int64_t* rows;
  const void* qkv;     // [rows][heads + 2 kv_heads][head_dim]
  const void* weight;  // [heads + kv_heads][head_dim], or null
  const float* rotation;
  const int64_t* blocks;   // [rows]
  const int64_t* offsets;  // [rows]
  void* query;             // [rows][heads][head_dim]
  void* keys;
  void* values;
  int64_t heads, kv_heads, head_dim, block_size;
  int64_t block_stride, head_stride;
  float eps, offset;
  Dtype dtype;
  Dtype page_dtype;
};

struct AttentionItem {  // queries of one sequence, over all segments that they see or over one of them
  int32_t sequence, first, count;
  int32_t segment;  // or -1
  int32_t partial;  // with a segment: the index of its result
};

struct AttentionMerge {  // the results of a sequence's segments, which are merged in order
  int32_t sequence, partial, count;
};

struct AttentionOp {
  const int64_t* item_count;
  const int64_t* merge_count;
  const AttentionItem* items;
  const AttentionMerge* merges;
  const int64_t* query_start;   // [sequences + 1]
  const int64_t* context_lens;  // [sequences]
  const int64_t* block_tables;  // [sequences][table_stride]
  int64_t table_stride;
  const void* query;
  const void* keys;
  const void* values;
  void* out;
  float* partials;  // [partial][kv_heads][group of heads][head_dim + 2]: sums, then maximum and weight
  int64_t heads, kv_heads, head_dim, block_size;
  int64_t block_stride, head_stride;
  int64_t window;
  float scale;
  Dtype dtype;
  Dtype page_dtype;
};

enum class Choosing : int8_t { greedy = 0, plain = 1, filtered = 2, top_k = 3 };  // a row's token; plain: no filter

enum class SampleStatus : int32_t { chosen = 0, not_finite = 1, all_banned = 2 };

struct SampleEdits {  // what changes a row's logits before its token is chosen, in this order
  int64_t bias_count, seen_count, banned_count;
  const int64_t* bias_ids;
  const float* biases;
  const int64_t* seen_ids;
  const float* seen_counts;  // in the output
  const int64_t* banned_ids;
  float repetition, presence, frequency;
};

// The next token of each of `count` rows of logits, which hold raw values before and after. The arrays from `choosing`
// to `logprobs` are indexed by what `rows` says, all else by the place among the rows sampled.
struct SampleOp {
  const int64_t* count;
  const int64_t* rows;
  float* logits;             // [count][vocab]
  const SampleEdits* edits;  // [count], or null
  int64_t vocab;
  const Choosing* choosing;
  const double* temperature;
  const int64_t* top_k;  // in [1, vocab] where it is what chooses
  const double* top_p;
  const double* min_p;
  const uint64_t* streams;     // of noise
  const int64_t* num_outputs;  // so far
  const int64_t* logprobs;     // how many of the best, at most vocab; -1: none at all
  int64_t* tokens;
  SampleStatus* status;
  int32_t* packed;  // [count][packed_stride]: logprobs
  int64_t packed_stride;
};

struct NextGroup {  // of one KV group: the batch's block tables, and what the model reads
  const int64_t* batch_tables;
  int64_t batch_stride;
  int64_t* tables;  // [rows][stride], as of the step before: a row's next block joins
  int64_t stride;
  int64_t* context_lens;  // [rows]
  int64_t* blocks;        // [rows]
  int64_t* offsets;       // [rows]
};

// The inputs of a step that computes the last token of each of `batch_rows`, as the step before did.
struct NextOp {
  const int64_t* rows;
  const int64_t* batch_rows;    // [rows]
  const int64_t* batch_tokens;  // indexed by batch row, as is num_computed
  int64_t tokens_stride;
  const int64_t* num_computed;
  int64_t* token_ids;  // [rows]
  int64_t* positions;  // [rows]
  const NextGroup* groups;
  int64_t group_count;
  int64_t block_size;
};

// Takes the tokens of such a step into the batch.
struct AcceptOp {
  const int64_t* rows;
  const int64_t* batch_rows;   // [rows]
  const int64_t* tokens;       // [rows]
  const SampleStatus* status;  // [rows]
  int64_t* batch_tokens;       // indexed by batch row, as are the counts
  int64_t tokens_stride;
  int64_t* num_tokens;
  int64_t* num_computed;
  int64_t* num_outputs;
  int64_t* failed;  // how many rows have no token
};

struct FiniteOp {  // whether a row holds neither NaN nor infinity
  const int64_t* rows;
  const void* x;  // [rows][width]
  bool* finite;   // [rows]
  int64_t width;
  Dtype dtype;
};

struct Op {
  OpCode code;
  union {
    EmbeddingOp embedding;
    NormOp norm;
    LinearOp linear;
    RotationOp rotation;
    CacheOp cache;
    AttentionOp attention;
    SampleOp sample;
    RouteOp route;
    ExpertsOp experts;
    NextOp next;
    AcceptOp accept;
    FiniteOp finite;
  };
};

// The bits of a packed value.
inline int64_t bits_of(Scheme scheme) {
  switch (scheme) {
    case Scheme::f32:
      return 32;
    case Scheme::bf16:
    case Scheme::int16:
      return 16;
    case Scheme::int8:
      return 8;
    case Scheme::int4:
      break;
  }
  return 4;
}

// k with padding: whole lines, and whole AMX tiles, whose rows are 64 bytes.
inline int64_t padded_k(const Matrix& weight) {
  const int64_t multiple = weight.scheme == Scheme::f32    ? 1
                           : weight.scheme == Scheme::int4 ? weight.group
                                                           : 512 / bits_of(weight.scheme);
  return (weight.k + multiple - 1) / multiple * multiple;
}

constexpr int64_t kColumns = 16;     // of a block of a packed weight
constexpr int64_t kLineBytes = 64;   // the values of 16 columns for one step along k
constexpr int64_t kSegment = 512;    // positions of a context whose results are merged one after the other
// int16, see packing.py: values along k whose products are summed as integers, and their bounds.
constexpr int64_t kSpan = 256;
constexpr double kMostNorm = 46300.0, kMostInt16 = 32767.0;

}  // namespace penstock
