"""POST /classify, as in vLLM: the labels of texts."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import msgspec

from penstock.frontend.call import RequestContext
from penstock.frontend.describe import NOT_EMPTY
from penstock.frontend.http.body import decode
from penstock.frontend.requests.deadlines import check_timeout
from penstock.frontend.requests.pooling import (
    Vectors,
    check_count,
    cut_limit,
    encode_with_items,
    pooling_of,
    probabilities,
    reserve_vectors,
    token_usage,
    vectors,
    wrong_task,
)
from penstock.frontend.requests.texts import encode_texts


class ClassifyFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters."""

    input: Annotated[str | list[str], NOT_EMPTY]
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    timeout: float | None = None  # seconds


async def classify(body: bytes, context: RequestContext) -> bytes:
    """Answers a request. Raises APIError 400 or 404 that names the parameter."""
    fields = decode(ClassifyFields, body)
    context = await context.for_model(fields.model)
    pooling = pooling_of(context)
    if pooling.task != "classify":
        raise wrong_task(context, "gives embeddings and has no labels", "/v1/embeddings, /rerank or /score")
    check_timeout(fields.timeout, "timeout", context.limits.request_timeout)
    inputs = [fields.input] if isinstance(fields.input, str) else fields.input
    check_count(len(inputs), "input", context)
    reserve_vectors(len(inputs), pooling.width, context)
    texts = await encode_texts(
        context, [(text, None) for text in inputs], "input", cut=cut_limit(fields.truncate_prompt_tokens, context)
    )
    found = await vectors(context, texts, "classify", timeout=fields.timeout)
    answer = {
        "id": f"classify-{context.id}",
        "object": "list",
        "created": context.created,
        "model": context.model.name,
        "data": [],
        "usage": token_usage(texts),
    }
    rows = probabilities(found, pooling.activation)
    return await encode_with_items(answer, "data", len(rows), pooling.width, partial(_items, rows, pooling.labels))


def _items(rows: Vectors, labels: Sequence[str], places: range) -> list[Any]:
    return [
        {"index": i, "label": labels[int(row.argmax())], "probs": row.tolist(), "num_classes": len(labels)}
        for i, row in zip(places, rows[places.start : places.stop], strict=True)
    ]
