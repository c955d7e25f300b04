// What a decode step takes from the batch and gives back to it (see runtime/batch.py): nothing to share among threads,
// but host's work otherwise, which finds the processor's caches full of weights.
#pragma once

#include "ops.h"
#include "team.h"

namespace penstock {

inline void next(Worker& worker, const NextOp& op) {
  worker.for_each(1, 1, [&](int64_t, int64_t) {
    for (int64_t i = 0; i < *op.rows; ++i) {
      const int64_t row = op.batch_rows[i], position = op.num_computed[row];
      op.token_ids[i] = op.batch_tokens[row * op.tokens_stride + position];
      op.positions[i] = position;
      const int64_t index = position / op.block_size;
      for (int64_t g = 0; g < op.group_count; ++g) {
        const NextGroup& group = op.groups[g];
        const int64_t block = group.batch_tables[row * group.batch_stride + index];
        group.tables[i * group.stride + index] = block;
        group.context_lens[i] = position + 1;
        group.blocks[i] = block;
        group.offsets[i] = position % op.block_size;
      }
    }
  });
}

inline void accept(Worker& worker, const AcceptOp& op) {
  worker.for_each(1, 1, [&](int64_t, int64_t) {
    *op.failed = 0;
    for (int64_t i = 0; i < *op.rows; ++i) {
      const int64_t row = op.batch_rows[i];
      ++op.num_computed[row];
      if (op.status[i] != SampleStatus::chosen) {
        ++*op.failed;
        continue;
      }
      op.batch_tokens[row * op.tokens_stride + op.num_tokens[row]++] = op.tokens[i];
      ++op.num_outputs[row];
    }
  });
}

}  // namespace penstock
