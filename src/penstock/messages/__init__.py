"""Frozen structs that packages and processes exchange, and the protocols of engine client and executor. No behaviour
but packing, and what a window sees."""

from penstock.messages.delta import (
    GRAMMAR_TOO_COMPLEX,
    OUT_OF_MEMORY,
    EngineInfo,
    EngineStats,
    RequestTiming,
    TokenDelta,
)
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
    EndsEngines,
    EngineClient,
    EngineError,
    Executor,
    Queue,
    QueueFull,
    RequestRejected,
)
from penstock.messages.request import LATER_PRIORITY, GenerateRequest, Grammar, PoolingParams, Thinking
from penstock.messages.sampling import NEUTRAL, GivenSampling, SamplingParams, range_of
from penstock.messages.window import Window

__all__ = [
    "GRAMMAR_TOO_COMPLEX",
    "LATER_PRIORITY",
    "NEUTRAL",
    "OUT_OF_MEMORY",
    "BlockCopy",
    "Capacity",
    "Clock",
    "DeadlineExceeded",
    "EndsEngines",
    "EngineClient",
    "EngineError",
    "EngineInfo",
    "EngineStats",
    "Executor",
    "FinishReason",
    "GenerateRequest",
    "GivenSampling",
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
    "Window",
    "Work",
    "check_sampling",
    "pack_row",
    "range_of",
    "row_size",
    "unpack_rows",
]
