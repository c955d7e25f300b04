"""Reads YAML that people write: a bounded file, and errors of one line that name the place."""

import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_PLACE = re.compile(r" - at `\$\.?(?P<place>[^`]*)`$")


def read_yaml_text(path: Path, most: int, named: str) -> str:
    """Returns the text of a YAML file of at most `most` bytes. `named` is what errors call it.

    Raises ValueError if it cannot be read, is too large or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"{named} cannot be read: {reason}; name a YAML file") from None
    if len(data) > most:
        raise ValueError(f"{named} has more than {most} bytes; make it shorter")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{named} is not UTF-8 text: {error.reason} at byte {error.start}; save it as UTF-8") from None


def read_yaml(path: Path, most: int, named: str) -> Any:
    """Returns what a YAML file says, None for an empty one. Raises ValueError, as `read_yaml_text` and `parse_yaml`."""
    return parse_yaml(read_yaml_text(path, most, named), named)


def parse_yaml(text: str, named: str) -> Any:
    """Returns what a YAML text says, None for an empty one. Raises ValueError, which names the line."""
    import yaml  # takes a while to import, and most servers read no YAML

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f"{named}, line {mark.line + 1}" if mark is not None else named
        raise ValueError(f"{where}: not valid YAML: {problem or 'it is nested too deeply'}") from None


def convert_yaml(content: Any, kind: type[T], named: str) -> T:
    """Returns what a YAML text said as a struct. Raises ValueError that names the place and what is wrong there."""
    try:
        return msgspec.convert({} if content is None else content, kind)
    except msgspec.ValidationError as error:
        found = _PLACE.search(str(error))
        place = "" if found is None else _named(found["place"], error, content, kind)
        where = f", at {place}" if place else ""
        what = _PLACE.sub("", str(error)).replace("`", "")
        what = re.sub("^Object contains unknown field (.*)", r"there is no field '\1'; correct or remove it", what)
        what = what.replace("Invalid RFC3339 encoded date", "it is no day; give one such as 2026-11-01")
        raise ValueError(f"{named}{where}: {what[:1].lower()}{what[1:]}") from None


def _named(place: str, error: msgspec.ValidationError, content: Any, kind: type) -> str:
    """Returns the place of an error, with the name of an entry of a mapping where msgspec says `[...]`."""
    field, dots, rest = place.partition("[...]")
    entries = content.get(field) if dots and isinstance(content, dict) else None
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        try:
            msgspec.convert({**content, field: {name: entry}}, kind)
        except msgspec.ValidationError as same:
            if str(same) == str(error):
                return f"{field}.{name}{rest}"
    return place
