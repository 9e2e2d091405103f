"""Gathered attention against dense attention in float64, from the definition: one query and one head at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from runtime.attention import gathered
from runtime.attention.gathered import BatchDecodeWithPagedKVCacheWrapper as Decode
from runtime.attention.gathered import BatchPrefillWithPagedKVCacheWrapper as Prefill
from runtime.attention.page_lists import PageLists
from tests.runtime.attention_batches import batch_of

ROWS = [(0, 1), (36, 1), (15, 1), (16, 1), (0, 17), (31, 1), (5, 9), (16, 16), (40, 3)]
DECODE = 4
KV_HEADS = 2
FP8 = torch.float8_e4m3fn


def dense(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, window: int, scale: float) -> np.ndarray:
    """[queries, heads, dim] of the last positions over [length, kv_heads, dim], float64."""
    count, heads, _ = queries.shape
    length, kv_heads, _ = keys.shape
    out = np.zeros(queries.shape)
    for at in range(count):
        position = length - count + at
        first = 0 if window < 0 else max(0, position - window)
        for head in range(heads):
            kv = head * kv_heads // heads
            scores = keys[first : position + 1, kv] @ queries[at, head] * scale
            weights = np.exp(scores - scores.max())
            out[at, head] = weights / weights.sum() @ values[first : position + 1, kv]
    return out


class Case:
    """A step's queries over pages that hold NaN wherever no row's token stands."""

    def __init__(self, page_size: int, group: int, dim: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(dim + group)
        self.batch, self.size = batch_of(ROWS, DECODE, page_size), page_size
        self.heads, self.dim = group * KV_HEADS, dim
        tokens = len(self.batch.kv_cells)
        self.queries = torch.randn(tokens, self.heads, dim)
        self.rows, pages = [], int(self.batch.page_table.max()) + 1
        shape = (pages, page_size, KV_HEADS, dim)
        self.keys, self.values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        for row, length in enumerate(self.batch.seq_lens.tolist()):
            at = np.arange(length)
            cells = torch.from_numpy(self.batch.page_table[row, at // page_size] * page_size + at % page_size).long()
            self.rows.append(cells)
            for cache in (self.keys, self.values):
                cache.flatten(0, 1)[cells] = torch.randn(length, KV_HEADS, dim)
        self.keys, self.values = self.keys.to(dtype), self.values.to(dtype)

    def shape(self) -> dict[str, Any]:
        return {"num_qo_heads": self.heads, "num_kv_heads": KV_HEADS, "page_size": self.size}

    def expected(self, row: int, queries: torch.Tensor, window: int, scale: float, k: float = 1, v: float = 1) -> Any:
        keys, values = (cache.double().flatten(0, 1)[self.rows[row]] for cache in (self.keys, self.values))
        return dense(queries.double().numpy(), (keys * k).numpy(), (values * v).numpy(), window, scale)

    def check(
        self, out: torch.Tensor, begin: int, end: int, window: int, scale: float, atol: float, **kv: float
    ) -> None:
        """`out` of the queries of rows `begin` to `end`."""
        first, rest = int(self.batch.query_lens[:begin].sum()), out
        for row in range(begin, end):
            count = int(self.batch.query_lens[row])
            queries, first = self.queries[first : first + count], first + count
            np.testing.assert_allclose(
                rest[:count].double(), self.expected(row, queries, window, scale, **kv), atol=atol
            )
            rest = rest[count:]
        assert not len(rest)


def host(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.copy())


def decode_of(case: Case, window: int, scale: float | None = None) -> Decode:
    lists = PageLists.of(case.batch, 0, DECODE, case.size)
    wrapper = Decode(torch.empty(0))
    arrays = host(lists.kv_indptr), host(lists.kv_indices), host(lists.last_page_len)
    wrapper.plan(*arrays, head_dim=case.dim, window_left=window, sm_scale=scale, **case.shape())
    return wrapper


def prefill_of(case: Case, window: int, scale: float | None = None) -> Prefill:
    lists = PageLists.of(case.batch, DECODE, len(ROWS), case.size)
    wrapper = Prefill(torch.empty(0))
    arrays = (host(a) for a in (lists.qo_indptr, lists.kv_indptr, lists.kv_indices, lists.last_page_len))
    wrapper.plan(*arrays, head_dim_qk=case.dim, causal=True, window_left=window, sm_scale=scale, **case.shape())
    return wrapper


@pytest.mark.parametrize("window", [-1, 0, 7])
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize(("size", "dim"), [(1, 64), (16, 64), (16, 128), (1, 256)])
def test_equal_to_dense_attention(size: int, dim: int, group: int, window: int) -> None:
    case = Case(size, group, dim)
    caches = case.keys, case.values
    out = decode_of(case, window).run(case.queries[:DECODE], caches)
    case.check(out, 0, DECODE, window, 1 / math.sqrt(dim), 1e-5)
    into = torch.full_like(case.queries[DECODE:], torch.nan)
    assert prefill_of(case, window).run(case.queries[DECODE:], caches, out=into) is into
    case.check(into, DECODE, len(ROWS), window, 1 / math.sqrt(dim), 1e-5)


@pytest.mark.parametrize("window", [-1, 7])
def test_in_small_parts_the_answer_is_the_same(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "KEYS", 40)
    monkeypatch.setattr(gathered, "SCORES", 150)
    case = Case(16, 4, 64)
    caches = case.keys, case.values
    decode, prefill = decode_of(case, window, 0.3), prefill_of(case, window, 0.3)
    assert len(decode._parts) == DECODE and len(prefill._parts) > 2 * (len(ROWS) - DECODE)
    case.check(decode.run(case.queries[:DECODE], caches), 0, DECODE, window, 0.3, 1e-5)
    case.check(prefill.run(case.queries[DECODE:], caches), DECODE, len(ROWS), window, 0.3, 1e-5)


@pytest.mark.parametrize(("queries", "cache"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)])
def test_half_precision_and_queries_that_are_a_view(queries: torch.dtype, cache: torch.dtype) -> None:
    case = Case(16, 4, 128, cache)
    case.queries = case.queries.to(queries)
    wide = torch.zeros(len(case.queries), case.heads + 4, 128, dtype=queries)
    wide[:, : case.heads] = case.queries
    out = prefill_of(case, -1).run(wide[DECODE:, : case.heads], (case.keys, case.values))
    assert out.dtype == queries and out.is_contiguous()
    case.check(out, DECODE, len(ROWS), -1, 128**-0.5, 0.02)


def test_keys_and_values_in_eight_bits_with_their_scales() -> None:
    case = Case(16, 7, 64, FP8)
    caches, scales = (case.keys, case.values), {"k_scale": 0.5, "v_scale": 3.0}
    for dtype, atol in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        queries = case.queries = case.queries.to(dtype)
        out = decode_of(case, 7).run(queries[:DECODE], caches, **scales)
        assert out.dtype == dtype
        case.check(out, 0, DECODE, 7, 1 / 8, atol, k=0.5, v=3.0)
        out = prefill_of(case, 7).run(queries[DECODE:], caches, **scales)
        case.check(out, DECODE, len(ROWS), 7, 1 / 8, atol, k=0.5, v=3.0)


def test_a_batch_padded_to_its_graph_reads_one_token_of_the_scratch_page_for_each_row_more() -> None:
    case, size = Case(16, 4, 64), DECODE + 3
    lists = PageLists.of(case.batch, 0, DECODE, 16).padded(size)
    buffers = [torch.full((n,), -1, dtype=torch.int32) for n in (size + 1, 100, size)]
    wrapper = Decode(torch.empty(0), "NHD", True, False, *buffers)
    arrays = host(lists.kv_indptr), host(lists.kv_indices), host(lists.last_page_len)
    wrapper.plan(*arrays, head_dim=64, **case.shape())
    assert buffers[0].tolist() == lists.kv_indptr.tolist() and buffers[2].tolist() == lists.last_page_len.tolist()
    assert buffers[1].tolist() == lists.kv_indices.tolist() + [-1] * (100 - len(lists.kv_indices))
    case.keys[0, 0] = case.values[0, 0] = 1.5  # the rest of the scratch page stays NaN
    out = wrapper.run(torch.cat((case.queries[:DECODE], torch.randn(3, case.heads, 64))), (case.keys, case.values))
    case.check(out[:DECODE], 0, DECODE, -1, 1 / 8, 1e-5)
    assert torch.equal(out[DECODE:], torch.full_like(out[DECODE:], 1.5))


def test_the_plan_stands_on_the_host_and_nothing_asks_the_device() -> None:
    """On the meta device any question for a value fails."""
    case = Case(16, 4, 64)
    for wrapper, queries in ((decode_of(case, 7), case.queries[:DECODE]), (prefill_of(case, 7), case.queries[DECODE:])):
        for name in ("_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf"):
            setattr(wrapper, name, getattr(wrapper, name).to("meta"))
        out = wrapper.run(queries.to("meta"), (case.keys.to("meta"), case.values.to("meta")))
        assert out.shape == queries.shape
