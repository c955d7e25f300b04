"""docs/troubleshooting.md quotes errors as the code words them, and knows every code of an error answer."""

import ast
import re
from pathlib import Path

import pytest

from penstock.frontend.errors import INTERNAL_ERROR

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
OTHERS = {"is not a supported wheel on this platform", "nvidia-", "oom-kill", "dmesg", "docker stop", "/v1"}  # not ours


def sources() -> str:
    """All Python code, with string literals that are split over lines put together."""
    paths = [*sorted((ROOT / "src").rglob("*.py")), ROOT / "hatch_build.py"]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in paths))


def quotes(heading: str) -> list[str]:
    """The quoted pieces of messages in the first column of a section's table."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| ((?:[^|`]|`[^`]*`)+) \|", section, re.MULTILINE)
    pieces = [
        piece.strip(" :") for cell in cells for quote in re.findall(r"`([^`]+)`", cell) for piece in quote.split("…")
    ]
    return [piece for piece in pieces if len(piece) > 3 and piece not in OTHERS]


@pytest.mark.parametrize("heading", ["Installing", "Starting", "Memory", "Models", "While it runs"])
def test_quoted_messages_are_in_the_code(heading: str) -> None:
    code, quoted = sources(), quotes(heading)
    assert quoted
    missing = [quote for quote in quoted if quote not in code and not quote.startswith(("--", "penstock_"))]
    assert not missing


def codes_of(path: Path) -> set[str]:
    """The codes that a module gives to error answers."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("invalid", "APIError"):
            given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            given += node.args[2:3] if node.func.id == "invalid" else []
            found |= {
                value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)
            }
    return found


def test_every_code_of_an_error_answer_is_in_the_table() -> None:
    codes = set().union(*map(codes_of, (ROOT / "src/penstock/frontend").rglob("*.py"))) | {INTERNAL_ERROR}
    table = PAGE.partition("\n## Requests\n")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`([a-z]+_[a-z_]+|draining)`", table))
    assert len(codes) > 12
    assert not codes - documented, "codes that docs/troubleshooting.md lacks"
