"""GET and DELETE of stored responses."""

import orjson

from penstock.frontend.call import RequestContext
from penstock.frontend.errors import APIError, invalid
from penstock.frontend.requests.pages import read_page, write_page
from penstock.frontend.storage import responses
from penstock.frontend.storage.database import Database, storage_of


async def show_response(body: bytes, context: RequestContext) -> bytes:
    """A stored response. Raises APIError 404."""
    return (await _find(context)).response


async def delete_response(body: bytes, context: RequestContext) -> bytes:
    """Deletes a stored response. Raises APIError 404."""
    response_id = context.path["id"]
    storage = storage_of(context.storage)
    return await storage.run(lambda db: responses.delete(db, context.tenant, response_id), reserve=True)


async def cancel_response(body: bytes, context: RequestContext) -> bytes:
    """Raises APIError 400: no response runs in the background. APIError 404 for one that is not stored."""
    await _find(context)
    raise invalid("only a response with background: true can be cancelled, and this server has none", "background")


async def list_input_items(body: bytes, context: RequestContext) -> bytes:
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
    return write_page(items[: page.limit], has_more=len(items) > page.limit)


async def _find(context: RequestContext) -> responses.Turn:
    storage: Database = storage_of(context.storage)
    return await storage.run(lambda db: responses.find(db, context.tenant, context.path["id"]))
