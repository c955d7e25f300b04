"""Frozen structs that cross a boundary between rooms, and the protocols between rooms. No behaviour but packing."""

from penstock.messages.delta import GRAMMAR_TOO_COMPLEX, EngineInfo, EngineStats, RequestTiming, TokenDelta
from penstock.messages.limits import InvalidParameter, check_sampling
from penstock.messages.logprobs import TokenLogprobs, pack_row, row_size, unpack_rows
from penstock.messages.plan import (
    BlockCopy,
    Capacity,
    FinishReason,
    KVGroup,
    MemoryRow,
    NewSequence,
    SequenceResult,
    StepPlan,
    StepResult,
    StepTiming,
    Work,
)
from penstock.messages.protocols import (
    Clock,
    DeadlineExceeded,
    EngineClient,
    EngineError,
    Executor,
    Queue,
    QueueFull,
    RequestRejected,
)
from penstock.messages.request import GenerateRequest, Grammar, PoolingParams, SamplingParams, Thinking

__all__ = [
    "GRAMMAR_TOO_COMPLEX",
    "BlockCopy",
    "Capacity",
    "Clock",
    "DeadlineExceeded",
    "EngineClient",
    "EngineError",
    "EngineInfo",
    "EngineStats",
    "Executor",
    "FinishReason",
    "GenerateRequest",
    "Grammar",
    "InvalidParameter",
    "KVGroup",
    "MemoryRow",
    "NewSequence",
    "PoolingParams",
    "Queue",
    "QueueFull",
    "RequestRejected",
    "RequestTiming",
    "SamplingParams",
    "SequenceResult",
    "StepPlan",
    "StepResult",
    "StepTiming",
    "Thinking",
    "TokenDelta",
    "TokenLogprobs",
    "Work",
    "check_sampling",
    "pack_row",
    "row_size",
    "unpack_rows",
]
