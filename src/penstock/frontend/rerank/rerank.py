"""POST /rerank, /v1/rerank and /v2/rerank: documents in the order in which they fit a query.

Cohere and Jina write requests alike. Answers have the fields of both.
"""

from typing import Annotated, Any

import msgspec
import orjson

from penstock.frontend.call import RequestContext
from penstock.frontend.describe import NOT_EMPTY
from penstock.frontend.errors import digits, invalid
from penstock.frontend.http.body import decode
from penstock.frontend.requests.deadlines import check_timeout
from penstock.frontend.requests.pooling import check_count, cut_limit, pooling_of, scores


class TextDocument(msgspec.Struct):
    """A document as an object. Fields besides its text are ignored."""

    text: str


class RerankFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters of the three routes."""

    query: Annotated[str, NOT_EMPTY]
    documents: Annotated[list[str | TextDocument], NOT_EMPTY]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None  # Cohere's: documents are cut
    truncate_prompt_tokens: int | None = None  # vLLM's: query and document together are cut
    timeout: float | None = None  # seconds
    priority: int | None = None  # Cohere's: accepted without effect


async def rerank(body: bytes, context: RequestContext) -> bytes:
    """Answers a request in the shape of Jina and of Cohere's first version, with the documents unless it says not to.
    Raises APIError 400 or 404 that names the parameter."""
    return await _rerank(body, context, return_documents=True)


async def rerank_v2(body: bytes, context: RequestContext) -> bytes:
    """As `rerank`, but documents are not repeated unless the request says so, as in Cohere's second version."""
    return await _rerank(body, context, return_documents=False)


async def _rerank(body: bytes, context: RequestContext, *, return_documents: bool) -> bytes:
    fields = decode(RerankFields, body)
    context = await context.for_model(fields.model)
    pooling = pooling_of(context)
    check_timeout(fields.timeout, "timeout", context.limits.request_timeout)
    documents = [each if isinstance(each, str) else each.text for each in fields.documents]
    check_count(len(documents), "documents", context)
    if fields.top_n is not None and fields.top_n < 1:
        raise invalid(f"top_n is {digits(fields.top_n)}; it must be 1 or more", "top_n")
    if not fields.query:
        raise invalid("query is empty; send at least one character", "query", "empty_prompt")
    pairs = [(fields.query, document) for document in documents]
    cut = cut_limit(-1 if fields.truncate_prompt_tokens is None else fields.truncate_prompt_tokens, context)
    if fields.max_tokens_per_doc is not None and fields.max_tokens_per_doc < 1:
        raise invalid(
            f"max_tokens_per_doc is {digits(fields.max_tokens_per_doc)}; it must be 1 or more", "max_tokens_per_doc"
        )
    found, usage = await scores(
        context,
        pooling,
        pairs,
        ("query", "documents"),
        cut=cut,
        cut_second=fields.max_tokens_per_doc,
        timeout=fields.timeout,
    )
    order = sorted(range(len(found)), key=lambda i: (-found[i], i))[: fields.top_n]
    with_documents = return_documents if fields.return_documents is None else fields.return_documents
    results: list[dict[str, Any]] = [
        {"index": i, "relevance_score": found[i], **({"document": {"text": documents[i]}} if with_documents else {})}
        for i in order
    ]
    return orjson.dumps(
        {
            "id": f"rerank-{context.id}",
            "model": context.model.name,
            "results": results,
            "usage": usage,
            "meta": {"api_version": {"version": "1" if return_documents else "2"}, "billed_units": {"search_units": 1}},
        }
    )
