"""/v1/batches: files of requests that are answered in the background."""

import time
from typing import Annotated, Any

import msgspec
import orjson

from penstock.frontend.batches.files import SHORTEST, expiry
from penstock.frontend.call import RequestContext
from penstock.frontend.errors import APIError, invalid
from penstock.frontend.http.body import decode
from penstock.frontend.jobs.lines import PATHS
from penstock.frontend.requests.metadata import check_metadata
from penstock.frontend.requests.pages import read_page, write_page
from penstock.frontend.storage import batches, files
from penstock.frontend.storage.database import storage_of

_WINDOW = 24 * 3600  # seconds
_OPEN = ("validating", "in_progress")


class ExpiryFields(msgspec.Struct, forbid_unknown_fields=True):
    anchor: Annotated[str, msgspec.Meta(extra_json_schema={"const": "created_at"})]
    seconds: Annotated[int, msgspec.Meta(extra_json_schema={"minimum": SHORTEST})]


class BatchFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters of POST /v1/batches."""

    input_file_id: str
    endpoint: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(PATHS)})]
    completion_window: Annotated[str, msgspec.Meta(extra_json_schema={"const": "24h"})]
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiryFields | None = None


async def create_batch(body: bytes, context: RequestContext) -> bytes:
    """Begins a batch. Raises APIError that names the parameter."""
    fields = decode(BatchFields, body)
    storage = storage_of(context.storage)
    if fields.endpoint not in PATHS:
        shown = fields.endpoint[:60]
        raise invalid(f"endpoint is {shown!r}; it must be one of {', '.join(PATHS)}", "endpoint")
    if fields.completion_window != "24h":
        raise invalid('completion_window must be "24h"', "completion_window")
    ends = fields.output_expires_after
    kept_until = expiry(
        None if ends is None else ends.anchor, None if ends is None else ends.seconds, "output_expires_after", context
    )
    batch = _new(fields, check_metadata(fields.metadata), context, kept_until)
    expires = batch["created_at"] + int(context.limits.storage_seconds)

    def add(connection: Any) -> None:
        file = files.find(connection, context.tenant, fields.input_file_id, "input_file_id")
        if file.purpose != "batch":
            message = f'the file {file.id} has the purpose {file.purpose!r}; upload it with purpose "batch"'
            raise invalid(message, "input_file_id")
        batches.add(connection, context.tenant, batch, expires, context.limits)

    await storage.run(add)
    context.wake_batches()
    return orjson.dumps(batches.shown(batch))


async def list_batches(body: bytes, context: RequestContext) -> bytes:
    """The batches of the key, the newest first. Raises APIError 400 or 404 that names the parameter."""
    page = read_page(context.query)
    found = await storage_of(context.storage).run(lambda db: batches.page_of(db, context.tenant, page))
    return write_page([batches.shown(batch) for batch in found[: page.limit]], has_more=len(found) > page.limit)


async def show_batch(body: bytes, context: RequestContext) -> bytes:
    """A batch and its counts. Raises APIError 404."""
    found = await storage_of(context.storage).run(lambda db: batches.find(db, context.tenant, context.path["id"]))
    return orjson.dumps(batches.shown(found))


async def cancel_batch(body: bytes, context: RequestContext) -> bytes:
    """Cancels a batch. The answers that exist by then are in its files. Raises APIError 404, or 409 for one that
    ended."""

    def cancel(connection: Any) -> batches.Fields:
        batch = batches.find(connection, context.tenant, context.path["id"])
        if batch["status"] in _OPEN:
            batch |= {"status": "cancelling", "cancelling_at": int(time.time())}
            batches.save(connection, batch)
        elif batch["status"] != "cancelling":
            message = f"the batch is {batch['status']}; only one that is not complete can be cancelled"
            raise APIError(409, message, code="batch_ended")
        return batch

    batch = await storage_of(context.storage).run(cancel, reserve=True)
    context.wake_batches()
    return orjson.dumps(batches.shown(batch))


def _new(fields: BatchFields, metadata: dict[str, str], context: RequestContext, kept_until: int) -> batches.Fields:
    times = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at")
    return {
        "id": f"batch_{context.id}",
        "object": "batch",
        "endpoint": fields.endpoint,
        "model": context.models.default.model.name,
        "errors": None,
        "input_file_id": fields.input_file_id,
        "completion_window": fields.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": context.created,
        "expires_at": context.created + _WINDOW,
        **dict.fromkeys((*times, "cancelled_at")),
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": metadata or None,
        "output": None,  # the files that are being written
        "errors_to": None,
        "owner": context.tenant,
        "kept_until": kept_until,
    }
