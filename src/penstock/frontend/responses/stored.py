"""GET and DELETE of stored responses."""

from collections.abc import AsyncIterator

import orjson

from penstock.frontend.call import RequestContext
from penstock.frontend.errors import APIError, invalid
from penstock.frontend.http.asgi import StreamedAnswer
from penstock.frontend.requests.pages import read_page, write_page
from penstock.frontend.storage import responses
from penstock.frontend.storage.database import storage_of

_PART = 64 << 10  # bytes


async def show_response(body: bytes, context: RequestContext) -> StreamedAnswer:
    """A stored response. Raises APIError 404, and 429 if too many bytes of them are being read."""
    return _in_parts((await _find(context)).response)


async def delete_response(body: bytes, context: RequestContext) -> bytes:
    """Deletes a stored response. Raises APIError 404."""
    response_id = context.path["id"]
    storage = storage_of(context.storage)
    return await storage.run(lambda db: responses.delete(db, context.tenant, response_id), reserve=True)


async def cancel_response(body: bytes, context: RequestContext) -> bytes:
    """Raises APIError 400: no response runs in the background. APIError 404 for one that is not stored."""
    await _size(context)
    raise invalid("only a response with background: true can be cancelled, and this server has none", "background")


async def list_input_items(body: bytes, context: RequestContext) -> StreamedAnswer:
    """The input items of a stored response, without those of the responses that it continues. Raises APIError."""
    page = read_page(context.query)
    items = orjson.loads((await _find(context)).input)
    if page.newest_first:
        items.reverse()
    if page.after:
        places = [i for i, item in enumerate(items) if item["id"] == page.after]
        if not places:
            raise APIError(404, f"there is no item {page.after[:100]!r}", param="after", code="not_found")
        items = items[places[0] + 1 :]
    return _in_parts(write_page(items[: page.limit], has_more=len(items) > page.limit))


async def _find(context: RequestContext) -> responses.Turn:
    context.hold(await _size(context))
    storage = storage_of(context.storage)
    return await storage.run(lambda db: responses.find(db, context.tenant, context.path["id"]))


async def _size(context: RequestContext) -> int:
    storage = storage_of(context.storage)
    return await storage.run(lambda db: responses.size_of(db, context.tenant, context.path["id"]))


def _in_parts(data: bytes) -> StreamedAnswer:
    """An answer that its reader takes in parts: it counts as a body until the last one is sent."""

    async def parts() -> AsyncIterator[bytes]:
        for begin in range(0, len(data), _PART):
            yield data[begin : begin + _PART]

    return StreamedAnswer(parts(), b"application/json", len(data), held=True)
