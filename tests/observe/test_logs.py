"""Lines that machines and people can read, one an event."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from penstock.observe.logs import configure_logging


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Logging is the process's own: put back what a test configures."""
    root, ours = logging.getLogger(), logging.getLogger("penstock")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], level, our_level = before
    root.setLevel(level)
    ours.setLevel(our_level)


def test_json_lines() -> None:
    sink = io.StringIO()
    configure_logging("info", "json", sink)
    log = logging.getLogger("penstock.access")
    log.debug("not this")
    log.info("request %s", "done", extra={"fields": {"status": 200, "request_id": "a\nb"}})
    try:
        raise ZeroDivisionError("a bug")
    except ZeroDivisionError:
        log.exception("failed")
    first, second = map(json.loads, sink.getvalue().splitlines())
    assert first["ts"].endswith("+00:00")
    expected = {
        "level": "info",
        "process": "api",
        "logger": "penstock.access",
        "message": "request done",
        "status": 200,
    }
    assert expected.items() <= first.items()
    assert first["request_id"] == "a\nb"
    assert "ZeroDivisionError: a bug" in second["exception"]


def test_text_lines_cannot_be_forged_by_a_value() -> None:
    sink = io.StringIO()
    configure_logging("debug", "text", sink)
    logging.getLogger("penstock").debug("request", extra={"fields": {"status": 200, "id": "a b\n12:00:00 INFO forged"}})
    (line,) = sink.getvalue().splitlines()
    assert line.endswith('DEBUG request status=200 id="a b\\n12:00:00 INFO forged"')


def test_libraries_are_heard_from_warnings_on() -> None:
    sink = io.StringIO()
    configure_logging("info", "text", sink)
    logging.getLogger("uvicorn.error").info("chatter")
    logging.getLogger("uvicorn.error").warning("trouble")
    assert sink.getvalue().count("\n") == 1


def test_a_level_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="'loud' does not exist"):
        configure_logging("loud")
