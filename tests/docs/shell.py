"""Runs the commands of a page, one after the other, as a reader would type them.

The port of a server is changed to one that is free, in the command that starts it and in all that address it. A server
runs until the next one is started or the page ends.
"""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.docs.processes import SMALL, ExampleFailed, in_terminal, on_a_pipe
from tests.docs.servers import Servers, starts_server

_MAKES_ENGINE = re.compile(r"\bpenstock (serve|run|bench (throughput|latency|quality))\b")
# What a user types who waits until something appears. Other commands have no terminal.
_KEYS = (
    (re.compile(r"(?:\S*/)?penstock run\b[^|<]*"), b"\x04"),  # Ctrl-D
    (re.compile(r"penstock top\b(?!.*--once).*"), b"\x03"),  # Ctrl-C
    (re.compile(r"penstock rm\b.*"), b"y\n"),
)


class Shell:
    """Runs commands in one folder. Exported variables and `cd` last."""

    def __init__(self, folder: Path, environment: Mapping[str, str], servers: Servers) -> None:
        self.folder = folder
        self.environment = dict(environment)
        self.servers = servers
        self.logs = 0

    def python(self, code: str, interpreter: str = "python") -> None:
        """Runs a Python example. Raises ExampleFailed if it fails."""
        script = self.folder / "example.py"
        script.write_text(self.servers.addressed(code))
        self.finish([interpreter, str(script)])

    def run(self, command: str, *, fails: bool = False) -> None:
        """Runs a shell command. Raises ExampleFailed unless it ends with 0, or with another status if it `fails`."""
        if starts_server(command) and not fails:
            self.logs += 1
            self.servers.start(command, self.folder, self.environment, self.folder / f"server-{self.logs}.log")
        elif re.match(r"(export|unset|cd|source|\.) ", command):
            self.change(command)
        else:
            keys = next((keys for pattern, keys in _KEYS if pattern.fullmatch(command)), b"")
            self.finish(["bash", "-o", "pipefail", "-c", self.servers.addressed(command)], keys=keys, fails=fails)

    def change(self, command: str) -> None:
        """Runs a command that changes the shell itself."""
        done = subprocess.run(
            ["bash", "-c", f"{command}\npwd; env -0"],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ExampleFailed(done.stderr)
        folder, _, variables = done.stdout.partition("\n")
        self.folder = Path(folder)
        self.environment = dict(entry.split("=", 1) for entry in variables.split("\0") if "=" in entry)

    def finish(self, words: list[str], *, keys: bytes = b"", fails: bool = False) -> None:
        environment = self.environment
        if _MAKES_ENGINE.search(words[-1]):
            environment = {**SMALL, **environment}
        if keys:
            status, output = in_terminal(words, self.folder, environment, keys)
        else:
            status, output = on_a_pipe(words, self.folder, environment)
        if (status != 0) != fails:
            wanted = "an exit status other than 0" if fails else "0"
            raise ExampleFailed(f"ended with {status}, expected {wanted}:\n{output[-3000:]}")
