"""The server's TLS certificate, which may be renewed while it serves."""

import asyncio
import contextlib
import logging
import os
import ssl
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

LOOK_SECONDS = 1.0  # between looks at the files
MAX_BYTES = 1 << 20  # of a file

_log = logging.getLogger("penstock.tls")


class WrongCertificate(ValueError):
    """The files of the certificate cannot be used. The message is one line that names the file."""


class Certificate(NamedTuple):
    """The certificate at the head of a chain."""

    serial: int
    not_after: float  # seconds since the epoch

    def __str__(self) -> str:
        return f"serial {self.serial:x}, valid until {datetime.fromtimestamp(self.not_after, UTC):%Y-%m-%d %H:%M} UTC"


class TLS:
    """The certificate and its key, read from PEM files. Connections that begin after `reload` get what it read."""

    def __init__(self, certificate: str, key: str = "") -> None:
        """`key` is the file of the private key, by default the certificate's file. Raises WrongCertificate."""
        self._files = (certificate, key or certificate)
        self._seen = self._signature()
        self._changed = self._seen
        self._current, self.certificate, self.pems = self._load()
        self.context = _context()
        # Every connection begins with this context, and gets the current one in its handshake. A renewal makes a whole
        # context: one that is loaded again would keep an RSA certificate beside one for ECDSA.
        self.context.sni_callback = self._choose

    def reload(self) -> None:
        """Reads the files again. If they cannot be used, the certificate stays, and a line of the log says why."""
        self._seen = self._changed = self._signature()
        try:
            self._current, self.certificate, self.pems = self._load()
        except (WrongCertificate, OSError) as error:  # an OSError: no descriptor or memory is left
            _log.error(
                "the TLS certificate was not renewed, and the one in use stays (%s): %s", self.certificate, error
            )
        else:
            _log.info("the TLS certificate was renewed: %s", self.certificate)

    async def watch(self) -> None:
        """Reloads whenever the files have changed, and have then stayed the same for LOOK_SECONDS. Never returns."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.to_thread(self._look)

    def _look(self) -> None:
        now, before = self._signature(), self._changed
        self._changed = now
        if now != self._seen and now == before:
            self.reload()

    def _signature(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Returns a signature for each file, which differs when the file has changed. None: the file is not there."""
        found: list[tuple[int, int, int] | None] = []
        for file in self._files:
            try:
                status = os.stat(file)
            except OSError:
                found.append(None)
            else:
                found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(found)

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._current

    def _load(self) -> tuple[ssl.SSLContext, Certificate, tuple[bytes, bytes]]:
        """The context, the certificate, and the contents of both files."""
        chain, key = (_read(flag, file) for flag, file in zip(("certificate", "key"), self._files, strict=True))
        certificate = _certificate(chain, self._files[0])
        context = _context()
        # Both are read once, so that the key is that of this certificate even if the files change in between.
        with _in_memory(chain) as chain_file, _in_memory(key) as key_file:
            try:
                context.load_cert_chain(chain_file, key_file, password=_refuse_password)
            except (ssl.SSLError, _Encrypted) as error:
                raise WrongCertificate(_explain(error, *self._files)) from None
        return context, certificate, (chain, key)


class _Encrypted(Exception):
    """A key can only be read with a password."""


def _refuse_password() -> str:
    raise _Encrypted


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _read(flag: str, file: str) -> bytes:
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise WrongCertificate(f"--tls-{flag} {file} is not a file; name a PEM file")
            text = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise WrongCertificate(f"--tls-{flag} {file} cannot be read: {error.strerror}; name a PEM file") from None
    if len(text) > MAX_BYTES:
        raise WrongCertificate(f"--tls-{flag} {file} has more than {MAX_BYTES >> 20} MiB; name a PEM file")
    return text


def _explain(error: Exception, certificate: str, key: str) -> str:
    if isinstance(error, _Encrypted):
        return f"--tls-key {key} is encrypted; remove its password: openssl pkey -in {key} -out FILE"
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return f"--tls-key {key} is not the key of --tls-certificate {certificate}; name the files that belong together"
    reason = getattr(error, "reason", None) or str(error)
    return f"--tls-key {key} holds no private key for {certificate} in PEM ({reason}); name the key's file"


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """A file that no other process sees."""
    descriptor = os.memfd_create("pem")
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _certificate(chain: bytes, file: str) -> Certificate:
    """The first certificate of a PEM file."""
    begin, end = chain.find(ssl.PEM_HEADER.encode()), chain.find(ssl.PEM_FOOTER.encode())
    try:
        der = ssl.PEM_cert_to_DER_cert(chain[begin : end + len(ssl.PEM_FOOTER)].decode("ascii").strip())
        return _parse(der)
    except (ValueError, IndexError, StopIteration):
        raise WrongCertificate(f"--tls-certificate {file} holds no certificate in PEM; name its file") from None


def _parse(der: bytes) -> Certificate:
    """Serial and end of a certificate (RFC 5280, 4.1). Other bytes raise ValueError, IndexError or StopIteration."""
    ((_, signed),) = _values(der)
    _, fields = next(_values(signed))
    body = list(_values(fields))
    if body[0][0] == 0xA0:  # the version
        del body[0]
    (_, serial), (_, validity) = body[0], body[3]
    kind, end = list(_values(validity))[1]
    text = end.decode("ascii")
    if kind == 0x17:  # UTCTime: the year has two digits
        text = ("19" if text >= "50" else "20") + text
    moment = datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
    return Certificate(int.from_bytes(serial, signed=True), moment.timestamp())


def _values(der: bytes) -> Iterator[tuple[int, bytes]]:
    """The tags and contents of values in DER, one behind the other."""
    at = 0
    while at < len(der):
        tag, size = der[at], der[at + 1]
        at += 2
        if size & 0x80:
            count = size & 0x7F
            size = int.from_bytes(der[at : at + count])
            at += count
        yield tag, der[at : at + size]
        at += size
