"""HTTPS: the certificate is renewed under load without a failed request, and wrong files change nothing."""

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.certificates import Authority
from tests.e2e.server import Server, gauge, serving
from tests.patience import PATIENCE, wait_for

STREAMS = 24
FLAGS = ("--kv-cache-memory", "64MiB", "--max-num-seqs", "32")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


class Site:
    """A server, and the files of its certificate."""

    def __init__(self, server: Server, certificate: Path, key: Path) -> None:
        self.server, self.certificate, self.key = server, certificate, key

    def renew(self, certificate: bytes, key: bytes) -> None:
        """As certbot and cert-manager do it: a new file takes the place of the old one."""
        for path, content in ((self.certificate, certificate), (self.key, key)):
            path.with_suffix(".new").write_bytes(content)
            os.replace(path.with_suffix(".new"), path)

    def serial(self, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> int:
        """The serial number that a new connection sees."""
        context = ssl.create_default_context(cafile=str(self.server.ca))  # type: ignore[attr-defined]
        context.maximum_version = version
        with (
            socket.create_connection(("127.0.0.1", self.server.port), 20) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            found = connection.getpeercert()
            assert found is not None
            return int(str(found["serialNumber"]), 16)

    def logged(self, text: str) -> int:
        return self.server.log.read_text().count(text)


@pytest.fixture(scope="module")
def site(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    for path, content in zip((certificate, key), authority.sign(1, "rsa"), strict=True):
        path.write_bytes(content)
    flags = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    with serving(folder / "log", *FLAGS, *flags, context=authority.context) as server:
        server.ca = authority.file  # type: ignore[attr-defined]
        yield Site(server, certificate, key)


class Load:
    """Streams without end on connections that stay open, and a new connection for each of other requests."""

    def __init__(self, site: Site) -> None:
        self.failures: list[str] = []
        self.streamed = self.asked = 0
        self._site = site
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._stream) for _ in range(STREAMS)]
        self._threads += [threading.Thread(target=self._ask) for _ in range(2)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _stream(self) -> None:
        body = {"prompt": "def f", "max_tokens": 40, "ignore_eos": True, "stream": True}
        server = self._site.server
        with httpx.Client(verify=server.context or True, timeout=PATIENCE) as client:
            while not self._stop.is_set():
                try:
                    with client.stream("POST", server.url + "/v1/completions", json=body) as answer:
                        lines = [line for line in answer.iter_lines() if line]
                    texts = [json.loads(line[6:]) for line in lines[:-1]]
                    assert answer.status_code == 200 and lines[-1] == "data: [DONE]" and "error" not in texts[-1]
                    self.streamed += 1
                except Exception as error:
                    self.failures.append(repr(error))

    def _ask(self) -> None:
        while not self._stop.is_set():
            try:
                assert self._site.server.get("/v1/models").status_code == 200
                self.asked += 1
            except Exception as error:
                self.failures.append(repr(error))


def test_renewed_twice_under_load(site: Site, authority: Authority) -> None:
    assert site.serial() == 1
    with Load(site) as load:
        wait_for(lambda: load.failures or (load.streamed and load.asked), "the first answers")
        site.renew(*authority.sign(2, "ec"))  # found by looking
        wait_for(lambda: site.serial() == 2, "the second certificate")
        site.renew(*authority.sign(3, "rsa"))
        site.server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: site.serial() == 3, "the third certificate")
        site.server.process.send_signal(signal.SIGHUP)  # a look reads no files that are the same
        wait_for(lambda: site.logged("was renewed: serial 3") >= 2, "the same certificate again")
        streamed, asked = load.streamed, load.asked
        wait_for(
            lambda: load.failures or (load.streamed >= streamed + STREAMS and load.asked > asked + 10),
            "answers afterwards",
        )
    assert load.failures == []
    # No key of an earlier certificate is left for clients that would prefer it.
    assert {site.serial(version) for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)} == {3}
    assert site.logged("the TLS certificate was renewed: serial 2, valid until") == 1
    metrics = site.server.get("/metrics").text
    assert 80000 < gauge(metrics, "penstock_tls_certificate_not_after_seconds") - time.time() < 90000


def test_a_wrong_pair_is_one_line_and_changes_nothing(site: Site, authority: Authority) -> None:
    serial, (certificate, key) = site.serial(), authority.sign(9)
    site.renew(certificate, authority.sign(10)[1])
    wait_for(lambda: site.logged("was not renewed") == 1, "the line")
    assert site.logged(f"--tls-key {site.key} is not the key of --tls-certificate {site.certificate}") == 1
    time.sleep(2.5)  # looked at twice
    assert site.logged("was not renewed") == 1 and site.serial() == serial
    site.renew(certificate, key)
    wait_for(lambda: site.serial() == 9, "the certificate with its key")


def test_the_answer_to_a_body_that_is_too_large_arrives(site: Site) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    context = ssl.create_default_context(cafile=str(site.server.ca))  # type: ignore[attr-defined]
    with (
        socket.create_connection(("127.0.0.1", site.server.port), 20) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall(head + b"Content-Length: 1000000000\r\n\r\n" + b" " * (1 << 16))
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 413 ") and b"body_too_large" in answer


def test_http_on_the_port_is_closed_and_others_go_on(site: Site) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{site.server.port}/livez", timeout=20)
    assert site.server.get("/livez").status_code == 200


def test_the_log_names_the_address_and_the_certificate(site: Site) -> None:
    assert re.search(r"TLS certificate: serial 1, valid until \d{4}-\d\d-\d\d", site.server.log.read_text())
    assert site.logged(f"on {site.server.url}, ready") == 1


@pytest.mark.parametrize("command", [("top", "{}", "--once"), ("reload", "{}"), ("bench", "serve", "--url", "{}")])
def test_commands_say_what_to_do_about_a_certificate(site: Site, command: tuple[str, ...]) -> None:
    """And about an address of the other scheme."""

    def said(url: str) -> str:
        words = [sys.executable, "-m", "penstock", *(word.format(url) for word in command)]
        environment = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    untrusted = said(site.server.url)
    assert "cannot be verified" in untrusted and "set SSL_CERT_FILE" in untrusted
    assert "https://" in said(site.server.url.replace("https:", "http:"))


def test_bench_trusts_the_authority_that_the_environment_names(site: Site, authority: Authority) -> None:
    command = [sys.executable, "-m", "penstock", "bench", "serve", "--url", site.server.url]
    numbers = ["--num-prompts", "2", "--input-len", "4", "--output-len", "2", "--vocab-size", "100"]
    environment = {**os.environ, "SSL_CERT_FILE": str(authority.file)}
    done = subprocess.run([*command, *numbers], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
