"""Runs plans of an encoder. It keeps nothing between steps: no rows, no pages, no sampler.

The texts of a step lie one after the other without padding.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.families import ModelSpec
from penstock.messages import (
    Capacity,
    Grammar,
    Identity,
    KVGroup,
    MemoryRow,
    NewSequence,
    SequenceResult,
    StepPlan,
    StepResult,
    StepTiming,
    Work,
)
from penstock.models.encoder import Encoder, Texts
from penstock.runtime.sampling.grammar_rows import Grammars

NOT_FINITE = "the model's numbers overflowed (NaN or infinity) for this text"


class EncoderRunner:
    """Executes plans in order, one at a time. `result` computes the oldest one."""

    def __init__(
        self,
        model: Encoder,
        config: EngineConfig,
        spec: ModelSpec,
        memory: Sequence[MemoryRow],
        *,
        identity: Identity,
        forward: Callable[[Texts], Tensor] | None = None,
    ) -> None:
        """`forward` computes what the model's does."""
        self._model = model
        self._forward = forward or model.forward
        self._new: dict[int, NewSequence] = {}
        self._plans: deque[StepPlan] = deque()
        rows = tuple(MemoryRow(r.name, model.nbytes if r.name == "weights" else r.bytes, r.note) for r in memory)
        # Nothing is kept, so there are blocks for as many sequences as may run.
        blocks = 1 + config.max_num_seqs * -(-config.max_model_len // config.block_size)
        self.capacity = Capacity(
            config.block_size,
            (KVGroup(blocks),),
            identity=identity,
            vocab_size=spec.vocabulary,
            memory=rows,
            output="vectors",
            keeps="nothing",
        )

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    @torch.inference_mode()
    def result(self) -> StepResult:
        """Computes the oldest plan and returns its result. Raises RuntimeError if the plan has a part of a text."""
        began = time.perf_counter()
        plan = self._plans.popleft()
        for seq in plan.gone:
            self._new.pop(seq, None)
        self._new.update((new.seq, new) for new in plan.new)
        results = self._compute(plan.work) if plan.work else ()
        seconds = time.perf_counter() - began
        return StepResult(plan.plan_id, results, StepTiming(forward=seconds, total=seconds))

    def execute(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.result()

    def _compute(self, work: Sequence[Work]) -> tuple[SequenceResult, ...]:
        inputs = [self._new[unit.seq] for unit in work]
        for unit, new in zip(work, inputs, strict=True):
            if unit.count != len(new.token_ids) or not unit.sample:
                raise RuntimeError(f"the plan computes {unit.count} of the {len(new.token_ids)} tokens of a text")
        lengths = [len(new.token_ids) for new in inputs]
        second = [(new.pooling and new.pooling.second) or len(new.token_ids) for new in inputs]
        token_ids = torch.tensor([token for new in inputs for token in new.token_ids])
        vectors = self._model.pool(self._forward(Texts(token_ids, lengths, second)), lengths)
        finite = vectors.isfinite().all(-1).tolist()
        return tuple(
            SequenceResult(unit.seq, pooled=vector.tobytes()) if good else _failed(unit.seq)
            for unit, vector, good in zip(work, vectors.numpy(), finite, strict=True)
        )

    def use_grammars(self, grammars: Grammars) -> None:
        """Requests with grammars are refused before they are planned."""

    def prepare(self, grammar: Grammar) -> bool:
        return True

    def forget(self) -> None:
        """Forget every text and outstanding plan."""
        self._new.clear()
        self._plans.clear()

    def trim(self, limits: Sequence[int]) -> None:
        """Does nothing: there are no blocks."""

    def close(self) -> None:
        self.forget()


def _failed(seq: int) -> SequenceResult:
    return SequenceResult(seq, error=NOT_FINITE)
