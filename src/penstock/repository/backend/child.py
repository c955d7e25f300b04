"""The process that runs models: python -m penstock.repository.backend.child KIND SOCKET MEMORY SIZE

Started by penstock.repository.backend.process, which passes the file descriptors of a packet socket and of the shared
memory. Every thread waits for packets itself: the one that gets a packet executes it and sends the report, so no packet
is handed from thread to thread.
"""

import ctypes
import faulthandler
import gc
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from penstock.engine.child import die_with_parent, log_to_stderr
from penstock.messages.arrays import read_array, write_array
from penstock.messages.tensors import TensorSpec
from penstock.repository.backend import wire

SPARE_THREADS = 1  # one loads a model while the others run batches
MAX_MESSAGE = 2000  # characters of an error


class ChildModel(Protocol):
    """A loaded model."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_rows: int  # of a batch; 0: no batch dimension
    note: str  # why rows must not be joined, "" if they may

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str] = ()) -> list[Any]:
        """Returns these outputs in this order; (): all. Inputs and outputs are arrays.

        Raises what the framework raises.
        """


class ModelWorker:
    """The models of the process, and the threads that run them."""

    def __init__(self, link: socket.socket, memory: memoryview, load: Callable[[wire.LoadModel], ChildModel]) -> None:
        self._link, self._memory, self._make = link, memory, load
        self._models: dict[int, ChildModel] = {}

    def run(self) -> None:
        """Executes packets until the parent closes the socket."""
        packet = memoryview(bytearray(wire.MAX_PACKET))
        while size := self._link.recv_into(packet):
            order = wire.decode_order(packet[:size])
            match order:
                case wire.RunBatch():
                    self._run(order)
                case wire.LoadModel():
                    self._send(self._load(order))
                case wire.DropModel():
                    self._models.pop(order.model, None)
                    _give_memory_back()
                    self._send(wire.ModelDropped(order.model))
        os._exit(0)

    def _load(self, order: wire.LoadModel) -> wire.ModelLoaded | wire.ModelFailed:
        before = _resident()
        try:
            model = self._make(order)
        except Exception as error:
            _give_memory_back()
            return wire.ModelFailed(order.model, _text(error))
        self._models[order.model] = model
        size = max(_resident() - before, 0)
        return wire.ModelLoaded(order.model, model.inputs, model.outputs, model.max_rows, model.note, size)

    def _run(self, order: wire.RunBatch) -> None:
        clock = time.perf_counter_ns
        began = clock()
        try:
            memory = self._memory
            inputs = {
                place.name: read_array(memory[place.start : place.start + place.size], place.datatype, place.shape)
                for place in order.inputs
            }
            read = clock()
            model, names = self._models[order.model], order.outputs
            arrays = model.run(inputs, names)
            ends = [clock()]
            for step in order.then:
                inputs = _handed_on(step, dict(zip(names, arrays, strict=True)), order.inputs[0].shape[0])
                model, names = self._models[step.model], step.outputs
                arrays = model.run(inputs, names)
                ends.append(clock())
            done, spilled = self._write(order, model, names, arrays)
        except Exception as error:
            self._send(wire.BatchDone(order.batch, [], 0, 0, 0, error=_text(error)))
            return
        done.input_ns, done.run_ns, done.output_ns = read - began, ends[0] - read, clock() - ends[-1]
        done.then_ns = [end - start for start, end in pairwise(ends)]
        if spilled is None:
            self._send(done)
        else:
            socket.send_fds(self._link, [wire.encode(done)], [spilled])
            os.close(spilled)

    def _write(
        self, order: wire.RunBatch, model: ChildModel, names: Sequence[str], arrays: list[Any]
    ) -> tuple[wire.BatchDone, int | None]:
        """Writes outputs of a model into their room, or into a file in memory if they do not fit."""
        by_name = {spec.name: spec for spec in model.outputs}
        specs = [by_name[name] for name in names or by_name]
        places, parts, at = [], [], 0
        for spec, array in zip(specs, arrays, strict=True):
            datatype, data = write_array(array)
            if spec.datatype == "BF16":  # NumPy has its bits
                datatype = "BF16"
            places.append(wire.TensorPlace(spec.name, datatype, array.shape, at, len(data)))
            parts.append(data)
            at += -(-len(data) // 64) * 64
        if at <= order.room_size:
            for place, data in zip(places, parts, strict=True):
                place.start += order.room
                self._memory[place.start : place.start + place.size] = data
            return wire.BatchDone(order.batch, places, 0, 0, 0), None
        spilled = os.memfd_create("penstock-outputs", os.MFD_CLOEXEC)
        os.ftruncate(spilled, at)
        with mmap.mmap(spilled, at) as file:
            for place, data in zip(places, parts, strict=True):
                file[place.start : place.start + place.size] = bytes(data)
        return wire.BatchDone(order.batch, places, 0, 0, 0), spilled

    def _send(self, report: Any) -> None:
        self._link.send(wire.encode(report))


def _handed_on(step: wire.RunNext, arrays: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The inputs of a model among the outputs of the one before. Raises ValueError if a shape is not as declared."""
    for _, before, row in step.inputs:
        if arrays[before].shape != (rows, *row):
            raise ValueError(f"output {before!r} has the shape {arrays[before].shape}, not {(rows, *row)}")
    return {own: arrays[before] for own, before, _ in step.inputs}


def _text(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__)[:MAX_MESSAGE]


def _resident() -> int:
    """The bytes of memory that the process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def _give_memory_back() -> None:
    """Returns freed memory to the system. glibc would keep it for later, and a model may be large."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:  # another C library
        pass


def _framework(kind: str) -> Callable[[wire.LoadModel], ChildModel]:
    """Imports a framework, and returns what loads its models."""
    if kind == "torch":
        from penstock.repository.backend import torch_model

        torch_model.begin()
        return torch_model.TorchModel
    from penstock.repository.backend import onnx_model

    onnx_model.begin()
    return onnx_model.OnnxModel


def main() -> None:
    """Runs models until the parent closes the socket or ends."""
    kind = sys.argv[1]
    log_to_stderr(kind)
    faulthandler.enable()
    die_with_parent()
    link, memory, size = (int(argument) for argument in sys.argv[2:5])
    for descriptor in (link, memory):
        os.set_inheritable(descriptor, False)
    cores = len(os.sched_getaffinity(0))
    worker = ModelWorker(socket.socket(fileno=link), memoryview(mmap.mmap(memory, size)), _framework(kind))
    for _ in range(cores + SPARE_THREADS - 1):
        threading.Thread(target=worker.run, daemon=True).start()
    worker.run()


if __name__ == "__main__":
    main()
