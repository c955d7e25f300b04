"""Matrices from disk into what native kernels read, by native threads: nearly all of a model. No torch here, so that it
is done while that is imported."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from penstock.families.spec import ModelSpec
from penstock.kernels.native.packer import STORED, NativePacker, NativePacking
from penstock.kernels.native.reading import ReadFailed, ReadJob, WeightReader
from penstock.weights.checkpoint import check_tensors, stored_tensors
from penstock.weights.pieces import READERS, Piece, open_files, pieces
from penstock.weights.safetensors_file import CheckpointError

_STORED = dict(zip(("F32", "BF16", "F16"), STORED, strict=True))


class MatrixReader:
    """Of a spec's matrices those that are whole rows of the checkpoint, which is all but a rank's columns. They are
    read from its construction on, beside whatever the caller does, until `finish` or `close`. One thread calls."""

    def __init__(self, folder: Path, spec: ModelSpec, packing: NativePacking, *, of: ModelSpec | None = None) -> None:
        """Where `spec` is a rank's part, `of` is the whole model. All is verified before anything is allocated: raises
        CheckpointError and OSError."""
        self.began = time.perf_counter()
        self.tensors = stored_tensors(folder)
        check_tensors(of or spec, self.tensors)
        self.packers: dict[str, NativePacker] = {
            p.name: packing(p.shape, p.kind, p.experts) for p in spec.parameters if p.kind != "vector"
        }
        matrices = [p for p in spec.parameters if p.name in self.packers]
        self.left: list[Piece] = []  # of the matrices, to be read by others
        self._owners: list[Piece] = []  # of each job
        with ExitStack() as held:
            files = open_files(self.tensors, held)
            jobs: list[ReadJob] = []
            for piece in pieces(matrices, self.tensors, self.packers):
                if piece.whole_rows:
                    jobs += self._jobs(piece, files[piece.source.path])
                else:
                    self.left.append(piece)
            self.bytes = sum(job.bytes for job in jobs)
            self._reading = WeightReader(jobs, READERS)
            held.callback(self._reading.close)  # before its files are
            self._held = held.pop_all()

    def finish(self, advance: Callable[[int], None]) -> None:
        """Have all read, taking part in it; `advance` is told of more bytes that are. Raises CheckpointError."""
        try:
            self._reading.finish(advance)
        except ReadFailed as error:
            source = self._owners[error.job].source
            raise CheckpointError(f"{source.path}: {source.name!r}: {error}") from None
        finally:
            self.close()

    def close(self) -> None:
        """Read no more. May be called twice."""
        self._held.close()

    def __del__(self) -> None:
        if hasattr(self, "_held"):  # the threads end before what they write to is gone
            self.close()

    def _jobs(self, piece: Piece, file: int) -> list[ReadJob]:
        packer, source = piece.packer, piece.source
        assert isinstance(packer, NativePacker)
        jobs = [
            ReadJob(job, piece.begin + first * source.row_bytes, job.count * source.row_bytes, file)
            for first, job in packer.jobs(piece.target, piece.count, _STORED[source.dtype])
        ]
        self._owners += [piece] * len(jobs)
        return jobs
