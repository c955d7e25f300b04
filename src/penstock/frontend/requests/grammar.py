"""Turns a request's grammar into one that the engine can hold. Independent of the wire."""

from dataclasses import dataclass
from functools import partial

from penstock.frontend.errors import APIError, invalid
from penstock.frontend.served import ServedModel
from penstock.messages import Grammar
from penstock.text import GrammarError
from penstock.text.grammars.questions import SourceKind
from penstock.text.process import WorkerEnded

ANY_OBJECT = '{"type":"object"}'  # a schema
MAX_WAITING = 64  # requests whose grammars wait to be compiled; the next ones get 429


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as a request has it. Errors name `param`."""

    kind: SourceKind
    text: str
    param: str


async def check_grammar(model: ServedModel, source: GrammarSource, trigger: str = "") -> Grammar:
    """Returns the grammar in the engine's form, before anything is generated. It is compiled in another process.

    Raises APIError 400 for a grammar that is wrong or cannot be held exactly; it names the parameter and the keyword.
    Raises APIError 503 if the process was ended by something else.
    """
    checker = model.grammars
    try:
        if (known := checker.known(source.kind, source.text, trigger)) is not None:
            return known
        if model.grammar_checks.waiting >= MAX_WAITING:
            raise APIError(429, f"{MAX_WAITING} grammars wait to be compiled; send it again later", retry_after=1)
        return await model.grammar_checks.run(partial(checker.check, source.kind, source.text, trigger))
    except GrammarError as error:
        raise invalid(f"{source.param}: {error}", source.param, "invalid_grammar") from None
    except WorkerEnded as error:
        raise APIError(503, f"{source.param} was not checked: {error}; send it again later", retry_after=1) from None
