"""The parameters of Anthropic's API. Unknown parameters are refused by name, except in messages: clients send
back those of earlier answers, with fields of their own."""

from typing import Annotated, Any

import msgspec

from penstock.frontend.describe import NOT_EMPTY, unsupported, with_sampling


class ContentBlock(msgspec.Struct):
    """A content block. Which of its fields are set depends on `type`."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None  # of a tool_use
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None  # of a tool_result
    content: str | list["ContentBlock"] | None = None


class Message(msgspec.Struct):
    role: Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["user", "assistant", "system"]})]
    content: str | list[ContentBlock]


class ThinkingFields(msgspec.Struct):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    format: OutputFormat | None = None
    task_budget: Any = None  # accepted without effect


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Tool(msgspec.Struct):
    """A tool. Fields that say how Anthropic's servers handle it, such as `cache_control`, have no effect."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None


class PromptFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters that messages and count_tokens share."""

    messages: Annotated[list[Message], NOT_EMPTY]
    model: str
    system: str | list[ContentBlock] | None = None
    thinking: ThinkingFields | None = None
    tool_choice: ToolChoice | None = None
    tools: list[Tool] | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # an earlier name of output_config.format
    # accepted without effect
    cache_control: Any = None
    context_management: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    # refused unless they have no effect
    mcp_servers: Annotated[Any, unsupported([])] = None
    prefill: Annotated[Any, unsupported()] = None


@with_sampling
class MessageFields(PromptFields, kw_only=True, forbid_unknown_fields=True):
    """The parameters of POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    seed: int | None = None  # not Anthropic's
    # accepted without effect
    diagnostics: Any = None
    inference_geo: Any = None
    metadata: Any = None
    service_tier: Any = None
    # refused unless it has no effect
    container: Annotated[Any, unsupported()] = None
