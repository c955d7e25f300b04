"""What a step gives for each unit of its work, and the slices in which prompts are scored."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.messages import SequenceResult, Work
from penstock.runtime.batch import PersistentBatch
from penstock.runtime.inputs import Segments

PROMPT_LOGPROB_ROWS = 128  # logits of a long prompt are sliced, never whole
NOT_FINITE = "the model's numbers overflowed (NaN or infinity) for this request"


class PromptSlice(NamedTuple):
    """Tokens of a prompt whose logits are computed at once: each scores the token after it."""

    row: int
    k: int  # of the best beside each
    first: int  # position of the first token
    length: int
    offset: int  # of the first token among the step's


def prompt_slices(batch: PersistentBatch, units: Segments) -> Iterator[PromptSlice]:
    """Of the rows that want prompt logprobs, for the prompt tokens that follow tokens of `units`."""
    if not batch.prompt_logprobs:
        return
    for row, first, length, offset in zip(*(a.tolist() for a in units[:4]), strict=False):
        k = batch.prompt_logprobs.get(row)
        if k is None:
            continue
        end = min(first + length, int(batch.num_prompt[row]) - 1)
        for start in range(first, end, PROMPT_LOGPROB_ROWS):
            yield PromptSlice(row, k, start, min(PROMPT_LOGPROB_ROWS, end - start), offset + start - first)


def decode_results(work: Sequence[Work], tokens: Sequence[int]) -> tuple[SequenceResult, ...]:
    """One for each unit of work: its token and nothing else."""
    return tuple([SequenceResult(unit.seq, (token,)) for unit, token in zip(work, tokens, strict=True)])


def sequence_results(
    work: Sequence[Work],
    rows: Sequence[int],
    sampled: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[bytes],
    prompt_logprobs: Mapping[int, bytes],
    errors: Mapping[int, str],
    *,
    decodes: bool,
) -> tuple[SequenceResult, ...]:
    """One for each unit of work, which is of that row: what was sampled there and its packed logprobs, if anything
    was, the prompt's packed logprobs, or why it failed. `sampled` are the rows of `tokens` and `logprobs`; with
    `decodes`, those of `work`."""
    if decodes and not errors:  # the common case, written out
        each = zip(work, tokens, logprobs, strict=True)
        return tuple([SequenceResult(unit.seq, (token,), packed) for unit, token, packed in each])
    by_row = dict(zip(sampled, zip(tokens, logprobs, strict=True), strict=True))
    results = []
    for unit, row in zip(work, rows, strict=True):
        prompt = prompt_logprobs.get(row, b"")
        if row in errors:
            results.append(SequenceResult(unit.seq, error=errors[row]))
        elif row in by_row:
            token, packed = by_row[row]
            results.append(SequenceResult(unit.seq, (token,), packed, prompt))
        else:
            results.append(SequenceResult(unit.seq, prompt_logprobs=prompt))
    return tuple(results)
