"""Makes the `Identity` of a runner: everything that its keys and values depend on, besides the tokens."""

import json
from hashlib import sha256
from typing import Any

import torch

from penstock.config import EngineConfig, stored_as
from penstock.families import ModelSpec
from penstock.kernels import Kernels, Platform
from penstock.messages import Identity
from penstock.version import __version__
from penstock.weights.digest import WeightsDigest


def identify(
    spec: ModelSpec, digest: WeightsDigest | None, config: EngineConfig, platform: Platform, kernels: Kernels
) -> Identity:
    """Returns the identity. `spec` is the whole model's. Only the first rank has a digest; others return empty
    `weights`. Blocks until the digest is computed. Raises OSError if the weights cannot be read."""
    numerics = {
        "weights": stored_as(config, platform.isa),
        "kv": [config.kv_dtype, "block,layer,kv,head,token,dim", config.block_size],
        "machine": machine(platform, kernels),
    }
    weights = sha256(f"{digest.result()} {spec!r}".encode()).hexdigest() if digest else ""
    return Identity(weights, json.dumps(numerics, sort_keys=True))


def machine(platform: Platform, kernels: Kernels) -> list[Any]:
    """Returns the properties of this machine and its software on which the bits of a result may depend."""
    ours = [__version__, torch.__version__, platform.device, platform.capability, kernels.fingerprint]
    if platform.device == "cpu":
        return [*ours, torch.get_num_threads()]
    return [
        *ours,
        torch.version.cuda,
        torch.cuda.get_device_name(),  # cuBLAS chooses kernels by the device
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    ]
