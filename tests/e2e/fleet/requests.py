"""Requests of every kind, and what their streams say."""

import random

from penstock.messages import GenerateRequest, Grammar, SamplingParams
from tests.engine.simulated import Answer

TOKENS = 60
SCHEMA = (
    '{"type": "object", "properties": {"title": {"type": "string", "maxLength": 60}, "pages": {"type": "integer"}, '
    '"words": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 6}}, '
    '"required": ["title", "pages", "words"], "additionalProperties": false}'
)
TOOL = 'start: "save(" /[a-z]{1,40}/ ", " /[0-9]{1,9}/ ")"'
GRAMMARS = (None, Grammar("json_schema", SCHEMA), Grammar("lark", TOOL), None, Grammar("regex", "[a-z ]{10,200}"))


def made(number: int, tokens: int = TOKENS) -> GenerateRequest:
    """The requests are of every kind in turn: greedy and sampled, held to a grammar, with logprobs, with choices."""
    drawn = random.Random(number)
    grammar = GRAMMARS[number % len(GRAMMARS)]
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_ids=tuple(drawn.randrange(300, 3000) for _ in range(drawn.randrange(4, 80))),
        sampling=SamplingParams(
            seed=number,
            max_tokens=tokens,
            temperature=0.0 if number % 3 == 0 else 0.9,
            ignore_eos=grammar is None,
            logprobs=2 if number % 2 else None,
            presence_penalty=0.5 if number % 7 == 0 else 0.0,
        ),
        grammar=grammar,
        n=3 if number % 4 == 1 else 1,
    )


def said(answer: Answer) -> tuple[object, ...]:
    return answer.choices, answer.logprobs, answer.reasons
