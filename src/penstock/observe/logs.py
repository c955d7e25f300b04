"""Formats logs as text or JSON, one line for each event. Lines hold names, codes, sizes and times, but no user text
beside the paths of requests."""

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from penstock.observe.stderr import StderrHandler

_OURS = "penstock"


LogFormat = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: ts (UTC), level, process, logger, message, the `fields` of `extra`, and
    exception."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process or "api",
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """Formats a record as text: `12:34:56 INFO message key=value ...`, the message after the name of the `process`."""

    def __init__(self, process: str = "") -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process + ': ' if process else ''}%(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        return " ".join([super().formatMessage(record), *(f"{key}={_word(value)}" for key, value in fields.items())])


def formatter(style: LogFormat, process: str = "") -> logging.Formatter:
    """The formatter of a process's log; without a name it is the API process's."""
    return JsonFormatter(process) if style == "json" else TextFormatter(process)


def configure_logging(
    level: str = "info", style: LogFormat = "text", stream: TextIO | None = None, process: str = ""
) -> Callable[[], int]:
    """Sends Penstock's logs and the libraries' warnings to `stream`, or to standard error without blocking. A command
    calls it once. Lines begin with the name of the `process` if it has one.

    Returns a function that gives the number of lines dropped because standard error was full.
    Raises ValueError if the level does not exist.
    """
    names = logging.getLevelNamesMapping()
    if level.upper() not in names:
        raise ValueError(f"log level {level!r} does not exist; choose one of debug, info, warning, error")
    sink: logging.Handler = StderrHandler() if stream is None else logging.StreamHandler(stream)
    sink.setFormatter(formatter(style, process))
    logging.basicConfig(level=logging.WARNING, handlers=[sink], force=True)
    logging.getLogger(_OURS).setLevel(names[level.upper()])
    return lambda: getattr(sink, "dropped", 0)


def _word(value: object) -> str:
    """A value as one word, so that a value with spaces or line ends cannot forge log fields or lines."""
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)
