// The structs that Python passes, one per op of a model; step_ops.h has those of the ops around it. `native/structs.py`
// reads them here: a field is `type name;` or `type name, other;`.
//
// Shapes are in elements. Sizes that vary by step (rows, sequences, items) are read through pointers, so that a
// recorded program can be run again after changing only these numbers. Matrices are row-major, and rows are dense
// unless a stride is given.
#pragma once

#include <cstddef>
#include <cstdint>

#include "step_ops.h"

namespace penstock {

enum class Dtype : int32_t { f32 = 0, bf16 = 1, i8 = 2 };  // i8: only for pages

// How a weight [n, k] is packed: in blocks of 16 output columns. A line of 64 bytes holds, for each of the 16 columns,
// the next 1 (f32), 2 (bf16, int16), 4 (codes of 8 bits) or 8 (of 4 bits) values along k. n and k are padded with zeros.
enum class Scheme : int32_t { f32 = 0, bf16 = 1, int16 = 2, grouped = 3 };

// The codes of a grouped weight: bytes, four bits, or four bits that are places in a table.
enum class Codes : int32_t { bytes = 0, nibbles = 1, iq4 = 2, mxfp4 = 3, nf4 = 4, fp4 = 5 };

// How scales and minima of groups are stored: fp16, fp32, as an int8 times an fp16 for each kSuper values along k, or as
// an fp16 times a power of two for each column: its scale times kByColumn. With the latter the largest value that a code
// of the column could have is in [2^13, 2^14) before it is multiplied by the power.
enum class Scales : int32_t { f16 = 0, f32 = 1, two_levels = 2, by_column = 3 };

inline int64_t bytes_of(Scales scales) { return scales == Scales::f32 ? 4 : scales == Scales::two_levels ? 1 : 2; }

// A grouped weight is scale * (code - zero) + minimum, with a scale and perhaps a minimum for each group of values
// along k. A code that is a place in a table stands for its value there plus 128.
struct Format {
  Scheme scheme;
  // The fields of grouped weights:
  Codes codes;
  Scales scales;
  int32_t mins;   // whether groups have minima
  int32_t group;  // 16, 32, 64 or 128
  int32_t zero;   // of nibbles 0 or 8; else 128
};

// The function that is applied to a product: to pairs of a gate and the value that it gates, or to each value.
// swiglu_oai is gpt-oss': the gate is at most 7, the other half within 7, and the result is gate * sigmoid(1.702 gate)
// * (other + 1).
enum class Epilogue : int32_t {
  none = 0,
  silu_and_mul,
  gelu_tanh_and_mul,
  gelu_and_mul,
  swiglu_oai_and_mul,
  silu,
  gelu_tanh,
  gelu,
  relu,
  relu_squared
};

inline bool is_gated(Epilogue epilogue) { return epilogue != Epilogue::none && epilogue < Epilogue::silu; }

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
  fill,
  advance,
  finite,
  recurrence,
  gate,
  latent,
  gather,
  count
};

struct Matrix {  // a packed weight
  const uint8_t* lines;
  const float* column_scales;  // int16, and scales by column: [n], what sums are multiplied with
  // Grouped: [n / 16][k / group][16], and for two levels [n / 16][k / kSuper][16]. Minima are null if there are none.
  const void* scales;
  const void* mins;
  const uint16_t* super_scales;
  const uint16_t* super_mins;
  int64_t n, k;
  Format format;
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

// RMSNorm, or with `centered` LayerNorm: the mean is subtracted first.
struct NormOp {
  const int64_t* rows;
  const void* x;
  const void* residual;  // or null
  const void* weight;
  const void* bias;  // or null
  void* normed;
  void* sum;  // (x + residual) * scale; null without a residual
  int64_t width;
  float eps, offset, scale;
  int32_t centered;
  Dtype dtype;
};

// out = (x weight^T + bias) * scale, then either + residual, or an epilogue. With a gated one every block of 16 columns
// is 8 of the gate and the 8 of the other half that belong to them. With a softcap the result is
// softcap * tanh(result / softcap).
//
// With several heads, x is [rows][heads][k], and head i is multiplied with rows [i * n / heads, (i + 1) * n / heads) of
// the weight, which are whole blocks of columns.
//
// A matrix of several formats is several ops: each writes its columns of the same rows.
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
  float scale, softcap;  // 1 and 0: none
  int64_t heads;         // 1: one x for the whole weight
  int64_t stride;        // elements from one row of out to the next, and of residual
};

