"""Warms up a runner with dummy steps of every size that serving may need.

Kernels that are compiled, and memory that is allocated, at the first step of a size are then ready before the first
request, and the memory peak can be measured.
"""

from collections.abc import Sequence
from itertools import zip_longest

from penstock.config import EngineConfig
from penstock.families.checkpoint.stored import CheckpointError
from penstock.messages import NewSequence, SamplingParams, StepPlan, StepResult, Work
from penstock.runtime.runner import ModelRunner

_GREEDY = SamplingParams(seed=0, max_tokens=2, temperature=0.0)
_SAMPLED = SamplingParams(seed=0, max_tokens=2)
_EVERY_OPTION = SamplingParams(
    seed=0,
    max_tokens=2,
    min_tokens=1,
    temperature=0.7,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
    logit_bias={0: 1.0},
    stop_token_ids=(0,),
    logprobs=1,
    prompt_logprobs=1,
)


def blocks_for_warm_up(config: EngineConfig) -> int:
    """The KV blocks per group that dummy steps of the largest size need. With fewer, they have fewer sequences."""
    whole = config.max_num_batched_tokens // config.block_size
    return 1 + whole + config.max_num_seqs * (2 + 2 // config.block_size)


def warm_up_all_sizes(runner: ModelRunner, config: EngineConfig) -> None:
    """Runs steps of 1, 2, 4, ... decoding sequences and prompt tokens, and each way of sampling. Then, with every
    sampling option, the largest step and, if steps have drafts, the one with most rows of logits. The runner must have
    no sequences, and has none afterwards."""
    steps = _DummySteps(runner, config)
    for count in _doubling(config.max_num_seqs):
        steps.run([1] * count, _GREEDY)
    for tokens in _doubling(config.max_num_batched_tokens):
        steps.run(_prompts(tokens, config), _GREEDY)
    for sampling in (_SAMPLED, _EVERY_OPTION):
        steps.run([2], sampling)
    steps.run(_spread(config.max_num_batched_tokens, config.max_num_seqs), _EVERY_OPTION)
    if drafts := min(config.max_step_drafts, config.max_num_batched_tokens - config.max_num_seqs):
        steps.run([1] * config.max_num_seqs, _EVERY_OPTION, _spread(drafts, config.max_num_seqs))


def warm_up_one_sequence(runner: ModelRunner, config: EngineConfig) -> None:
    """Runs a prefill of one token and a decode step."""
    _DummySteps(runner, config).run([1], _GREEDY)


def check_finite(result: StepResult | None) -> None:
    """Raises CheckpointError if a dummy step could not compute a token: no request could either.

    The result is None, or has no tokens, on a rank that does not sample.
    """
    for each in result.results if result is not None else ():
        if each.error:
            raise CheckpointError(
                "the model cannot compute a token: its logits are not finite. The weights are damaged, or too large "
                "for the dtype: download them again, or set --dtype float32"
            )


class _DummySteps:
    def __init__(self, runner: ModelRunner, config: EngineConfig) -> None:
        self._runner = runner
        self._longest = config.max_model_len
        self._blocks = min(group.num_blocks for group in runner.capacity.groups) - 1

    def run(self, lengths: Sequence[int], sampling: SamplingParams, drafts: Sequence[int] = ()) -> None:
        """Prefills prompts of these lengths in one step, then decodes a token of each with its number of `drafts`.
        Leaves out the first prompt for which too few blocks are left, and all after it. Raises CheckpointError for
        logits that are not finite."""
        size = self._runner.capacity.block_size
        new: list[NewSequence] = []
        decode: list[Work] = []
        next_block = 1  # block 0 belongs to no sequence
        for length, drafted in zip_longest(lengths, drafts, fillvalue=0):
            after = min(1 + drafted, self._longest - 1)
            tokens = min(length, self._longest - after)
            blocks = -(-(tokens + after) // size)
            if next_block + blocks > self._blocks + 1:
                break
            ids = tuple(range(next_block, next_block + blocks))
            groups = tuple(ids for _ in self._runner.capacity.groups)
            decode.append(Work(-1 - len(new), after, True, (0,) * (after - 1)))
            new.append(NewSequence(-1 - len(new), (0,) * tokens, tokens, 0, groups, sampling, 0))
            next_block += blocks
        prefill = tuple(Work(each.seq, each.num_prompt, True) for each in new)
        check_finite(self._runner.execute(StepPlan(-1, prefill, tuple(new))))
        if self._longest > 1:
            check_finite(self._runner.execute(StepPlan(-1, tuple(decode))))
        self._runner.execute(StepPlan(-1, (), gone=tuple(each.seq for each in new)))


def _spread(total: int, count: int) -> list[int]:
    """Returns `count` numbers that differ by at most 1, with this total."""
    each, more = divmod(total, count)
    return [each + (i < more) for i in range(count)]


def _doubling(most: int) -> list[int]:
    """Returns 1, 2, 4, ... below `most`, and `most`."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def _prompts(tokens: int, config: EngineConfig) -> list[int]:
    """The lengths of the fewest prompts with `tokens` tokens in total; max_num_seqs prompts at most."""
    longest = max(config.max_model_len - 1, 1)
    whole, rest = divmod(tokens, longest)
    return [*[longest] * whole, *[rest] * (rest > 0)][: config.max_num_seqs]
