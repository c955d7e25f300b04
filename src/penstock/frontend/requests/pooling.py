"""Runs texts on a model that gives vectors. Independent of the wire."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, cast

import numpy as np
import orjson
from numpy.typing import NDArray

from penstock.config.facts import PoolingFacts
from penstock.frontend.call import ModelContext, RequestContext
from penstock.frontend.errors import APIError, GenerationFailed, digits, invalid
from penstock.frontend.requests.deadlines import deadlines
from penstock.frontend.requests.texts import encode_texts
from penstock.frontend.served import ServedModel
from penstock.messages import GenerateRequest, PoolingParams, RequestRejected, SamplingParams
from penstock.text import TextTokens

AT_ONCE = 128  # texts of one request that are in the engine at a time
TEXT_SPACING = 0.02  # seconds between the places of its texts in the queue, so that others come between
NUMBER_BYTES = 13  # of a number in an answer, with its comma
_NUMBERS_AT_ONCE = 32_768  # that the event loop writes as JSON in one go, in about 1 ms

Vectors = NDArray[np.float32]  # [texts, width]
Items = Callable[[range], list[Any]]  # the items at these places


def pooling_of(context: ModelContext) -> PoolingFacts:
    """The pooling of the request's model. Raises APIError 400 if the model gives no vectors."""
    pooling = context.model.pooling
    if pooling is None:
        raise invalid(
            f"model {context.model.name!r} generates text and has no embeddings; serve an embedding model, for "
            "instance all-minilm-l6-v2",
            "model",
            "model_not_supported",
        )
    return pooling


def embedder_of(context: ModelContext) -> PoolingFacts:
    """The pooling of the request's model. Raises APIError 400 if the model gives no embeddings."""
    pooling = pooling_of(context)
    if pooling.task != "embed":
        raise wrong_task(context, "is a classifier and has no embeddings", "/classify, or /rerank with one label")
    return pooling


def check_generates(model: ServedModel) -> None:
    """Raises APIError 400 if the model gives vectors instead of text."""
    if model.pooling is None:
        return
    what, routes = "labels texts", "/classify, /score or /rerank"
    if model.pooling.task == "embed":
        what, routes = "embeds texts", "/v1/embeddings, /score or /rerank"
    raise invalid(f"model {model.name!r} {what} and generates none; use {routes}", "model", "model_not_supported")


def check_count(count: int, param: str, context: RequestContext) -> None:
    """Raises APIError 400 for no texts, or for more than a request may have."""
    if not count:
        raise invalid(f"{param} is empty; send at least one text", param, "empty_prompt")
    if count > context.limits.max_inputs:
        raise invalid(f"{param} has {count} texts; the limit is {context.limits.max_inputs}: send fewer", param)


def reserve_vectors(count: int, width: int, context: RequestContext) -> None:
    """Counts the bytes of an answer of `count` vectors in the budget of answers. Raises APIError 400 if they are more
    than an answer may have, and 429 if the budget is spent."""
    size, limit = count * width * NUMBER_BYTES, context.limits.max_answer_bytes
    if size > limit:
        raise invalid(
            f"{count} vectors of {width} numbers would be an answer of about {size} bytes; the limit is {limit}: send "
            "fewer texts",
            "input",
            "answer_too_large",
        )
    context.reserve(size)


def cut_limit(truncate: int | None, context: ModelContext) -> int | None:
    """The number of tokens that texts are cut to; None: they are not cut. `truncate` is vLLM's
    `truncate_prompt_tokens`, of which -1 is the model's limit. Without it, --truncate-embeddings decides."""
    most = context.model.max_model_len
    if truncate is None:
        return most if context.model.truncate_embeddings else None
    if truncate == -1:
        return most
    if not 1 <= truncate <= most:
        raise invalid(
            f"truncate_prompt_tokens is {digits(truncate)}; it must be from 1 to {most}, or -1 for {most}",
            "truncate_prompt_tokens",
        )
    return truncate


async def vectors(
    context: ModelContext,
    texts: Sequence[TextTokens],
    operation: str,
    *,
    salt: str | None = None,
    priority: int = 0,
    timeout: float | None = None,
) -> Vectors:
    """The vectors of texts, in their order. At most AT_ONCE are in the engine at a time. `timeout` is the request's, in
    seconds. Raises what the engine raises, and GenerationFailed for a text that failed; the others are then aborted."""
    deadline, first_token_deadline = deadlines(context, timeout, None)
    context.show({"model": context.model.name, "prompt_tokens": sum(len(text.ids) for text in texts)})
    found: list[bytes] = [b""] * len(texts)
    todo = iter(range(len(texts)))

    async def work() -> None:
        for i in todo:
            request = GenerateRequest(
                request_id=f"{context.id}-{i}",
                prompt_ids=texts[i].ids,
                sampling=SamplingParams(seed=0, max_tokens=1),
                pooling=PoolingParams(texts[i].second),
                cache_salt=context.salt(salt),
                tenant=context.tenant,
                priority=priority,
                behind=min(i, AT_ONCE - 1) * TEXT_SPACING,
                arrival=time.monotonic(),
                deadline=deadline,
                first_token_deadline=first_token_deadline,
            )
            found[i] = await _vector(context, request, operation)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(AT_ONCE, len(texts))):
                group.create_task(work())
    except* Exception as errors:
        raise _first(errors) from None
    context.metrics.request_finished(operation, time.monotonic() - context.start)
    return np.frombuffer(b"".join(found), np.float32).reshape(len(texts), -1)


