"""Files that a user names for figures: refused before the work, where they could not be written after it."""

from pathlib import Path

import pytest

from penstock.cli.bench.commands import Load, offline, online
from penstock.cli.output import write_file
from penstock.cli.plan import plan
from penstock.prepare.files import check_file

LOAD = Load(1, "8", "4", 0, 100, None, 1.0, None, None, 0)


def test_a_file_is_written_where_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    for text in ("first", "second"):
        check_file("--json", str(file))
        write_file("--json", str(file), text)
        assert file.read_text() == text
    check_file("--json", None)
    write_file("--json", None, "nowhere")
    assert list(tmp_path.iterdir()) == [file]


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "none" / "out.json")
    with pytest.raises(ValueError, match=r"--plot .* cannot be written: it is a folder"):
        check_file("--plot", str(tmp_path))
    for command in (
        lambda: plan(None, None, None, nowhere, {}),
        lambda: offline(None, "1x8/2", 1, nowhere, {}, "latency"),
        lambda: online("http://127.0.0.1:9", "m", None, LOAD, nowhere),
    ):
        with pytest.raises(ValueError, match=r"--json .* cannot be written: there is no folder .*none"):
            command()


def test_a_disk_that_fills_up_is_one_clear_line() -> None:
    with pytest.raises(ValueError, match="--json /dev/full cannot be written: no space left on device"):
        write_file("--json", "/dev/full", "figures")
