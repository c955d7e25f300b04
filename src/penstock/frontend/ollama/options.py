"""Reads what requests to generate and to chat share."""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from penstock.frontend.call import ModelContext, RequestContext
from penstock.frontend.errors import invalid
from penstock.frontend.http.asgi import Answer
from penstock.frontend.http.body import refuse_unsupported
from penstock.frontend.limits import RequestLimits
from penstock.frontend.ollama.codec import NDJSON, now
from penstock.frontend.ollama.fields import Options, RequestFields
from penstock.frontend.requests.chat import ChatMessages, ChatRequest
from penstock.frontend.requests.grammar import ANY_OBJECT, GrammarSource
from penstock.frontend.requests.reasoning import reasoning_variables, thinking_variables
from penstock.frontend.requests.reply import ToolUse
from penstock.frontend.requests.sampling import (
    GenerationOptions,
    check_logprobs,
    check_options,
    given_sampling,
    stop_strings,
)

_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|)")
_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}


def bare_name(name: str) -> str:
    """A model's name as commands take it: Ollama's clients add the tag `latest`."""
    return name.removesuffix(":latest")


def read_options(fields: RequestFields, limits: RequestLimits) -> GenerationOptions:
    """The options of a request. Raises APIError 400 for a parameter that is wrong for every prompt."""
    given = fields.options or Options()
    refuse_unsupported(given, "options.")
    options = GenerationOptions(
        stop=stop_strings(given.stop),
        seed=None if given.seed == -1 else given.seed,
        sampling=given_sampling(given),
    )
    check_options(options, limits)
    return options


def read_request(fields: RequestFields, prompt: ChatMessages, use: ToolUse, limits: RequestLimits) -> ChatRequest:
    """The chat of a request with this prompt. Raises APIError 400 that names the parameter."""
    return ChatRequest(
        prompt=prompt,
        options=read_options(fields, limits),
        use=use,
        grammar=read_format(fields),
        max_tokens=max_tokens(fields),
        max_tokens_param="options.num_predict",
        shorten=True,
        logprobs=read_logprobs(fields, limits),
    )


def max_tokens(fields: RequestFields) -> int | None:
    """The limit of the answer. None: as far as the context allows; 0 and below mean this too."""
    wanted = None if fields.options is None else fields.options.num_predict
    return wanted if wanted is not None and wanted > 0 else None


def read_logprobs(fields: RequestFields, limits: RequestLimits) -> int | None:
    """The number of alternatives for each token, or None for no logprobs."""
    if not fields.logprobs:
        return None
    check_logprobs(fields.top_logprobs or 0, "top_logprobs", limits)
    return fields.top_logprobs or 0


def read_format(fields: RequestFields) -> GrammarSource | None:
    """The schema of the answer. Raises APIError 400 for another kind of `format`."""
    raw = bytes(fields.format)
    if raw in (b"", b"null", b'""'):
        return None
    if raw == b'"json"':
        return GrammarSource("json_schema", ANY_OBJECT, "format")
    if not raw.startswith(b"{"):
        raise invalid('format must be "json" or a JSON schema', "format")
    return GrammarSource("json_schema", raw.decode(), "format")


def read_think(fields: RequestFields) -> Mapping[str, Any]:
    """The template's variables for `think`."""
    if fields.think is None:
        return {}
    if fields.think is False:
        return reasoning_variables("none")
    effort = fields.think if isinstance(fields.think, str) else None
    return thinking_variables(effort, "think")


async def enter_model(context: RequestContext, name: str, keep_alive: float | str | None) -> ModelContext:
    """Returns the context with the model. Its engine stays for `keep_alive` after this request, if it may sleep at all
    (docs/many-models.md). Raises APIError."""
    seconds = read_keep_alive(keep_alive)
    found = await context.for_model(bare_name(name))
    if seconds is not None:
        context.models.find(bare_name(name)).stay(seconds)
    return found


def unload(context: RequestContext, name: str) -> None:
    """Ends the engine of a model after its last request, if it may sleep. Raises APIError 404."""
    if context.models.absent(bare_name(name)) is None:
        context.models.find(bare_name(name)).stay(0.0)


def read_keep_alive(value: float | str | None) -> float | None:
    """Returns seconds, as Ollama reads them: a number of seconds, or a duration such as 1h30m; negative: for ever. None
    without a value. Raises APIError 400."""
    if not isinstance(value, str):
        return value
    parts = _DURATION.findall(value)
    if not value or "".join("".join(part) for part in parts) != value.removeprefix("-"):
        raise invalid(f"keep_alive is {value[:40]!r}; give seconds, or a duration such as 5m or 1h30m", "keep_alive")
    return sum(float(number) * _UNITS[unit] for number, unit in parts) * (-1 if value[0] == "-" else 1)


async def answer_nothing(fields: RequestFields, content: Mapping[str, Any], context: RequestContext) -> Answer:
    """Returns the answer to a request without a prompt, which means: load the model, or unload it. Raises APIError."""
    unloads = read_keep_alive(fields.keep_alive) == 0
    if unloads:
        unload(context, fields.model)
    else:
        await enter_model(context, fields.model, fields.keep_alive)
    reason = {"done": True, "done_reason": "unload" if unloads else "load"}
    body = orjson.dumps({"model": fields.model, "created_at": now(), **content, **reason})
    return Answer(body) if fields.stream is False else Answer(body + b"\n", content_type=NDJSON)
