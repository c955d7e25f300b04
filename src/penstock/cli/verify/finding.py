"""The result of one check of a model."""

from typing import Literal

import msgspec

Status = Literal["ok", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """The result of a check. `remedy` is what to change, unless the status is "ok"."""

    check: str
    status: Status
    found: str
    remedy: str = ""
