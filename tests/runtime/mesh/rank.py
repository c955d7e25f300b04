"""Runs ranks in separate processes, for tests: python -m tests.runtime.mesh.rank SOCKET...

It forks one process per socket (a file descriptor). Orders arrive over the socket, each after its length. Torch is
imported once, before the fork.
"""

import dataclasses
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import BinaryIO, cast
from unittest.mock import patch

import msgspec
import torch

from penstock.config import EngineConfig, RankPlace
from penstock.families import load_spec, shard
from penstock.kernels import Needs, Platform, detect_platform, select_kernels
from penstock.messages import Capacity, StepPlan, StepResult
from penstock.runtime.loading.cpu import load_cpu_runner
from penstock.runtime.loading.gpu import join_mesh
from penstock.runtime.mesh.shared_memory import open_shared_memory
from penstock.runtime.pages import KVPages
from penstock.runtime.runner import ModelRunner
from penstock.weights.load import load_parameters
from tests.runtime.mirror_device import MirrorDevice, mirror_kernels


class Load(msgspec.Struct, frozen=True, tag=True):
    """Unload the current model and load another."""

    config: EngineConfig
    rank: int
    rendezvous: str
    num_blocks: tuple[int, ...]
    native: bool  # whether native kernels may be used
    share: bool  # whether ranks may use shared memory instead of sockets
    device: bool  # whether the batch is on a device: a MirrorDevice


class Execute(msgspec.Struct, frozen=True, tag=True):
    """Execute a plan. A rank on a device sends no answer."""

    plan: StepPlan
    learned: tuple[StepResult, ...]


class Take(msgspec.Struct, frozen=True, tag=True):
    """Send the result of the oldest plan of a rank on a device."""


class Answer(msgspec.Struct, frozen=True):
    error: str = ""
    capacity: Capacity | None = None
    result: StepResult | None = None
    traffic: tuple[int, int, int] = (0, 0, 0)  # bytes so far: sum, gather, send


def write(stream: BinaryIO, message: object) -> None:
    frame = msgspec.msgpack.encode(message)
    stream.write(len(frame).to_bytes(4, "little") + frame)
    stream.flush()


def read(stream: BinaryIO) -> bytes:
    """Returns the next frame; b"" at the end of the stream."""
    return stream.read(int.from_bytes(stream.read(4), "little"))


def share_nothing(*_: object) -> None:
    pass


def without_native(device: str) -> Platform:
    return dataclasses.replace(detect_platform(device), isa="")


def load_device_rank(order: Load, place: RankPlace) -> ModelRunner:
    """Loads a rank like loading/gpu.py, but with torch's kernels and without measuring memory."""
    config, device, folder = order.config, torch.device("cpu"), Path(order.config.model)
    whole = load_spec(folder)
    spec = shard(whole, place)
    dtype = getattr(torch, config.dtype)
    needs = Needs(dtype, config.block_size, spec.head_dims)
    kernels = select_kernels(without_native("cpu"), needs)
    parameters = load_parameters(folder, spec, dtype, whole=whole, progress=False)
    mesh = join_mesh(config, spec, place, order.rendezvous, device)
    pages = KVPages(spec, order.num_blocks, config.block_size, dtype)
    runner = ModelRunner(spec, parameters, mirror_kernels(kernels), config, pages, MirrorDevice(), mesh=mesh)
    runner.capture(progress=False)
    return runner


class Rank:
    def __init__(self) -> None:
        self._runner: ModelRunner | None = None
        self._reports = self._on_device = False

    def obey(self, order: Load | Execute | Take) -> Answer | None:
        if isinstance(order, Load):
            return Answer(capacity=self._load(order))
        if isinstance(order, Take):
            return Answer(result=cast(ModelRunner, self._runner).take())
        runner = cast(ModelRunner, self._runner)
        for result in () if self._reports else order.learned:
            runner.learn(result)
        if self._on_device:
            runner.submit(order.plan)
            return None
        result = runner.execute(order.plan)
        traffic = runner.traffic
        return Answer(result=result, traffic=(traffic.sum, traffic.gather, traffic.send))

    def _load(self, order: Load) -> Capacity:
        if self._runner is not None:
            self._runner.close()
        place = RankPlace(order.config.split, order.rank)
        self._reports = place.reports
        self._on_device = order.device
        if order.device:
            self._runner = load_device_rank(order, place)
            return self._runner.capacity
        platform = detect_platform if order.native else without_native
        shared = open_shared_memory if order.share else share_nothing
        detection = patch("penstock.runtime.loading.cpu.detect_platform", platform)
        with detection, patch("penstock.runtime.mesh.mesh.open_shared_memory", shared):
            self._runner = load_cpu_runner(order.config, place, order.rendezvous, order.num_blocks, progress=False)
        return self._runner.capacity


def be_rank(orders: BinaryIO, answers: BinaryIO) -> None:
    rank, decoder = Rank(), msgspec.msgpack.Decoder(Load | Execute | Take)
    while frame := read(orders):
        try:
            answer = rank.obey(decoder.decode(frame))
            if answer is not None:
                write(answers, answer)
        except Exception:
            write(answers, Answer(error=traceback.format_exc()))


def main() -> None:
    sockets = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    for mine in sockets:
        if os.fork() == 0:
            for other in sockets:
                if other is not mine:
                    other.close()
            be_rank(mine.makefile("rb"), mine.makefile("wb"))
            os._exit(0)
    for each in sockets:
        each.close()
    for _ in sockets:
        os.wait()


if __name__ == "__main__":
    main()
