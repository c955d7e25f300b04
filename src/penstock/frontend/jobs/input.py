"""Reads the lines of a batch's input file, in constant memory."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from typing import Any

from penstock.frontend.errors import APIError
from penstock.frontend.http.json_scan import JsonScan
from penstock.frontend.jobs.lines import read_line
from penstock.frontend.limits import RequestLimits
from penstock.frontend.storage.content import read_chunks
from penstock.frontend.storage.database import Database

_MAX_ERRORS = 20  # that a batch shows

Lines = list[tuple[int, bytes]]  # with their numbers, from 1


class InputError(Exception):
    """The lines of an input file that are wrong, as a batch shows them."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__(errors[0]["message"])
        self.errors = errors


async def read_lines(storage: Database, file_id: str, limits: RequestLimits) -> AsyncGenerator[Lines, None]:
    """Yields the lines that are not empty, some at a time. Raises InputError if a line is too long."""
    rest, number = b"", 0
    async for chunk in read_chunks(storage, file_id):
        # In a thread, as a chunk may be 262,144 lines.
        lines, rest, count = await asyncio.to_thread(_split, rest + chunk, number, limits.max_batch_line_bytes)
        yield lines
        number += count
    if rest.strip():
        yield [(number + 1, rest)]


def _split(text: bytes, number: int, most: int) -> tuple[Lines, bytes, int]:
    """The lines after line `number` that are not empty, the begin of the next one, and the count of all lines. Raises
    InputError for a line of more than `most` bytes."""
    *whole, rest = text.split(b"\n")
    if len(text) > most:
        place = next((i for i, line in enumerate((*whole, rest), 1) if len(line) > most), 0)
        if place:
            message = f"the line has more than {most} bytes, the limit; shorten the request"
            raise InputError([_error(number + place, "line_too_long", message)])
    return [(number + i, line) for i, line in enumerate(whole, 1) if line and line.strip()], rest, len(whole)


async def check_input(storage: Database, file_id: str, endpoint: str, limits: RequestLimits) -> int:
    """Checks every line. Returns how many requests there are. Raises InputError."""
    seen: set[bytes] = set()
    errors: list[dict[str, Any]] = []

    def check(lines: Lines) -> None:
        for number, line in lines:
            try:
                JsonScan(limits).feed(line)
                custom_id = read_line(line, (endpoint,)).custom_id
            except (ValueError, APIError) as error:
                message = error.message if isinstance(error, APIError) else str(error)
                errors.append(_error(number, "invalid_line", message))
                continue
            digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
            if digest in seen:
                message = f"custom_id {custom_id[:100]!r} was used before; make it unique"
                errors.append(_error(number, "duplicate_custom_id", message))
            seen.add(digest)
            if len(seen) > limits.max_batch_requests:
                message = f"the file has more than {limits.max_batch_requests} requests, the limit; divide it"
                raise InputError([_error(number, "too_many_requests", message)])

    async for lines in read_lines(storage, file_id, limits):
        await asyncio.to_thread(check, lines)
        if len(errors) >= _MAX_ERRORS:
            break
    if errors:
        raise InputError(errors[:_MAX_ERRORS])
    if not seen:
        raise InputError([_error(None, "empty_file", "the file has no requests; write one JSON object a line")])
    return len(seen)


def _error(line: int | None, code: str, message: str) -> dict[str, Any]:
    return {"code": code, "line": line, "message": message, "param": None}
