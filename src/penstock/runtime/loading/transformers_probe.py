"""Proves at the start that transformers' code, with our attention, computes what it computes with its own."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.families import UnsupportedModel
from penstock.messages import NewSequence, SamplingParams, StepPlan, TokenLogprobs, Work, unpack_rows
from penstock.runtime.runner import ModelRunner

LENGTHS = (9, 14)  # tokens of the random prompts
CHUNK = 6  # of the second one; the rest is computed beside a decode step of the first one
ALTERNATIVES = 8
# How far logprobs may differ, as a share of the largest logit: sums are taken in another order.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}

logger = logging.getLogger(__name__)


def check_transformers(runner: ModelRunner, config: EngineConfig) -> None:
    """Computes random prompts, in one step and in chunks, and compares logprobs with transformers' own for each alone.
    That every layer calls our attention is checked in each step. The runner must have no sequences, and has none
    afterwards. Raises UnsupportedModel."""
    from penstock.models.transformers_decoder import TransformersDecoder, refusing  # transformers is optional

    model = runner.model
    assert isinstance(model, TransformersDecoder), "transformers' code executes the model"
    sequences = _sequences(runner, config)
    with refusing(model.code.architecture):
        computed = _compute(runner, sequences)
    for new, rows in zip(sequences, computed, strict=True):
        tokens = [*new.token_ids, rows[new.num_prompt - 1].token_id]
        with torch.inference_mode():
            logits = model.reference(torch.tensor(tokens))
        allowed = TOLERANCE[config.dtype] * max(float(logits.abs().max()), 1.0)
        # A row has the logprob of the token after those that it follows.
        difference = max(map(_difference, rows, logits.log_softmax(-1)))
        if not difference <= allowed:
            raise UnsupportedModel(
                f"transformers' code of {model.code.architecture} cannot be used: with our attention, logprobs of a "
                f"random prompt differ by {difference:.2g} from those with its own, more than {allowed:.2g}; use a "
                "model of another architecture (see `penstock models`)"
            )
    logger.warning("%s", model.execution)


def _sequences(runner: ModelRunner, config: EngineConfig) -> list[NewSequence]:
    """One prompt, or two if they fit in a step and in the KV cache."""
    capacity = runner.capacity
    free = min(group.num_blocks for group in capacity.groups) - 1
    k = min(ALTERNATIVES, capacity.vocab_size)
    sampling = SamplingParams(seed=0, max_tokens=2, temperature=0.0, logprobs=k, prompt_logprobs=k)
    generator = torch.Generator().manual_seed(0)
    sequences: list[NewSequence] = []
    block = 1  # block 0 belongs to no sequence
    for length in LENGTHS:
        count = max(min(length, config.max_model_len - 2, config.max_num_batched_tokens), 1)
        blocks = -(-(count + 1) // capacity.block_size)
        if block + blocks > free + 1:
            break
        tokens = tuple(torch.randint(capacity.vocab_size, (count,), generator=generator).tolist())
        ids = tuple(range(block, block + blocks))
        sequences.append(NewSequence(-1 - len(sequences), tokens, count, 0, (ids,) * len(capacity.groups), sampling, 0))
        block += blocks
    both = config.max_num_seqs > 1 and config.max_num_batched_tokens >= sum(LENGTHS) and config.max_model_len > 16
    return sequences if both else sequences[:1]


def _compute(runner: ModelRunner, sequences: Sequence[NewSequence]) -> list[list[TokenLogprobs]]:
    """The logprobs of each sequence: of its prompt's tokens but the first, and of the tokens that it gains."""
    first, *second = sequences
    k = first.sampling.logprobs or 0
    rows: dict[int, list[TokenLogprobs]] = {new.seq: [] for new in sequences}
    plans = (
        StepPlan(
            -1,
            (Work(first.seq, first.num_prompt, True), *(Work(new.seq, CHUNK, False) for new in second)),
            tuple(sequences),
        ),
        StepPlan(-1, (Work(first.seq, 1, True), *(Work(new.seq, new.num_prompt - CHUNK, True) for new in second))),
    )
    for plan in plans:
        result = runner.execute(plan)
        for each in result.results if result is not None else ():
            if each.error:
                raise UnsupportedModel(f"a random prompt could not be computed: {each.error}")
            rows[each.seq] += [*unpack_rows(each.prompt_logprobs, k), *unpack_rows(each.logprobs, k)]
    runner.execute(StepPlan(-1, (), gone=tuple(new.seq for new in sequences)))
    return list(rows.values())


def _difference(row: TokenLogprobs, expected: Tensor) -> float:
    """The largest difference from transformers' logprobs [vocab]; NaN where there is one."""
    pairs = [(row.token_id, row.logprob), *row.top]
    ids, ours = torch.tensor([token for token, _ in pairs]), torch.tensor([logprob for _, logprob in pairs])
    return float((ours - expected[ids]).abs().max())
