// What an instruction set without tiles offers: the last of the headers that its file includes.

namespace penstock::PENSTOCK_ISA {
namespace {

void linear(Worker& worker, const LinearOp& op) {
  if (op.dtype == Dtype::f32) return linear_as<float>(worker, op);
  linear_as<uint16_t>(worker, op);
}

// Bytes of shared memory that `prepare` uses at most. A word holds a value of x at least; where sums start from other
// than 0 it holds four, which leaves room for that.
size_t linear_shared_bytes(const LinearOp& op) { return *op.rows * (padded_k(op.weight) + 1) * 4; }

void experts(Worker& worker, const ExpertsOp& op) {
  if (op.dtype == Dtype::f32) return experts_as<float>(worker, op);
  experts_as<uint16_t>(worker, op);
}

size_t experts_shared_bytes(const ExpertsOp& op) { return ExpertsMemory(op, 1).bytes; }

void attention(Worker& worker, const AttentionOp& op) {
  if (op.page_dtype == Dtype::i8) return attention_as<int8_t>(worker, op);
  op.dtype == Dtype::f32 ? attention_as<float>(worker, op) : attention_as<uint16_t>(worker, op);
}

constexpr Isa offered(const char* name) {
  return {name,   embedding, norm,  linear,  rotation,            cache, attention,
          sample, route,     experts, linear_shared_bytes, experts_shared_bytes};
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
