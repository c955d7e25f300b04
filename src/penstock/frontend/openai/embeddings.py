"""POST /v1/embeddings."""

import base64
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np

from penstock.config.facts import PoolingFacts
from penstock.frontend.call import ModelContext, RequestContext
from penstock.frontend.describe import NOT_EMPTY
from penstock.frontend.errors import digits, invalid
from penstock.frontend.http.body import decode
from penstock.frontend.requests.deadlines import check_timeout
from penstock.frontend.requests.pooling import (
    Vectors,
    check_count,
    cut_limit,
    embedder_of,
    encode_with_items,
    normalized,
    reserve_vectors,
    token_usage,
    vectors,
)
from penstock.frontend.requests.prompts import check_ids
from penstock.frontend.requests.sampling import check_priority
from penstock.frontend.requests.texts import encode_texts
from penstock.text import TextTokens


class EmbeddingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters of POST /v1/embeddings."""

    input: Annotated[str | list[str | int | list[int]], NOT_EMPTY]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    prompt_name: str | None = None  # of a prompt in config_sentence_transformers.json
    # vLLM's
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    timeout: float | None = None  # seconds; Penstock's
    cache_salt: str | None = None
    # accepted without effect
    user: str | None = None


async def embeddings(body: bytes, context: RequestContext) -> bytes:
    """Answers a request. Raises APIError 400 or 404 that names the parameter."""
    fields = decode(EmbeddingFields, body)
    context = await context.for_model(fields.model)
    pooling = embedder_of(context)
    width = _check(fields, pooling)
    check_priority(fields.priority or 0, context.limits)
    check_timeout(fields.timeout, "timeout", context.limits.request_timeout)
    inputs = _split(fields.input)
    check_count(len(inputs), "input", context)
    reserve_vectors(len(inputs), width, context)
    texts = await _encode(fields, pooling, inputs, context)
    found = await vectors(
        context, texts, "embeddings", salt=fields.cache_salt, priority=fields.priority or 0, timeout=fields.timeout
    )
    if width < pooling.width:
        found = normalized(found[:, :width]) if pooling.normalize else found[:, :width]
    as_base64 = fields.encoding_format == "base64"
    answer = {"object": "list", "data": [], "model": context.model.name, "usage": token_usage(texts)}
    found = np.ascontiguousarray(found)
    return await encode_with_items(answer, "data", len(found), width, partial(_items, found, as_base64=as_base64))


def _check(fields: EmbeddingFields, pooling: PoolingFacts) -> int:
    """The width of the answer's vectors."""
    if fields.encoding_format not in (None, "float", "base64"):
        shown = fields.encoding_format[:40]
        raise invalid(f"encoding_format is {shown!r}; it must be float or base64", "encoding_format")
    width = pooling.width if fields.dimensions is None else fields.dimensions
    if not 1 <= width <= pooling.width:
        raise invalid(
            f"dimensions is {digits(width)}; it must be from 1 to {pooling.width}, the model's own number", "dimensions"
        )
    if fields.cache_salt is not None and not 0 < len(fields.cache_salt) <= 256:
        raise invalid(f"cache_salt has {len(fields.cache_salt)} characters; it must have 1 to 256", "cache_salt")
    if fields.prompt_name is not None and fields.prompt_name not in pooling.prompts:
        names = ", ".join(map(repr, pooling.prompts)) or "none"
        raise invalid(f"prompt_name is {fields.prompt_name[:40]!r}; the model's are: {names}", "prompt_name")
    return width


def _split(given: str | list[Any]) -> list[str | list[int]]:
    """The inputs in a text, token ids, or a list of either."""
    if isinstance(given, str):
        return [given]
    if len(set(map(type, given))) > 1:
        raise invalid("input mixes texts, token ids and lists; send one kind", "input")
    return [given] if given and isinstance(given[0], int) else given


async def _encode(
    fields: EmbeddingFields, pooling: PoolingFacts, inputs: list[str | list[int]], context: ModelContext
) -> list[TextTokens]:
    cut = cut_limit(fields.truncate_prompt_tokens, context)
    if isinstance(inputs[0], str):
        name = pooling.default_prompt if fields.prompt_name is None else fields.prompt_name
        prompt = pooling.prompts.get(name, "")
        pairs = [(prompt + str(text) if text else "", None) for text in inputs]
        special = fields.add_special_tokens is not False
        return await encode_texts(context, pairs, "input", cut=cut, add_special_tokens=special)
    if fields.prompt_name is not None:
        raise invalid("prompt_name needs texts, but input has token ids; leave it out", "prompt_name")
    every = [TextTokens(tuple(ids if cut is None else ids[:cut])) for ids in inputs if not isinstance(ids, str)]
    return [TextTokens(check_ids(context.model, text.ids, "input", output=0)) for text in every]


def _items(found: Vectors, places: range, *, as_base64: bool) -> list[Any]:
    rows: list[Any] = list(found[places.start : places.stop])
    if as_base64:
        rows = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in rows]
    return [{"object": "embedding", "index": i, "embedding": row} for i, row in zip(places, rows, strict=True)]
