"""Markdown while it streams: what it looks like, that no text is lost, and that nothing controls the terminal."""

import re

from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.chat.markdown import MAX_SPAN, MarkdownStream
from penstock.cli.chat.safe_text import one_line, printable
from penstock.cli.chat.wrap import columns

OURS = re.compile(r"\x1b\[[0-9;]*m")  # only colours, never the cursor
MARKS = ["**", "*", "`", "```", "#", "-", "1.", ">", "|", "word", "x", "2**8", "längeres", "中文", "é", "."]
OTHERS = (" ", "    ", "\n", "\n\n", "```py\n", "~~~\n", "---\n", "a" * 30, "\x1b[2J", "\t")
PIECES = st.lists(st.sampled_from((*MARKS, *OTHERS)), max_size=40)


def render(*pieces: str, width: int = 60) -> str:
    stream = MarkdownStream(width)
    return "".join(stream.push(piece) for piece in pieces) + stream.finish()


def plain(text: str) -> str:
    return OURS.sub("", text)


def test_blocks() -> None:
    shown = render("\n\n## Title\ntext\n- one\n  * two\n3. three\n> said\n***\n```python\nx = `1` ** 2\n```\nend")
    assert plain(shown).splitlines() == [
        *("Title", "text", "• one", "  • two", "3. three", "│ said", "─" * 40),
        *("── python ──────────────────────────────", "x = `1` ** 2", "─" * 40, "end"),
    ]
    assert "\x1b[1;36mTitle\x1b[0m" in shown and "\x1b[36mx = `1` ** 2\x1b[0m" in shown


def test_spans() -> None:
    assert render("a **b** `c` **d `e`**.") == ("a \x1b[1mb \x1b[0m\x1b[36mc \x1b[0m\x1b[1md \x1b[0m\x1b[36me\x1b[0m.")


def test_marks_without_a_partner_stay() -> None:
    for text in (
        "2**8 and 3**2",
        "the **kwargs and *args",
        "a ` b",
        "**",
        "** no **",
        "#hashtag",
        "5 * 3 * 2",
        "``` x ``` y `",
    ):
        assert plain(render(text)) == text.replace("``` x ```", "x"), text
    assert plain(render("**" + "a" * MAX_SPAN + "**", width=0)) == "**" + "a" * MAX_SPAN + "**"


def test_text_appears_as_soon_as_it_is_clear() -> None:
    stream = MarkdownStream(80)
    assert [stream.push(piece) for piece in ("The", " cap", "ital ", "**of", " it", "**", ".")] == [
        *("The", " cap", "ital", "", "", ""),
        " \x1b[1mof it\x1b[0m.",
    ]


def test_lines_break_between_words() -> None:
    shown = plain(render("- " + "word " * 40)).splitlines()
    assert len(shown) > 2 and all(len(line) <= 60 for line in shown)
    assert all(line.startswith("  word") for line in shown[1:])
    assert all(sum(map(columns, line)) <= 60 for line in plain(render("中文" * 50)).splitlines())
    code = "x = " + "1 + " * 40 + "1"
    assert code in plain(render(f"```\n{code}\n```"))  # to be copied


@given(PIECES, st.integers(48, 90))
def test_how_text_is_cut_changes_nothing(pieces: list[str], width: int) -> None:
    text = "".join(pieces)
    expected = render(text, width=width)
    assert render(*pieces, width=width) == expected
    assert render(*text, width=width) == expected


@given(PIECES)
def test_no_text_is_lost(pieces: list[str]) -> None:
    """Apart from marks, and from spaces where lines break."""
    text = "".join(pieces)
    assert _letters(plain(render(text))) == _letters(printable(text))


def _letters(text: str) -> str:
    return "".join(char for char in text if char.isalnum())


@given(st.text() | PIECES.map("".join))
def test_nothing_controls_the_terminal(text: str) -> None:
    shown = plain(render(*text))
    assert not [char for char in shown if char != "\n" and (ord(char) < 32 or 127 <= ord(char) < 160)]


def test_controls_become_visible() -> None:
    assert printable("a\x1b[31mb\x07\r\n\x9b2J\x7f") == "a␛[31mb␇\n\N{REPLACEMENT CHARACTER}2J␡"
    assert one_line("a\n\x1bb  c") == "a ␛b c" and one_line("x" * 100, 10) == "x" * 9 + "…"
