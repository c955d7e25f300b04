"""Reads matrices from disk into the layout of the native kernels, by native threads. Matrices are nearly all of a
model, and there is no torch here: they are read while torch is imported."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from penstock.families.checkpoint.stored import CheckpointError
from penstock.families.spec import ModelSpec
from penstock.kernels.native.packer import NativePacker, NativePacking, SectionPacker
from penstock.kernels.native.reading import ReadFailed, ReadJob, WeightReader
from penstock.weights.checkpoint import check_tensors, stored_tensors
from penstock.weights.reads import READERS, PlannedRead, open_files, plan_reads


class MatrixReader:
    """Reads a spec's matrices in the background, from construction until `finish` or `close`: those that are whole rows
    of the checkpoint, which is all but a rank's columns. One thread calls."""

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        packing: NativePacking,
        *,
        whole: ModelSpec | None = None,
        hurry: bool = True,
    ) -> None:
        """If `spec` is a rank's part, `whole` is the model's. Without `hurry`, `finish` takes no part, and all is read
        at the lowest priority. Everything is checked before memory is allocated: raises CheckpointError and OSError."""
        self.began = time.perf_counter()
        self._hurry = hurry
        self.tensors = stored_tensors(folder, whole or spec)
        check_tensors(whole or spec, self.tensors)
        self.packers: dict[str, NativePacker | SectionPacker] = {
            p.name: packing(p.shape, p.kind, p.experts, p.sections, sensitive=p.sensitive)
            for p in spec.parameters
            if p.kind != "vector"
        }
        matrices = [p for p in spec.parameters if p.name in self.packers]
        self.unread: list[PlannedRead] = []  # reads of the matrices that the caller must do: columns
        self._reads: list[PlannedRead] = []  # per job, the read that it belongs to
        with ExitStack() as held:
            files = open_files(self.tensors, held)
            jobs: list[ReadJob] = []
            for read in plan_reads(matrices, self.tensors, self.packers):
                if read.full_rows and not read.source.steps:
                    jobs += self._jobs(read, files[read.source.path])
                else:
                    self.unread.append(read)
            self.bytes = sum(job.bytes for job in jobs)
            self._reading = WeightReader(jobs, READERS)
            held.callback(self._reading.close)  # before its files are closed
            self._held = held.pop_all()

    def finish(self, advance: Callable[[int], None]) -> None:
        """Read the rest, with this thread too. Calls `advance` with the number of bytes read since its last call.
        Raises CheckpointError."""
        try:
            self._reading.finish(advance, hurry=self._hurry)
        except ReadFailed as error:
            source = self._reads[error.job].source
            raise CheckpointError(f"{source.path}: {source.name!r}: {error}") from None
        finally:
            self.close()

    def close(self) -> None:
        """Stop reading. May be called twice."""
        self._held.close()

    def __del__(self) -> None:
        if hasattr(self, "_held"):  # the threads must end before the memory that they write to is freed
            self.close()

    def _jobs(self, read: PlannedRead, file: int) -> list[ReadJob]:
        packer, source = read.packer, read.source
        assert isinstance(packer, NativePacker | SectionPacker)
        jobs = [
            ReadJob(job, read.begin + first * read.stride, (job.count - 1) * read.stride + source.row_bytes, file)
            for first, job in packer.jobs(read.target, read.count, source.dtype, read.stride)
        ]
        self._reads += [read] * len(jobs)
        return jobs
