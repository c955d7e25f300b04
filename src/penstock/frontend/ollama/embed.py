"""POST /api/embed and /api/embeddings."""

import time
from typing import Any

import msgspec
import numpy as np
import orjson

from penstock.config.facts import PoolingFacts
from penstock.frontend.call import ModelContext, RequestContext
from penstock.frontend.errors import digits, invalid
from penstock.frontend.http.body import decode
from penstock.frontend.ollama.options import enter_model
from penstock.frontend.requests.pooling import (
    Vectors,
    check_count,
    embedder_of,
    encode_with_items,
    normalized,
    reserve_vectors,
    vectors,
)
from penstock.frontend.requests.texts import encode_texts
from penstock.text import TextTokens


class EmbedFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters of POST /api/embed. Those without a type are accepted without effect."""

    model: str
    input: str | list[str] = ""
    truncate: bool | None = None
    dimensions: int | None = None
    keep_alive: float | str | None = None
    options: Any = None


class EmbeddingsFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters of POST /api/embeddings, which is older."""

    model: str
    prompt: str = ""
    keep_alive: float | str | None = None
    options: Any = None


async def embed(body: bytes, context: RequestContext) -> bytes:
    """The vectors of texts, of length 1; none for a request without texts, which means: load the model. Raises APIError
    400 or 404 that names the parameter."""
    fields = decode(EmbedFields, body)
    inputs = [fields.input] if isinstance(fields.input, str) else fields.input
    context = await enter_model(context, fields.model, fields.keep_alive)
    pooling = embedder_of(context)
    width = pooling.width if fields.dimensions is None else fields.dimensions
    if not 1 <= width <= pooling.width:
        raise invalid(f"dimensions is {digits(width)}; it must be from 1 to {pooling.width}", "dimensions")
    cut = fields.truncate is not False
    found, texts = await _vectors(context, pooling, inputs if fields.input else [], "input", cut=cut)
    found = np.ascontiguousarray(normalized(found[:, :width]))
    answer = {
        "model": fields.model,
        "embeddings": [],
        "total_duration": int((time.monotonic() - context.start) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": sum(len(text.ids) for text in texts),
    }
    return await encode_with_items(answer, "embeddings", len(found), width, lambda at: list(found[at.start : at.stop]))


async def embeddings(body: bytes, context: RequestContext) -> bytes:
    """The vector of a text, as the model gives it; an empty one without a text. Raises APIError 400 or 404 that names
    the parameter."""
    fields = decode(EmbeddingsFields, body)
    context = await enter_model(context, fields.model, fields.keep_alive)
    pooling = embedder_of(context)
    if not fields.prompt:
        return orjson.dumps({"embedding": []})
    found, _ = await _vectors(context, pooling, [fields.prompt], "prompt", cut=True)
    return orjson.dumps({"embedding": np.ascontiguousarray(found[0])}, option=orjson.OPT_SERIALIZE_NUMPY)


async def _vectors(
    context: ModelContext, pooling: PoolingFacts, inputs: list[str], param: str, *, cut: bool
) -> tuple[Vectors, list[TextTokens]]:
    """With `cut`, texts that are too long are cut."""
    if not inputs:
        return np.empty((0, pooling.width), np.float32), []
    check_count(len(inputs), param, context)
    reserve_vectors(len(inputs), pooling.width, context)
    prompt = pooling.prompts.get(pooling.default_prompt, "")
    pairs = [(prompt + text if text else "", None) for text in inputs]
    texts = await encode_texts(context, pairs, param, cut=context.model.max_model_len if cut else None)
    return await vectors(context, texts, "embeddings"), texts
