"""POST /classify, as in vLLM: the labels of texts."""

import msgspec
import orjson

from penstock.frontend.call import RequestContext
from penstock.frontend.http.body import decode
from penstock.frontend.pooling import (
    check_answer,
    check_count,
    cut_limit,
    encode,
    pooling_of,
    probabilities,
    token_usage,
    vectors,
    wrong_task,
)


class ClassifyFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters."""

    input: str | list[str]
    model: str | None = None
    truncate_prompt_tokens: int | None = None


_decoder = msgspec.json.Decoder(ClassifyFields)


async def classify(body: bytes, context: RequestContext) -> bytes:
    """Answers a request. Raises APIError 400 or 404 that names the parameter."""
    fields = decode(_decoder, body)
    pooling = pooling_of(context, fields.model)
    if pooling.task != "classify":
        raise wrong_task(context, "gives embeddings and has no labels", "/v1/embeddings, /rerank or /score")
    inputs = [fields.input] if isinstance(fields.input, str) else fields.input
    check_count(len(inputs), "input", context)
    check_answer(len(inputs), pooling.width, context)
    texts = await encode(
        context, [(text, None) for text in inputs], "input", cut=cut_limit(fields.truncate_prompt_tokens, context)
    )
    found = probabilities(await vectors(context, texts, "classify"), pooling.activation)
    data = [
        {
            "index": i,
            "label": pooling.labels[int(row.argmax())],
            "probs": row.tolist(),
            "num_classes": len(pooling.labels),
        }
        for i, row in enumerate(found)
    ]
    return orjson.dumps(
        {
            "id": f"classify-{context.id}",
            "object": "list",
            "created": context.created,
            "model": context.model.name,
            "data": data,
            "usage": token_usage(texts),
        }
    )
