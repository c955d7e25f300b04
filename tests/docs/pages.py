"""Reads the examples of a Markdown page: shell and Python blocks, and the comments above them on how to run them.

An indented block, or a fenced one without a language, is shell. Text that is no command is fenced as `text` or another
language. A comment stands on its own line above a block:

    <!-- not run: needs a GPU -->                         the whole block
    <!-- not run "pip install": changes the machine -->   its commands that begin with these words
    <!-- fails "penstock serve": no such port -->         these commands end with an exit status other than 0
    <!-- first: penstock serve Qwen/Qwen3-0.6B -->        a command to run before the block, which readers do not see
    <!-- needs: litellm -->                               runs where place.py finds a Python that has this package
    <!-- part of: src/penstock/families/architectures.py -->   the block is no command: this file has its text
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELL = ("", "sh", "bash", "shell", "console")
PYTHON = ("python", "py")

_FENCE = re.compile(r"(?P<indent> {0,3})(?P<ticks>```+|~~~+)\s*(?P<language>[\w+-]*)")
_MARK = re.compile(
    r'<!--\s*(?P<kind>not run|fails|first|needs|part of)(?: "(?P<beginning>[^"]+)")?:\s*(?P<text>.+?)\s*-->'
)
_GENERATED = re.compile(r"<!-- (made by \S+|end) -->")  # around text that a program writes
_INDENT = "    "


@dataclass(frozen=True)
class Mark:
    """A comment above a block. Without `beginning` it is about the whole block."""

    kind: str  # as in the docstring of the module
    beginning: str
    text: str

    def is_about(self, command: str) -> bool:
        return command.startswith(self.beginning)


@dataclass(frozen=True)
class Block:
    """A block of a page. `line` is the number of its first line of code."""

    page: Path
    line: int
    language: str
    text: str
    marks: tuple[Mark, ...] = ()

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_shell(self) -> bool:
        return self.language in SHELL

    @property
    def runs(self) -> bool:
        is_part = any(mark.kind == "part of" for mark in self.marks)
        return (self.is_shell or self.language in PYTHON) and not is_part

    def mark(self, kind: str, command: str) -> Mark | None:
        """The mark of this kind that is about a command."""
        return next((mark for mark in self.marks if mark.kind == kind and mark.is_about(command)), None)

    def commands(self) -> list[str]:
        """The commands of a shell block, each with its continued lines; all of a Python block."""
        return list(_commands(self.text, self.language)) if self.is_shell else [self.text]


def pages() -> list[Path]:
    """The pages whose examples are run."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order. Raises AssertionError for a comment that looks like a mark and is none."""
    return _Reader(page).read()


@dataclass
class _Reader:
    page: Path
    found: list[Block] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def read(self) -> list[Block]:
        lines = self.page.read_text(encoding="utf-8").splitlines()
        at, in_list = 0, False
        while at < len(lines):
            line = lines[at]
            if fence := _FENCE.match(line):
                end = next(i for i in range(at + 1, len(lines) + 1) if lines[i].strip() == fence["ticks"])
                code = [text.removeprefix(fence["indent"]) for text in lines[at + 1 : end]]
                self.add(at + 2, fence["language"].lower(), code)
                at = end
            elif line.startswith(_INDENT) and not in_list and (at == 0 or self.ends_paragraph(lines[at - 1])):
                end = at
                while end < len(lines) and (lines[end].startswith(_INDENT) or not lines[end].strip()):
                    end += 1
                self.add(at + 1, "", [text.removeprefix(_INDENT) for text in lines[at:end]])
                at = end - 1
            elif _GENERATED.fullmatch(line.strip()):
                self.marks = []
            elif line.startswith("<!--"):
                self.marks.append(self.mark(line, at + 1))
            elif line.strip():
                self.marks = []
                in_list = bool(re.match(r"\s*([-*+]|\d+\.) ", line)) or (in_list and line.startswith(" "))
            at += 1
        return self.found

    def add(self, line: int, language: str, code: list[str]) -> None:
        self.found.append(Block(self.page, line, language, "\n".join(code).rstrip() + "\n", tuple(self.marks)))
        self.marks = []

    def mark(self, line: str, number: int) -> Mark:
        mark = _MARK.fullmatch(line.strip())
        assert mark, f"{self.page.relative_to(ROOT)}:{number}: not a mark that tests/docs/pages.py knows: {line}"
        return Mark(mark["kind"], mark["beginning"] or "", mark["text"])

    @staticmethod
    def ends_paragraph(line: str) -> bool:
        return not line.strip() or line.startswith("<!--")


def _commands(text: str, language: str) -> Iterator[str]:
    """Commands of a shell block. In a console block, lines that begin with $ are commands and the others output."""
    lines = iter(text.splitlines())
    for line in lines:
        if language == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        while not _is_complete(line) and (more := next(lines, None)) is not None:
            line += "\n" + more
        yield line.strip()


def _is_complete(command: str) -> bool:
    if command.endswith("\\"):
        return False
    if here := re.search(r"<<-?\s*['\"]?(\w+)", command):
        return command.splitlines()[-1].strip() == here[1]
    try:
        shlex.split(command, comments=True)
    except ValueError:  # a quotation that goes on in the next line
        return False
    return True
