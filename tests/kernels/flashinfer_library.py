"""A stand-in for FlashInfer: the wrapper that Penstock uses, with the same signatures and the same contract.

It computes in plain torch, and refuses what the library refuses, or would read or write beyond its memory for. Names
and order of arguments are those of flashinfer-python 0.7.2; tests/gpu holds them against the one installed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16)
LAYOUT = "HND"  # of pages: [pages, kv_heads, page_size, head_dim]; the only one computed here


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        if float_workspace_buffer.data_ptr() % 16:
            raise ValueError("float_workspace_buffer must be 16-byte aligned")
        if kv_layout != LAYOUT or use_cuda_graph or backend != "auto" or jit_args is not None:
            raise NotImplementedError("not of this stand-in")
        self.plans = 0
        self._planned: dict[str, Any] = {}

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        sequences = len(qo_indptr) - 1
        starts, pages, last = qo_indptr.tolist(), paged_kv_indptr.tolist(), paged_kv_last_page_len.tolist()
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        if any(array.dtype != torch.int32 or array.dim() != 1 for array in arrays):
            raise ValueError("indptr, indices and lengths are int32 [n]")
        if len(pages) != sequences + 1 or len(last) != sequences:
            raise ValueError("paged_kv_indptr is [batch_size + 1], paged_kv_last_page_len [batch_size]")
        if starts[0] or pages[0] or sorted(starts) != starts or sorted(pages) != pages:
            raise ValueError("an indptr begins at 0 and does not descend")
        if pages[-1] != len(paged_kv_indices) or not all(1 <= length <= page_size for length in last):
            raise ValueError("paged_kv_indices are [paged_kv_indptr[-1]]; 1 <= paged_kv_last_page_len <= page_size")
        if num_qo_heads % num_kv_heads:
            raise ValueError("num_qo_heads must be a multiple of num_kv_heads")
        kv_data_type = kv_data_type or q_data_type
        if q_data_type not in DTYPES or kv_data_type != q_data_type:
            raise ValueError(f"there is no kernel for queries in {q_data_type} and pages in {kv_data_type}")
        if (
            custom_mask is not None
            or pos_encoding_mode != "NONE"
            or not causal
            or logits_soft_cap
            or head_dim_vo not in (None, head_dim_qk)
        ):
            raise NotImplementedError("not of this stand-in")
        lengths = [(pages[i + 1] - pages[i] - 1) * page_size + last[i] for i in range(sequences)]
        if any(length < starts[i + 1] - starts[i] for i, length in enumerate(lengths)):
            raise ValueError("causal: a context is no shorter than its queries")
        self.plans += 1
        self._planned = {
            "starts": starts,
            "pages": [paged_kv_indices[pages[i] : pages[i + 1]].long() for i in range(sequences)],
            "lengths": lengths,
            "query": (starts[-1], num_qo_heads, head_dim_qk),
            "page": (num_kv_heads, page_size, head_dim_qk),
            "dtype": q_data_type,
            "scale": head_dim_qk**-0.5 if sm_scale is None else sm_scale,
            "window_left": window_left,
        }

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Tensor:
        planned = self._planned
        if not planned:
            raise RuntimeError("run before plan")
        keys, values = paged_kv_cache
        if q.dtype != planned["dtype"] or keys.dtype != planned["dtype"]:
            raise ValueError(f"q is {q.dtype} and pages {keys.dtype}, but {planned['dtype']} was planned")
        if tuple(q.shape) != planned["query"] or tuple(keys.shape[1:]) != planned["page"]:
            raise ValueError(f"q is {tuple(q.shape)} and pages {tuple(keys.shape)}, which is not what was planned")
        if q.stride(-1) != 1 or keys.stride(-1) != 1 or keys.stride() != values.stride():
            raise ValueError("elements of a head lie side by side, and keys as values do")
        if out is None:
            out = torch.zeros_like(q)
        elif out.shape != q.shape or out.dtype != q.dtype:
            raise ValueError("out is as q")
        for i, (start, end) in enumerate(zip(planned["starts"], planned["starts"][1:], strict=False)):
            out[start:end] = self._attend(q[start:end], keys, values, planned["pages"][i], planned["lengths"][i])
        return out

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, length: int) -> Tensor:
        """One sequence: queries are the last of its tokens."""
        planned, (count, _, head_dim) = self._planned, query.shape
        k, v = (
            cache[pages].transpose(1, 2).reshape(-1, keys.shape[1], head_dim)[:length].float().transpose(0, 1)[None]
            for cache in (keys, values)
        )
        query_at, key_at = torch.arange(length - count, length)[:, None], torch.arange(length)
        visible = key_at <= query_at
        if planned["window_left"] >= 0:
            visible &= key_at >= query_at - planned["window_left"]
        result = F.scaled_dot_product_attention(
            query.float().transpose(0, 1)[None], k, v, attn_mask=visible, scale=planned["scale"], enable_gqa=True
        )
        return result[0].transpose(0, 1).to(query.dtype)
