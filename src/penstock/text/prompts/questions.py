"""Prompts to encode, and what comes of them. As JSON they go to a worker process and back, one a line."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class PromptSetup(msgspec.Struct, frozen=True, tag="prompts"):
    """The tokenizer that a worker loads, and the limits of its work."""

    path: str
    files_state: str  # see `text.files.files_state`
    tool_format: str
    reasoning_format: str
    max_model_len: int
    seconds: float  # of processor time, for each prompt


class EncodeText(msgspec.Struct, frozen=True, tag="text"):
    text: str
    add_special_tokens: bool
    most: int = 0  # tokens to encode; two contexts if that is more


class EncodeChat(msgspec.Struct, frozen=True, tag="chat"):
    """`variables` are arguments of the template. All values are JSON."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    variables: Mapping[str, Any]


class EncodeInfill(msgspec.Struct, frozen=True, tag="infill"):
    """A prompt whose continuation belongs between two texts."""

    before: str
    after: str
    add_special_tokens: bool


class EncodePair(msgspec.Struct, frozen=True, tag="pair"):
    """A text, or a pair of texts, that the model reads as a whole."""

    text: str
    second: str | None
    add_special_tokens: bool


PromptQuestion = EncodeText | EncodeChat | EncodeInfill | EncodePair


class Encoded(msgspec.Struct, frozen=True, tag="ids"):
    """The token ids of a prompt. The last two fields are those of `TextTokens`, for a pair."""

    ids: tuple[int, ...]
    end: str = ""  # of the text of a chat
    second: int = 0
    content: tuple[int, int] = (0, 0)  # begin, end


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A prompt that cannot be encoded: the class of the exception, and its message."""

    error: str
    message: str
