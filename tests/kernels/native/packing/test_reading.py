"""Native threads that read rows from files and pack them."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config.weights import GGUF_FORMATS
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.memory import WeightMemory
from penstock.kernels.native.pack import pack
from penstock.kernels.native.packer import NativePacker
from penstock.kernels.native.reading import ReadFailed, ReadJob, WeightReader
from tests.gguf.blocks import random_rows, reference
from tests.kernels.native.reference import FROM_FLOATS, unpacked

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no native kernels for this machine")

ROWS, COLUMNS, OFFSET = 67, 96, 13


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def file(tmp_path: Path, weight: Tensor) -> Iterator[int]:
    """The weight in float32 from byte OFFSET on."""
    path = tmp_path / "rows"
    path.write_bytes(bytes(OFFSET) + weight.numpy().tobytes())
    descriptor = os.open(path, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def jobs_of(packer: NativePacker, file: int, rows: int = 5) -> list[ReadJob]:
    """Pieces that end anywhere in a block."""
    size, jobs = COLUMNS * 4, []
    for start in range(0, ROWS, rows):
        for first, job in packer.jobs(start, min(rows, ROWS - start), "F32", size):
            jobs.append(ReadJob(job, OFFSET + (start + first) * size, job.count * size, file))
    return jobs


def packer_of(scheme: str = "int8") -> NativePacker:
    return NativePacker((ROWS, COLUMNS), FROM_FLOATS[scheme], gated=False, memory=WeightMemory())


@pytest.mark.parametrize("hurry", [True, False])
@pytest.mark.parametrize("threads", [0, 1, 4])
@pytest.mark.parametrize("scheme", list(FROM_FLOATS))
def test_what_is_read_is_what_packing_gives(file: int, weight: Tensor, scheme: str, threads: int, hurry: bool) -> None:
    packer, told = packer_of(scheme), []
    reading = WeightReader(jobs_of(packer, file), threads)
    reading.finish(told.append, hurry=hurry)
    reading.close()
    assert sum(told) == weight.nbytes and min(told) >= 0
    want = pack(weight, None, FROM_FLOATS[scheme])
    assert all(torch.equal(x, y) for x, y in zip(packer.finish().tensors, want.tensors, strict=True))


@pytest.mark.parametrize("stored", ["Q4_0", "Q6_K"])
def test_every_second_row_of_a_gguf_type_is_read(tmp_path: Path, stored: str) -> None:
    data = random_rows(stored, 2 * 21, 512)
    path, size = tmp_path / "rows", data.shape[1]
    path.write_bytes(bytes(OFFSET) + data.tobytes())
    packer = NativePacker((21, 512), GGUF_FORMATS[stored], gated=False, memory=WeightMemory())
    with path.open("rb") as opened:
        jobs = [
            ReadJob(job, OFFSET + 2 * (start + first) * size, (2 * job.count - 1) * size, opened.fileno())
            for start in range(0, 21, 5)
            for first, job in packer.jobs(start, min(5, 21 - start), stored, 2 * size)
        ]
        reading = WeightReader(jobs, 2)
        reading.finish(lambda count: None)
        reading.close()
    np.testing.assert_array_equal(unpacked(packer.finish()).values(), reference(stored, data[::2]))


def test_rows_that_are_too_short_for_their_type_are_an_error(file: int) -> None:
    packer = NativePacker((4, 512), GGUF_FORMATS["Q4_0"], gated=False, memory=WeightMemory())
    reading = WeightReader([ReadJob(job, 0, 4 * 200, file) for _, job in packer.jobs(0, 4, "Q4_0", 200)], 0)
    with pytest.raises(ReadFailed, match=os.strerror(22)):  # EINVAL
        reading.finish(lambda count: None)
    reading.close()


def failure(file: int, *, threads: int = 2) -> ReadFailed:
    packer = packer_of()
    reading = WeightReader(jobs_of(packer, file), threads)
    with pytest.raises(ReadFailed) as caught:
        reading.finish(lambda count: None)
    reading.close()
    return caught.value


@pytest.mark.parametrize("threads", [0, 2])
def test_a_file_that_is_too_short_is_told_with_its_end(file: int, threads: int) -> None:
    os.truncate(file, OFFSET + 22 * COLUMNS * 4)  # in the fifth piece
    error = failure(file, threads=threads)
    if not threads:
        assert error.job == 4
    assert error.job >= 4 and "ended at byte" in str(error)


def test_an_error_of_the_system_is_told(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    assert str(failure(folder)) == os.strerror(21)  # EISDIR
    os.close(folder)


def test_rows_that_cannot_be_quantised_are_counted(file: int, weight: Tensor) -> None:
    for row in (40, 41):
        os.pwrite(file, np.float32(np.nan).tobytes(), OFFSET + row * COLUMNS * 4)
    error = failure(file)
    assert error.job == 8 and str(error).startswith("2 rows hold infinity or NaN")


def test_it_may_be_closed_before_all_is_read(file: int) -> None:
    packer = packer_of()
    reading = WeightReader(jobs_of(packer, file, rows=1), 2)
    reading.close()
    reading.close()
    WeightReader(jobs_of(packer, file, rows=1), 2).__del__()


def test_nothing_to_read_is_read_at_once() -> None:
    told: list[int] = []
    reading = WeightReader([], 2)
    reading.finish(told.append)
    reading.close()
    assert sum(told) == 0
