"""What a setting is, and the kinds of values that settings have. config/settings.py reads and checks values."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple


class Kind(NamedTuple):
    """The type and range of a setting's values. Use the functions and constants below."""

    name: Literal["whole", "number", "size", "switch", "text", "list", "choice"]
    metavar: str  # of its flag
    # Limits of a number, or of the number of characters in a text.
    least: float | None = None
    above: float | None = None  # values must be larger than this
    most: float | None = None
    choices: tuple[str, ...] = ()
    one_way: bool = False  # a switch whose flag has no --no- form


def whole(least: int = 1, most: int = 2**31 - 1) -> Kind:
    """An integer from `least` to `most`."""
    return Kind("whole", "N", least=least, most=most)


def text(metavar: str, least: int = 1, most: int | None = None) -> Kind:
    """A text of `least` to `most` characters."""
    return Kind("text", metavar, least=least, most=most)


def choice(*values: str) -> Kind:
    """One of these texts."""
    return Kind("choice", "NAME", choices=values)


COUNT = whole()
RANKS = whole(1, 1024)
SECONDS = Kind("number", "SECONDS", above=0, most=86_400)
SIZE = Kind("size", "SIZE", least=1, most=2**50)  # bytes: 4GiB, 500MB or a number
SWITCH = Kind("switch", "")
ONE_WAY = Kind("switch", "", one_way=True)


class Setting(NamedTuple):
    name: str
    kind: Kind
    help: str  # without a full stop
    default: Any = None
    why: str = ""  # the reason for the default; "": config/defaults.py computes both
    words: str = ""  # the default in words, shown instead of the value
    more: str = ""  # follows `help` in docs/configuration.md, in Markdown: a link, or sentences
    secret: bool = False  # its value is never shown

    @property
    def default_in_words(self) -> str:
        """The default in Markdown; "" if there is none."""
        value = self.default
        if self.words or value in (None, "", ()):
            return self.words
        if isinstance(value, bool):
            return str(value).lower()
        if self.kind.name == "size":
            return f"{value >> 20}MiB"
        return f"{value:g}" if isinstance(value, float) else str(value) if isinstance(value, int) else f"`{value}`"

    @property
    def flag(self) -> str:
        """The name of its flag on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def flag_help(self) -> str:
        values = "" if len(self.kind.choices) > 6 else _any_of(self.kind.choices)
        default = self.default_in_words.replace("`", "")
        return f"{self.help}{values}." + (f" Default: {default}." if default not in ("", "false") else "")

    @property
    def row(self) -> str:
        """Its row in docs/configuration.md."""
        meaning = self.help + _any_of([f"`{value}`" for value in self.kind.choices])
        more = self.more and (f" ({self.more})" if self.more.startswith("[") else f". {self.more}")
        return f"| `{self.flag[2:]}` | {self.default_in_words or 'none'} | {meaning}{more} |"


def _any_of(values: Sequence[str]) -> str:
    return f": {', '.join(values[:-1])} or {values[-1]}" if values else ""
