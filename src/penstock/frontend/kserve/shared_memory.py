"""Triton's extension for system shared memory: clients on the same machine pass tensors in regions of memory.

A region is a part of a file in /dev/shm. It is read and written as a file and never mapped: access to a mapping ends
the process with SIGBUS if a client has made its file shorter.
"""

import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import orjson

from penstock.frontend.call import RequestContext
from penstock.frontend.describe import NOT_EMPTY
from penstock.frontend.errors import APIError, invalid
from penstock.frontend.http.asgi import Answer
from penstock.frontend.http.body import decode
from penstock.frontend.kserve.generate import NO_REPOSITORY, repository_of
from penstock.messages.tensors import Bytes

FOLDER = Path("/dev/shm")
MAX_REGIONS = 1024
_MAX_NAME = 256  # characters of a region's name
_KEY = re.compile(r"/?(?!\.\.?$)[A-Za-z0-9_.-]{1,255}")  # as of shm_open: the name of a file in the folder
_OFF = "shared memory of clients is off; start the server with --client-shared-memory, or send the tensor's data"


class RegionFields(msgspec.Struct):
    """The body of a request to register a region. `offset` and `byte_size` are within the file."""

    key: Annotated[str, NOT_EMPTY]
    byte_size: Annotated[int, msgspec.Meta(ge=1, le=2**62)]
    offset: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0


class _Region:
    """A registered region, whose file is open until `close`."""

    def __init__(self, name: str, fields: RegionFields) -> None:
        """Raises APIError 400 for a file that is not in the folder, or ends before the region does."""
        if not _KEY.fullmatch(fields.key):
            raise invalid(f"key is {fields.key[:100]!r}; it must be the name of a file in {FOLDER}, as '/name'", "key")
        self.name, self.fields = name, fields
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # the last one: a FIFO must not block
        try:
            self.fd = os.open(FOLDER / fields.key.removeprefix("/"), flags)
        except OSError as error:
            raise invalid(
                f"Unable to open shared memory region: {fields.key!r}: {error.strerror}; create it first", "key"
            ) from None
        file = os.fstat(self.fd)
        if not stat.S_ISREG(file.st_mode) or file.st_size < fields.offset + fields.byte_size:
            self.close()
            raise invalid(
                f"shared memory region {name!r} would end at byte {fields.offset + fields.byte_size}, but the file "
                f"{fields.key!r} has {file.st_size} bytes; check offset and byte_size",
                "byte_size",
            )

    def close(self) -> None:
        """Closes the file. Requests that still use the region then fail."""
        os.close(self.fd)
        self.fd = -1


class SharedPart(NamedTuple):
    """The part of a region that holds a tensor."""

    region: _Region
    start: int  # within the file
    size: int

    def read(self) -> bytes:
        """Returns its bytes. Raises APIError 400 if the region is gone or its file has become shorter."""
        try:
            data = os.pread(self.region.fd, self.size, self.start)
        except OSError:
            data = b""
        if len(data) != self.size:
            raise self._gone()
        return data

    def write(self, name: str, data: Bytes) -> dict[str, Any]:
        """Writes an output, and returns the parameters of its answer. The file never becomes longer. Raises as
        `read`, and for an output that does not fit."""
        if len(data) > self.size:
            raise invalid(
                f"shared memory size specified with the request for output {name!r} ({self.size} bytes) should be at "
                f"least {len(data)} bytes to hold the results",
                "outputs",
            )
        try:
            fits = os.fstat(self.region.fd).st_size >= self.start + len(data)
            written = os.pwrite(self.region.fd, data, self.start) if fits else -1
        except OSError:
            written = -1
        if written != len(data):
            raise self._gone()
        offset = self.start - self.region.fields.offset
        of_region = {"shared_memory_region": self.region.name, "shared_memory_offset": offset}
        return of_region | {"shared_memory_byte_size": len(data)}

    def _gone(self) -> APIError:
        return invalid(
            f"shared memory region {self.region.name!r} has been unregistered, or its file has been made shorter; "
            "register it again"
        )


