"""Defaults of the settings with their reasons: the constants of `penstock.declared.settings`, and computed ones."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock.config.checks.speculation import cannot_speculate, off_by_default
from penstock.config.engine import EngineConfig
from penstock.config.facts import ModelFacts
from penstock.config.machine.hardware import Hardware
from penstock.config.memory import (
    fit_tokens,
    fixed_bytes,
    gpu_budget,
    kv_budget,
    pool_bytes,
    states_bytes,
    tokens_of_one_sequence,
    workspace_bytes,
)
from penstock.config.sizes import format_bytes
from penstock.config.split import Split
from penstock.declared.settings import SETTINGS

MAX_NUM_SEQS = (256, 128, 64)
WORKSPACE_BYTES = 160 << 20  # for logits and the sampler: peak memory is then weights + KV + 500 MB
STATE_SHARE = 1 / 8  # of the memory, for states
STEP_TOKENS = 512
GPU_STEP_TOKENS = 2048
SPECULATIVE_TOKENS = 31

# (split, number of values of a row that share a scale) to the sizes of each rank. Raises ValueError if the model cannot
# be split like this.
Divide = Callable[[Split, int], Sequence[ModelFacts]]


@dataclass(frozen=True)
class DefaultInputs:
    """Everything that a default may depend on."""

    facts: ModelFacts
    hardware: Hardware
    folder: str  # of the model, or its file
    local_name: str  # of the model if it is not from a hub
    values: Mapping[str, Any]  # settings decided so far, given or not
    divide: Divide

    @property
    def split(self) -> Split:
        names = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel")
        return Split(*(self.values[name] for name in names))

    @property
    def ranks(self) -> Sequence[ModelFacts]:
        """The sizes of each rank of the split."""
        int4 = self.values["quantization"] == "int4"
        return self.divide(self.split, self.values["quantization_group"] if int4 else 1)

    @property
    def local_ranks(self) -> int:
        """The number of ranks that share this hardware. 1 with Ray, which decides where ranks run."""
        return self.split.world if self.hardware.shared and self.values["distributed_executor"] != "ray" else 1

    @property
    def memory(self) -> int:
        """Bytes that each rank may use."""
        if self.hardware.device == "cuda":
            return gpu_budget(self.hardware.memory_total, self.engine())
        return self.hardware.memory_available // self.local_ranks

    def engine(self, **changes: Any) -> EngineConfig:
        """An engine with the values decided so far, for sizing memory."""
        names = (
            "gpu_memory_utilization",
            "enforce_eager",
            "dtype",
            "quantization",
            "quantization_group",
            "block_size",
            "kv_cache_dtype",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "expert_parallel",
            "num_speculative_tokens",
        )
        decided = {name: self.values[name] for name in names if name in self.values}
        return EngineConfig(model="", name="", device=self.hardware.device, **{**decided, **changes})


class Default(NamedTuple):
    value: Any
    reason: str


def _constant(value: Any, reason: str) -> Callable[[DefaultInputs], Default]:
    return lambda inputs: Default(value, reason)


def _served_model_name(inputs: DefaultInputs) -> Default:
    model, path = inputs.values.get("model"), Path(inputs.folder)
    if model is None or model == inputs.local_name:
        return Default(inputs.local_name, "the model's name")
    if Path(os.path.expanduser(model)) in (path, path.parent):
        return Default(inputs.local_name, "the model's folder or file")
    return Default(model, "the model's id on the hub")


def _device(inputs: DefaultInputs) -> Default:
    hardware = inputs.hardware
    if hardware.device == "cuda":
        return Default("cuda", f"there is {hardware.name}")
    return Default("cpu", "there is no GPU that torch and its driver can use")


def _dtype(inputs: DefaultInputs) -> Default:
    stored = inputs.facts.checkpoint_dtype
    if stored == "float32":
        return Default("float32", "the checkpoint's own")
    if stored == "bfloat16":
        return Default("bfloat16", "the checkpoint's own")
    return Default("bfloat16", f"the checkpoint's {stored} is converted to it: as small, and without overflow")


def _speculation(inputs: DefaultInputs) -> Default:
    """Returns what "auto" stands for, which is also the default."""
    reason = cannot_speculate(inputs.facts) or off_by_default(inputs.hardware.device, inputs.split)
    if reason is not None:
        return Default("off", reason)
    return Default("suffix", "this engine can verify drafts from every source")


def _num_speculative_tokens(inputs: DefaultInputs) -> Default:
    if inputs.values["speculation"] == "off":
        return Default(0, "speculation is off")
    if inputs.hardware.device == "cuda":
        return Default(SPECULATIVE_TOKENS, "as on a CPU: no number was measured on a GPU")
    return Default(SPECULATIVE_TOKENS, "with the token before them 32 rows, which a CPU computes at the cost of 16")


def _max_num_seqs(inputs: DefaultInputs) -> Default:
    if inputs.hardware.device == "cuda":
        return Default(MAX_NUM_SEQS[0], "a GPU takes little longer for many sequences than for one")

    def workspace(count: int) -> int:
        return max(workspace_bytes(facts, count) for facts in inputs.ranks)

    count = next((count for count in MAX_NUM_SEQS if workspace(count) <= WORKSPACE_BYTES), MAX_NUM_SEQS[-1])
    state, share = states_bytes(inputs.facts, 1), int(inputs.memory * STATE_SHARE)
    if state * count > share:
        count = max(share // state, 1)
        return Default(count, f"their states, of {format_bytes(state)} each, take {STATE_SHARE:g} of the memory")
    return Default(count, f"their logits and the sampler take {format_bytes(workspace(count))}")


def _enable_prefix_caching(inputs: DefaultInputs) -> Default:
    if inputs.facts.state_elements:
        return Default(False, "the model keeps states, which are not shared between sequences")
    return Default(True, "equal prefixes are computed once")


def _max_num_batched_tokens(inputs: DefaultInputs) -> Default:
    if inputs.hardware.device == "cuda":
        count = max(GPU_STEP_TOKENS, inputs.values["max_num_seqs"])
        return Default(count, "enough to keep tensor cores busy, few enough to keep a prompt from stalling others")
    count = max(STEP_TOKENS, inputs.values["max_num_seqs"])
    pooling = inputs.facts.pooling
    if pooling is not None and pooling.whole_prompts:
        longest = inputs.values.get("max_model_len") or inputs.facts.max_position
        return Default(max(count, longest), "a text is computed in one step")
    return Default(count, "enough to keep a CPU's GEMMs busy, few enough to keep a joining prompt from stalling others")


def _max_model_len(inputs: DefaultInputs) -> Default:
    longest, given = inputs.facts.max_position, inputs.values["kv_cache_memory"]
    engine = inputs.engine(max_model_len=longest)
    pools = [
        given or kv_budget(engine, max(inputs.memory - fixed_bytes(facts, engine), 0), 0) for facts in inputs.ranks
    ]
    tokens = min(fit_tokens(facts, engine, pool) for facts, pool in zip(inputs.ranks, pools, strict=True))
    if tokens >= longest or all(group.window for group in inputs.facts.groups) or tokens == 0:
        return Default(longest, "the model's own limit")
    return Default(tokens, f"what a KV cache of {format_bytes(min(pools))} holds of the model's {longest}")


def _kv_cache_memory(inputs: DefaultInputs) -> Default:
    if inputs.split.world > 1:  # stages of different sizes need different amounts
        return Default(None, "a share of what everything else leaves of each rank's memory")
    if inputs.hardware.device == "cuda":
        return Default(None, "what --gpu-memory-utilization leaves when all else has been measured")
    engine = inputs.engine()
    left = inputs.memory - fixed_bytes(inputs.facts, engine)
    one = pool_bytes(inputs.facts, engine, tokens_of_one_sequence(inputs.facts, engine))
    share = kv_budget(engine, max(left, 0), one)
    wanted = pool_bytes(inputs.facts, engine, engine.max_num_seqs * engine.max_model_len)
    if wanted <= share:
        return Default(wanted, f"{engine.max_num_seqs} sequences of {engine.max_model_len} tokens")
    return Default(share, f"a share of the {format_bytes(left)} that everything else leaves")


def _threads(inputs: DefaultInputs) -> Default:
    if inputs.values["distributed_executor"] == "ray":
        return Default(0, "each rank takes its share of the cores where it is placed")
    cores, ranks = inputs.hardware.cores, inputs.local_ranks
    if ranks == 1:
        return Default(cores, "every core this process may use")
    if ranks > cores:
        return Default(1, f"{ranks} ranks share {cores} cores and wait for each other: fewer ranks are faster")
    return Default(cores // ranks, f"the share of each of {ranks} ranks in {cores} cores")


DEFAULTS: Mapping[str, Callable[[DefaultInputs], Default]] = {
    **{name: _constant(each.default, each.why) for name, each in SETTINGS.items() if each.why},
    # In this order: a later one may use the values of earlier ones.
    "served_model_name": _served_model_name,
    "device": _device,
    "dtype": _dtype,
    "enable_prefix_caching": _enable_prefix_caching,
    "speculation": _speculation,
    "num_speculative_tokens": _num_speculative_tokens,
    "max_num_seqs": _max_num_seqs,
    "max_num_batched_tokens": _max_num_batched_tokens,
    "max_model_len": _max_model_len,
    "kv_cache_memory": _kv_cache_memory,
    "threads": _threads,
}
