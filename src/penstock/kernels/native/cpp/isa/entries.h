// The table of functions of an instruction set without tiles. Its file includes this header last.

namespace penstock::PENSTOCK_ISA {
namespace {

void linear(Worker& worker, const LinearOp& op) {
  if (op.dtype == Dtype::f32) return linear_as<float>(worker, op);
  linear_as<uint16_t>(worker, op);
}

// The most bytes of shared memory that `prepare` uses.
size_t linear_shared_bytes(const LinearOp& op) { return prepared_bytes(op, *op.rows * op.heads); }

void experts(Worker& worker, const ExpertsOp& op) {
  if (op.dtype == Dtype::f32) return experts_by<ByWords, float>(worker, op);
  experts_by<ByWords, uint16_t>(worker, op);
}

size_t experts_shared_bytes(const ExpertsOp& op) { return ExpertsMemory(op, 1).bytes; }

void attention(Worker& worker, const AttentionOp& op) {
  if (op.page_dtype == Dtype::i8) return attention_as<int8_t>(worker, op);
  op.dtype == Dtype::f32 ? attention_as<float>(worker, op) : attention_as<uint16_t>(worker, op);
}

constexpr Isa table(const char* name) {
  return {name,  embedding, norm,       linear, rotation, cache,               attention, sample,
          route, experts,   recurrence, gate,   latent,   linear_shared_bytes, experts_shared_bytes};
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA
