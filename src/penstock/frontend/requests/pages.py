"""Reads the query of a list, and writes a page of it, as OpenAI does."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import orjson

from penstock.frontend.errors import invalid

MAX_LIMIT = 100
_MAX_QUERY = 4096  # bytes
QUERY: dict[str, Any] = {  # the parameters as JSON Schemas
    "limit": {"type": "integer", "minimum": 1, "maximum": 10_000, "description": f"Above {MAX_LIMIT}: {MAX_LIMIT}"},
    "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string", "description": "The id of the item before the page"},
}


class Page(NamedTuple):
    """The part of a list that a request selects."""

    limit: int
    after: str  # the id of the item before the page; "": the page is the first one
    newest_first: bool
    others: dict[str, str]  # the other parameters


def read_page(query: bytes, *, limit: int = 20) -> Page:
    """Raises APIError 400 that names the parameter. `limit` is the default."""
    if len(query) > _MAX_QUERY:
        raise invalid(f"the query has {len(query)} bytes; the limit is {_MAX_QUERY}: shorten it")
    given = dict(parse_qsl(query.decode("latin-1"), max_num_fields=64))
    text, order, after = given.pop("limit", str(limit)), given.pop("order", "desc"), given.pop("after", "")
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= 10_000):
        raise invalid(f"limit is {text[:20]!r}; it must be a number from 1 to {MAX_LIMIT}", "limit")
    if order not in ("asc", "desc"):
        raise invalid(f"order is {order[:20]!r}; it must be asc or desc", "order")
    return Page(min(int(text), MAX_LIMIT), after, order == "desc", given)


def write_page(items: Sequence[dict[str, Any]], *, has_more: bool) -> bytes:
    ids = {"first_id": items[0]["id"] if items else None, "last_id": items[-1]["id"] if items else None}
    return orjson.dumps({"object": "list", "data": items, **ids, "has_more": has_more})


def page_shape(item: Any) -> Any:
    """The shape of a page of items of one shape (see `penstock.frontend.describe.json_schema`)."""
    return {"object": "list", "data": [item], "first_id": (str, None), "last_id": (str, None), "has_more": bool}
