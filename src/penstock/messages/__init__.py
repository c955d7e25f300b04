"""Structs that packages and processes exchange, the protocols of engine client and executor, and what several clients
share: a stream's state and the keys of blocks, without anything that waits."""

from penstock.messages.block_keys import BlockKeys
from penstock.messages.control import Completed, ControlAnswer, ControlMessage, ForgottenBlocks, ResetCache, Sleep, Wake
from penstock.messages.delta import (
    GRAMMAR_TOO_COMPLEX,
    GRAMMARS_BUSY,
    OUT_OF_MEMORY,
    BlockChanges,
    EngineInfo,
    EngineState,
    EngineStats,
    EngineStatus,
    RequestTiming,
    TokenDelta,
)
from penstock.messages.delta_buffer import DeltaBuffer
from penstock.messages.limits import InvalidParameter, check_sampling
from penstock.messages.logprobs import TokenLogprobs, pack_row, row_size, unpack_rows
from penstock.messages.plan import (
    BlockCopy,
    Capacity,
    FinishReason,
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
from penstock.messages.stream import Stream
from penstock.messages.window import Window

__all__ = [
    "GRAMMARS_BUSY",
    "GRAMMAR_TOO_COMPLEX",
    "LATER_PRIORITY",
    "NEUTRAL",
    "OUT_OF_MEMORY",
    "BlockChanges",
    "BlockCopy",
    "BlockKeys",
    "Capacity",
    "Clock",
    "Completed",
    "ControlAnswer",
    "ControlMessage",
    "DeadlineExceeded",
    "DeltaBuffer",
    "EndsEngines",
    "EngineClient",
    "EngineError",
    "EngineInfo",
    "EngineState",
    "EngineStats",
    "EngineStatus",
    "Executor",
    "FinishReason",
    "ForgottenBlocks",
    "GenerateRequest",
    "GivenSampling",
    "Grammar",
    "Identity",
    "InvalidParameter",
    "KVGroup",
    "MemoryRow",
    "NewSequence",
    "PoolingParams",
    "Queue",
    "QueueFull",
    "RequestRejected",
    "RequestTiming",
    "ResetCache",
    "SamplingParams",
    "SequenceResult",
    "Sleep",
    "StepPlan",
    "StepResult",
    "StepTiming",
    "Stream",
    "Thinking",
    "TokenDelta",
    "TokenLogprobs",
    "Wake",
    "Window",
    "Work",
    "check_sampling",
    "pack_row",
    "range_of",
    "row_size",
    "unpack_rows",
]
