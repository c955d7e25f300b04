"""The messages between the server and a child process that runs models. Each is one packet of a socket pair."""

from typing import Any

import msgspec

from penstock.messages.tensors import TensorSpec

MAX_PACKET = 128 << 10  # bytes: what a socket's default buffer takes; tensors are not in packets


class TensorPlace(msgspec.Struct, array_like=True):
    """A tensor in shared memory."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    start: int
    size: int  # bytes


class LoadModel(msgspec.Struct, tag="load", array_like=True):
    """Load a model from a file."""

    model: int
    path: str
    root: str  # the folder that files which the model names must be in
    max_rows: int  # of a batch, 0: no batch dimension; -1: the model decides
    inputs: tuple[TensorSpec, ...]  # as the settings declare them; (): as the model has them
    outputs: tuple[str, ...]  # their names in the settings, for files in which outputs have no names
    threads: int  # that compute one run


class RunNext(msgspec.Struct, array_like=True):
    """Run another model with the outputs of the one before, which stay in the process."""

    model: int
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]  # its input, the output before, and the shape of a row
    outputs: tuple[str, ...]


class RunBatch(msgspec.Struct, tag="run", array_like=True):
    """Run a model, `then` others. The outputs of the last one go to the region at `room`, one after the other."""

    batch: int
    model: int
    inputs: list[TensorPlace]
    outputs: tuple[str, ...]
    room: int
    room_size: int
    then: list[RunNext] = []


class DropModel(msgspec.Struct, tag="drop", array_like=True):
    """Free a model's memory."""

    model: int


class ModelLoaded(msgspec.Struct, tag="loaded", array_like=True):
    """A model is ready."""

    model: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_rows: int  # of a batch; 0: no batch dimension
    note: str  # why rows of several requests must not run together; "" if they may
    size: int  # bytes of memory that the process has taken for it


class ModelFailed(msgspec.Struct, tag="failed", array_like=True):
    """A model could not be loaded."""

    model: int
    message: str


class ModelDropped(msgspec.Struct, tag="dropped", array_like=True):
    model: int


class BatchDone(msgspec.Struct, tag="done", array_like=True):
    """The outputs of a batch; times are in nanoseconds. Outputs that did not fit in the room are in a file of their
    own, whose descriptor came with the packet."""

    batch: int
    outputs: list[TensorPlace]
    input_ns: int
    run_ns: int
    output_ns: int
    error: str = ""
    then_ns: list[int] = []  # the runs of the models that followed


ToChild = LoadModel | RunBatch | DropModel
FromChild = ModelLoaded | ModelFailed | ModelDropped | BatchDone
decode_order = msgspec.msgpack.Decoder(ToChild).decode  # raises msgspec.DecodeError, as the next one
decode_report = msgspec.msgpack.Decoder(FromChild).decode
_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """Returns a packet. Raises ValueError if it is too large."""
    packet = _encoder.encode(message)
    if len(packet) > MAX_PACKET:
        raise ValueError(f"the message has {len(packet)} bytes; the limit is {MAX_PACKET}: use fewer or shorter names")
    return packet
