"""POST /score, as in vLLM: how well pairs of texts fit."""

import msgspec
import orjson

from penstock.frontend.call import RequestContext
from penstock.frontend.errors import invalid
from penstock.frontend.http.body import decode
from penstock.frontend.requests.deadlines import check_timeout
from penstock.frontend.requests.pooling import check_count, cut_limit, pooling_of, scores


class ScoreFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters: one first text for all second ones, or as many of both."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    timeout: float | None = None  # seconds


async def score(body: bytes, context: RequestContext) -> bytes:
    """Answers a request. Raises APIError 400 or 404 that names the parameter."""
    fields = decode(ScoreFields, body)
    context = await context.for_model(fields.model)
    pooling = pooling_of(context)
    check_timeout(fields.timeout, "timeout", context.limits.request_timeout)
    first = [fields.text_1] if isinstance(fields.text_1, str) else fields.text_1
    second = [fields.text_2] if isinstance(fields.text_2, str) else fields.text_2
    check_count(len(first), "text_1", context)
    check_count(len(second), "text_2", context)
    if len(first) not in (1, len(second)):
        raise invalid(
            f"text_1 has {len(first)} texts and text_2 has {len(second)}; send one text_1, or as many as text_2",
            "text_1",
        )
    pairs = list(zip(first * (len(second) // len(first)), second, strict=True))
    cut = cut_limit(fields.truncate_prompt_tokens, context)
    found, usage = await scores(context, pooling, pairs, ("text_1", "text_2"), cut=cut, timeout=fields.timeout)
    data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(found)]
    return orjson.dumps(
        {
            "id": f"score-{context.id}",
            "object": "list",
            "created": context.created,
            "model": context.model.name,
            "data": data,
            "usage": usage,
        }
    )
