"""A server counts what earlier ones were promised of the memory, and nothing of those that have ended."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.prepare.promises import promise, promised

TOTAL = 8 << 30  # more than the process has
CODE = "import sys; from pathlib import Path; from penstock.prepare.promises import promise; "
CODE += "promise(int(sys.argv[1]), Path(sys.argv[2])); print('done', flush=True); sys.stdin.read()"


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", CODE, str(TOTAL), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"done\n"
        yield process
        process.kill()


def test_what_another_server_may_still_take_is_promised(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    left = promised(tmp_path)
    assert TOTAL - (1 << 30) < left < TOTAL, "what it has taken already is not available anyway"
    promise(TOTAL, tmp_path)
    assert abs(promised(tmp_path) - left) < 16 << 20, "its own promise does not count"


def test_a_process_that_has_ended_promises_nothing(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    (folder,) = tmp_path.iterdir()
    other.kill()
    other.wait()
    assert promised(tmp_path) == 0
    assert not list(folder.iterdir())


def test_another_process_with_the_same_id_promises_nothing(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    (folder,) = tmp_path.iterdir()
    (file,) = folder.iterdir()
    started, total = file.read_text().split()
    file.write_text(f"{int(started) + 1} {total}")
    assert promised(tmp_path) == 0 and not file.exists()


@pytest.mark.parametrize("content", ["", "x", "1", "1 2 3"])
def test_a_file_that_is_being_written_does_not_matter(tmp_path: Path, content: str) -> None:
    promise(TOTAL, tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "1").write_text(content)
    assert promised(tmp_path) == 0


def test_no_file_is_no_error(tmp_path: Path) -> None:
    promise(TOTAL, tmp_path / "there" / "is" / "none")
    assert promised(tmp_path / "there") == 0
