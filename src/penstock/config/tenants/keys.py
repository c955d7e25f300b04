"""API keys of tenants: psk-ID-SECRET.

The file has a key's id and the salted hash of its secret. A secret has 256 random bits, so no one can guess it from a
fast hash. A slow hash would only cost time at every request.
"""

import hashlib
import hmac
import re
import secrets

_PREFIX = "psk-"
_KEY = re.compile(rb"psk-([0-9a-f]{12})-([A-Za-z0-9_-]{43})")
HASH = re.compile(r"sha256:[0-9a-f]{32}:[0-9a-f]{64}")
ID = re.compile(r"[0-9a-f]{12}")


def new_key() -> tuple[str, str, str]:
    """Return a new key, its id and its hash."""
    key_id, secret, salt = secrets.token_hex(6), secrets.token_urlsafe(32), secrets.token_hex(16)
    return f"{_PREFIX}{key_id}-{secret}", key_id, f"sha256:{salt}:{_digest(salt, secret.encode())}"


def key_id(key: bytes) -> str | None:
    """Return the id in a key; None if it is not of this form."""
    found = _KEY.fullmatch(key)
    return None if found is None else found[1].decode()


def matches(key: bytes, stored: str) -> bool:
    """Return whether a key of the right form has this hash. The time says nothing about the secret."""
    _, salt, digest = stored.split(":")
    found = _KEY.fullmatch(key)
    return found is not None and hmac.compare_digest(_digest(salt, found[2]), digest)


def _digest(salt: str, secret: bytes) -> str:
    return hashlib.sha256(bytes.fromhex(salt) + secret).hexdigest()