// A token's experts: the `slots` largest scores, which are the softmax of its logits or with `sigmoid` that of each.
// `bias` is added to scores for the choice alone. The experts form `groups` groups, and only the best `kept` take part:
// those with the largest score, or with `by_pairs` the largest sum of two. The weights are the scores, with `normalize`
// scaled to a sum of 1, times `scale` and the expert's of `scales`.
struct RouteOp {
  const int64_t* rows;
  const float* logits;  // [rows][count]
  const float* bias;    // [count], or null
  const float* scales;  // [count], or null
  int64_t* experts;     // [rows][slots]
  float* weights;       // [rows][slots]
  int64_t count, slots;
  int64_t groups, kept;
  float scale;
  int32_t normalize, sigmoid, by_pairs;
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
  const float* gate_up_bias;  // [held][columns with padding], or null
  const float* down_bias;
  const void* shared;        // or null
  const float* shared_gate;  // [rows], or null
  const void* residual;     // or null
  void* out;
  int64_t* tally;  // [2]: how often matrices of an expert were read, and the rows they were multiplied with
  int64_t slots, first, held;
  Epilogue epilogue;
  int32_t weigh_inputs;  // an expert's input is multiplied by its weight, not its output
  Dtype dtype;
};

struct RotationOp {
  const int64_t* rows;
  const int64_t* positions;
  const float* frequencies;  // [2][half]: radians per position, and what cosine and sine are multiplied by
  float* out;                // [rows][2][half]: cosines, then sines; with a temperature [rows][4][half]: then queries'
  int64_t half;
  int64_t every, first;  // queries' are multiplied by 1 + temperature * log(1 + (position + first) / every); 0: not
  float temperature;
};

// Norms and rotates the query and key heads of a fused projection, and stores keys and values in the pages. With `whole`
// all query heads are normed together, and all key heads; with `centered` the norm of each head is LayerNorm.
//
// A page's keys of one head are [head_dim / p][block_size][p], its values [block_size / p][head_dim][p], where p is how
// many elements 4 bytes hold: these are the lines that products read. In i8 pages, block_size floats follow for each
// head: the tokens' scales. Their keys are stored as `spread` (isa/math.h) leaves them, since keys have elements far
// larger than the others; attention spreads its queries likewise. Strides are in elements of the pages.
struct CacheOp {
  const int64_t* rows;
  const void* qkv;     // [rows][heads + 2 kv_heads][head_dim]
  const void* weight;  // [heads + kv_heads][head_dim], with norm_values [heads + 2 kv_heads][head_dim]; or null
  const float* rotation;
  const int64_t* blocks;   // [rows]
  const int64_t* offsets;  // [rows]
  void* query;             // [rows][heads][head_dim]
  void* keys;
  void* values;
  int64_t heads, kv_heads, head_dim, block_size;
  int64_t block_stride, head_stride;
  int64_t rotation_stride, query_rotation;  // of the rows of rotations, and where in a row those of queries are
  float eps, offset;
  int32_t whole;
  int32_t centered;
  int32_t norm_values;
  Dtype dtype;
  Dtype page_dtype;
};

// The queries and the cache of latent attention. A token's latent, `rank` values, and its rotated key, `rope` values, are
// what all heads' queries meet: a key of one head of rank + rope values, stored as CacheOp stores keys. A query is the
// head's part in the latents' space, then its rotated part.
struct LatentOp {
  const int64_t* rows;
  const void* absorbed;  // [rows][heads][rank]
  const void* rotated;   // [rows][heads][rope], not rotated yet
  const void* latent;    // [rows][rank]
  const void* key;       // [rows][rope], not rotated yet
  const float* rotation;
  const int64_t* blocks;   // [rows]
  const int64_t* offsets;  // [rows]
  void* query;             // [rows][heads][rank + rope]
  void* pages;
  int64_t heads, rank, rope, block_size;
  int64_t block_stride;
  Dtype dtype;  // of the pages too
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
  const void* values;  // null: the first value_dim values of a key are its value too
  void* out;           // [rows][heads][value_dim]
  float* partials;     // [partial][kv_heads][group of heads][value_dim + 2]: sums, then maximum and weight
  int64_t heads, kv_heads, head_dim, value_dim, block_size;
  int64_t block_stride, head_stride;
  int64_t window;  // tokens that a query sees, itself included; 0: all
  float scale;
  float softcap;       // of scores: softcap * tanh(score / softcap); 0: none
  const float* sinks;  // [heads], or null: the score of a further position without a value, which all queries see
  Dtype dtype;
  Dtype page_dtype;
  int32_t bidirectional;  // queries also see later tokens of their sequence, within the window on that side too
  int32_t chunked;        // a query sees those of its own chunk of `window` tokens, up to itself
};

struct FiniteOp {  // whether a row holds neither NaN nor infinity
  const int64_t* rows;
  const void* x;  // [rows][width]
  bool* finite;   // [rows]
  int64_t width;
  Dtype dtype;
};

