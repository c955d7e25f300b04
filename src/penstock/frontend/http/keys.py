"""The API keys of a server, and the names of their holders."""

import hashlib
import logging
from pathlib import Path
from typing import NamedTuple, Protocol

from penstock.config.texts import check_key
from penstock.frontend.tenants.grant import Grant, tenant_id

_MAX_BYTES = 1 << 20  # of a file of keys
_MAX_NAME = 64  # characters
_log = logging.getLogger("penstock.server")


class Holder(NamedTuple):
    """Who sends a key."""

    tenant: str  # owns what is stored; "" without keys
    name: str = ""  # in the log; "" if the key has none
    grant: Grant | None = None  # None: the server has no tenants file

    @property
    def admin(self) -> bool:
        """True if the key may use the operator's routes."""
        return self.grant is not None and self.grant.key is not None and self.grant.key.admin


class Keys(Protocol):
    @property
    def required(self) -> bool:
        """False if requests without a key are answered."""

    @property
    def tenants(self) -> list[str]:
        """All that may own something."""

    def holder(self, key: bytes) -> Holder | None:
        """Returns the holder of a key; None if it is not valid. b"" is no key."""

    def reload(self) -> None:
        """Reads the keys again. If they cannot be read, they stay as they are."""


class ApiKeys:
    """The keys that clients may send. None is required if there is none."""

    def __init__(self, key: str | None = None, file: str = "") -> None:
        """`key` is one without a name. `file` names a file of more; "": there is none. Raises ValueError, which names
        the line."""
        self._file = file
        self._key = key
        self._holders = self._read()

    @property
    def required(self) -> bool:
        return bool(self._holders)

    @property
    def tenants(self) -> list[str]:
        """All that may own something; "" if no key is required."""
        return sorted({holder.tenant for holder in self._holders.values()}) or [""]

    def holder(self, key: bytes) -> Holder | None:
        """Returns the holder of a key, or None if it is not valid. Only digests are compared, so the time of a look-up
        says nothing about a key."""
        return Holder("") if not self._holders else self._holders.get(key_digest(key))

    def reload(self) -> None:
        """Reads the file again. If it cannot be used, a line of the log says why, and the keys stay as they are."""
        if not self._file:
            return
        try:
            self._holders = self._read()
        except ValueError as error:
            _log.error("the API keys stay as they are: %s", error)
        else:
            _log.info("%d API keys are valid, of %d holders", len(self._holders), len(self.tenants))

    def _read(self) -> dict[bytes, Holder]:
        """The holders by the digests of their keys."""
        found = {} if self._key is None else {key_digest(self._key.encode()): Holder(tenant_of(self._key))}
        for number, line in enumerate(_lines(self._file), 1):
            if not (words := line.split()) or line.lstrip().startswith("#"):
                continue
            where = f"--api-key-file {self._file}, line {number}"
            if len(words) > 2 or (len(words[0]) > _MAX_NAME and len(words) == 2):
                raise ValueError(f"{where}: give a key, or a name of at most {_MAX_NAME} characters and a key")
            *named, key = words
            try:
                check_key(key)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            digest = key_digest(key.encode())
            if digest in found:
                raise ValueError(f"{where}: the key is there already; give each line a key of its own")
            found[digest] = Holder(tenant_id(named[0]), named[0]) if named else Holder(tenant_of(key))
        if self._file and not found:
            raise ValueError(f"--api-key-file {self._file} has no key; give one a line, or leave the setting out")
        return found


def tenant_of(key: str | None) -> str:
    """The name of a key's holder, which owns what is stored. "" without keys."""
    return "" if key is None else key_digest(key.encode()).hex()[:16]


def key_digest(key: bytes) -> bytes:
    """Returns what is kept of a key, and compared."""
    return hashlib.sha256(key).digest()


def _lines(file: str) -> list[str]:
    if not file:
        return []
    try:
        with Path(file).open("rb") as opened:
            data = opened.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ValueError(f"--api-key-file {file} is larger than {_MAX_BYTES} bytes; give fewer keys")
        return data.decode().splitlines()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"--api-key-file {file} cannot be read: {reason}; name a file of keys") from None
    except UnicodeDecodeError:
        raise ValueError(f"--api-key-file {file} is not UTF-8 text; give one key a line") from None
