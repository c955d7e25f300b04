"""Attention of steps with prompts by FlashInfer (Ye et al., 2025), a library that is installed beside Penstock.

FlashInfer plans a step on the host, from its lengths and page tables, before the launch. The host has both for a step
with prompts. Decode-only steps are left to another provider: a captured graph would need a new plan before each replay,
and the host sends neither lengths nor tables while sequences decode.
"""

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.config import ConfigError
from penstock.kernels.attention import AttentionBatch, PagedAttention
from penstock.kernels.registry import Needs
from penstock.messages import Window

logger = logging.getLogger(__name__)

PACKAGE = "flashinfer-python"
LEAST_VERSION = (0, 6)
HEAD_DIMS = (64, 128, 256)  # supported by its kernels for Hopper and for older GPUs
DTYPES = (torch.bfloat16, torch.float16)
# Twice what its documentation recommends. The wrappers share it for partial results of divided contexts; 8 heads per KV
# head of 128 elements took 138 MB in earlier versions.
WORKSPACE_BYTES = 256 << 20


def installed_version() -> str:
    """The version of FlashInfer. Raises ConfigError if it is not installed or too old."""
    least = ".".join(map(str, LEAST_VERSION))
    remedy = f"pip install '{PACKAGE}>={least}', or set --attention-backend triton"
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        raise ConfigError(f"--attention-backend is flashinfer, which is not installed: {remedy}") from None
    if _numbers(found) < LEAST_VERSION:
        raise ConfigError(f"--attention-backend is flashinfer, but the one installed is {found}, too old: {remedy}")
    return found


def library() -> Any:
    """The flashinfer module. Raises ConfigError if it is missing, too old or cannot be imported."""
    found = installed_version()
    try:
        import flashinfer
    except (ImportError, OSError, RuntimeError) as error:  # its own, or of a library that it needs
        raise ConfigError(
            f"--attention-backend is flashinfer, and {found} is installed, but importing it fails: {error}; install "
            "what it needs, or set --attention-backend triton"
        ) from None
    return flashinfer


def unsupported_head_dims(needs: Needs) -> tuple[int, ...]:
    """The model's head sizes that FlashInfer has no kernels for."""
    return tuple(sorted({dim for dim in needs.head_dims if dim not in HEAD_DIMS}))


def check_attention(needs: Needs) -> None:
    """Raise ConfigError if FlashInfer is configured and cannot be used. Log a warning if it has no kernels for the
    model's head sizes: Triton computes these."""
    if needs.attention != "flashinfer":
        return
    if odd := unsupported_head_dims(needs):
        logger.warning(
            "attention is computed by Triton: FlashInfer supports head sizes %s, and the model has %s",
            ", ".join(map(str, HEAD_DIMS)),
            ", ".join(map(str, odd)),
        )
    else:
        library()


def _numbers(found: str) -> tuple[int, ...]:
    """(0, 7) for '0.7.2.post1'."""
    leading = ("".join(char for char in part if char.isdigit()) for part in found.split(".")[: len(LEAST_VERSION)])
    return tuple(int(digits or 0) for digits in leading)


@dataclass(eq=False)
class FlashInferPlan:
    """A step of a KV group: its sequences' queries and pages, int32 on the host. The first layer completes the plan,
    since only layers have the number of heads and the scale."""

    window: Window  # not chunked
    page_size: int
    query_start: Tensor  # [sequences + 1]
    page_start: Tensor  # [sequences + 1]
    pages: Tensor  # [page_start[-1]]
    last_page: Tensor  # [sequences]: tokens in the last page of each
    wrappers: dict[tuple[int, float], Any] = field(default_factory=dict)  # by (heads, scale)


@dataclass
class _Wrapper:
    """A wrapper of FlashInfer's, which holds one plan at a time."""

    wrapper: Any
    owner: Callable[[], FlashInferPlan | None]  # the step it was planned for, or None once that is gone
    sent: Any = None  # a CUDA event: the plan was copied from the host's buffer, which the next plan is written to


class FlashInferAttention:
    """Provides PagedAttention and PlannedAttention (see kernels/attention.py) for pages without scales."""

    def __init__(self, beside: PagedAttention, wrapper: Callable[..., Any]) -> None:
        """`beside` writes the pages and computes decode-only steps. `wrapper` is FlashInfer's
        BatchPrefillWithPagedKVCacheWrapper."""
        self._beside = beside
        self._make = wrapper
        self._wrappers: list[_Wrapper] = []
        self._workspace: Tensor | None = None
        self.rotation = beside.rotation
        self.store = beside.store
        self.arrange = beside.arrange

    def prepare(self, batch: AttentionBatch, keys: Tensor) -> Any:
        return self.plan(batch) if (batch.query_lens > 1).any() else self._beside.prepare(batch, keys)

    def plan(self, batch: AttentionBatch) -> FlashInferPlan:
        """Plan a step. Blocks before the window are left out, since their table entries are undefined; FlashInfer
        derives a query's position from its distance to the end of the context."""
        size, context, tables = batch.block_size, batch.context_lens, batch.block_tables
        first, past = batch.first_seen() // size, -(-context // size)
        column = np.arange(tables.shape[1])
        named = (column >= first[:, None]) & (column < past[:, None])
        page_start = np.concatenate([[0], np.cumsum(past - first)])
        last_page = context - (past - 1) * size
        arrays = (batch.query_start, page_start, tables[named], last_page)
        query_start, page_starts, pages, last_pages = map(_int32, arrays)
        return FlashInferPlan(batch.window, size, query_start, page_starts, pages, last_pages)

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        prepared: Any,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if not isinstance(prepared, FlashInferPlan):
            return self._beside(query, keys, values, prepared, scale, softcap=softcap, sinks=sinks)
        key = query.shape[1], scale
        if key not in prepared.wrappers:
            prepared.wrappers[key] = self._planned(query, keys, prepared, scale)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)  # FlashInfer would clear its own first
        prepared.wrappers[key].run(query, (keys, values), out=out)
        return out

    def _planned(self, query: Tensor, keys: Tensor, step: FlashInferPlan, scale: float) -> Any:
        """A wrapper that has planned the step and is reserved for it while the step exists."""
        device = keys.device
        held = self._unused_wrapper(step, device)
        if held.sent is not None:
            held.sent.synchronize()
        arrays = (step.query_start, step.page_start, step.pages, step.last_page)
        # Pinned, so that copies do not block on earlier steps.
        staged = [array.pin_memory() for array in arrays] if device.type == "cuda" else arrays
        held.wrapper.plan(
            *staged,
            query.shape[1],
            keys.shape[1],
            query.shape[2],
            step.page_size,
            causal=True,
            sm_scale=scale,
            window_left=step.window.tokens - 1,  # tokens before a query; -1: all
            q_data_type=query.dtype,
            kv_data_type=keys.dtype,
        )
        if device.type == "cuda":
            held.sent = torch.cuda.Event()
            held.sent.record(torch.cuda.current_stream(device))
        return held.wrapper

    def _unused_wrapper(self, step: FlashInferPlan, device: torch.device) -> _Wrapper:
        """A wrapper whose step is gone, or a new one."""
        free = next((held for held in self._wrappers if held.owner() is None), None)
        if free is None:
            if self._workspace is None:
                self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            free = _Wrapper(self._make(self._workspace, kv_layout="HND"), weakref.ref(step))
            self._wrappers.append(free)
        free.owner = weakref.ref(step)
        return free


def _int32(array: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))
