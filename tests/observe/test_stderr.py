"""Standard error that nobody reads."""

import logging
import os
import time

import pytest

from penstock.observe.stderr import StderrHandler
from tests.patience import AT_ONCE


def logger_to(handler: StderrHandler) -> logging.Logger:
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.Logger("unread", logging.INFO)
    log.addHandler(handler)
    return log


def read_until(descriptor: int, last: bytes) -> bytes:
    """What is read up to and including a line that ends so."""
    text = b""
    while not text.endswith(last):
        text += os.read(descriptor, 1 << 16)
    return text


def test_a_full_pipe_drops_lines_and_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    end, descriptor = os.pipe()
    handler = StderrHandler(descriptor)
    log = logger_to(handler)
    monkeypatch.setattr(logging.getLogger("penstock.log"), "handlers", [handler])
    began = time.monotonic()
    for i in range(20_000):
        log.info("%05d %s", i, "x" * 93)
    assert time.monotonic() - began < AT_ONCE
    assert os.get_blocking(descriptor)  # the flag is not ours to change
    written = 20_000 - handler.dropped
    assert 1 << 20 < written * 100 < 1_200_000
    text = read_until(end, b"full\n")
    *lines, last = text.decode().splitlines()
    assert lines == [f"{i:05d} {'x' * 93}" for i in range(written)]
    assert last == f"{handler.dropped} log lines were dropped: standard error was full"
    log.info("and on")
    assert os.read(end, 100) == b"and on\n"
    os.close(end)
    log.info("to nobody")  # is no error
    os.close(descriptor)


def test_a_slow_reader_loses_nothing() -> None:
    end, descriptor = os.pipe()
    handler = StderrHandler(descriptor)
    log = logger_to(handler)
    for i in range(5_000):
        log.info("%05d %s", i, "y" * 93)
    log.info("end %s", "z" * 50_000)
    text = read_until(end, b"z\n")
    assert handler.dropped == 0
    assert text.count(b"\n") == 5_001 and text.endswith(b"z" * 50_000 + b"\n")
    os.close(end)
    os.close(descriptor)
