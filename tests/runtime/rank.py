"""Ranks in processes of their own, for tests: python -m tests.runtime.rank SOCKET...

One for each socket, by its number: orders come over it, each with its length before it, and each is answered. Torch is
imported once, before they part.
"""

import dataclasses
import os
import socket
import sys
import traceback
from typing import BinaryIO, cast
from unittest.mock import patch

import msgspec

from penstock.config import EngineConfig, Place
from penstock.kernels import Platform, detect_platform
from penstock.messages import Capacity, StepPlan, StepResult
from penstock.runtime import ModelRunner, load_host_runner
from penstock.runtime.shared_memory import share


class Load(msgspec.Struct, frozen=True, tag=True):
    """Let go of the model there is, and load another one."""

    config: EngineConfig
    rank: int
    rendezvous: str
    num_blocks: tuple[int, ...]
    native: bool  # whether the native kernels may be used,
    share: bool  # and memory instead of sockets


class Execute(msgspec.Struct, frozen=True, tag=True):
    plan: StepPlan
    learned: tuple[StepResult, ...]


class Answer(msgspec.Struct, frozen=True):
    error: str = ""
    capacity: Capacity | None = None
    result: StepResult | None = None
    traffic: tuple[int, int, int] = (0, 0, 0)  # sum, gather, send: bytes handed over so far


def write(stream: BinaryIO, message: object) -> None:
    frame = msgspec.msgpack.encode(message)
    stream.write(len(frame).to_bytes(4, "little") + frame)
    stream.flush()


def read(stream: BinaryIO) -> bytes:
    """The next frame; nothing at the end of the stream."""
    return stream.read(int.from_bytes(stream.read(4), "little"))


def share_nothing(*_: object) -> None:
    pass


def without_native(device: str) -> Platform:
    return dataclasses.replace(detect_platform(device), isa="")


class Rank:
    def __init__(self) -> None:
        self._runner: ModelRunner | None = None
        self._reports = False

    def obey(self, order: Load | Execute) -> Answer:
        if isinstance(order, Load):
            return Answer(capacity=self._load(order))
        runner = cast(ModelRunner, self._runner)
        for result in () if self._reports else order.learned:
            runner.learn(result)
        result = runner.execute(order.plan)
        traffic = runner.traffic
        return Answer(result=result, traffic=(traffic.sum, traffic.gather, traffic.send))

    def _load(self, order: Load) -> Capacity:
        if self._runner is not None:
            self._runner.close()
        place = Place(order.config.split, order.rank)
        self._reports = place.reports
        platform = detect_platform if order.native else without_native
        shared = share if order.share else share_nothing
        with patch("penstock.runtime.load.detect_platform", platform), patch("penstock.runtime.mesh.share", shared):
            self._runner = load_host_runner(order.config, place, order.rendezvous, order.num_blocks, progress=False)
        return self._runner.capacity


def be_rank(orders: BinaryIO, answers: BinaryIO) -> None:
    rank, decoder = Rank(), msgspec.msgpack.Decoder(Load | Execute)
    while frame := read(orders):
        try:
            write(answers, rank.obey(decoder.decode(frame)))
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
