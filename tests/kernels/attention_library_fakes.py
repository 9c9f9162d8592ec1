"""Stand-ins for flashinfer 0.7.4 and flash-attn-4 4.0.0b36: their signatures, their demands, plain values.

Parameters, their order and their defaults are the documented ones, as far as the first that nobody here
passes; a call that the libraries would refuse fails here, too. Values come from the tests' oracle.
"""

# ruff: noqa: PLR0917  (the libraries take what they take in order)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from attention_samples import naive_attention

from engine.ops import BatchLayout

NARROW = (torch.float16, torch.bfloat16)


def oracle(
    starts: torch.Tensor,
    contexts: torch.Tensor,
    tables: torch.Tensor,
    key_value: torch.Tensor,
    queries: torch.Tensor,
    window_left: int | None,
) -> torch.Tensor:
    """`key_value` [blocks, 2, kv_heads, block_size, head_dim]; `window_left` is inclusive."""
    no_rows = np.zeros(0, dtype=np.int64)
    layout = BatchLayout(starts.numpy(), contexts.numpy(), tables.numpy(), no_rows, no_rows)
    window = None if window_left is None else window_left + 1
    attended = naive_attention(layout, key_value[:, None].float(), 0, queries.float(), window)
    return attended.to(queries.dtype)


def require_int32(*tensors: torch.Tensor) -> None:
    assert all(tensor.dtype is torch.int32 and tensor.is_contiguous() for tensor in tensors)


def require_aligned(*tensors: torch.Tensor) -> None:
    """Others are copied on each call, all blocks of the cache."""
    for tensor in tensors:
        assert tensor.dtype in NARROW
        assert tensor.stride(-1) == 1
        assert tensor.data_ptr() % 16 == 0
        assert all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])


@dataclass(frozen=True)
class Plan:
    starts: torch.Tensor
    contexts: torch.Tensor
    tables: torch.Tensor
    sizes: tuple[int, int, int, int]  # heads, KV heads, head dim, block size
    window_left: int
    dtype: torch.dtype


class Wrapper:
    """What both wrappers of flashinfer have in common."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert workspace.dtype is torch.uint8
        assert kv_layout == "HND"
        self.num_plans = 0
        self.current: Plan | None = None

    def keep_plan(
        self,
        starts: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        sizes: tuple[int, int, int, int],
        window_left: int,
        dtypes: tuple[Any, Any],
    ) -> None:
        require_int32(starts, indptr, indices, last_page_len)
        num_pages = indptr.diff()
        assert len(starts) == len(indptr) == len(last_page_len) + 1
        assert (num_pages >= 1).all()
        assert len(indices) == indptr[-1]
        assert ((last_page_len >= 1) & (last_page_len <= sizes[3])).all()
        assert dtypes[0] is dtypes[1]
        tables = torch.nn.utils.rnn.pad_sequence(indices.split(num_pages.tolist()), batch_first=True)
        contexts = (num_pages - 1) * sizes[3] + last_page_len
        self.num_plans += 1
        self.current = Plan(starts, contexts, tables, sizes, window_left, dtypes[0])

    def run(self, q: torch.Tensor, paged_kv_cache: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert not args
        assert not kwargs
        plan = self.current
        assert plan is not None
        require_aligned(q, paged_kv_cache)
        assert q.dtype is paged_kv_cache.dtype is plan.dtype
        heads, kv_heads, head_dim, block_size = plan.sizes
        assert q.shape == (plan.starts[-1], heads, head_dim)
        assert paged_kv_cache.shape[1:] == (2, kv_heads, block_size, head_dim)
        window_left = None if plan.window_left == -1 else plan.window_left
        return oracle(plan.starts, plan.contexts, plan.tables, paged_kv_cache, q, window_left)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        assert use_tensor_cores
        assert not use_cuda_graph
        assert backend == "fa2"

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,  # passing more by position is deprecated
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        starts = torch.arange(len(indptr), dtype=torch.int32)
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self.keep_plan(
            starts, indptr, indices, last_page_len, sizes, window_left, (q_data_type, kv_data_type)
        )


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        assert not use_cuda_graph
        assert backend == "fa2"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        assert causal
        assert head_dim_vo is None
        rows = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.keep_plan(*rows, sizes, window_left, (q_data_type, kv_data_type))


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    assert cu_seqlens_q is not None
    assert seqused_k is not None
    assert page_table is not None
    assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
    require_int32(cu_seqlens_q, seqused_k, page_table)
    require_aligned(q, k, v)
    num_sequences = len(cu_seqlens_q) - 1
    assert q.dtype is k.dtype is v.dtype
    assert k.shape == v.shape
    assert len(seqused_k) == len(page_table) == num_sequences
    assert len(q) == cu_seqlens_q[-1]
    assert (max_seqlen_q, max_seqlen_k) == (cu_seqlens_q.diff().max(), seqused_k.max())
    assert causal
    left, right = window_size
    assert right == (None if left is None else 0)
    key_value = torch.stack([k, v], dim=1).transpose(2, 3)
    return oracle(cu_seqlens_q, seqused_k, page_table, key_value, q, left), None
