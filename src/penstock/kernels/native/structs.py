"""The structs that native code takes, made from the headers that declare them: LinearOp, SampleOp, PackJob and others.

A module imports one from here by its name in C++. A pointer is an address, an enum is a number, and the one union is
the field `op` of RecordedOp.
"""

import ctypes
import re
from ctypes import c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

from penstock.kernels.native.build import CPP

F32, BF16, I8 = range(3)
SCHEMES = ("f32", "bf16", "int16", "grouped")
CODES = ("bytes", "nibbles", "iq4", "mxfp4", "nf4", "fp4")
SCALES = ("f16", "f32", "two_levels", "by_column")
EPILOGUES = ("", "silu", "gelu_tanh", "gelu", "swiglu_oai")  # of gated weights, in the order of Epilogue,
UNGATED = ("silu", "gelu_tanh", "gelu", "relu", "relu_squared")  # and those that follow

_HEADERS = ("step_ops.h", "ops.h", "pack.h", "reading.h")
_NUMBERS = {"float": c_float, "int32_t": c_int32, "int64_t": c_int64, "uint32_t": c_uint32, "uint64_t": c_uint64}
_STRUCT = re.compile(r"^struct (\w+) \{$(.*?)^\};$", re.MULTILINE | re.DOTALL)
_FIELDS = re.compile(r"^ +(?:const )?(\w+)(\*?) (\w+(?:, \w+)*);$", re.MULTILINE)  # of one type


def epilogue(activation: str, *, gated: bool) -> int:
    """The number of an activation in Epilogue."""
    return EPILOGUES.index(activation) if gated else len(EPILOGUES) + UNGATED.index(activation)


def _read_headers() -> dict[str, Any]:
    """The types in the headers by name, a class for each struct."""
    text = "".join((CPP / name).read_text(encoding="utf-8") for name in _HEADERS)
    text = re.sub(r" *//.*", "", text)
    types: dict[str, Any] = {**_NUMBERS, **dict.fromkeys(re.findall(r"enum class (\w+)", text), c_int32)}
    for struct, body in _STRUCT.findall(text):
        fields = [
            (name, c_void_p if pointer else types[kind])
            for kind, pointer, names in _FIELDS.findall(body)
            for name in names.split(", ")
        ]
        if "union {" in body:
            code, *ops = fields
            fields = [code, ("op", type("_Ops", (ctypes.Union,), {"_fields_": ops}))]
        types[struct] = type(struct, (ctypes.Structure,), {"_fields_": fields})
    return types


_TYPES = _read_headers()
AnyOp = ctypes.Structure
OPS: tuple[tuple[str, type[AnyOp]], ...] = tuple(_TYPES["RecordedOp"]._fields_[1][1]._fields_)  # in the order of OpCode


def __getattr__(name: str) -> Any:
    if name in _TYPES:
        return _TYPES[name]
    raise AttributeError(name)
