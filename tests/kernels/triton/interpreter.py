"""Triton's interpreter, where there is no GPU: kernels run in NumPy, one program after the other.

Three of its operations are not those of a GPU (Triton 3.6 and 3.7): fp32 to bf16 cuts off instead of rounding, to fp8 a
carry out of the mantissa is lost, and a product of bf16 matrices multiplies their bits as integers. torch does these
right. And integers are no longer checked for overflow, the language is made the interpreter's once and not again for
each function that a kernel calls, and a type's counterpart is looked up once: these took most of the time.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language import core  # noqa: F401 (see repair)
from triton.runtime import interpreter

DTYPES = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def repair() -> None:
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("triton was imported to compile: import it after the package `tests`")
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    run = interpreter.GridExecutor.__call__

    def run_quietly(self: Any, *arguments: Any, **options: Any) -> None:
        with np.errstate(all="ignore"):  # a GPU does not warn of infinity, nor of wrapping hashes
            run(self, *arguments, **options)

    interpreter.GridExecutor.__call__ = run_quietly
    interpreter._patch_lang(repair)  # the language under the names it has here: kernels know `tl`, Triton's own `core`
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    counterpart = interpreter._get_np_dtype
    of_scalars = cache(counterpart)  # pointers cannot be looked up
    interpreter._get_np_dtype = lambda kind: (of_scalars if type(kind) is tl.dtype else counterpart)(kind)
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_dot = _dot


def _as_torch(data: Any, dtype: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(data).view(f"i{data.itemsize}")).view(DTYPES[dtype])


def _convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    converted = _as_torch(data, source).to(DTYPES[target])
    return converted.view(BITS[converted.itemsize]).numpy().view(f"u{converted.itemsize}").reshape(data.shape)


def _dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    if a.dtype in DTYPES:
        product = (_as_torch(a.data, a.dtype).float() @ _as_torch(b.data, b.dtype).float()).numpy()
    else:
        product = np.matmul(a.data.astype(np.int32), b.data.astype(np.int32))
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)
