"""Structs that packages and processes exchange, the protocols of engine client and executor, and what several clients
share: a stream's state and the keys of blocks, without anything that waits."""

from penstock.messages.block_keys import BlockKeys
from penstock.messages.control import (
    Completed,
    ControlAnswer,
    ControlMessage,
    Describe,
    Description,
    Drain,
    ForgottenBlocks,
    ResetCache,
    Resize,
    Sleep,
    TextFile,
    Wake,
    WatchBlocks,
)
from penstock.messages.delta import (
    GRAMMAR_TOO_COMPLEX,
    GRAMMARS_BUSY,
    OUT_OF_MEMORY,
    BlockChanges,
    ComputeUsage,
    EngineInfo,
    EngineRole,
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
    Kept,
    KVGroup,
    MemoryRow,
    ModelOutput,
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
    StepLease,
    other_region,
)
from penstock.messages.request import (
    LATER_PRIORITY,
    GenerateRequest,
    Grammar,
    PagesAt,
    PoolingParams,
    TenantShare,
    Thinking,
)
from penstock.messages.sampling import NEUTRAL, GivenSampling, SamplingParams, range_of
from penstock.messages.stream import Stream
from penstock.messages.window import Window
