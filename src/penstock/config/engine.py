"""What an engine process is started with: everything resolved, nothing left to guess but how many KV blocks fit."""

from typing import Literal

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: str  # the model's folder
    name: str  # as shown to users
    revision: str = ""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    device: str = "cpu"
    max_model_len: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_bytes: int | None = None  # None: what the machine has left, see runtime.memory
    enable_prefix_caching: bool = True
    max_waiting: int = 1024
    depth: int = 1
    threads: int = 0  # 0: every core the process may use
    incarnation: int = 1
    step_deadline: float = 120.0  # seconds without a step, while there is work, after which the engine counts as hung
