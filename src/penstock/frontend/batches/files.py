"""/v1/files: files of requests, and of the answers of batches."""

import time
from collections.abc import AsyncIterator
from typing import Any

import orjson

from penstock.frontend.batches.multipart import FormPart, read_boundary, read_form
from penstock.frontend.call import RequestContext
from penstock.frontend.errors import APIError, invalid
from penstock.frontend.http.asgi import StreamedAnswer
from penstock.frontend.requests.pages import read_page, write_page
from penstock.frontend.storage import files
from penstock.frontend.storage.content import read_chunks, remove
from penstock.frontend.storage.database import Database, storage_of

PURPOSES = ("batch", "user_data")
_MAX_FIELD = 256  # bytes
_MAX_NAME = 255  # characters
SHORTEST = 3600  # seconds until a file expires
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


async def create_file(chunks: AsyncIterator[bytes], context: RequestContext) -> bytes:
    """Stores a file while it arrives. Raises APIError."""
    storage = storage_of(context.storage)
    content_type = next((value for name, value in context.headers if name == b"content-type"), b"")
    upload = _Upload(storage, context)
    try:
        async for event in read_form(chunks, read_boundary(content_type)):
            if isinstance(event, FormPart):
                await upload.begin(event)
            else:
                await upload.add(event)
        return orjson.dumps((await upload.complete()).shown())
    finally:
        await upload.discard()


async def list_files(body: bytes, context: RequestContext) -> bytes:
    """The files of the key, the newest first. Raises APIError 400 or 404 that names the parameter."""
    page = read_page(context.query, limit=100)
    found = await storage_of(context.storage).run(lambda db: files.page_of(db, context.tenant, page))
    return write_page([file.shown() for file in found[: page.limit]], has_more=len(found) > page.limit)


async def show_file(body: bytes, context: RequestContext) -> bytes:
    """A file's name and size. Raises APIError 404."""
    return orjson.dumps((await _find(context)).shown())


async def show_content(body: bytes, context: RequestContext) -> StreamedAnswer:
    """A file's content. Raises APIError 404."""
    file = await _find(context)
    chunks = read_chunks(storage_of(context.storage), file.id)
    # Never a type that a browser would show as a page of this server.
    return StreamedAnswer(chunks, b"application/octet-stream", file.bytes, {"x-content-type-options": "nosniff"})


async def delete_file(body: bytes, context: RequestContext) -> bytes:
    """Deletes a file. Raises APIError 404."""
    file = await _find(context)
    await remove(storage_of(context.storage), file.id)
    return orjson.dumps({"id": file.id, "object": "file", "deleted": True})


def expiry(anchor: Any, seconds: Any, param: str, context: RequestContext) -> int:
    """When a file expires, in seconds since the epoch. None, None: after the server's time. Raises APIError 400."""
    most = int(context.limits.storage_seconds)
    if anchor is None and seconds is None:
        return int(time.time()) + most
    if anchor != "created_at":
        raise invalid(f'{param}.anchor must be "created_at"', f"{param}.anchor")
    if not isinstance(seconds, int) or not SHORTEST <= seconds <= most:
        shown = str(seconds)[:20]
        raise invalid(f"{param}.seconds is {shown}; it must be from {SHORTEST} to {most}", f"{param}.seconds")
    return int(time.time()) + seconds


async def _find(context: RequestContext) -> files.StoredFile:
    return await storage_of(context.storage).run(lambda db: files.find(db, context.tenant, context.path["id"]))


class _Upload:
    """A form that arrives: fields of a few bytes, and one file, which goes to the storage in chunks."""

    def __init__(self, storage: Database, context: RequestContext) -> None:
        self._storage = storage
        self._context = context
        self._fields: dict[str, bytes] = {}
        self._field = ""  # that arrives; "": the file does
        self._name = ""
        self._id: str | None = None
        self._buffer = bytearray()
        self._chunks = 0
        self._size = 0

    async def begin(self, part: FormPart) -> None:
        if part.name == "file" and part.filename is not None:
            if self._id is not None:
                raise invalid("the form has more than one file; send each in a request of its own", "file")
            if not 0 < len(part.filename) <= _MAX_NAME:
                count = len(part.filename)
                raise invalid(f"the file's name has {count} characters; it must have 1 to {_MAX_NAME}", "file")
            self._field, self._name = "", part.filename
            owner, expires = self._context.tenant, expiry(None, None, "", self._context)
            self._id = await self._storage.run(lambda db: files.begin(db, owner, self._name, "", expires))
        elif part.name in _FIELDS and part.filename is None:
            self._field = part.name
            self._fields[part.name] = b""
        elif part.name == "file":
            raise invalid('the part "file" has no filename; send it as a file: filename="..."', "file")
        else:
            known = ", ".join(("file", *_FIELDS))
            raise invalid(f"unknown parameter {part.name[:60]!r}; the form has {known}", part.name[:60])

    async def add(self, data: bytes) -> None:
        if self._field:
            self._fields[self._field] += data
            if len(self._fields[self._field]) > _MAX_FIELD:
                raise invalid(f"{self._field} has more than {_MAX_FIELD} bytes, the limit", self._field)
            return
        self._size += len(data)
        most = self._context.limits.max_file_bytes
        if self._size > most:
            message = f"the file has more than {most} bytes, the limit; divide it"
            raise APIError(413, message, param="file", code="file_too_large", close=True)
        self._buffer += data
        while len(self._buffer) >= files.CHUNK:
            await self._store(files.CHUNK)

    async def complete(self) -> files.StoredFile:
        """Raises APIError 400 if the form lacks something."""
        if self._id is None:
            raise invalid("file is missing; send a part with a name and a filename", "file", "missing_parameter")
        if self._buffer:
            await self._store(len(self._buffer))
        texts = {name: value.decode("utf-8", "replace") for name, value in self._fields.items()}
        purpose = texts.get("purpose")
        if purpose not in PURPOSES:
            shown = "missing" if purpose is None else repr(purpose[:40])
            raise invalid(f"purpose is {shown}; it must be {' or '.join(PURPOSES)}", "purpose")
        seconds = texts.get("expires_after[seconds]")
        number = int(seconds) if seconds and seconds.isascii() and seconds.isdigit() and len(seconds) < 12 else seconds
        expires = expiry(texts.get("expires_after[anchor]"), number, "expires_after", self._context)
        file_id, name = self._id, self._name
        file = await self._storage.run(lambda db: files.complete(db, file_id, name, purpose, expires))
        self._id = None
        return file

    async def discard(self) -> None:
        """Deletes what has arrived of a file that is not complete."""
        if (file_id := self._id) is not None:
            await remove(self._storage, file_id)

    async def _store(self, size: int) -> None:
        data, file_id, number = bytes(self._buffer[:size]), self._id, self._chunks
        assert file_id is not None
        await self._storage.run(lambda db: files.append(db, file_id, number, data))
        self._chunks += 1
        del self._buffer[:size]
