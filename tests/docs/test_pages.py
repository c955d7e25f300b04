"""Every command of README.md, docs/*.md and benchmarks/README.md runs as written, or the page says why not."""

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from penstock.cli.main import app
from penstock.cli.usage import command_of, flags_of
from tests.docs.pages import ROOT, Block, blocks, pages
from tests.docs.place import Stock, python_with
from tests.docs.processes import ExampleFailed
from tests.docs.servers import Served, Servers
from tests.docs.shell import Shell
from tests.often import often
from tests.weights.standin_hub import serving_several

PAGES = {str(page.relative_to(ROOT)): page for page in pages()}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    stock = Stock(tmp_path_factory.mktemp("stock"))
    with serving_several(stock.models_of_hub()) as stock.hub_url:
        yield stock


@pytest.fixture(scope="module")
def shared(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """shared(command) gives a server that all pages share."""
    started: dict[str, Served] = {}

    def start(command: str) -> Served:
        if command not in started:
            folder = stock.lay_out(tmp_path_factory.mktemp("server") / "place")
            started[command] = Served(command, folder, stock.environment(folder), folder / "log")
        return started[command]

    yield start
    for served in started.values():
        served.close()


def _runs(block: Block, command: str) -> bool:
    """Whether a command of a page runs here."""
    needs = block.mark("needs", command)
    return block.mark("not run", command) is None and (needs is None or python_with(needs.text) is not None)


def _every() -> list[tuple[Block, str]]:
    """The commands of all pages."""
    found = [block for page in PAGES.values() for block in blocks(page) if block.runs]
    return [(block, command) for block in found for command in block.commands()]


# Each takes from 10 to 60 seconds, and other tests make the same requests (python.md: tests/api; planning.md:
# tests/cli/simulate and tests/simulate).
SLOW = (
    *(f"docs/{name}.md" for name in ("chat", "clients", "embeddings", "parallelism", "planning", "python")),
    *(f"docs/{name}.md" for name in ("quantization", "serving", "verify", "watermarking")),
    "benchmarks/README.md",
)
NAMES = [
    name
    for name, page in PAGES.items()
    if any(_runs(block, command) for block in blocks(page) if block.runs for command in block.commands())
]


@pytest.mark.parametrize("name", often(NAMES, set(NAMES) - set(SLOW)))
def test_the_examples_of_a_page_run(name: str, stock: Stock, shared: Callable[[str], Served], tmp_path: Path) -> None:
    folder = stock.lay_out(tmp_path / "place")
    servers = Servers(shared)
    shell = Shell(folder, stock.environment(folder), servers)
    failed = []
    try:
        for block in blocks(PAGES[name]):
            if block.runs:
                failed += _run(block, shell)
    finally:
        servers.close()
    assert not failed, "\n\n".join(failed)


def _run(block: Block, shell: Shell) -> list[str]:
    """Runs the commands of a block. Returns what failed."""
    failed = []
    commands = [command for command in block.commands() if _runs(block, command)]
    for mark in block.marks:
        if mark.kind == "first" and commands:
            shell.run(mark.text)
    for command in commands:
        needs = block.mark("needs", command)
        try:
            if block.is_shell:
                shell.run(command, fails=block.mark("fails", command) is not None)
            else:
                shell.python(command, str(python_with(needs.text)) if needs else "python")
        except ExampleFailed as error:
            failed.append(f"{block.where}: {command}\n{error}")
    return failed


def test_marks_are_about_a_command() -> None:
    """A mark that names the beginning of a command stands above a block with such a command."""
    stale = [
        f'{block.where}: {mark.kind} "{mark.beginning}"'
        for page in PAGES.values()
        for block in blocks(page)
        for mark in block.marks
        if mark.kind != "part of"
        if not block.runs or not any(mark.is_about(command) for command in block.commands())
    ]
    assert not stale


def test_parts_of_files_are_there() -> None:
    parts = [
        (block, mark)
        for page in PAGES.values()
        for block in blocks(page)
        for mark in block.marks
        if mark.kind == "part of"
    ]
    assert parts
    assert [block.where for block, mark in parts if block.text not in (ROOT / mark.text).read_text()] == []


def test_few_examples_are_not_run(record_property: Callable[[str, object], None]) -> None:
    """What is not run is listed: see it with pytest --junit-xml, or in the message when there are many."""
    every = _every()
    left_out = [
        f"{block.where}: {command.splitlines()[0]}: {mark.text}"
        for block, command in every
        if (mark := block.mark("not run", command))
    ]
    record_property("not run", "\n".join(left_out))
    assert len(every) > 30
    assert len(left_out) * 4 < len(every), "\n".join(left_out)


def test_shell_blocks_are_cut_into_commands() -> None:
    text = "a 'b\n c'   # d\n\n# e\nf \\\n  g\ncat <<END\nh i\nEND\n"
    block = Block(ROOT / "README.md", 1, "", text)
    assert block.commands() == ["a 'b\n c'   # d", "f \\\n  g", "cat <<END\nh i\nEND"]
    assert shlex.split(block.commands()[0], comments=True) == ["a", "b\n c"]
    assert Block(block.page, 1, "console", "$ a\nout\n$ b\n").commands() == ["a", "b"]


def _inline() -> list[tuple[str, list[str]]]:
    """The commands of Penstock that a page names within a line, as words after `penstock`."""
    found = []
    for name, page in PAGES.items():
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            for text in re.findall(r"`penstock ([^`]+)`", line):
                found.append((f"{name}:{number}", shlex.split(text)))
    return found


def test_commands_within_a_line_exist() -> None:
    """Their commands and flags; they are not run."""
    unknown, root = [], typer.main.get_command(app)
    for where, words in _inline():
        path, command = command_of(root, words)
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        if getattr(command, "commands", None) and not flags:
            unknown += [f"{where}: {path} {word}" for word in words[len(path.split()) - 1 :]]
        unknown += [f"{where}: {path} {flag}" for flag in flags if flag not in flags_of(command)]
    assert len(_inline()) > 20
    assert not unknown
