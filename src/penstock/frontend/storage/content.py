"""Reads and deletes the content of a file in constant memory."""

from collections.abc import AsyncIterator
from functools import partial

from penstock.frontend.storage import files
from penstock.frontend.storage.database import Database


async def read_chunks(storage: Database, file_id: str) -> AsyncIterator[bytes]:
    number = -1
    while (found := await storage.run(partial(files.next_chunk, file_id=file_id, after=number))) is not None:
        number, data = found
        yield data


async def remove(storage: Database, file_id: str) -> None:
    """Deletes a file. It is hidden from the first step on; if a step fails, the file is deleted later, as one that
    expired."""
    await storage.run(partial(files.hide, file_id=file_id), reserve=True)
    while await storage.run(partial(files.remove_part, file_id=file_id), reserve=True):
        pass
