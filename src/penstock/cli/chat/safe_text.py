"""Makes text safe to print: a terminal obeys control characters, and a model may write any."""

DELETE = 0x7F
_SHOWN = {code: chr(0x2400 + code) for code in range(0x20)}  # Unicode has a picture of each: ESC becomes ␛
_TABLE: dict[int, str | None] = {
    **_SHOWN,
    ord("\t"): "\t",
    ord("\n"): "\n",
    ord("\r"): None,  # it would go back to the start of the line
    DELETE: "\N{SYMBOL FOR DELETE}",
    **dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}"),  # C1: 0x9B begins a sequence as ESC [ does
}


def printable(text: str) -> str:
    """Returns `text` with a visible symbol for each control character, apart from tabs and line breaks.

    It works character by character, so a sequence that is cut between two calls is caught, too.
    """
    return text.translate(_TABLE)


def one_line(text: str, most: int = 80) -> str:
    """Returns the beginning of `text` on one line of at most `most` characters, safe to print."""
    line = " ".join(printable(text[: 4 * most]).split())
    return line if len(line) <= most else line[: most - 1] + "…"
