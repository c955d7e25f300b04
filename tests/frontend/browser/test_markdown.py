"""The playground's reader of Markdown and of imported files, run by Node: what it makes of usual and hostile texts."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend import pages

NODE = shutil.which("node")
SCRIPT = Path(__file__).with_name("markdown_times.mjs")
MOST_MS = 2000  # of processor time for 100 kB; a pattern that is not linear takes half a minute

pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node: apt install nodejs")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    folder = Path(pages.__file__).parent / "playground"
    answer = subprocess.run([str(NODE), str(SCRIPT), str(folder)], stdout=subprocess.PIPE, check=True, timeout=120)
    read: dict[str, Any] = json.loads(answer.stdout)
    return read


def test_no_text_holds_the_page(found: dict[str, Any]) -> None:
    assert len(found["times"]) > 20
    assert {name: ms for name, ms in found["times"].items() if ms > MOST_MS} == {}


def test_headings_fences_and_tables_are_read(found: dict[str, Any]) -> None:
    code = {"type": "code", "closed": True}
    assert found["blocks"] == [
        [{"type": "heading", "level": 1, "text": "A title"}],
        [{"type": "heading", "level": 2, "text": "Two"}],
        [{**code, "lang": "py", "text": "a"}, {"type": "paragraph", "text": "b"}],
        [{**code, "lang": "", "text": "a\n~~~"}, {"type": "paragraph", "text": "b"}],
        [{"type": "paragraph", "text": "``` a`b"}],
        [{"type": "rule"}],
        [{"type": "table", "head": ["a", "b"], "align": ["left", "right"], "rows": ["1|2"]}],
        [{"type": "paragraph", "text": "a|b\n-- x"}],
    ]


def test_an_imported_answer_has_a_text(found: dict[str, Any]) -> None:
    """One without would stop the page, now and each time that it is opened. It is left out."""
    assert found["imported"] == [1, 1, 1, 2, 2]
