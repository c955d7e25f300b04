"""The kernels compiled for an H100 or H200, at the sizes of models in use, and what they take of one. Needs no GPU.

    python -m tests.kernels.triton.hopper few|all

prints a row of `Resources` for each kernel that the launchers would launch, as JSON lines. "few": at the sizes of one
model in bf16, dense and in two quantised formats. Each kernel takes about a second to compile.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from penstock.config.weights import GGUF_FORMATS
from penstock.kernels.attention import AttentionBatch, unscaled
from penstock.kernels.batch_arrays import BatchRows, EditRows, SamplingRows, StepArrays
from penstock.kernels.linear import DenseWeight
from penstock.kernels.triton.attention import TritonAttention
from penstock.kernels.triton.batch import advance, fill
from penstock.kernels.triton.experts import TritonExperts
from penstock.kernels.triton.gate import gate, quantized_gate
from penstock.kernels.triton.linear import TritonLinear
from penstock.kernels.triton.norm import TritonNorm
from penstock.kernels.triton.quantized import quantize_rows
from penstock.kernels.triton.sampling.choose import choose
from penstock.kernels.triton.weights import Scheme, Weight, empty_codes, empty_weight
from penstock.messages import Window

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Resources:
    kernel: str
    constants: dict[str, Any]  # what it was specialised for
    registers: int  # of a thread
    stack: int  # bytes of a thread: registers that were spilt
    shared: int  # bytes of a block
    tensor_cores: bool
    asynchronous: bool  # whether it loads ahead


class _Driver:
    """Of a GPU that compiles and runs nothing."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def record_launches() -> dict[int, Any]:
    """From now on launches only compile; gives what will hold each kernel once."""
    kernels: dict[int, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        kernels.setdefault(id(kernel), kernel)
        return kernel

    driver.set_active(_Driver())  # type: ignore[arg-type]
    JITFunction.run = compile_only
    return kernels


def resources(kernel: Any) -> Resources:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    if not found:
        raise ValueError(f"cuobjdump said nothing of registers: {said}")
    names = kernel.src.fn.arg_names
    constants = {names[path[0]]: value for path, value in kernel.src.constants.items() if names[path[0]].isupper()}
    code = kernel.asm["ptx"]
    return Resources(
        kernel.metadata.name,
        constants,
        int(found[1]),
        int(found[2]),
        kernel.metadata.shared,
        "mma.sync" in code or "wgmma" in code,
        "cp.async" in code,
    )


def rows(count: int, width: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(count, width, dtype=dtype)


def elementwise() -> None:
    norm, weight = TritonNorm(), torch.zeros(4096, dtype=BF16)
    norm(rows(8, 4096), rows(8, 4096), weight, 1e-5, 0.0)
    norm.quantized(rows(8, 4096), rows(8, 4096), weight, 1e-5, 0.0, dtype=FP8)
    gate(rows(8, 28672), "silu")
    quantized_gate(rows(8, 28672), "silu", FP8)
    quantize_rows(rows(8, 4096), torch.int8)


def attention(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int) -> None:
    """`dtype` is that of the pages."""
    provider, kind = TritonAttention(), torch.float32 if dtype == torch.float32 else BF16
    width = head_dim + 4 if dtype == FP8 else head_dim
    pages = torch.zeros(64, 2, 2, kv_heads, 16, width, dtype=dtype)
    keys, values = pages[:, 0, 0], pages[:, 0, 1]
    decodes = ([(1, 300)] * 32, [(1, 300)] * 4) if dtype == BF16 and not window else ([(1, 300)] * 4,)
    for lens in (*decodes, [(600, 700)]):
        lengths, contexts = np.array(lens, np.int64).T
        start = np.concatenate([[0], np.cumsum(lengths)])
        batch = AttentionBatch(16, Window(window), start, contexts, np.zeros((len(lens), 64), np.int64))
        query = torch.zeros(int(start[-1]), heads, head_dim, dtype=kind)
        provider(query, keys, values, provider.prepare(batch, keys), 0.1)
    TritonAttention(fixed=True)(query, keys, values, provider.prepare(batch, keys), 0.1)
    where = torch.zeros(8, dtype=torch.int64)
    turns = provider.rotation(where, unscaled(torch.ones(head_dim // 2)), BF16)
    weight = torch.zeros(heads + kv_heads, head_dim, dtype=kind)
    qkv = rows(8, (heads + 2 * kv_heads) * head_dim, kind)
    provider.store(qkv, heads, weight, turns, keys, values, where, where, 1e-6, 0.0)


def products() -> None:
    schemes: dict[Scheme, tuple[int, ...]] = {"int8": (1, 256), "fp8": (1, 60, 256), "int4": (1, 60, 256)}
    for scheme, counts in schemes.items():
        weight = empty_weight(4096, 4096, scheme, 32, "cpu")
        for count in counts:
            TritonLinear()(rows(count, 4096), weight, rows(count, 4096))
    # Half bytes and bytes, groups of 32 and 16, minima, and a table.
    for name, counts in {"Q4_K": (1, 60, 256), "Q6_K": (1, 60, 256), "Q3_K": (1,), "IQ4_NL": (1, 256)}.items():
        for count in counts:
            TritonLinear()(rows(count, 4096), empty_codes(4096, 4096, GGUF_FORMATS[name], "cpu"))
    TritonLinear().rows(
        torch.zeros(8, dtype=torch.int64), empty_codes(512, 4096, GGUF_FORMATS["Q6_K"], "cpu"), 1.0, BF16
    )
    for dtype in (BF16, torch.float32):
        dense = DenseWeight(torch.zeros(1, dtype=dtype).expand(4096, 4096), None)
        TritonLinear(fixed=True)(rows(8, 4096, dtype), dense, rows(8, 4096, dtype))


def experts() -> None:
    one = DenseWeight(torch.zeros(1, dtype=BF16).expand(128 * 1536, 2048), None)
    two = DenseWeight(torch.zeros(1, dtype=BF16).expand(128 * 2048, 768), None)
    # Small tiles and large ones: what lies between takes no more.
    for tokens in (4, 4096):
        mixture((one, two), tokens, TritonExperts())
    mixture((one, two), 4, TritonExperts(fixed=True))
    schemes: dict[Scheme, tuple[int, ...]] = {"int8": (4,), "fp8": (4096,), "int4": (4, 4096)}
    for scheme, counts in schemes.items():
        stacks = tuple(empty_weight(*weight.shape, scheme, 32, "meta") for weight in (one, two))
        for tokens in counts:
            mixture((stacks[0], stacks[1]), tokens, TritonExperts())
    codes = tuple(empty_codes(*weight.shape, GGUF_FORMATS["Q6_K"], "meta") for weight in (one, two))
    for tokens in (4, 4096):
        mixture((codes[0], codes[1]), tokens, TritonExperts())


def mixture(weights: tuple[Weight, Weight], tokens: int, provider: TritonExperts) -> None:
    routing = provider.route(rows(tokens, 128, torch.float32), 8, normalize=True)
    stacks = (provider.pack(weight, 128) for weight in weights)
    provider(rows(tokens, 2048), routing, *stacks, "silu", residual=rows(tokens, 2048))


def sampling() -> None:
    cpu = torch.device("cpu")
    state, step = BatchRows.empty(8, 100, 2, 10, cpu), StepArrays.empty(8, 8, 16, 2, cpu)
    sampling, edits = SamplingRows.empty(9, cpu), EditRows.empty(9, 1024, 260, cpu)
    fill(state, step, 4, 16)
    advance(state, step, 4, torch.zeros(4, dtype=torch.int64), sampling.outputs)
    logits, of_rows = rows(3, 128256, torch.float32), torch.arange(3).int()
    choose(
        logits,
        step.logit_rows[:, :3],
        sampling,
        edits,
        state.token_ids,
        edited=of_rows,
        filtered=True,
        logprobs=5,
    )


def one_model() -> None:
    """A kernel of each kind."""
    attention(BF16, 8, 4, 256, 512)
    linear, dense = TritonLinear(), DenseWeight(torch.zeros(1, dtype=BF16).expand(4096, 4096), None)
    linear(rows(60, 4096), empty_weight(4096, 4096, "int8", 32, "cpu"), rows(60, 4096))
    for count in (1, 60):
        linear(rows(count, 4096), empty_codes(4096, 4096, GGUF_FORMATS["Q4_K"], "cpu"))
    TritonLinear(fixed=True)(rows(8, 4096), dense, rows(8, 4096))
    one, two = (
        DenseWeight(torch.zeros(1, dtype=BF16).expand(128 * n, k), None) for n, k in ((1536, 2048), (2048, 768))
    )
    mixture((one, two), 4, TritonExperts())
    codes = tuple(empty_codes(*weight.shape, GGUF_FORMATS["Q6_K"], "meta") for weight in (one, two))
    mixture((codes[0], codes[1]), 4096, TritonExperts())


def every_size() -> None:
    for dtype in (BF16, FP8):
        attention(dtype, 32, 8, 128, 0)
    attention(BF16, 8, 4, 256, 512)
    attention(torch.float32, 32, 8, 128, 0)
    products()
    experts()


def main(sizes: str) -> None:
    kernels = record_launches()
    elementwise()
    {"few": one_model, "all": every_size}[sizes]()
    sampling()
    for kernel in kernels.values():
        print(json.dumps(asdict(resources(kernel))))


if __name__ == "__main__":
    main(sys.argv[1])
