"""Compiles a grammar with llguidance, within limits of its work."""

import json
import re
from typing import TYPE_CHECKING

from penstock.messages import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Between tokens of JSON: nothing, a space, or a new line with its indentation. Unbounded white space would let a model
# write nothing else until max_tokens.
WHITESPACE = r" |\n[ \t]{0,24}"


def parser_limits(kind: str) -> "LLParserLimits":
    """Bounds of llguidance's work for a grammar and for a token. Memory: about 2 kB a state.

    For each item of a row, the parser may look at all pairs of items if the grammar is ambiguous. The brackets of JSON
    leave little room for that, and a schema needs four items for each property that is not required.
    """
    from llguidance import LLParserLimits

    ambiguous = kind == "lark"
    return LLParserLimits(
        max_items_in_row=500 if ambiguous else 4000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=50_000,  # about 4 ms
        step_max_items=4000 if ambiguous else 20_000,  # if it is not, 20,000 take about 1 ms
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def compile_grammar(tokenizer: "LLTokenizer", grammar: Grammar) -> "LLMatcher":
    """Returns a matcher before its first token. It is in error if the grammar is invalid; see `first_line`."""
    from llguidance import LLMatcher

    if grammar.kind == "json_schema":
        text = LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": WHITESPACE})
    elif grammar.kind == "regex":
        text = LLMatcher.grammar_from_regex(_with_plain_digits(grammar.text))
    else:
        text = LLMatcher.grammar_from_lark(grammar.text)
    return LLMatcher(tokenizer, text, log_level=0, limits=parser_limits(grammar.kind))


def _with_plain_digits(expression: str) -> str:
    r"""Returns the expression with 0 to 9 for `\d`, as in a schema's `pattern`. llguidance takes the digits of all
    scripts for it, and a model that has to write a digit now and then takes one of those."""
    return re.sub(r"\\(.)", lambda found: "[0-9]" if found[1] == "d" else found[0], expression, flags=re.DOTALL)


def lark_of_choices(choices: list[str]) -> str:
    """A grammar for exactly one of some texts. They are one terminal, as the parser has an item for each alternative of
    a rule."""
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)


def lark_of(text: str) -> str:
    """A grammar in Lark of one in Lark or in llama.cpp's GBNF. Raises ValueError for GBNF that cannot be read."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark: str = any_to_lark(text)
    except Exception as error:
        raise ValueError(f"the GBNF grammar cannot be read: {error}") from None
    return lark


def first_line(error: str) -> str:
    """The part of llguidance's error that a user can use."""
    return " ".join(error.split("\n<state>")[0].removesuffix("<non-verbose/>").split())[:300]
