"""The tables of benchmarks/README.md."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOW = "import sys; sys.path.insert(0, 'benchmarks'); import tables; print({})"


def shown(expression: str) -> str:
    command = [sys.executable, "-c", SHOW.format(expression)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def test_a_case_with_fewer_steps_than_tokens_is_marked() -> None:
    assert shown("repr(tables.drafts('1x256/64', {'steps': 40}))") == "' †'"
    assert shown("repr(tables.drafts('1x256/64', {'steps': 64}))") == "''"
    assert shown("repr(tables.drafts('1x1024/1', {'steps': 2}))") == "''"
    assert shown("repr(tables.drafts('8x256/64', None))") == "''"  # a peer


def test_the_page_has_the_tables_of_the_results() -> None:
    assert shown("tables.tables()") in (ROOT / "benchmarks" / "README.md").read_text()
