"""Files of blocks: what is read is what was written, whatever has become of the file."""

import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.config.kv_disk import KVDisk
from penstock.engine.tier.files import HEADER, PageFiles, block_name
from penstock.engine.tier.open import PageFolder

KEYS = [bytes([i]) * 32 for i in range(1, 6)]
PAGE = bytes(range(256)) * 40


def read(files: PageFiles, key: bytes) -> bytes | None:
    """The page that is read; None if it is a miss."""
    page = bytearray(len(PAGE))
    return bytes(page) if files.read(key, memoryview(page)) else None


@pytest.fixture
def files(tmp_path: Path) -> PageFiles:
    files = PageFiles(tmp_path, "numerics", len(PAGE))
    assert files.write(KEYS[0], memoryview(PAGE)) and files.write(KEYS[1], memoryview(PAGE[::-1]))
    return files


def path_of(files: PageFiles, key: bytes) -> Path:
    return files.folder / f"{block_name(key):016x}"


def test_a_page_comes_back_after_a_restart(files: PageFiles, tmp_path: Path) -> None:
    assert read(files, KEYS[0]) == PAGE and read(files, KEYS[2]) is None
    again = PageFiles(tmp_path, "numerics", len(PAGE))
    assert dict(again.scan()).keys() == {block_name(KEYS[0]), block_name(KEYS[1])}
    assert read(again, KEYS[1]) == PAGE[::-1]


def test_only_the_owner_can_read_them(files: PageFiles) -> None:
    for path in files.folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "spoil",
    [
        *(lambda path, place=place: flip(path, place) for place in (0, 8, 39, 40, 48, HEADER.size, -1)),
        lambda path: os.truncate(path, 100),
        lambda path: os.truncate(path, 0),
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
    ],
)
def test_a_file_that_was_changed_is_a_miss(files: PageFiles, spoil: Callable[[Path], object]) -> None:
    spoil(path_of(files, KEYS[0]))
    assert read(files, KEYS[0]) is None
    assert read(files, KEYS[1]) == PAGE[::-1]


def test_a_file_of_another_key_is_a_miss(files: PageFiles) -> None:
    """As when two keys have the same first 8 bytes, or files were copied."""
    path_of(files, KEYS[0]).rename(path_of(files, KEYS[3]))
    assert read(files, KEYS[3]) is None and not path_of(files, KEYS[3]).exists()


def test_pages_of_another_meaning_are_deleted(files: PageFiles, tmp_path: Path) -> None:
    other = PageFiles(tmp_path, "another version", len(PAGE))
    assert not list(other.scan()) and not files.folder.exists()
    assert not other.read(KEYS[0], memoryview(bytearray(len(PAGE))))


def test_what_a_killed_process_left_is_deleted(files: PageFiles) -> None:
    (files.folder / "0123456789abcdef.part").write_bytes(PAGE)
    (files.folder / "0123456789abcdef").write_bytes(PAGE)  # too short
    (files.folder / "readme").write_bytes(PAGE)
    assert len(list(files.scan())) == 2 == len(list(files.folder.iterdir()))


def test_a_file_that_is_deleted_during_the_scan_is_left_out(files: PageFiles) -> None:
    found = files.scan()
    first, _ = next(found)
    for key in KEYS[:2]:
        if block_name(key) != first:
            path_of(files, key).unlink()
    assert not list(found)


def test_a_disk_that_is_full_keeps_nothing_of_a_block(files: PageFiles) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(PAGE), before[1]))
    try:
        assert not files.write(KEYS[4], memoryview(PAGE))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(list(files.folder.iterdir())) == 2
    assert files.write(KEYS[4], memoryview(PAGE)) and read(files, KEYS[4]) == PAGE


def test_all_are_deleted(files: PageFiles) -> None:
    assert files.clear() and not list(files.scan())
    assert files.write(KEYS[0], memoryview(PAGE)) and read(files, KEYS[0]) == PAGE


def test_a_folder_has_one_engine(tmp_path: Path) -> None:
    disk = KVDisk(str(tmp_path / "kv"), 1 << 20, 1.0)
    folder = PageFolder(disk)
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    with pytest.raises(ValueError, match=f"is used by another engine, process {os.getpid()}: name another") as refused:
        PageFolder(disk)
    assert "\n" not in str(refused.value)
    folder.close()
    PageFolder(disk).close()
