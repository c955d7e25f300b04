"""The root of prefix cache keys: it identifies the keys and values that a runner computes."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.config import EngineConfig, stored_as
from penstock.families import ModelSpec
from penstock.kernels import Kernels, Platform

SAMPLES, SAMPLED_BYTES = 16, 256  # parts of each weight tensor that enter the digest, and the size of each


def cache_root(
    spec: ModelSpec, parameters: Mapping[str, Any], config: EngineConfig, platform: Platform, kernels: Kernels
) -> str:
    """Returns as JSON everything besides the tokens that keys and values depend on: the revision of the weights, dtype
    and layout of the pages, and everything else that may change a bit of the results."""
    root = {
        "weights": [config.revision, stored_as(config, platform.isa), weights_digest(spec, parameters)],
        "kv": [config.kv_dtype, "block,layer,kv,head,token,dim", config.block_size],
        "numerics": numerics(platform, kernels),
    }
    return json.dumps(root, sort_keys=True)


def weights_digest(spec: ModelSpec, parameters: Mapping[str, Any]) -> str:
    """Returns a digest of the spec, and of evenly spaced samples of each weight tensor: its beginning alone may be of
    only one of several matrices that are stored as one."""
    digest = hashlib.sha256(repr(spec).encode())
    for name in sorted(parameters):
        for tensor in _tensors(parameters[name]):
            digest.update(_samples(tensor.view(-1).view(torch.uint8)).cpu().numpy().tobytes())
    return digest.hexdigest()


def _samples(data: Tensor) -> Tensor:
    """Parts of an array of bytes, the first and the last among them; all of a small one."""
    last = len(data) - SAMPLED_BYTES
    if last <= SAMPLES * SAMPLED_BYTES:
        return data
    starts = (last * i // (SAMPLES - 1) for i in range(SAMPLES))
    return torch.cat([data[start : start + SAMPLED_BYTES] for start in starts])


def numerics(platform: Platform, kernels: Kernels) -> list[Any]:
    """The properties of this machine and its software that may change a bit of a result."""
    ours = [torch.__version__, platform.device, platform.capability, kernels.fingerprint]
    if platform.device == "cpu":
        return [*ours, torch.get_num_threads()]
    return [
        *ours,
        torch.version.cuda,
        torch.cuda.get_device_name(),  # cuBLAS chooses kernels by the device
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    ]


def _tensors(parameter: Any) -> Iterator[Tensor]:
    """Yields the tensors of a parameter, which may be packed."""
    if isinstance(parameter, Tensor):
        yield parameter
    elif isinstance(parameter, tuple):
        for section in parameter:
            yield from _tensors(section)
    elif dataclasses.is_dataclass(parameter):
        for field in dataclasses.fields(parameter):
            yield from _tensors(getattr(parameter, field.name))
