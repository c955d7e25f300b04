"""POST /api/pull and DELETE /api/delete: act on the models of the machine if the server allows it.

Create, copy and push are refused.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import orjson

from penstock.frontend.call import RequestContext
from penstock.frontend.errors import APIError, invalid
from penstock.frontend.http.asgi import Answer, StreamedAnswer
from penstock.frontend.ollama.codec import NDJSON
from penstock.frontend.ollama.models import read_model
from penstock.frontend.ollama.options import bare_name
from penstock.frontend.store import ModelStore

_LINE_SECONDS = 0.2  # between two lines of progress
_HOW = "start the server with --manage-models"


async def pull(body: bytes, context: RequestContext) -> Answer | StreamedAnswer:
    """Downloads a model from the hub. Success at once for a served one. Raises APIError 403 if the server does not
    allow it."""
    fields, name = read_model(body)
    streams = fields.stream is not False
    if _not_served(context, name) is None:
        return _success(streams)
    store = context.store
    if store is None:
        message = f"this server does not pull models; {_HOW}, or run penstock pull {name[:200]}"
        raise APIError(403, message, param="model")
    download = _ModelDownload(store, bare_name(name))
    if streams:
        return StreamedAnswer(download.lines(), NDJSON)
    try:
        await download.running
    except ValueError as error:
        raise invalid(str(error), "model") from None
    finally:
        download.stop()
    return _success(streams)


async def delete(body: bytes, context: RequestContext) -> Answer:
    """Removes a model from the cache. Raises APIError 403 for a served one, and 404 for one that is not there or if
    the server deletes none."""
    _, name = read_model(body)
    missing = _not_served(context, name)
    if missing is None:
        served = context.models.find(bare_name(name)).model.name
        raise APIError(403, f"model {served!r} is in use; stop the server, then run penstock rm", param="model")
    if context.store is None:
        raise missing
    stored = bare_name(name)
    models = await asyncio.to_thread(context.store.models)
    if all(stored not in (model.name, model.name.partition(":")[0]) for model in models):
        raise APIError(404, f"model {name[:200]!r} is not on this machine", param="model", code="model_not_found")
    try:
        await asyncio.to_thread(context.store.remove, stored)
    except ValueError as error:
        raise APIError(403, str(error), param="model") from None
    return Answer(b"")


async def create(body: bytes, context: RequestContext) -> bytes:
    """Refuses to make a model. Raises APIError 403 that says what to do instead."""
    raise APIError(403, "this server creates no models: penstock serve takes a folder or a GGUF file, and its settings")


async def copy(body: bytes, context: RequestContext) -> bytes:
    """Refuses to copy a model. Raises APIError 403 that says what to do instead."""
    raise APIError(403, "this server copies no models: --served-model-name NAME,NAME gives a model several names")


async def push(body: bytes, context: RequestContext) -> bytes:
    """Refuses to upload a model. Raises APIError 403 that says what to do instead."""
    raise APIError(403, "this server uploads no models: use the command hf upload of huggingface_hub")


def _not_served(context: RequestContext, name: str) -> APIError | None:
    """Returns the error for a model that is not served, None if it is."""
    try:
        context.models.find(bare_name(name))
    except APIError as error:
        return error
    return None


class _ModelDownload:
    """A download on a thread, which ends with the answer at the latest."""

    def __init__(self, store: ModelStore, name: str) -> None:
        self._digest = hashlib.sha256(name.encode()).hexdigest()
        self._done = self._total = 0
        self._stopped = False
        self.running = asyncio.create_task(asyncio.to_thread(store.pull, name, self._watch))
        self.running.add_done_callback(lambda task: task.cancelled() or task.exception())  # its error may never be read

    async def lines(self) -> AsyncIterator[bytes]:
        """Yields the lines of an answer: what Ollama's clients show as progress, then success or an error."""
        try:
            yield _line({"status": "pulling manifest"})
            shown = -1
            while not self.running.done():
                await asyncio.wait((self.running,), timeout=_LINE_SECONDS)
                if self._total and self._done != shown:
                    shown = self._done
                    yield _line(self._progress(shown))
            self.running.result()
            if self._total:
                yield _line(self._progress(self._total))
            yield _line({"status": "verifying sha256 digest"})
            yield _line({"status": "success"})
        except ValueError as error:
            yield _line({"error": str(error)})
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the download. Downloaded bytes stay, and the next pull goes on from there."""
        self._stopped = True

    def _progress(self, done: int) -> dict[str, Any]:
        digest = self._digest
        fields = {"status": f"pulling {digest[:12]}", "digest": f"sha256:{digest}", "total": self._total}
        return {**fields, "completed": done}

    def _watch(self, done: int, total: int) -> None:
        """Called by the thread."""
        if self._stopped:
            raise asyncio.CancelledError
        self._done, self._total = done, total


def _success(streams: bool) -> Answer:
    done = {"status": "success"}
    return Answer(_line(done), content_type=NDJSON) if streams else Answer(orjson.dumps(done))


def _line(fields: dict[str, Any]) -> bytes:
    return orjson.dumps(fields) + b"\n"
