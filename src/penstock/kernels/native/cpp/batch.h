// Builds a step's inputs from the rows of the batch, and updates the rows after the step (see runtime/batch.py). One
// thread does this within the step: the work is small, but Python would find the processor's caches full of weights.
#pragma once

#include "ops.h"
#include "team.h"

namespace penstock {

// Fills in the token ids, positions, contexts and block tables of a step.
inline void fill(Worker& worker, const FillOp& op) {
  worker.for_each(1, 1, [&](int64_t, int64_t) {
    for (int64_t i = 0; i < *op.sequences; ++i) {
      const auto line = [&](UnitLine which) -> int32_t& { return op.units[which * op.units_stride + i]; };
      const int64_t row = line(kBatchRow), first = line(kFirst), length = line(kLength), before = op.computed[row];
      line(kContext) = static_cast<int32_t>(before + length);
      for (int64_t j = 0; j < length; ++j) {
        const int64_t position = before + j;
        op.token_ids[first + j] = op.batch_tokens[row * op.tokens_stride + position];
        op.positions[first + j] = position;
      }
      for (int64_t g = 0; g < op.group_count; ++g) {
        const FillGroup& group = op.groups[g];
        group.context_lens[i] = before + length;
        for (int64_t j = 0; j < length; ++j) {
          const int64_t index = (before + j) / op.block_size;
          const int64_t block = group.batch_tables[row * group.batch_stride + index];
          group.tables[i * group.stride + index] = block;
          group.blocks[first + j] = block;
          group.offsets[first + j] = (before + j) % op.block_size;
        }
      }
    }
  });
}

// Counts the step's tokens as computed and appends the sampled ones. A draft is accepted when it and all drafts before
// it equal the sampled tokens. The sampled token after the accepted drafts is appended too.
inline void advance(Worker& worker, const AdvanceOp& op) {
  worker.for_each(1, 1, [&](int64_t, int64_t) {
    for (int64_t i = 0; i < *op.sequences; ++i) {
      const auto line = [&](UnitLine which) { return op.units[which * op.units_stride + i]; };
      const int64_t row = line(kBatchRow), drafts = line(kDrafts), known = line(kContext) - drafts;
      int64_t appended = 0;
      if (line(kLogits) >= 0) {
        int32_t* place = op.batch_tokens + row * op.tokens_stride + known;
        const int64_t* sampled = op.tokens + line(kLogits);
        bool matches = true;
        for (; matches && appended <= drafts; ++appended) {
          matches = appended < drafts && place[appended] == sampled[appended];
          place[appended] = static_cast<int32_t>(sampled[appended]);
        }
        op.outputs[row] += static_cast<int32_t>(appended);
        op.accepted[line(kLogits)] = static_cast<int32_t>(appended);
      }
      op.computed[row] = static_cast<int32_t>(known + (appended > 0 ? appended - 1 : 0));
    }
  });
}

}  // namespace penstock
