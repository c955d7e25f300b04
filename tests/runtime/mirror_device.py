"""A device for tests that runs on the CPU in place of a GPU.

It runs launched work only when a result is requested, and then all of it. So a test fails if a step depends on anything
but its uploaded inputs, reads a result too early, or has its result overwritten by a later step.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.config import EngineConfig
from penstock.kernels import Kernels, Needs, Platform, select_kernels
from penstock.kernels.attention import AttentionBatch, HeadNorm, ReferenceAttention, TorchPages
from penstock.kernels.batch_arrays import StepSequences, order_units
from penstock.runtime.device import CudaDevice, Device, DevicePage, HostDevice, Job, StepOutputs, pack, places, unpack
from penstock.runtime.loading.device_memory import DeviceMemory
from penstock.runtime.loading.gpu import load_device_runner
from penstock.runtime.runner import ModelRunner
from tests.patience import PATIENCE

PLAIN = Platform("cpu", "", True)  # torch's kernels


class MirrorDevice(HostDevice):
    """See Device. Time is the host's."""

    shared = False

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[_Deferred] = deque()
        self.launched = self.ran = 0  # jobs

    def page(self, page: Tensor) -> DevicePage:
        """Copies, by another thread, wait for the jobs launched before."""
        after = self.launched

        def copy(target: Tensor, source: Tensor) -> None:
            end = time.monotonic() + PATIENCE
            while self.ran < after:
                assert time.monotonic() < end, "the jobs launched before were not run"
                time.sleep(0.0005)
            target.copy_(source)

        return DevicePage(page, copy)

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        at, size = places(arrays)
        staged = torch.empty(size, dtype=torch.uint8)
        pack(arrays, at, staged.numpy())
        self.sent += size
        return unpack(staged, arrays, at)

    def launch(self, job: Job) -> "_Deferred":
        self.launched += 1
        deferred = _Deferred(job, self)
        self._waiting.append(deferred)
        return deferred

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


class _Deferred:
    """A pending copy. Waiting for one runs all launched work; only then is the data copied."""

    def __init__(self, job: Job, device: MirrorDevice) -> None:
        self._job, self._device = job, device
        self._waiting = device._waiting
        self._outputs = StepOutputs()

    def ready(self) -> bool:
        return True

    def wait(self) -> StepOutputs:
        while self._waiting:
            self._waiting.popleft()._run()
        return self._outputs.mapped(lambda tensor: tensor.numpy().copy())

    def _run(self) -> None:
        self._outputs = self._job()
        self._device.ran += 1


def mirror_kernels(kernels: Kernels) -> Kernels:
    """Kernels for a MirrorDevice. Their attention reads the arrays that the step kernels wrote on the device."""
    return dataclasses.replace(kernels, attention=MirrorAttention(), session=None)


class MirrorAttention(TorchPages):
    """Replaces kernels/triton/attention.py: reads contexts and block tables that step kernels wrote on the device."""

    def prepare(self, batch: AttentionBatch, keys: Tensor) -> StepSequences:
        lengths, count = batch.query_lens, len(batch.context_lens)
        units, decodes = order_units(lengths, batch.query_start[:-1], batch.context_lens, np.arange(count))
        tables = torch.from_numpy(batch.block_tables.astype(np.int32))
        several = lengths[lengths > 1]
        bounds = int(several.sum()), int(several.max(initial=0))
        return StepSequences(batch.window, torch.from_numpy(units), tables, decodes, count - decodes, *bounds)

    def store(
        self,
        qkv: Tensor,
        heads: int,
        weight: Tensor | None,
        rotation: tuple[Tensor, ...],
        keys: Tensor,
        values: Tensor,
        blocks: Tensor,
        offsets: Tensor,
        eps: float,
        offset: float,
        *,
        norm: HeadNorm = "heads",
        queries_only: bool = False,
    ) -> Tensor:
        kept = blocks >= 0  # padding is not
        places = keys, values, blocks[kept], offsets[kept]
        turned = tuple(each[kept] for each in rotation)
        forms: dict[str, Any] = {"norm": norm, "queries_only": queries_only}
        stored = super().store(qkv[kept], heads, weight, turned, *places, eps, offset, **forms)
        query = stored.new_zeros(len(qkv), *stored.shape[1:])
        query[kept] = stored
        return query

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, prepared: StepSequences, scale: float, **scores: Any
    ) -> Tensor:
        count = prepared.decodes + prepared.prompts
        first, length, context, row, _ = prepared.units[:5, :count].numpy().astype(np.int64)
        real = np.flatnonzero(context)
        order = real[np.argsort(first[real])]  # that of the step's tokens; padding comes behind
        start = np.concatenate([[0], np.cumsum(length[order])])
        tables = prepared.tables.numpy()[row[order]].astype(np.int64)
        batch = AttentionBatch(keys.shape[2], prepared.window, start, context[order], tables)
        out = torch.zeros_like(query)
        out[: start[-1]] = ReferenceAttention()(query[: start[-1]], keys, values, batch, scale, **scores)
        return out


def device_at(where: torch.device) -> Device:
    """Returns the GPU, or a MirrorDevice on a machine without one."""
    return CudaDevice(where) if where.type == "cuda" else MirrorDevice()


def load_mirror(config: EngineConfig, memory: DeviceMemory, *where: Any, progress: bool = True) -> ModelRunner:
    """load_device_runner with torch's kernels on a MirrorDevice."""

    def select(platform: Platform, needs: Needs) -> Kernels:
        return mirror_kernels(select_kernels(platform, needs))

    with patch("penstock.runtime.loading.gpu.select_kernels", select):
        return load_device_runner(config, MirrorDevice(), PLAIN, memory, *where, progress=progress)