async def _vector(context: ModelContext, request: GenerateRequest, operation: str) -> bytes:
    metrics, ended = context.metrics, False
    try:
        async with aclosing(cast(Any, context.model.client.generate(request))) as deltas:
            async for delta in deltas:
                if delta.error or not delta.pooled:
                    raise GenerationFailed(delta.error or "the engine aborted the request; send it again")
                ended = True
                metrics.request_prefilled(operation, len(request.prompt_ids), time.monotonic() - context.start)
                metrics.choice_finished(operation, "stop", 0, 0.0)
                if delta.timing is not None:
                    metrics.engine_timed(delta.timing)
                return bytes(delta.pooled)
    except RequestRejected:
        ended = True  # it never began
        raise
    finally:
        if not ended:
            metrics.choices_cut_short("abort", 1)
    raise GenerationFailed("the engine ended the request before it was complete; send it again")


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return cast(Exception, error)


async def encode_with_items(answer: dict[str, Any], field: str, count: int, width: int, items: Items) -> bytes:
    """Returns the JSON of `answer` with `count` items, of about `width` numbers each, in its list `field`, which is
    empty. Writes them in parts, and lets the event loop do other work in between: orjson holds the interpreter's lock
    for 26 ms to write 2048 vectors of 384 numbers."""
    key = b'"%b":[' % field.encode()
    head, _, tail = orjson.dumps(answer).partition(key + b"]")
    parts = [head, key]
    each = max(_NUMBERS_AT_ONCE // width, 1)
    for start in range(0, count, each):
        if start:
            parts.append(b",")
            await asyncio.sleep(0)
        made = items(range(start, min(start + each, count)))
        parts.append(orjson.dumps(made, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1])
    return b"".join((*parts, b"]", tail))


def normalized(rows: Vectors) -> Vectors:
    """Vectors of length 1; one of zeros stays as it is."""
    length = np.linalg.norm(rows, axis=-1, keepdims=True)
    return cast(Vectors, rows / np.maximum(length, 1e-12))


def probabilities(logits: Vectors, activation: str) -> Vectors:
    """A classifier's scores, 0 to 1, of its logits."""
    if activation == "sigmoid":
        return cast(Vectors, 1.0 / (1.0 + np.exp(-logits)))
    grown = np.exp(logits - logits.max(-1, keepdims=True))
    return cast(Vectors, grown / grown.sum(-1, keepdims=True))


def token_usage(texts: Iterable[TextTokens]) -> dict[str, int]:
    count = sum(len(text.ids) for text in texts)
    return {"prompt_tokens": count, "total_tokens": count}


async def scores(
    context: ModelContext,
    pooling: PoolingFacts,
    pairs: Sequence[tuple[str, str]],
    params: tuple[str, str],
    *,
    cut: int | None,
    cut_second: int | None = None,
    timeout: float | None = None,
) -> tuple[list[float], dict[str, int]]:
    """How well the second text of each pair fits the first, and the usage: the score of a classifier with one label, 0
    to 1; or the cosine of two embeddings. `params` are the parameters that have the first texts and the second ones.
    `cut` and `cut_second`: see `encode_texts`."""
    if pooling.task == "classify":
        if len(pooling.labels) != 1:
            raise invalid(
                f"model {context.model.name!r} has {len(pooling.labels)} labels, and a score needs one; use /classify",
                "model",
                "model_not_supported",
            )
        texts = await encode_texts(context, pairs, params[1], cut=cut, cut_second=cut_second)
        found = await vectors(context, texts, "rerank", timeout=timeout)
        return probabilities(found, "sigmoid")[:, 0].tolist(), token_usage(texts)
    firsts = list(dict.fromkeys(first for first, _ in pairs))  # often one query for all documents
    seconds = [second for _, second in pairs]
    texts = await encode_texts(context, [(text, None) for text in firsts], params[0], cut=cut)
    texts += await encode_texts(context, [(text, None) for text in seconds], params[1], cut=cut, cut_second=cut_second)
    found = normalized(await vectors(context, texts, "rerank", timeout=timeout))
    row = dict(zip(firsts, found, strict=False))
    cosines = [float(row[first] @ second) for (first, _), second in zip(pairs, found[len(firsts) :], strict=True)]
    return cosines, token_usage(texts)


def wrong_task(context: ModelContext, wanted: str, instead: str) -> APIError:
    """The error for a model that gives other vectors than a route needs."""
    return invalid(f"model {context.model.name!r} {wanted}; use {instead}", "model", "model_not_supported")
