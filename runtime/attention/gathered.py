"""Paged attention in plain torch, behind the interface of flashinfer's wrappers: keys and values gathered cell by cell.

Reference of `runtime.attention.flashinfer`, and its replacement where flashinfer or its kernels are missing. Names,
order and meaning of arguments are those of flashinfer 0.6; those that are not used here are left out. Arrays for `plan`
are the host's but for the page indices; what `run` reads, it reads on the device, and no shape depends on it. Only a
row's own keys are ever read, so what else stands in its pages, or in the scratch page, does not matter.

Heads that share a KV head are folded into the query dimension. What is gathered at once is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from runtime.kv_cache import indexable

Tensor = torch.Tensor
KEYS = 1 << 17  # gathered at once, where rows are short
SCORES = 1 << 24  # of one head and several queries: cells of a mask


@dataclass(frozen=True)
class Part:
    """Rows `begin` to `end`, of which each attends with its queries `first` to `last`, all to the same span of keys."""

    begin: int
    end: int
    query: int  # index among all queries of the first
    back: int  # positions from the first query to the row's end
    count: int  # queries of each row
    span: tuple[int, int]  # of keys, by position


class Gathered:
    """What both wrappers share. Of the workspace only the device counts."""

    device: torch.device
    _paged_kv_indptr_buf: Tensor
    _paged_kv_indices_buf: Tensor
    _paged_kv_last_page_len_buf: Tensor

    def _plan(self, num_qo_heads: int, num_kv_heads: int, page_size: int, window_left: int, scale: float) -> None:
        self._kv_heads, self._group = num_kv_heads, num_qo_heads // num_kv_heads
        self._page_size, self._window, self._scale = page_size, window_left, scale
        self._parts: list[Part] = []

    def _load(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, non_blocking: bool = True) -> None:
        self._paged_kv_indptr_buf = indptr.to(self.device, non_blocking=non_blocking)
        self._paged_kv_indices_buf = indices.to(self.device, non_blocking=non_blocking)
        self._paged_kv_last_page_len_buf = last_page_len.to(self.device, non_blocking=non_blocking)

    def _add(self, begin: int, query: int, back: int, count: int, lengths: list[int]) -> None:
        """Plan a part of rows of these lengths."""
        first = 0 if self._window < 0 else max(0, min(lengths) - back - self._window)
        span = (first, max(lengths) - back + count)
        self._parts.append(Part(begin, begin + len(lengths), query, back, count, span))

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Queries [T, heads, head_dim] over keys and values, each [pages, page_size, kv_heads, head_dim], to [T, ...].

        KV may be of another dtype than `q`, float8_e4m3fn among them: a key is what is stored times `k_scale`.
        """
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        for part in self._parts:
            queries = slice(part.query, part.query + (part.end - part.begin) * part.count)
            out[queries] = self._attend(part, q[queries], paged_kv_cache, k_scale or 1.0)
        return out if v_scale in (None, 1.0) else out.mul_(v_scale)

    def _attend(self, part: Part, q: Tensor, caches: tuple[Tensor, Tensor], k_scale: float) -> Tensor:
        cells, mask = self._cells(part, q.device)
        keys, values = (_gathered(cache, cells).to(q.dtype).transpose(1, 2) for cache in caches)
        shape = (part.end - part.begin, self._kv_heads, part.count, self._group, q.shape[-1])
        folded = q.view(-1, part.count, *shape[1:2], *shape[3:]).transpose(1, 2).flatten(2, 3)
        mask = mask if part.count == 1 else mask.repeat_interleave(self._group, 1)
        answer = scaled_dot_product_attention(folded, keys, values, mask[:, None], scale=self._scale * k_scale)
        return answer.view(shape).transpose(1, 2).reshape(q.shape)

    def _cells(self, part: Part, device: torch.device) -> tuple[Tensor, Tensor]:
        """int64[rows, keys]: where the keys of the span stand; bool[rows, queries, keys]: which each query sees."""
        begins, ends = (self._paged_kv_indptr_buf[part.begin + at : part.end + at].long() for at in (0, 1))
        lengths = (ends - begins - 1) * self._page_size + self._paged_kv_last_page_len_buf[part.begin : part.end]
        keys = torch.arange(*part.span, device=device)
        at = (lengths[:, None] - part.back + torch.arange(part.count, device=device))[..., None]
        seen = keys <= at
        if self._window >= 0:
            seen &= keys >= at - self._window
        own = torch.minimum(keys, lengths[:, None] - 1)
        pages = self._paged_kv_indices_buf[begins[:, None] + own // self._page_size].long()
        return pages * self._page_size + own % self._page_size, seen


class BatchDecodeWithPagedKVCacheWrapper(Gathered):
    """One query for each row. Its plan may be run many times, but a CUDA graph would replay the widths of one plan."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self.device, self._static = float_workspace_buffer.device, use_cuda_graph
        if use_cuda_graph:
            buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
            indptr, indices, last_page_len = (buffer for buffer in buffers if buffer is not None)
            self._load(indptr, indices, last_page_len)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        window_left: int = -1,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
        seq_lens: Tensor | None = None,
    ) -> None:
        """int32[R + 1], [n], [R], and [R] `seq_lens`. A query sees `window_left` keys before its own, all where -1."""
        if self._static:
            self._paged_kv_indptr_buf.copy_(indptr, non_blocking=non_blocking)
            self._paged_kv_last_page_len_buf.copy_(last_page_len, non_blocking=non_blocking)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices, non_blocking=non_blocking)
        else:
            self._load(indptr, indices, last_page_len, non_blocking)
        self._plan(num_qo_heads, num_kv_heads, page_size, window_left, sm_scale or head_dim**-0.5)
        lengths = _lengths(indptr, last_page_len, page_size)
        rows = max(1, KEYS // max(lengths))
        for begin in range(0, len(lengths), rows):
            self._add(begin, begin, 1, 1, lengths[begin : begin + rows])


class BatchPrefillWithPagedKVCacheWrapper(Gathered):
    """Some queries for each row: its last tokens."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        self.device = float_workspace_buffer.device

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
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
        seq_lens: Tensor | None = None,
        max_token_per_sequence: int | None = None,
    ) -> None:
        """As for decode rows; int32[R + 1] `qo_indptr` says which queries are a row's."""
        assert causal
        self._load(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, non_blocking)
        self._plan(num_qo_heads, num_kv_heads, page_size, window_left, sm_scale or head_dim_qk**-0.5)
        begins = qo_indptr.tolist()
        for row, length in enumerate(_lengths(paged_kv_indptr, paged_kv_last_page_len, page_size)):
            begin, end = begins[row : row + 2]
            step = max(1, SCORES // (length * self._group))
            for query in range(begin, end, step):
                self._add(row, query, end - query, min(step, end - query), [length])


def _lengths(indptr: Tensor, last_page_len: Tensor, page_size: int) -> list[int]:
    """Tokens of each row, from arrays of the host."""
    return [int(length) for length in ((indptr[1:] - indptr[:-1] - 1) * page_size + last_page_len).tolist()]


def _gathered(cache: Tensor, cells: Tensor) -> Tensor:
    """int64[rows, keys] to [rows, keys, kv_heads, head_dim]."""
    found = indexable(cache).flatten(0, 1).index_select(0, cells.flatten())
    return found.view(cache.dtype).view(*cells.shape, *cache.shape[2:])
