"""Defaults of the settings, declared in order with their reasons. A later default may use earlier values."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
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
from penstock.config.server import WIRE_NAMES
from penstock.config.sizes import format_bytes
from penstock.config.split import Split

MAX_NUM_SEQS = (256, 128, 64)
WORKSPACE_BYTES = 160 << 20  # for logits and the sampler: peak memory is then weights + KV + 500 MB
STATE_SHARE = 1 / 8  # of the memory, for states
STEP_TOKENS = 512
GPU_STEP_TOKENS = 2048
QUANTIZATION_GROUP = 32
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


def _attention_backend(inputs: DefaultInputs) -> Default:
    if inputs.hardware.device == "cuda":
        return Default("auto", "Triton's kernels, as FlashInfer has not been measured beside them")
    return Default("auto", "the processor's kernels")


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
    return Default(max(cores // ranks, 1), f"the share of each of {ranks} ranks in {cores} cores")


DEFAULTS: Mapping[str, Callable[[DefaultInputs], Default]] = MappingProxyType(
    {
        "served_model_name": _served_model_name,
        "revision": _constant("", "the hub's main branch, or the folder as it is"),
        "host": _constant("127.0.0.1", "reachable from this machine only"),
        "port": _constant(8000, "what clients of such servers expect"),
        "api_processes": _constant(1, "enough for about a thousand streams"),
        "grpc_port": _constant(None, "HTTP only"),
        "api_key": _constant(None, "no key is required"),
        "admin_key": _constant(None, "on loopback without an API key none is required; else there are no such routes"),
        "allowed_host": _constant((), "on loopback without an API key only loopback's names; else any"),
        "tls_certificate": _constant("", "HTTP without TLS"),
        "tls_key": _constant("", "the key is in the certificate's file, if there is one"),
        "allow_insecure_bind": _constant(False, "other machines need a key"),
        "manage_models": _constant(False, "clients change nothing on this machine"),
        "cors_origin": _constant((), "only pages of the server itself may use it"),
        "seed": _constant(None, "each request draws its own"),
        "generation_config": _constant("model", "the values that the model recommends"),
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
        "enable_prefix_caching": _enable_prefix_caching,
        "tensor_parallel_size": _constant(1, "layers are not divided"),
        "pipeline_parallel_size": _constant(1, "layers stay together"),
        "expert_parallel": _constant(False, "each tensor rank has a part of every expert, so that all have equal work"),
        "distributed_executor": _constant("auto", "ranks are processes of this machine"),
        "speculation": _speculation,
        "num_speculative_tokens": _num_speculative_tokens,
        "max_num_seqs": _max_num_seqs,
        "max_num_batched_tokens": _max_num_batched_tokens,
        "max_model_len": _max_model_len,
        "kv_cache_memory": _kv_cache_memory,
        "watermark": _constant("none", "outputs are what the model gives"),
        "watermark_key": _constant("", "nothing is marked"),
        "max_waiting": _constant(1024, "a longer queue would only time out"),
        "max_waiting_tokens": _constant(1 << 20, "a thousand tokens for each request that may wait"),
        "target_itl": _constant(0.0, "prompts are cut to --max-num-batched-tokens only"),
        "threads": _threads,
        "step_deadline": _constant(120.0, "no step of a healthy engine takes as long"),
        "log_format": _constant("text", "for people"),
        "otlp_endpoint": _constant("", "no traces are sent"),
        "event_log": _constant("", "no events are written"),
        "max_body_size": _constant(4 << 20, "a prompt of a million tokens"),
        "max_answer_size": _constant(32 << 20, "4 million tokens, or 330,000 log-probabilities"),
        "wires": _constant(",".join(WIRE_NAMES), "every client finds its own"),
        "state_dir": _constant("auto", "penstock/port-N in the user's folder for state"),
        "max_prompts": _constant(64, "a batch of an evaluation harness"),
        "max_choices": _constant(32, "more are better sent as requests"),
        "max_sequences": _constant(256, "what one request may take of the queue"),
        "max_logprobs": _constant(20, "as in the OpenAI API"),
        "max_stop_strings": _constant(16, "each is searched for in every token's text"),
        "max_priority": _constant(10, "seconds: the others wait at most twice as much longer"),
        "tool_format": _constant("auto", "as the chat template shows it"),
        "reasoning_format": _constant("auto", "as the chat template shows it"),
        "thinking_budget": _constant(None, "models think as long as max_tokens allows"),
        "max_in_flight": _constant(2048, "bounds memory and open sockets"),
        "request_timeout": _constant(None, "a request may take as long as it needs"),
        "first_token_timeout": _constant(None, "a request may wait as long as it needs"),
        "sleep_after": _constant(None, "the engine stays loaded"),
        "drain_timeout": _constant(30.0, "as long as orchestrators wait before they kill"),
    }
)
