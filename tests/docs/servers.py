"""The servers of examples, on free ports, and what addresses them.

`make serve` runs `penstock serve`: it has been installed.
"""

import re
import shlex
import signal
import ssl
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from tests.docs.processes import PATIENCE, SMALL, ExampleFailed, kill
from tests.e2e.bound import bound
from tests.e2e.server import status
from tests.patience import wait_for
from tests.ports import free_port

PLAIN = "penstock serve"
SECURE = "penstock serve --tls-certificate fullchain.pem --tls-key privkey.pem"
PORT = "8000"
SHORT = {"PENSTOCK_MAX_MODEL_LEN": "1024"}  # for servers of text: an answer without max_tokens may be long

_SERVE = re.compile(r"(?:\S*/)?penstock serve\b")
_SERVES = re.compile(r"(?:\w+=\S+ +)*(?:(?:\S*/)?penstock|make) serve\b")
_MAKE = re.compile(r"\bmake serve\b(?: +ARGS=\"([^\"]*)\")?")
_PORT = re.compile(r"(--(?:grpc-)?port[ =])(\d+)")
_ADDRESS = re.compile(r"\b(127\.0\.0\.1|localhost|0\.0\.0\.0):(\d{2,5})\b")
_SECURE_ADDRESS = re.compile(r"\bhttps://(?:host:8443|llm\.example\.com)")  # of a server with SECURE
_TAKES_URL = re.compile(r"\bpenstock (?:bench serve|repository)\b(?!.*--url)", re.DOTALL)
_OPERATES = re.compile(r"\bpenstock (?:top|reload|sleep|wake)\b(?! +https?:)")


def starts_server(command: str) -> bool:
    return bool(_SERVES.match(command))


class Served:
    """A server of an example. `ports` has the free port that takes the place of each port in the page."""

    def __init__(self, command: str, folder: Path, environment: Mapping[str, str], log: Path) -> None:
        self.log, self.ports = log, dict[str, int]()
        command = _MAKE.sub(lambda found: f"penstock serve {found[1] or ''}", command).rstrip("& ")
        if not re.search(r"--port[ =]\d", command):
            command = _SERVE.sub(rf"\g<0> --port {PORT}", command)
        command = _PORT.sub(lambda found: f"{found[1]}{self._free(found[2])}", command)
        self.port = int(re.findall(r"--port[ =](\d+)", command)[0])
        command = _SERVE.sub(r"exec \g<0>", command)
        self.context = ssl.create_default_context(cafile=environment["SSL_CERT_FILE"]) if "--tls-" in command else None
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                bound(["bash", "-c", command]),
                cwd=folder,
                env={**environment, **SMALL, **({} if "minilm" in command else SHORT)},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        try:
            wait_for(self.is_ready, "the server to be ready")
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"{'http' if self.context is None else 'https'}://127.0.0.1:{self.port}"

    def is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise ExampleFailed(f"the server ended with {self.process.returncode}:\n{self.log.read_text()}")
        return status(f"{self.url}/readyz", self.context) == 200

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            kill(self.process)
            raise ExampleFailed(f"the server did not end on SIGTERM:\n{self.log.read_text()}") from None

    def _free(self, written: str) -> int:
        return self.ports.setdefault(written, free_port())


class Servers:
    """The servers that the commands of a page address. `shared`, by command, are there for all pages: each starts when
    a page first needs it."""

    def __init__(self, shared: Callable[[str], Served]) -> None:
        self._shared = shared
        self._own: Served | None = None  # until the next one starts or the page ends
        self._chosen: Served | None = None

    def start(self, command: str, folder: Path, environment: Mapping[str, str], log: Path) -> None:
        self.close()
        words = " ".join(shlex.split(command.replace("make", "penstock", 1), comments=True))
        if words in (PLAIN, SECURE):
            self._chosen = self._shared(words)
        else:
            self._own = self._chosen = Served(command, folder, environment, log)

    def close(self) -> None:
        own, self._own, self._chosen = self._own, None, None
        if own is not None:
            own.close()

    def addressed(self, text: str) -> str:
        """The text with the addresses of servers changed to those where they listen."""
        if _SECURE_ADDRESS.search(text):
            return _SECURE_ADDRESS.sub(self._shared(SECURE).url, text)
        if not any(pattern.search(text) for pattern in (_ADDRESS, _TAKES_URL, _OPERATES)):
            return text
        served = self._chosen or self._shared(PLAIN)
        text = _TAKES_URL.sub(rf"\g<0> --url {served.url}", text)
        text = _OPERATES.sub(rf"\g<0> {served.url}", text)
        return _ADDRESS.sub(
            lambda found: f"127.0.0.1:{served.ports[found[2]]}" if found[2] in served.ports else found[0], text
        )