// A layer with a state: a gated delta net or, with `skip`, Mamba 2. See kernels/recurrence.py for the maths.
struct RecurrenceOp {
  const int64_t* rows;       // tokens
  const int64_t* sequences;  // units
  const int32_t* units;      // [lines][units_stride], see UnitLine in step_ops.h
  int64_t units_stride;
  const void* inputs;  // [rows][channels + heads * value_dim]: queries, keys, values, gates
  const float* rates;  // [rows][heads], of a delta net [rows][2][heads]
  // [row of the batch][state_stride]: of each head [value_dim / 16][key_dim][16], the last 16 or fewer; then
  // [taps - 1][channels].
  float* states;
  int64_t state_stride;
  const float* conv;       // [taps][channels]
  const float* conv_bias;  // [channels], or null
  const float* decay;      // [heads]
  const float* step_bias;  // [heads]
  const float* skip;       // [heads], or null
  const float* norm;       // [norm_size]
  void* out;               // [rows][heads * value_dim]
  int64_t key_heads, heads, key_dim, value_dim, taps;
  int64_t norm_width, norm_size;
  float eps;
  Dtype dtype;    // of inputs and out
  int32_t tiled;  // value head i reads key head i % key_heads, else i / (heads / key_heads)
};

// The bytes of convolved channels and unfinished outputs in float32.
inline size_t recurrence_shared_bytes(const RecurrenceOp& op) {
  const int64_t values = op.heads * op.value_dim, channels = 2 * op.key_heads * op.key_dim + values;
  return static_cast<size_t>(*op.rows * (channels + values)) * sizeof(float);
}

struct GateOp {  // out = x * sigmoid(gate), or with `plain` x * gate
  const int64_t* rows;
  const void* x;  // [rows][width], as the others
  const void* gate;
  void* out;
  int64_t width;
  int32_t plain;
  Dtype dtype;
};

struct GatherOp {  // out[row][i] = x[row][order[i]]
  const int64_t* rows;
  const void* x;         // [rows][width], as out
  const int32_t* order;  // [width], each from 0 to width - 1
  void* out;
  int64_t width;
  Dtype dtype;
};

struct RecordedOp {
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
    FillOp fill;
    AdvanceOp advance;
    FiniteOp finite;
    RecurrenceOp recurrence;
    GateOp gate;
    LatentOp latent;
    GatherOp gather;
  };
};

constexpr int64_t kColumns = 16;     // of a block of a packed weight
constexpr int64_t kLineBytes = 64;   // the values of 16 columns for one step along k
constexpr int64_t kSegment = 512;    // positions of a context whose results are merged one after the other
// int16, see packing.py: values along k whose products are summed as integers, and their bounds.
constexpr int64_t kSpan = 256;
constexpr double kMostNorm = 46300.0, kMostInt16 = 32767.0;
constexpr int64_t kGroupOfX = 32;  // values of a row of x that share a scale where they meet grouped weights
constexpr float kByColumn = 0x1p-48f;  // AMX's sums are smaller than x times codes by this (see isa/amx/weights.h)
constexpr int64_t kSuper = 256;    // values along k that share the second level of scales

// The values of codes that are places in a table: those of llama.cpp's IQ4_NL and IQ4_XS, those of MXFP4 (OCP
// Microscaling formats, FP4 E2M1) times two, and those of bitsandbytes' NF4 and FP4 in units (FRACTIONS in
// config/weights.py).
inline constexpr int8_t kIq4Table[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
inline constexpr int8_t kMxfp4Table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
inline constexpr int8_t kNf4Table[16] = {-124, -86, -65, -49, -35, -23, -11, 0, 10, 20, 31, 42, 55, 70, 90, 124};
inline constexpr int8_t kFp4Table[16] = {0, 1, 80, 120, 40, 60, 20, 30, 0, -1, -80, -120, -40, -60, -20, -30};

// Null for codes that are numbers themselves.
inline const int8_t* table_of(Codes codes) {
  constexpr const int8_t* kTables[] = {nullptr, nullptr, kIq4Table, kMxfp4Table, kNf4Table, kFp4Table};
  return kTables[static_cast<int32_t>(codes)];
}

// The bits of a packed value.
inline int64_t bits_of(const Format& format) {
  if (format.scheme == Scheme::f32) return 32;
  if (format.scheme != Scheme::grouped) return 16;
  return format.codes == Codes::bytes ? 8 : 4;
}

// k with padding: whole groups, or lines that fill an AMX tile, whose rows are 64 bytes.
inline int64_t padded_k(int64_t k, const Format& format) {
  const int64_t multiple = format.scheme == Scheme::f32       ? 1
                           : format.scheme != Scheme::grouped ? 32
                           : format.group < kGroupOfX         ? kGroupOfX
                                                              : format.group;
  return (k + multiple - 1) / multiple * multiple;
}

inline int64_t padded_k(const Matrix& weight) { return padded_k(weight.k, weight.format); }

}  // namespace penstock