class ClientMemory:
    """The regions that clients have registered."""

    def __init__(self, most: int) -> None:
        """`most`: bytes of all regions together."""
        self._most = most
        self._regions: dict[str, _Region] = {}

    def register(self, name: str, fields: RegionFields) -> None:
        """Adds a region. Raises APIError 400 that names the limit."""
        if name in self._regions:
            raise invalid(f"shared memory region {name!r} already in manager; unregister it first", "name")
        if not 1 <= len(name) <= _MAX_NAME or len(self._regions) >= MAX_REGIONS:
            raise invalid(f"a region has a name of 1 to {_MAX_NAME} characters; there may be {MAX_REGIONS}", "name")
        taken = sum(region.fields.byte_size for region in self._regions.values())
        if taken + fields.byte_size > self._most:
            raise invalid(
                f"byte_size is {fields.byte_size}, and regions with {taken} bytes are registered; the limit is "
                f"{self._most} (--client-shared-memory): unregister others, or raise it",
                "byte_size",
            )
        self._regions[name] = _Region(name, fields)

    def unregister(self, name: str | None) -> None:
        """Removes a region, if it is there; None: all."""
        for each in list(self._regions) if name is None else [name]:
            if (region := self._regions.pop(each, None)) is not None:
                region.close()

    def show(self, name: str | None) -> list[dict[str, Any]]:
        """Returns the facts of a region; None: of all. Raises APIError 400 for one that is not there."""
        found = self._regions.values() if name is None else [self._find(name)]
        return [{"name": each.name, **msgspec.structs.asdict(each.fields)} for each in found]

    def part(self, name: Any, offset: Any, size: Any) -> SharedPart:
        """Returns a part of a region. Raises APIError 400."""
        region = self._find(name)
        end = region.fields.byte_size
        if not isinstance(offset, int) or not isinstance(size, int) or not 0 <= offset <= offset + size <= end:
            raise invalid(
                f"Invalid offset + byte size for shared memory region: {region.name!r} has {end} bytes, the request "
                f"has shared_memory_offset {offset!r:.40} and shared_memory_byte_size {size!r:.40}",
                "parameters",
            )
        return SharedPart(region, region.fields.offset + offset, size)

    def _find(self, name: Any) -> _Region:
        region = self._regions.get(name) if isinstance(name, str) else None
        if region is None:
            raise invalid(f"Unable to find shared memory region: {str(name)[:100]!r}; register it first", "parameters")
        return region


def shared_part(memory: ClientMemory | None, parameters: Mapping[str, Any]) -> SharedPart | None:
    """Returns the part of a region that a tensor's parameters name; None if they name none. Raises APIError 400."""
    name = parameters.get("shared_memory_region")
    if not name:
        return None
    if memory is None:
        raise invalid(_OFF, "parameters.shared_memory_region", "unsupported_parameter")
    return memory.part(name, parameters.get("shared_memory_offset", 0), parameters.get("shared_memory_byte_size"))


def check_size(parts: Iterable[SharedPart | None], most: int) -> None:
    """Raises APIError 400 if the inputs of a request would be larger than a body may be."""
    size = sum(part.size for part in parts if part is not None)
    if size > most:
        raise invalid(
            f"the inputs in shared memory have {size} bytes; the limit is {most} (--max-body-size): send fewer rows",
            "inputs",
        )


async def show_memory(body: bytes, context: RequestContext) -> bytes:
    """The regions that are registered, or the one in the path. Raises APIError 400 and 403."""
    memory = _memory(context)
    return orjson.dumps([] if memory is None else memory.show(context.path.get("region")))


async def register_memory(body: bytes, context: RequestContext) -> Answer:
    """Registers a region. Raises APIError 400 and 403."""
    memory, fields = _memory(context), decode(RegionFields, body)
    if memory is None:
        raise invalid(NO_REPOSITORY if context.models.tensors is None else _OFF)
    memory.register(context.path["region"], fields)
    return Answer(b"")


async def unregister_memory(body: bytes, context: RequestContext) -> Answer:
    """Removes the region in the path, or all. Raises APIError 403."""
    memory = _memory(context)
    if memory is not None:
        memory.unregister(context.path.get("region"))
    return Answer(b"")


async def show_cuda_memory(body: bytes, context: RequestContext) -> bytes:
    """No regions: memory of a GPU is not shared. Clients show and unregister it before they begin."""
    return b"[]"


async def register_cuda_memory(body: bytes, context: RequestContext) -> Answer:
    """Raises APIError 400."""
    raise invalid("shared memory of a GPU is not supported; register system shared memory instead")


def _memory(context: RequestContext) -> ClientMemory | None:
    """The regions, for the operator. Raises APIError 403."""
    repository_of(context)
    return context.models.memory
