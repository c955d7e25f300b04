"""The messages between a GrammarChecker and its process: JSON, one message a line."""

from typing import Literal

import msgspec

from penstock.messages import Grammar

DEADLINE = 0.7  # seconds of processor time that compiling a grammar may take: with all around it, less than 1 s

SourceKind = Literal["json_schema", "regex", "choice", "grammar", "tools"]


class Setup(msgspec.Struct, frozen=True, tag="grammars"):
    """The special tokens that grammars may name."""

    vocab_size: int
    eos_token_id: int
    special: dict[int, str]


class Source(msgspec.Struct, frozen=True):
    """A grammar as a client sends it: `choice` is a JSON list of texts, `grammar` is in Lark or GBNF. `tools` is in
    Lark and made here, of schemas that a client sends."""

    kind: SourceKind
    text: str
    trigger: str = ""


class Checked(msgspec.Struct, frozen=True):
    """The grammar as the engine is to read it, or what is wrong with it."""

    grammar: Grammar | None = None
    error: str = ""
