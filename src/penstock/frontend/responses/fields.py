"""The parameters of OpenAI's Responses API. Unknown parameters are refused by name, except in items: clients send back
the items of earlier answers, with fields of their own."""

from typing import Annotated, Any, Literal

import msgspec

from penstock.frontend.describe import unsupported, with_sampling
from penstock.frontend.openai.fields import StreamOptions


class ContentPart(msgspec.Struct, omit_defaults=True):
    """A part of an item's content: a text, or a refusal."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct, omit_defaults=True):
    """An item of input, or of an earlier answer. Which of its fields are set depends on `type`."""

    type: str = ""  # a message may leave it out
    id: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    status: str | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    effort: str | None = None
    summary: str | None = None  # accepted without effect: reasoning is shown as it is
    generate_summary: str | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """`strict` changes nothing: a schema is always held exactly."""

    type: str
    name: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    strict: bool | None = None
    description: str | None = None


class TextFields(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class PromptFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters that a response and the count of its input's tokens share."""

    input: Annotated[str | list[Item] | None, msgspec.Meta(extra_json_schema={"minItems": 1})] = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextFields | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # refused unless they have no effect
    conversation: Annotated[Any, unsupported()] = None


@with_sampling
class ResponseFields(PromptFields, kw_only=True, forbid_unknown_fields=True):
    """The parameters of POST /v1/responses."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    # not OpenAI's
    seed: int | None = None
    priority: int | None = None
    # accepted without effect
    client_metadata: Any = None  # of Codex
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # refused unless they have no effect
    background: Annotated[Any, unsupported(False)] = None
    context_management: Annotated[Any, unsupported([])] = None
    max_tool_calls: Annotated[Any, unsupported()] = None
    moderation: Annotated[Any, unsupported()] = None
    prompt: Annotated[Any, unsupported()] = None
    service_tier: Annotated[Any, unsupported("auto", "default")] = None
    top_logprobs: Annotated[Any, unsupported(0)] = None


# Reasoning is never encrypted: its items have it as text, and can be sent back.
INCLUDABLE = ("reasoning.encrypted_content",)
