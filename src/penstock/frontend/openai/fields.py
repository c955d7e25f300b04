"""The parameters of requests: those of the OpenAI API, and those of vLLM that clients use.

Types are strict (no "1" for 1, no true for 1), and unknown parameters are refused by name. A parameter of the API that
Penstock does not support is declared `unsupported`, and refused unless its value has no effect.
"""

from typing import Annotated, Any

import msgspec

from penstock.frontend.describe import NOT_EMPTY, unsupported
from penstock.messages import GivenSampling


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage with every chunk
    include_obfuscation: bool | None = None  # padding against traffic analysis: accepted, and no padding is sent


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`strict` changes nothing: a schema is always held exactly."""

    name: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)  # llama.cpp's, of the type json_object


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's: exactly one of these."""

    json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)  # a schema, or a string that contains one
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingFields(GivenSampling, kw_only=True, forbid_unknown_fields=True):
    """The parameters that completions and chat share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    # vLLM's
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    # Penstock's
    timeout: float | None = None  # seconds
    first_token_timeout: float | None = None
    # OpenAI's, and vLLM's
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # as in `structured_outputs`, which replaced these four
    guided_json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # accepted without effect
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # refused unless they have no effect
    truncate_prompt_tokens: Annotated[Any, unsupported()] = None
    use_beam_search: Annotated[Any, unsupported(False)] = None
    service_tier: Annotated[Any, unsupported("auto", "default")] = None
    # SGLang's, which the routers smg and vllm-router send with every request
    no_stop_trim: Annotated[Any, unsupported(False)] = None
    return_hidden_states: Annotated[Any, unsupported(False)] = None


class CompletionFields(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The parameters of POST /v1/completions."""

    prompt: Annotated[str | list[str | int | list[int]], NOT_EMPTY]
    max_tokens: Annotated[int | None, msgspec.Meta(extra_json_schema={"minimum": 0})] = None  # 0: with `echo`
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None  # for models with fill-in-the-middle tokens


class ContentPart(msgspec.Struct):
    """A part of a message's content. Fields of other servers and clients, such as `cache_control`, are ignored."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = "{}"


class MessageToolCall(msgspec.Struct):
    """A tool call of an earlier answer. Clients copy it with fields of their own, which are ignored."""

    function: CalledFunction
    id: str | None = None
    type: str | None = "function"


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class ChatMessage(msgspec.Struct):
    """A message. Clients copy messages of earlier answers, of this server and of others, with all their fields: unknown
    ones are ignored."""

    role: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(ROLES)})]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: Annotated[Any, unsupported("")] = None
    annotations: Annotated[Any, unsupported([])] = None
    audio: Annotated[Any, unsupported()] = None
    function_call: Annotated[Any, unsupported()] = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    type: Annotated[Any, unsupported("text", "message")] = None  # lm-eval sends "text" with every message


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """The answer that the client expects. Its tokens are proposed as speculative tokens."""

    type: str
    content: str | list[ContentPart]


class ChatFields(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The parameters of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], NOT_EMPTY]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prediction: Prediction | None = None
    # vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None  # vLLM's name for it; -1: no budget
    # refused unless they have no effect
    chat_template: Annotated[Any, unsupported()] = None
    functions: Annotated[Any, unsupported([])] = None
    function_call: Annotated[Any, unsupported("none")] = None
    modalities: Annotated[Any, unsupported(["text"])] = None
    audio: Annotated[Any, unsupported()] = None
    web_search_options: Annotated[Any, unsupported()] = None
    verbosity: Annotated[Any, unsupported("medium")] = None


class TokenizeFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters of POST /tokenize, as in vLLM: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template: Annotated[Any, unsupported()] = None


class DetokenizeFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters of POST /detokenize, as in vLLM."""

    tokens: list[Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 0})]]
    model: str | None = None
