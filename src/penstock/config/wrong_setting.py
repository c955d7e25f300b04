"""Words for a setting that was given a wrong value, and for a setting that does not exist."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from penstock.config.sizes import without_unit

PREFIX = "PENSTOCK_"  # of environment variables
# Sources of settings, as errors name them.
COMMAND_LINE = "command line"
LIBRARY = "argument of LLM"


def flag(name: str) -> str:
    """Returns the command line flag of a setting."""
    return "--" + name.replace("_", "-")


def unknown(name: str, source: str, known: Iterable[str]) -> str:
    """Returns the error for a setting that does not exist. `source` says where it is."""
    spell = _speller(source)
    close = difflib.get_close_matches(name.lower(), list(known), n=1)
    what = f"{source}: there is no setting {spell(name)}"
    return f"{what}; did you mean {spell(close[0])}?" if close else f"{what}; penstock serve --help lists them"


def wanted(error: Mapping[str, Any], annotation: Any) -> str:
    """Returns what a setting takes, for one of pydantic's errors about it: "give a whole number from 0 to 65535"."""
    kind, accepted = str(error["type"]), list(_parts(annotation))
    if choices := next((get_args(part) for part in accepted if get_origin(part) is Literal), ()):
        *most, last = choices
        return f"give {', '.join(most)} or {last}"
    if kind == "value_error":  # of a check of ours
        return _lower(str(error["msg"]).removeprefix("Value error, "))
    if bool in accepted:
        return "give true or false"
    if kind == "string_too_short":
        return "it is empty; give a value, or leave it out"
    if kind.startswith("string"):
        return "give a text"
    if int in accepted or float in accepted:
        return f"give {_range(accepted)}{without_unit(error.get('input')) if int in accepted else ''}"
    return _lower(str(error["msg"]))


def _range(accepted: list[Any]) -> str:
    least, above, most = (
        next((found for part in accepted if (found := getattr(part, name, None)) is not None), None)
        for name in ("ge", "gt", "le")
    )
    what = "a whole number" if int in accepted else "a number"
    start = f" above {above:g}" if above is not None else f" from {least}" if least is not None else ""
    end = f" {'up' if above is not None or least is None else ''} to {most}" if most is not None else ""
    return what + start + end.replace("  ", " ")


def _parts(annotation: Any) -> Iterator[Any]:
    """The types, and the limits, that an annotation is made of."""
    yield annotation
    if get_origin(annotation) is Literal:
        return
    for part in get_args(annotation):
        yield from _parts(part)
    for part in getattr(annotation, "metadata", ()):
        yield from _parts(part)


def _speller(source: str) -> Any:
    """How a setting is written where it was found: as a flag, an argument, a variable or a key."""
    if source.startswith("environment"):
        return lambda name: PREFIX + name.upper()
    if source == COMMAND_LINE:
        return flag
    if source == LIBRARY:
        return str
    return lambda name: name.replace("_", "-")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
