"""A scheduler's plan of one step, and the executor's result.

A sequence is one choice of one request. Its number `seq` is unique for the life of the scheduler. There is one unit of
work: compute `count` tokens of a sequence. Prefill, a chunk of it, decode, the rest after a prefix hit and the
verification of drafts are all that.
"""

from hashlib import sha256
from typing import Literal

import msgspec

from penstock.messages.request import Grammar, PoolingParams
from penstock.messages.sampling import SamplingParams
from penstock.messages.window import Window


class NewSequence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence that is new to the executor, or was in an earlier plan's `gone`."""

    seq: int
    token_ids: tuple[int, ...]  # prompt, then output so far
    num_prompt: int
    num_computed: int  # tokens whose KV already lies in `blocks` (a prefix hit or a fork); < len(token_ids)
    blocks: tuple[tuple[int, ...], ...]  # per KV group, including those this step needs
    sampling: SamplingParams
    choice: int
    grammar: Grammar | None = None
    pooling: PoolingParams | None = None


class Work(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Compute the next `count` tokens of a sequence, the last of which are the drafts `draft_ids`.

    With `sample`, the unit ends at the sequence's last token and yields between 1 and 1 + drafts new tokens. That last
    token may be one that an outstanding plan has yet to sample: the executor has it, the scheduler does not.
    """

    seq: int
    count: int
    sample: bool
    draft_ids: tuple[int, ...] = ()  # a sequence that has any has no other work outstanding

    @property
    def drafts(self) -> int:
        """The number of drafts."""
        return len(self.draft_ids)


class BlockCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copy a page before this step computes anything: a sequence is about to write into a block it shared."""

    group: int
    source: int
    target: int


class StepPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A delta: only what changed since the previous plan. Applied in the order gone, new, blocks, copies, work."""

    plan_id: int  # 1, 2, 3, ...
    work: tuple[Work, ...]
    new: tuple[NewSequence, ...] = ()
    blocks: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()  # (seq, per group: ids to append to its table)
    copies: tuple[BlockCopy, ...] = ()
    gone: tuple[int, ...] = ()  # finished, aborted or preempted sequences: forget them


class SequenceResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of one unit of work."""

    seq: int
    token_ids: tuple[int, ...] = ()  # empty for work that did not sample
    logprobs: bytes = b""  # one packed row per token id, see messages.logprobs
    prompt_logprobs: bytes = b""  # one packed row per prompt token whose logprob this step computed
    error: str = ""  # a request-scoped failure; its blocks are not published
    pooled: bytes = b""  # float32 numbers: what a unit that samples gives for a sequence that is pooled


class StepTiming(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Seconds spent in one step, as the executor measured them."""

    forward: float = 0.0
    sample: float = 0.0
    total: float = 0.0  # the whole of execute(), inputs included
    inputs: float = 0.0  # from the plan's work to what the model reads


class StepResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of a plan."""

    plan_id: int
    results: tuple[SequenceResult, ...]  # one for each of the plan's work, in its order
    timing: StepTiming = StepTiming()
    forced: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (seq, the only tokens its grammar allows next)


class KVGroup(msgspec.Struct, frozen=True, array_like=True):
    """Layers that share a block table, since they see the same tokens."""

    num_blocks: int
    window: Window = Window()


class MemoryRow(msgspec.Struct, frozen=True, array_like=True):
    """A line of the memory table."""

    name: str
    bytes: int
    note: str = ""


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """What keys, values and tokens depend on besides the request. Engines with equal ones compute the same bits."""

    weights: str = ""  # digest of all bytes of the weights, and of what the model computes with them
    numerics: str = ""  # everything else: how weights and pages are stored, instruction set, versions, ranks

    @property
    def fingerprint(self) -> str:
        """A digest of both, as hexadecimal digits."""
        return sha256(f"{self.weights} {self.numerics}".encode()).hexdigest()


# What every request of a model gives.
ModelOutput = Literal["tokens", "vectors"]

# What is kept of a sequence after a step. "blocks": those of its tokens, with which others may begin. "states": also a
# state in its row of the batch, so none can begin with its blocks. "nothing": a prompt is computed in one step.
Kept = Literal["blocks", "states", "nothing"]


class Capacity(msgspec.Struct, frozen=True, array_like=True):
    """How much an executor can hold, as measured. The scheduler keeps to it; the configuration stays as it is."""

    block_size: int
    groups: tuple[KVGroup, ...]
    depth: int = 1  # plans that may be outstanding
    identity: Identity = Identity()
    vocab_size: int = 0  # the width of the logits
    memory: tuple[MemoryRow, ...] = ()  # what it allocated, as measured
    late_ids: bool = True  # a plan may build upon a token that an outstanding one has yet to sample
    exact_drafts: bool = True  # a token is the same to the last bit, computed alone or verified as a draft
    output: ModelOutput = "tokens"
    keeps: Kept = "blocks"
    resizable: bool = False  # the memory of blocks with high ids can be given back


FinishReason = Literal["stop", "length", "abort", "error"]
