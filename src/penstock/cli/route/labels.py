"""Reads labels: requests with what both models' answers were worth."""

from pathlib import Path
from typing import Any

import msgspec

MOST_BYTES = 1 << 28  # of a file of labels
MOST_LABELS = 100_000


class Label(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request, and the quality and cost of its answers. Any units will do, if they are the same for both models."""

    request: dict[str, Any]  # the body, as clients send it
    small: float  # quality of the small model's answer, such as 1 for right and 0 for wrong
    large: float
    small_cost: float = 0.0
    large_cost: float = 1.0
    logprob: float | None = None  # mean of the first tokens of the small answer, for a cascade


def read_labels(path: str) -> list[Label]:
    """Returns the labels of a file of JSON lines. Raises ValueError that names the line."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"LABELS {path} cannot be read: {reason}; name a file of JSON lines") from None
    lines = data.splitlines()
    if len(data) > MOST_BYTES or len(lines) > MOST_LABELS:
        raise ValueError(f"LABELS {path} has more than {MOST_LABELS} lines or {MOST_BYTES} bytes; make it shorter")
    decoder, labels = msgspec.json.Decoder(Label), []
    for number, line in enumerate(lines, 1):
        try:
            labels.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(f"LABELS {path}, line {number}: {error}; see docs/gateway.md for its form") from None
    if not labels:
        raise ValueError(f"LABELS {path} is empty; give at least one label")
    return labels
