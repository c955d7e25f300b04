"""The process that runs models: python -m penstock.repository.backend.child SOCKET MEMORY SIZE

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
from typing import Any

from penstock.engine.child import die_with_parent, log_to_stderr
from penstock.repository.backend.onnx_model import OnnxModel, begin, read_array, write_array
from penstock.repository.backend.wire import (
    MAX_PACKET,
    BatchDone,
    DropModel,
    LoadModel,
    ModelDropped,
    ModelFailed,
    ModelLoaded,
    RunBatch,
    TensorPlace,
    decode_order,
    encode,
)

SPARE_THREADS = 1  # one loads a model while the others run batches
MAX_MESSAGE = 2000  # characters of an error


class ModelWorker:
    """The models of the process, and the threads that run them."""

    def __init__(self, link: socket.socket, memory: memoryview) -> None:
        self._link, self._memory = link, memory
        self._models: dict[int, OnnxModel] = {}

    def run(self) -> None:
        """Executes packets until the parent closes the socket."""
        packet = memoryview(bytearray(MAX_PACKET))
        while size := self._link.recv_into(packet):
            order = decode_order(packet[:size])
            match order:
                case RunBatch():
                    self._run(order)
                case LoadModel():
                    self._send(self._load(order))
                case DropModel():
                    self._models.pop(order.model, None)
                    _give_memory_back()
                    self._send(ModelDropped(order.model))
        os._exit(0)

    def _load(self, order: LoadModel) -> ModelLoaded | ModelFailed:
        before = _resident()
        try:
            model = OnnxModel(order)
        except Exception as error:
            _give_memory_back()
            return ModelFailed(order.model, _text(error))
        self._models[order.model] = model
        return ModelLoaded(
            order.model,
            model.inputs,
            model.outputs,
            model.max_rows,
            not model.note,
            model.note,
            max(_resident() - before, 0),
        )

    def _run(self, order: RunBatch) -> None:
        clock = time.perf_counter_ns
        began = clock()
        try:
            memory = self._memory
            inputs = {
                place.name: read_array(memory[place.start : place.start + place.size], place.datatype, place.shape)
                for place in order.inputs
            }
            read = clock()
            arrays = self._models[order.model].run(inputs, order.outputs)
            ran = clock()
            done, spilled = self._write(order, arrays)
        except Exception as error:
            self._send(BatchDone(order.batch, [], 0, 0, 0, error=_text(error)))
            return
        done.input_ns, done.run_ns, done.output_ns = read - began, ran - read, clock() - ran
        if spilled is None:
            self._send(done)
        else:
            socket.send_fds(self._link, [encode(done)], [spilled])
            os.close(spilled)

    def _write(self, order: RunBatch, arrays: list[Any]) -> tuple[BatchDone, int | None]:
        """Writes outputs into their room, or into a file in memory if they do not fit."""
        names = order.outputs or self._models[order.model].output_names
        places, parts, at = [], [], 0
        for name, array in zip(names, arrays, strict=True):
            datatype, data = write_array(array)
            places.append(TensorPlace(name, datatype, array.shape, at, len(data)))
            parts.append(data)
            at += -(-len(data) // 64) * 64
        if at <= order.room_size:
            for place, data in zip(places, parts, strict=True):
                place.start += order.room
                self._memory[place.start : place.start + place.size] = data
            return BatchDone(order.batch, places, 0, 0, 0), None
        spilled = os.memfd_create("penstock-outputs", os.MFD_CLOEXEC)
        os.ftruncate(spilled, at)
        with mmap.mmap(spilled, at) as file:
            for place, data in zip(places, parts, strict=True):
                file[place.start : place.start + place.size] = bytes(data)
        return BatchDone(order.batch, places, 0, 0, 0, spilled=True), spilled

    def _send(self, report: Any) -> None:
        self._link.send(encode(report))


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


def main() -> None:
    """Runs models until the parent closes the socket or ends."""
    log_to_stderr("onnx")
    faulthandler.enable()
    die_with_parent()
    link, memory, size = (int(argument) for argument in sys.argv[1:4])
    for descriptor in (link, memory):
        os.set_inheritable(descriptor, False)
    cores = len(os.sched_getaffinity(0))
    begin()
    worker = ModelWorker(socket.socket(fileno=link), memoryview(mmap.mmap(memory, size)))
    for _ in range(cores + SPARE_THREADS - 1):
        threading.Thread(target=worker.run, daemon=True).start()
    worker.run()


if __name__ == "__main__":
    main()
