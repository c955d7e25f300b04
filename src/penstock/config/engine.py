"""The configuration of an engine process: every setting has a value."""

from typing import Literal

import msgspec

from penstock.config.split import Split
from penstock.declared.settings import DEFAULTS
from penstock.messages import EngineRole

LEASE_PLACES = 255  # for engines that take turns on the processors
LEASE_BYTES = 64 * (LEASE_PLACES + 1)
STEP_DRAFTS = 32  # in one step: more take a processor longer than the tokens they save


class LeasePlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place of an engine among those that take turns on the same processors."""

    path: str  # of a file of LEASE_BYTES, all zero at first, that all of them map
    place: int  # below LEASE_PLACES
    weight: float = 1.0  # its share of the processors, in proportion to that of others that compete


class PageAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine and others read KV blocks from each other."""

    host: str = "127.0.0.1"  # to listen on
    port: int = 0  # 0: a free one
    key: str = ""  # that all of them have; a secret
    certificate: str = ""  # PEM file of this engine; "": no TLS
    private_key: str = ""  # PEM file; "": in the certificate's
    authority: str = ""  # PEM file, of the others' certificates; "": no TLS


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`penstock.declared.settings` describes these fields for operators. Without a setting, the defaults here are only
    those of tests and tools: config/defaults.py computes the others from the model and the machine."""

    model: str  # the model's folder
    name: str  # as shown to users
    revision: str = DEFAULTS["revision"]
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of weights, activations and KV cache
    quantization: Literal["none", "int8", "int4", "fp8"] = DEFAULTS["quantization"]  # of matrices
    quantization_group: int = DEFAULTS["quantization_group"]  # int4: values of a row that share a scale
    device: Literal["cpu", "cuda"] = "cpu"
    gpu_memory_utilization: float = DEFAULTS["gpu_memory_utilization"]
    enforce_eager: bool = DEFAULTS["enforce_eager"]  # on a GPU: no graphs
    deterministic: bool = DEFAULTS["deterministic"]
    max_model_len: int = 2048  # tokens of prompt and output together
    max_num_seqs: int = 64  # sequences that run at once
    max_num_batched_tokens: int = 2048  # tokens computed in one step
    block_size: int = DEFAULTS["block_size"]  # tokens per KV block
    kv_cache_bytes: int | None = None  # None: a share of what the machine has left, see memory.py
    kv_reserve_bytes: int | None = None  # address space for a KV cache whose size changes (`Resize`); None: it does not
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = DEFAULTS["kv_cache_dtype"]  # auto: the dtype
    enable_prefix_caching: bool = True
    speculation: Literal["off", "ngram", "suffix"] = "off"  # where drafts come from
    num_speculative_tokens: int = 0  # drafts of one sequence in a step, at most; 0: none
    watermark: Literal["none", "green-list", "gumbel"] = DEFAULTS["watermark"]
    watermark_key: str = DEFAULTS["watermark_key"]  # a secret
    max_waiting: int = DEFAULTS["max_waiting"]  # requests queued before new ones are refused
    max_waiting_tokens: int = DEFAULTS["max_waiting_tokens"]  # of the prompts of these
    target_itl: float = DEFAULTS["target_itl"]  # ms; 0: no target
    depth: int = 1  # plans that may be outstanding
    threads: int = 0  # of each rank; 0: its share of the cores its process may use
    tensor_parallel_size: int = DEFAULTS["tensor_parallel_size"]
    pipeline_parallel_size: int = DEFAULTS["pipeline_parallel_size"]
    expert_parallel: bool = DEFAULTS["expert_parallel"]  # the tensor ranks hold whole experts each
    distributed_executor: Literal["auto", "process", "ray"] = DEFAULTS["distributed_executor"]
    kv_disk: str = DEFAULTS["kv_disk"]  # see kv_disk.py; "": none
    kv_host: int | None = DEFAULTS["kv_host"]  # bytes of the host's memory for blocks of a GPU; None: none
    role: EngineRole = "alone"  # in a fleet
    region: str = DEFAULTS["region"]  # where the machine is
    pages: PageAccess | None = None  # None: no blocks are exchanged with other engines
    event_log: str = DEFAULTS["event_log"]  # a file; "": none
    has_tenants: bool = False  # requests are of several tenants (--tenants), which share the engine
    lease: LeasePlace | None = None  # None: no other engine shares the processors
    replaces: bool = False  # another engine answers until this one is ready, which loads at the lowest priority
    incarnation: int = 1
    log_format: Literal["text", "json"] = DEFAULTS["log_format"]
    log_level: Literal["debug", "info", "warning", "error"] = DEFAULTS["log_level"]
    step_deadline: float = DEFAULTS["step_deadline"]  # seconds

    @property
    def split(self) -> Split:
        """The ranks that share the model."""
        return Split(self.tensor_parallel_size, self.pipeline_parallel_size, self.expert_parallel)

    @property
    def max_step_drafts(self) -> int:
        """Drafts of all sequences in a step, at most."""
        return max(self.num_speculative_tokens, STEP_DRAFTS) if self.num_speculative_tokens else 0

    @property
    def kv_dtype(self) -> str:
        """The dtype of the KV cache, by torch's name."""
        if self.kv_cache_dtype == "fp8":
            return "float8_e4m3fn"
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def element_size(self) -> int:
        """Bytes of one weight or activation."""
        return 4 if self.dtype == "float32" else 2

    @property
    def kv_element_size(self) -> int:
        """Bytes of one element of the KV cache."""
        return self.element_size if self.kv_cache_dtype == "auto" else 1
