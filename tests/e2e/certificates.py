"""Certificates for 127.0.0.1 from an authority of the tests, made by openssl."""

import ssl
import subprocess
from pathlib import Path

KEYS = {"ec": ("ec", "-pkeyopt", "ec_paramgen_curve:P-256"), "rsa": ("rsa:2048",)}


class Authority:
    """Signs certificates; `context` trusts them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.file = folder / "authority.pem"
        self._key = folder / "authority.key"
        new = ("req", "-x509", "-newkey", *KEYS["ec"], "-nodes", "-days", "2", "-subj", "/CN=authority")
        _openssl(*new, "-keyout", self._key, "-out", self.file)
        self.context = ssl.create_default_context(cafile=str(self.file))

    def sign(self, serial: int, kind: str = "ec") -> tuple[bytes, bytes]:
        """A certificate and its key, in PEM."""
        names = [self._folder / f"{serial}.{kind}" for kind in ("key", "csr", "pem", "ext")]
        key, request, certificate, extensions = names
        extensions.write_text("subjectAltName=IP:127.0.0.1\n")
        _openssl("req", "-newkey", *KEYS[kind], "-nodes", "-keyout", key, "-out", request, "-subj", "/CN=penstock")
        signer = ("-CA", self.file, "-CAkey", self._key, "-set_serial", serial, "-days", "1", "-extfile", extensions)
        _openssl("x509", "-req", "-in", request, *signer, "-out", certificate)
        return certificate.read_bytes(), key.read_bytes()


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
