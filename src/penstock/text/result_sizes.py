"""Estimates the size of an operation's result before the operation runs. Templates use some operations whose result can
be much larger than their operands."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinja2.exceptions import TemplateError

_INTEGER_BITS = 4096  # limit for a product or power: no template needs larger integers, and their text would be long
_WIDE_FIELD = re.compile(r"\d{5,}|%[^a-zA-Z%]*\*|\{[^{}]*\{")  # a width of 10000 or more, or one that an argument sets

Measure = Callable[[tuple[Any, ...], Mapping[str, Any], int], int]


class TooLarge(TemplateError):
    def __init__(self, limit: int) -> None:
        super().__init__(f"it makes a value of more than {limit} characters or items, which is the limit")


def text_size(value: Any, limit: int) -> int:
    """Returns the approximate length of str(value). Raises TooLarge as soon as the count passes the limit.

    A list that holds the same list twice, nested many times, is small in memory but huge as text, so every occurrence
    counts. Each item counts at least eight characters, which keeps the walk to the limit short.
    """
    if isinstance(value, str):
        return _within(len(value), limit)
    total, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, Mapping):
            total += 16 * len(item)
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            total += 8 * len(item)
            waiting += item
        elif isinstance(item, int):
            total += 1 + item.bit_length() // 3
        else:
            total += 8
        _within(total, limit)
    return total


def operator_size(operator: str, left: Any, right: Any, limit: int) -> int:
    """Returns the size of `left operator right`, for + * ** and %."""
    if operator == "%" and isinstance(left, str | bytes):
        return _formatted((left, right), {}, limit)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        return _within(bits, _INTEGER_BITS)
    sized = [item for item in (left, right) if isinstance(item, str | bytes | list | tuple)]
    if operator == "+" and len(sized) == 2:
        return len(left) + len(right)
    if operator == "*" and len(sized) == 1:
        times = right if sized[0] is left else left
        return len(sized[0]) * int(times) if isinstance(times, int) else 0
    return 0


def materialise(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replaces generators, such as the result of `map`, by lists, because measuring would use them up."""
    return tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)


def _within(size: int, limit: int) -> int:
    if size > limit:
        raise TooLarge(limit)
    return size


def _printed(args: tuple[Any, ...], named: Mapping[str, Any], limit: int) -> int:
    return text_size(args[0], limit)


def _padded(args: tuple[Any, ...], named: Mapping[str, Any], limit: int) -> int:
    """Returns a bound for operations in which each line and each tab can grow by the other arguments: a number is a
    width, a text is inserted."""
    subject, *rest = args
    text = subject if isinstance(subject, str) else ""
    by = sum(abs(arg) if isinstance(arg, int) else text_size(arg, limit) for arg in [*rest, *named.values()])
    return text_size(subject, limit) + by * (1 + text.count("\n") + text.count("\t"))


def _multiplied(args: tuple[Any, ...], named: Mapping[str, Any], limit: int) -> int:
    """Returns a bound for operations in which each character can be replaced by all of the other arguments."""
    return text_size(args[0], limit) * (1 + text_size([*args[1:], *named.values()], limit))


def _replaced(args: tuple[Any, ...], named: Mapping[str, Any], limit: int) -> int:
    if len(args) < 3:
        return _multiplied(args, named, limit)
    text_size([*args[:3]], limit)
    texts: list[Any] = [arg if isinstance(arg, bytes) else str(arg) for arg in args[:3]]
    subject, old, new = texts
    more: int = subject.count(old) * max(0, len(new) - len(old))
    return len(subject) + more


def _joined(args: tuple[Any, ...], named: Mapping[str, Any], limit: int) -> int:
    items, separator = args[0], args[1] if len(args) > 1 else named.get("d", "")
    return text_size(items, limit) + len(items) * text_size(separator, limit)


def _joined_by(args: tuple[Any, ...], named: Mapping[str, Any], limit: int) -> int:
    return _joined((args[1], args[0]) if len(args) > 1 else ([], ""), named, limit)


def _formatted(args: tuple[Any, ...], named: Mapping[str, Any], limit: int) -> int:
    """Returns a bound for formatting: each field can show all other arguments, padded to a width of four digits."""
    pattern = args[0].decode("latin-1") if isinstance(args[0], bytes) else str(args[0])
    if _WIDE_FIELD.search(pattern):
        raise TemplateError("it formats a field to a width of 10000 or more, or to a computed width")
    fields = pattern.count("%") + pattern.count("{")
    return len(pattern) + fields * (text_size([*args[1:], *named.values()], limit) + pattern.count("0") * 1000)


def _as_json(args: tuple[Any, ...], named: Mapping[str, Any], limit: int) -> int:
    indent = args[2] if len(args) > 2 else named.get("indent")
    width = len(indent) if isinstance(indent, str) else int(indent or 0)
    return text_size(args[0], limit) * (1 + width)


def _number(args: tuple[Any, ...], named: Mapping[str, Any], limit: int) -> int:
    return max([abs(arg) for arg in [*args[1:], *named.values()] if isinstance(arg, int)], default=0)


# Methods of strings, bytes and integers; the first argument is the object itself.
METHODS: Mapping[str, Measure] = {
    "center": _padded,
    "expandtabs": _padded,
    "format": _formatted,
    "format_map": _formatted,
    "join": _joined_by,
    "ljust": _padded,
    "replace": _replaced,
    "rjust": _padded,
    "to_bytes": _number,
    "translate": _multiplied,
    "zfill": _padded,
}

FILTERS: Mapping[str, Measure] = {
    "batch": _number,
    "center": _padded,
    "format": _formatted,
    "indent": _padded,
    "join": _joined,
    "pprint": _printed,
    "replace": _replaced,
    "slice": _number,
    "string": _printed,
    "tojson": _as_json,
    "truncate": _padded,
    "wordwrap": _multiplied,
}
