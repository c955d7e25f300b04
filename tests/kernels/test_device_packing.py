"""Weights for a GPU's products, packed while they are read, on the device of the rows."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config.weights import device_bytes, schemes
from penstock.kernels import CannotQuantize, Needs, Packing, Platform, check_kv_dtype, select_packing
from penstock.kernels.triton.weights import CodedWeight, QuantizedWeight
from tests.kernels.device_weights import dense, pack

GPU = Platform("cuda", "9.0")
HERE = torch.device("cpu")


def packing(quantization: str, group: int = 32, dtype: torch.dtype = torch.bfloat16) -> Packing:
    return select_packing(GPU, Needs(dtype), quantization, group, HERE)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("quantization", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("kind", ["matrix", "gated", "vocabulary"])
def test_rows_in_any_order_give_the_weight_packed_at_once(quantization: str, kind: str) -> None:
    weight = normal(52, 200).bfloat16()
    packer = packing(quantization, 64)((52, 200), kind)
    for start, stop in ((32, 52), (0, 10), (10, 32)):
        packer.put(start, weight[start:stop])
    got = packer.finish()
    scheme = schemes("bfloat16", quantization)[kind == "vocabulary"]
    want = pack(weight, scheme, 64)
    assert type(got) is type(want) and torch.equal(dense(got), dense(want))
    assert got.nbytes == device_bytes(52, 200, scheme, 64)


def packed(make: Packing, kind: Any) -> Any:
    packer = make((8, 64), kind)
    packer.put(0, normal(8, 64))
    return packer.finish()


def test_the_vocabulary_is_never_int4_and_a_router_is_dense() -> None:
    make = packing("int4")
    assert isinstance(packed(make, "matrix"), CodedWeight)
    vocabulary = packed(make, "vocabulary")
    assert isinstance(vocabulary, QuantizedWeight) and vocabulary.values.dtype == torch.int8
    assert packed(packing("fp8"), "vocabulary").values.dtype == torch.float8_e4m3fn
    router = packed(make, "router")
    assert isinstance(router, Tensor) and router.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_quantisation_weights_are_tensors_of_the_dtype(dtype: torch.dtype) -> None:
    rows = normal(6, 40)
    packer = packing("none", dtype=dtype)((6, 40), "gated")
    packer.put(0, rows.half())
    assert torch.equal(packer.finish(), rows.half().to(dtype))


def test_experts_lie_one_below_the_other() -> None:
    stack = normal(3 * 8, 64)
    packer = packing("fp8")((24, 64), "gated", 3)
    packer.put(0, stack)
    assert torch.equal(dense(packer.finish()), dense(pack(stack, "fp8")))


@pytest.mark.parametrize("quantization", ["int8", "fp8", "int4"])
def test_rows_that_cannot_be_quantised_are_found_at_the_end(quantization: str) -> None:
    packer = packing(quantization)((4, 64), "matrix")
    rows = normal(4, 64)
    rows[2, 5] = torch.inf
    packer.put(0, rows)
    with pytest.raises(ValueError, match=r"rows 0 to 3 hold infinity or NaN, .*: use --quantization none"):
        packer.finish()


def test_pages_in_fp8_are_a_gpus() -> None:
    check_kv_dtype(GPU, Needs(torch.bfloat16, head_dims=(64, 128)), "float8_e4m3fn")
    with pytest.raises(CannotQuantize, match=r"--kv-cache-dtype fp8 needs .* on this cpu device it is torch"):
        check_kv_dtype(Platform("cpu", "AVX2"), Needs(torch.bfloat16), "float8_e4m3fn")
    with pytest.raises(CannotQuantize, match="multiples of 4, not 30; leave it at auto"):
        check_kv_dtype(GPU, Needs(torch.bfloat16, head_dims=(64, 30)), "float8_e4m3fn")


def test_packing_needs_no_triton() -> None:
    script = (
        "import sys\nsys.modules['triton'] = None\nimport torch\n"
        "from penstock.kernels import Needs, Platform, select_packing\n"
        "make = select_packing(Platform('cuda', '9.0'), Needs(torch.bfloat16), 'fp8', 32, torch.device('cpu'))\n"
        "packer = make((4, 64), 'matrix')\npacker.put(0, torch.ones(4, 64))\npacker.finish()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
