"""The parameters of Ollama's API. Unknown parameters are refused by name, except in messages."""

from typing import Annotated, Any

import msgspec

from penstock.declared.sampling import SAMPLING
from penstock.frontend.describe import unsupported
from penstock.messages import GivenSampling, range_of


class Options(GivenSampling, kw_only=True, forbid_unknown_fields=True):
    """How to sample."""

    repetition_penalty: Annotated[float | None, range_of("repetition_penalty")] = msgspec.field(
        default=None, name="repeat_penalty"
    )
    num_predict: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    # accepted without effect: the server's own settings decide, or the sampler has no such thing
    f16_kv: Any = None
    logits_all: Any = None
    low_vram: Any = None
    main_gpu: Any = None
    mirostat_eta: Any = None
    mirostat_tau: Any = None
    num_batch: Any = None
    num_ctx: Any = None
    num_gpu: Any = None
    num_gqa: Any = None
    num_keep: Any = None
    num_thread: Any = None
    numa: Any = None
    penalize_newline: Any = None
    repeat_last_n: Any = None
    rope_frequency_base: Any = None
    rope_frequency_scale: Any = None
    use_mlock: Any = None
    use_mmap: Any = None
    # refused unless they have no effect
    embedding_only: Annotated[Any, unsupported(False)] = None
    mirostat: Annotated[Any, unsupported(0)] = None
    tfs_z: Annotated[Any, unsupported(1)] = None
    typical_p: Annotated[Any, unsupported(1)] = None
    vocab_only: Annotated[Any, unsupported(False)] = None


# Ollama's names of sampling parameters, and those of SamplingParams.
SAMPLING_NAMES = {field.encode_name: field.name for field in msgspec.structs.fields(Options) if field.name in SAMPLING}


class RequestFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters that generate and chat share."""

    model: str
    stream: bool | None = None
    options: Options | None = None
    format: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    keep_alive: float | str | None = None
    # accepted without effect
    shift: Any = None
    truncate: Any = None


class GenerateFields(RequestFields, kw_only=True, forbid_unknown_fields=True):
    """The parameters of POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    suffix: str | None = None  # for models with fill-in-the-middle tokens
    # refused unless they have no effect
    height: Annotated[Any, unsupported([], "", 0)] = None
    images: Annotated[Any, unsupported([], "", 0)] = None
    steps: Annotated[Any, unsupported([], "", 0)] = None
    template: Annotated[Any, unsupported([], "", 0)] = None
    width: Annotated[Any, unsupported([], "", 0)] = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | None = None


class ToolCall(msgspec.Struct):
    function: CalledFunction
    id: str | None = None


ROLES = ("system", "user", "assistant", "tool")


class Message(msgspec.Struct):
    role: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(ROLES)})]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Annotated[Any, unsupported([])] = None


class ChatFields(RequestFields, kw_only=True, forbid_unknown_fields=True):
    """The parameters of POST /api/chat."""

    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None


class ModelFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters of requests about a model."""

    model: str | None = None
    name: str | None = None  # an earlier name of `model`
    stream: bool | None = None
    # accepted without effect
    insecure: Any = None
    verbose: Any = None
