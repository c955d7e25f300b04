"""Steps over made-up sequences, of every size that serving may bring: what is compiled or allocated at the first step
of its kind is so before anybody waits for it, and memory is measured at its peak."""

from collections.abc import Sequence
from typing import Protocol

from penstock.config import EngineConfig
from penstock.messages import Capacity, NewSequence, SamplingParams, StepPlan, StepResult, Work

_GREEDY = SamplingParams(seed=0, max_tokens=2, temperature=0.0)
_DRAWN = SamplingParams(seed=0, max_tokens=2)
# All that a sampler does to a row, at once.
_ALL = SamplingParams(
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


class Runner(Protocol):
    """That plans are rehearsed on."""

    @property
    def capacity(self) -> Capacity: ...

    def execute(self, plan: StepPlan) -> StepResult | None: ...


def warm_up_blocks(config: EngineConfig) -> int:
    """KV blocks of a group with which every rehearsed step is as large as a step may be; fewer make it smaller."""
    whole = config.max_num_batched_tokens // config.block_size
    return 1 + whole + config.max_num_seqs * (2 + 2 // config.block_size)


def warm_up(runner: Runner, config: EngineConfig) -> None:
    """Every size of step, by doubling: decoding sequences, and tokens of prompts; every way to sample; at last the
    largest step with everything at once. The runner has no sequences, and has none after."""
    stage = _Stage(runner, config)
    for count in _doubling(config.max_num_seqs):
        stage.perform([1] * count, _GREEDY)
    for tokens in _doubling(config.max_num_batched_tokens):
        stage.perform(_prompts(tokens, config), _GREEDY)
    for sampling in (_DRAWN, _ALL):
        stage.perform([2], sampling)
    each, more = divmod(config.max_num_batched_tokens, config.max_num_seqs)
    stage.perform([each + (i < more) for i in range(config.max_num_seqs)], _ALL)


def warm_up_decode(runner: Runner, config: EngineConfig) -> None:
    """One sequence, a prompt of a token and a step after it."""
    _Stage(runner, config).perform([1], _GREEDY)


class _Stage:
    def __init__(self, runner: Runner, config: EngineConfig) -> None:
        self._runner = runner
        self._longest = config.max_model_len
        self._blocks = min(group.num_blocks for group in runner.capacity.groups) - 1

    def perform(self, lengths: Sequence[int], sampling: SamplingParams) -> None:
        """Prompts of these lengths in one step, as far as there are blocks for them, then a step of a token each."""
        size = self._runner.capacity.block_size
        decodes = self._longest > 1
        new: list[NewSequence] = []
        done = 1  # block 0 is nobody's
        for length in lengths:
            tokens = min(length, self._longest - decodes)
            blocks = -(-(tokens + decodes) // size)
            if done + blocks > self._blocks + 1:
                break
            ids = tuple(range(done, done + blocks))
            groups = tuple(ids for _ in self._runner.capacity.groups)
            new.append(NewSequence(-1 - len(new), (0,) * tokens, tokens, 0, groups, sampling, 0))
            done += blocks
        self._runner.execute(StepPlan(-1, tuple(Work(each.seq, each.num_prompt, True) for each in new), tuple(new)))
        if decodes:
            self._runner.execute(StepPlan(-1, tuple(Work(each.seq, 1, True) for each in new)))
        self._runner.execute(StepPlan(-1, (), gone=tuple(each.seq for each in new)))


def _doubling(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def _prompts(tokens: int, config: EngineConfig) -> list[int]:
    """As few prompts as have so many tokens."""
    longest = max(config.max_model_len - 1, 1)
    whole, rest = divmod(tokens, longest)
    return [*[longest] * whole, *[rest] * (rest > 0)][: config.max_num_seqs]
