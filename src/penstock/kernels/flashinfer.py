"""Attention of steps with prompts by FlashInfer (Ye et al., 2025), a library that is installed beside Penstock.

FlashInfer cuts a step into work on the host, by its lengths and page tables, before it is launched. Of a step with
prompts the host knows both. Steps in which every sequence has one query stay with the attention it is given beside: a
captured one would have to be planned before each replay, and the host sends neither lengths nor tables while sequences
decode.
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

logger = logging.getLogger(__name__)

PACKAGE = "flashinfer-python"
LEAST_VERSION = (0, 6)
HEAD_DIMS = (64, 128, 256)  # that its kernels for Hopper and those before are made for
DTYPES = (torch.bfloat16, torch.float16)
# Twice what its documentation recommends: what is computed of a context that was cut up lies there, of all wrappers in
# turn. 8 heads to a KV head of 128 elements took 138 MB in its earlier versions.
WORKSPACE_BYTES = 256 << 20


def installed_version() -> str:
    """Of FlashInfer. Raises ConfigError where there is none, or one too old."""
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
    """The module. Raises ConfigError where it is missing, too old or cannot be imported."""
    found = installed_version()
    try:
        import flashinfer
    except (ImportError, OSError, RuntimeError) as error:  # of itself, of what it takes, or of their libraries
        raise ConfigError(
            f"--attention-backend is flashinfer, and {found} is installed, but importing it fails: {error}; see to "
            "what it needs, or set --attention-backend triton"
        ) from None
    return flashinfer


def unsupported_head_dims(needs: Needs) -> tuple[int, ...]:
    """Sizes of the model's heads that there is nothing for."""
    return tuple(sorted({dim for dim in needs.head_dims if dim not in HEAD_DIMS}))


def check_attention(needs: Needs) -> None:
    """Raise ConfigError where FlashInfer is asked for and cannot be had. Where it has nothing for a model's heads, say
    so: others compute them."""
    if needs.attention != "flashinfer":
        return
    if odd := unsupported_head_dims(needs):
        logger.warning(
            "attention by Triton: FlashInfer is for heads of %s, and the model's are of %s",
            ", ".join(map(str, HEAD_DIMS)),
            ", ".join(map(str, odd)),
        )
    else:
        library()


def _numbers(found: str) -> tuple[int, ...]:
    """(0, 7) of '0.7.2.post1'."""
    leading = ("".join(char for char in part if char.isdigit()) for part in found.split(".")[: len(LEAST_VERSION)])
    return tuple(int(digits or 0) for digits in leading)


@dataclass(eq=False)
class FlashInferPlan:
    """A step of a KV group. Its sequences' queries and pages are int32 on the host; the rest of a plan waits for the
    first layer, which knows its heads and their scale."""

    window: int  # tokens a query sees, itself included; 0: all
    page_size: int
    query_start: Tensor  # [sequences + 1]
    page_start: Tensor  # [sequences + 1]
    pages: Tensor  # [page_start[-1]]
    last_page: Tensor  # [sequences]: tokens in the last page of each
    wrappers: dict[tuple[int, float], Any] = field(default_factory=dict)  # by heads and scale


@dataclass
class _Wrapper:
    """One of the library's, which holds a plan at a time."""

    wrapper: Any
    owner: Callable[[], FlashInferPlan | None]  # whose plan that is, while anybody needs it
    sent: Any = None  # an event: the plan has left the host's buffer, which the next one is written to


class FlashInferAttention:
    """Provides PagedAttention and PlannedAttention (see kernels/attention.py) for pages without scales."""

    reads_whole_blocks = False

    def __init__(self, beside: PagedAttention, wrapper: Callable[..., Any]) -> None:
        """`beside` writes the pages and computes steps of one query a sequence. `wrapper` is the library's
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
        """Blocks before those that a window reaches are left out, as what a table says of them means nothing: a query
        is placed by its distance to the context's end."""
        size, context, tables = batch.block_size, batch.context_lens, batch.block_tables
        first, past = batch.first_seen() // size, -(-context // size)
        column = np.arange(tables.shape[1])
        named = (column >= first[:, None]) & (column < past[:, None])
        page_start = np.concatenate([[0], np.cumsum(past - first)])
        last_page = context - (past - 1) * size
        arrays = (batch.query_start, page_start, tables[named], last_page)
        query_start, page_starts, pages, last_pages = map(_int32, arrays)
        return FlashInferPlan(batch.window, size, query_start, page_starts, pages, last_pages)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, prepared: Any, scale: float) -> Tensor:
        if not isinstance(prepared, FlashInferPlan):
            return self._beside(query, keys, values, prepared, scale)
        key = query.shape[1], scale
        if key not in prepared.wrappers:
            prepared.wrappers[key] = self._planned(query, keys, prepared, scale)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)  # its own it would clear first
        prepared.wrappers[key].run(query, (keys, values), out=out)
        return out

    def _planned(self, query: Tensor, keys: Tensor, step: FlashInferPlan, scale: float) -> Any:
        """A wrapper that has planned the step, and which nobody else uses while the step is held."""
        device = keys.device
        held = self._unused_wrapper(step, device)
        if held.sent is not None:
            held.sent.synchronize()
        arrays = (step.query_start, step.page_start, step.pages, step.last_page)
        # Pinned, so that copies do not wait for the steps before.
        staged = [array.pin_memory() for array in arrays] if device.type == "cuda" else arrays
        held.wrapper.plan(
            *staged,
            query.shape[1],
            keys.shape[1],
            query.shape[2],
            step.page_size,
            causal=True,
            sm_scale=scale,
            window_left=step.window - 1,  # tokens before a query; -1: all
            q_data_type=query.dtype,
            kv_data_type=keys.dtype,
        )
        if device.type == "cuda":
            held.sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            held.sent.record(torch.cuda.current_stream(device))
        return held.wrapper

    def _unused_wrapper(self, step: FlashInferPlan, device: torch.device) -> _Wrapper:
        """A wrapper whose plan nobody needs any more, or another."""
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
