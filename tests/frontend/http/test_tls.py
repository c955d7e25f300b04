"""Wrong files of a certificate: one line that names the file."""

import os
import subprocess
from pathlib import Path

import pytest

from penstock.frontend.http.tls import MAX_BYTES, TLS, WrongCertificate
from tests.e2e.certificates import Authority


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two certificates with their keys, and files that are something else."""
    folder = tmp_path_factory.mktemp("files")
    authority = Authority(folder)
    for name, serial in (("one", 255), ("other", 2)):
        certificate, key = authority.sign(serial)
        (folder / f"{name}.pem").write_bytes(certificate)
        (folder / f"{name}.key").write_bytes(key)
    (folder / "both.pem").write_bytes((folder / "one.key").read_bytes() + (folder / "one.pem").read_bytes())
    command = [
        "openssl",
        "pkey",
        "-in",
        folder / "one.key",
        "-aes256",
        "-passout",
        "pass:x",
        "-out",
        folder / "locked.key",
    ]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "garbage.pem").write_text("-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n")
    (folder / "text.pem").write_text("hello")
    (folder / "large.pem").write_bytes(bytes(MAX_BYTES + 1))
    os.mkfifo(folder / "fifo.pem")
    return folder


@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [
        ("none.pem", "one.key", "--tls-certificate .*none.pem cannot be read: No such file or directory"),
        ("one.pem", "none.key", "--tls-key .*none.key cannot be read"),
        ("one.pem", "other.key", "--tls-key .*other.key is not the key of --tls-certificate .*one.pem"),
        ("one.pem", "locked.key", "--tls-key .*locked.key is encrypted; remove its password"),
        ("one.pem", "text.pem", "--tls-key .*text.pem holds no private key"),
        ("one.pem", "", "--tls-key .*one.pem holds no private key"),
        ("text.pem", "one.key", "--tls-certificate .*text.pem holds no certificate"),
        ("garbage.pem", "one.key", "--tls-certificate .*garbage.pem holds no certificate"),
        ("one.key", "one.key", "--tls-certificate .*one.key holds no certificate"),
        ("large.pem", "one.key", "has more than 1 MiB"),
        ("fifo.pem", "one.key", "is not a file"),
        (".", "one.key", "cannot be read: Is a directory; name a PEM file"),
    ],
)
def test_wrong_files(folder: Path, certificate: str, key: str, words: str) -> None:
    with pytest.raises(WrongCertificate, match=words) as caught:
        TLS(str(folder / certificate), str(folder / key) if key else "")
    assert "\n" not in str(caught.value)


def test_certificate_and_key_in_one_file(folder: Path) -> None:
    found = TLS(str(folder / "both.pem")).certificate
    assert found.serial == 255 and str(found).startswith("serial ff, valid until 20")
    printed = subprocess.run(
        ["openssl", "x509", "-in", folder / "one.pem", "-noout", "-enddate", "-dateopt", "iso_8601"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert str(found).endswith(printed.partition("=")[2][:16] + " UTC")
