"""Defaults of settings that nobody gave, declared in order with their reasons. A later one may use earlier values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from penstock.config.engine import EngineConfig
from penstock.config.facts import ModelFacts
from penstock.config.hardware import Hardware
from penstock.config.memory import (
    fit_tokens,
    fixed_bytes,
    gpu_budget,
    kv_budget,
    pool_bytes,
    tokens_of_one,
    workspace_bytes,
)
from penstock.config.sizes import format_bytes
from penstock.config.split import Split

MAX_NUM_SEQS = (256, 128, 64)
WORKSPACE_BYTES = 160 << 20  # what logits and the sampler may take by default: peak memory is weights + KV + 500 MB
STEP_TOKENS = 512
GPU_STEP_TOKENS = 2048
QUANTIZATION_GROUP = 32

# What each rank of a split holds of the model; the number is that of a row's values that share a scale. ValueError for
# a split that cannot be.
Divide = Callable[[Split, int], Sequence[ModelFacts]]


@dataclass(frozen=True)
class Known:
    """What a default may look at."""

    facts: ModelFacts
    hardware: Hardware
    folder: str
    values: Mapping[str, Any]  # settings decided so far, given or not
    divide: Divide

    @property
    def split(self) -> Split:
        names = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel")
        return Split(*(self.values[name] for name in names))

    @property
    def ranks(self) -> Sequence[ModelFacts]:
        """What each rank of the split holds."""
        int4 = self.values["quantization"] == "int4"
        return self.divide(self.split, self.values["quantization_group"] if int4 else 1)

    @property
    def local_ranks(self) -> int:
        """Those that share the hardware; Ray places ranks, so that none is known to be here beside another."""
        return self.split.world if self.hardware.shared and self.values["distributed_executor"] != "ray" else 1

    @property
    def memory(self) -> int:
        """Bytes that each rank may use."""
        if self.hardware.device == "cuda":
            return gpu_budget(self.hardware.memory_total, self.engine())
        return self.hardware.memory_available // self.local_ranks

    def engine(self, **changes: Any) -> EngineConfig:
        """An engine of the values decided so far, to size memory with."""
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
        )
        settled = {name: self.values[name] for name in names if name in self.values}
        return EngineConfig(model="", name="", device=self.hardware.device, **{**settled, **changes})


class Chosen(NamedTuple):
    value: Any
    reason: str


def _constant(value: Any, reason: str) -> Callable[[Known], Chosen]:
    return lambda known: Chosen(value, reason)


def _served_model_name(known: Known) -> Chosen:
    model = known.values.get("model")
    if model is None or Path(model).expanduser() == Path(known.folder):
        return Chosen(Path(known.folder).name or "model", "the model's folder")
    return Chosen(model, "the model's id on the hub")


def _device(known: Known) -> Chosen:
    hardware = known.hardware
    if hardware.device == "cuda":
        return Chosen("cuda", f"there is {hardware.name}")
    return Chosen("cpu", "there is no GPU that torch and its driver can use")


def _attention_backend(known: Known) -> Chosen:
    if known.hardware.device == "cuda":
        return Chosen("auto", "Triton's kernels, as FlashInfer has not been measured beside them")
    return Chosen("auto", "the processor's kernels")


def _dtype(known: Known) -> Chosen:
    stored = known.facts.checkpoint_dtype
    if stored == "float32":
        return Chosen("float32", "the checkpoint's own")
    if stored == "bfloat16":
        return Chosen("bfloat16", "the checkpoint's own")
    return Chosen("bfloat16", f"the checkpoint's {stored} is converted to it: as small, and without overflow")


def _max_num_seqs(known: Known) -> Chosen:
    if known.hardware.device == "cuda":
        return Chosen(MAX_NUM_SEQS[0], "a GPU takes little longer for many sequences than for one")

    def workspace(count: int) -> int:
        return max(workspace_bytes(facts, count) for facts in known.ranks)

    count = next((count for count in MAX_NUM_SEQS if workspace(count) <= WORKSPACE_BYTES), MAX_NUM_SEQS[-1])
    return Chosen(count, f"their logits and the sampler take {format_bytes(workspace(count))}")


def _max_num_batched_tokens(known: Known) -> Chosen:
    if known.hardware.device == "cuda":
        count = max(GPU_STEP_TOKENS, known.values["max_num_seqs"])
        return Chosen(count, "enough to keep tensor cores busy, few enough to keep a prompt from stalling others")
    count = max(STEP_TOKENS, known.values["max_num_seqs"])
    return Chosen(count, "enough to keep a CPU's GEMMs busy, few enough to keep a joining prompt from stalling others")


def _max_model_len(known: Known) -> Chosen:
    longest, given = known.facts.max_position, known.values["kv_cache_memory"]
    engine = known.engine(max_model_len=longest)
    pools = [given or kv_budget(engine, max(known.memory - fixed_bytes(facts, engine), 0), 0) for facts in known.ranks]
    tokens = min(fit_tokens(facts, engine, pool) for facts, pool in zip(known.ranks, pools, strict=True))
    if tokens >= longest or 0 not in known.facts.windows or tokens == 0:
        return Chosen(longest, "the model's own limit")
    return Chosen(tokens, f"what a KV cache of {format_bytes(min(pools))} holds of the model's {longest}")


def _kv_cache_memory(known: Known) -> Chosen:
    if known.split.world > 1:  # for stages of different sizes no one amount is right
        return Chosen(None, "a share of what everything else leaves of each rank's memory")
    if known.hardware.device == "cuda":
        return Chosen(None, "what --gpu-memory-utilization leaves when all else has been measured")
    engine = known.engine()
    left = known.memory - fixed_bytes(known.facts, engine)
    one = pool_bytes(known.facts, engine, tokens_of_one(known.facts, engine))
    share = kv_budget(engine, max(left, 0), one)
    wanted = pool_bytes(known.facts, engine, engine.max_num_seqs * engine.max_model_len)
    if wanted <= share:
        return Chosen(wanted, f"{engine.max_num_seqs} sequences of {engine.max_model_len} tokens")
    return Chosen(share, f"a share of the {format_bytes(left)} that everything else leaves")


def _threads(known: Known) -> Chosen:
    if known.values["distributed_executor"] == "ray":
        return Chosen(0, "each rank takes its share of the cores where it is placed")
    cores, ranks = known.hardware.cores, known.local_ranks
    if ranks == 1:
        return Chosen(cores, "every core this process may use")
    return Chosen(max(cores // ranks, 1), f"the share of each of {ranks} ranks in {cores} cores")


DEFAULTS: Mapping[str, Callable[[Known], Chosen]] = MappingProxyType(
    {
        "served_model_name": _served_model_name,
        "revision": _constant("", "the hub's main branch, or the folder as it is"),
        "host": _constant("127.0.0.1", "reachable from this machine only"),
        "port": _constant(8000, "what clients of such servers expect"),
        "api_key": _constant(None, "no key is asked for"),
        "allow_insecure_bind": _constant(False, "other machines need a key"),
        "seed": _constant(None, "each request draws its own"),
        "device": _device,
        "gpu_memory_utilization": _constant(0.9, "the rest is for what CUDA and other programs take beside it"),
        "enforce_eager": _constant(False, "CUDA graphs save the launches of a step"),
        "deterministic": _constant(False, "on a GPU the fast path; on a CPU tokens never depend on the batch"),
        "attention_backend": _attention_backend,
        "dtype": _dtype,
        "quantization": _constant("none", "weights in the dtype lose nothing"),
        "quantization_group": _constant(QUANTIZATION_GROUP, "the smallest: in int4, quality comes from small groups"),
        "block_size": _constant(16, "small blocks waste little at a sequence's end"),
        "kv_cache_dtype": _constant("auto", "keys and values in the dtype lose nothing"),
        "enable_prefix_caching": _constant(True, "equal prefixes are computed once"),
        "tensor_parallel_size": _constant(1, "layers are not divided"),
        "pipeline_parallel_size": _constant(1, "layers stay together"),
        "expert_parallel": _constant(False, "tensor ranks have a part of every expert each, so that all work alike"),
        "distributed_executor": _constant("auto", "ranks are processes of this machine"),
        "max_num_seqs": _max_num_seqs,
        "max_num_batched_tokens": _max_num_batched_tokens,
        "max_model_len": _max_model_len,
        "kv_cache_memory": _kv_cache_memory,
        "max_waiting": _constant(1024, "a longer queue would only time out"),
        "threads": _threads,
        "step_deadline": _constant(120.0, "no step of a healthy engine takes as long"),
        "event_log": _constant("", "no events are written"),
        "max_body_size": _constant(4 << 20, "a prompt of a million tokens"),
        "max_prompts": _constant(64, "a batch of an evaluation harness"),
        "max_choices": _constant(32, "more are better sent as requests"),
        "max_sequences": _constant(256, "what one request may take of the queue"),
        "max_logprobs": _constant(20, "as in the OpenAI API"),
        "max_stop_strings": _constant(16, "each is searched for in every token's text"),
        "max_in_flight": _constant(2048, "bounds memory and open sockets"),
        "drain_timeout": _constant(30.0, "as long as orchestrators wait before they kill"),
    }
)
