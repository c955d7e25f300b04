"""Messages from an engine to its client: new tokens of a choice, stats, and facts about the engine."""

import operator
from itertools import zip_longest
from typing import Literal

import msgspec

from penstock.messages.plan import FinishReason, Identity, MemoryRow


class ComputeUsage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a choice has used of its engine."""

    computed: int = 0  # tokens, without prefix hits
    repeated: int = 0  # of these, tokens computed again after a preemption
    rejected: int = 0  # of these, draft tokens that were refused
    step_seconds: float = 0.0  # its part of the time of its steps
    block_seconds: float = 0.0  # KV blocks held, times seconds

    def __add__(self, other: "ComputeUsage") -> "ComputeUsage":
        return ComputeUsage(*map(operator.add, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))


class RequestTiming(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Seconds on the engine's clock, given once with the delta that finishes a choice."""

    queued: float = 0.0  # arrival to the first step that computed something
    prefill: float = 0.0  # that step to the first token
    decode: float = 0.0  # first token to the last
    preemptions: int = 0
    accepted_prediction: int = 0  # drafts from the request's prediction that were accepted
    rejected_prediction: int = 0
    usage: ComputeUsage | None = None  # None: the engine does not measure it
    engine: str = ""  # of a fleet, on which the choice has ended; "": there is one engine
    moves: int = 0  # how often the request went on at another engine


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens `offset`, `offset + 1`, ... of one choice's output.

    With a finish reason the choice ends at offset + len(token_ids), which may lie before tokens already sent where
    `finish` truncated it. `stop_token` names the token that ended it, which is the last of its tokens.
    """

    request_id: str
    choice: int
    offset: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int = 0  # prompt tokens served by the prefix cache, in the first and last delta of a choice
    logprobs: bytes = b""  # one packed row per token id
    prompt_logprobs: bytes = b""  # packed rows for prompt tokens 1, 2, ...; whole, in the first delta of choice 0
    error: str = ""
    timing: RequestTiming | None = None
    incarnation: int = 0  # of the engine; a delta of an earlier one is refused
    pooled: bytes = b""  # float32 numbers: the vector of a request with `pooling`, in its only delta


class BlockChanges(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Keys of blocks (see `BlockKeys`) that an engine's prefix cache has come to hold, or holds no longer.

    Report 1 begins anew: it has all blocks that are cached. A reader that misses a number asks for that again. Where
    layers see a window only, an engine may lack some of what they need of a block, so a hit is not certain.
    """

    number: int
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


# So begin errors of a request that have a status of their own.
GRAMMAR_TOO_COMPLEX = "the request's grammar is too complex"
OUT_OF_MEMORY = "the engine's memory did not suffice for this request"
GRAMMARS_BUSY = "too many grammars that were too complex are still being followed"


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Gauges now and counters since start, after a step. Block counts are per KV group."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    blocks_total: tuple[int, ...] = ()
    blocks_held: tuple[int, ...] = ()
    blocks_cached: tuple[int, ...] = ()  # not held, kept for their content
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # prompt tokens found
    computed_tokens: int = 0  # every unit of work, recomputation included
    decode_tokens: int = 0  # of these, tokens that continue an output, one for each sequence that decodes
    drafts: int = 0  # units of work with drafts
    draft_tokens: int = 0
    accepted_tokens: int = 0  # of the draft tokens
    accepted_at: tuple[int, ...] = ()  # the same by place among the drafts of a unit
    step_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    waiting_tokens: int = 0  # of the prompts of waiting requests, where several processes share the engine
    # The disk tier (--kv-disk), in blocks:
    disk_blocks: int = 0  # that it has now
    disk_bytes: int = 0  # of their files
    disk_reads: int = 0
    disk_writes: int = 0
    disk_failures: int = 0  # that could not be read or written
    disk_dropped: int = 0  # that were evicted from memory before they could be written
    # Between engines (--role), in blocks:
    peer_reads: int = 0
    peer_sends: int = 0
    peer_failures: int = 0  # requests whose blocks did not all come

    def ended(self) -> "EngineStats":
        """The counters of an engine that has ended."""
        return EngineStats(**{name: getattr(self, name) for name in (*_COUNTERS, "accepted_at")})

    def after(self, earlier: "EngineStats") -> "EngineStats":
        """These stats with the counters of an earlier engine added."""
        places = zip_longest(self.accepted_at, earlier.accepted_at, fillvalue=0)
        return msgspec.structs.replace(
            self,
            accepted_at=tuple(map(sum, places)),
            **{name: getattr(self, name) + getattr(earlier, name) for name in _COUNTERS},
        )

    @property
    def prefill_tokens(self) -> int:
        """The computed tokens that are neither decode tokens nor drafts: prompts, and what preemption repeats."""
        return max(self.computed_tokens - self.decode_tokens - self.draft_tokens, 0)

    @property
    def kv_usage(self) -> float:
        """The fullest group's share of blocks held by requests, 0 to 1."""
        return max((h / t for h, t in zip(self.blocks_held, self.blocks_total, strict=True) if t), default=0.0)


_COUNTERS = (
    *("steps", "preemptions", "prefix_queries", "prefix_hits", "computed_tokens", "decode_tokens"),
    *("drafts", "draft_tokens", "accepted_tokens"),
    *("step_seconds", "forward_seconds", "sample_seconds"),
    *("disk_reads", "disk_writes", "disk_failures", "disk_dropped", "peer_reads", "peer_sends", "peer_failures"),
)


# The part of the work that an engine of a fleet does: all of its requests, prompts for other engines, or the tokens
# after their prompts. All but the first exchange KV blocks with other engines.
EngineRole = Literal["alone", "both", "prefill", "decode"]


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about an engine that stay the same while it lives."""

    model: str
    revision: str
    vocab_size: int  # ids 0 .. vocab_size - 1 are valid (the width of the logits)
    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_blocks: tuple[int, ...]
    dtype: str
    incarnation: int
    pid: int
    eos_token_ids: tuple[int, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
    identity: Identity = Identity()
    max_step_tokens: int = 0  # tokens of the largest step; 0: unknown
    role: EngineRole = "alone"
    region: str = ""  # where its machine is; "": it has no name
    page_port: int = 0  # where other engines read KV blocks; 0: they do not
    cpu: int | None = None  # the one processor that the engine's loop stays on, where it does


# restarting: it is started after it had ended or was asleep; requests wait and streams pause. asleep: it was ended by
# `Sleep`, and a request or `Wake` starts it. ended: it is not started again.
EngineStatus = Literal["ready", "restarting", "asleep", "ended"]


class EngineState(msgspec.Struct, frozen=True, array_like=True):
    """What has become of an engine since its first start."""

    status: EngineStatus = "ready"
    restarts: int = 0  # starts after it had ended by itself
    leave_within: float | None = None  # seconds that its requests may stay (`Drain`); None: it takes new ones
