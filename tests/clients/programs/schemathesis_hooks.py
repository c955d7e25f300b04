"""Hooks of schemathesis: every second request names what the server has, so that it gets past the check of the name.

KNOWN: names and ids that the server has, as JSON, by the name of a path's parameter, or by the path up to it and the
name.
"""

import itertools
import json
import os
from typing import Any

import schemathesis

_KNOWN: dict[str, str] = json.loads(os.environ["KNOWN"])
_count = itertools.count()


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    if next(_count) % 2:
        return
    for name in case.path_parameters or {}:
        place = case.path.split("{")[0] + name
        if case.method != "DELETE" and (known := _KNOWN.get(place, _KNOWN.get(name))):
            case.path_parameters[name] = known
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = _KNOWN["model"]
