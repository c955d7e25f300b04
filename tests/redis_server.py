"""A redis-server of a test's own. It needs Debian's package of the same name."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_port

redis = pytest.importorskip("redis")
needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="apt-get install redis-server")


class RedisServer:
    """A server whose data survives a kill."""

    def __init__(self, folder: Path) -> None:
        self.port, self._folder = free_port(), folder
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.Redis(port=self.port)
        self.start()

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        command += ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for _ in range(500):
            try:
                self.client.ping()
                return
            except redis.exceptions.RedisError:
                time.sleep(0.02)
        raise AssertionError("redis-server did not start")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)


def redis_servers(folder: Path) -> Iterator[RedisServer]:
    """Yields a server until the test is over; for a fixture."""
    made = RedisServer(folder)
    yield made
    made.stop()
