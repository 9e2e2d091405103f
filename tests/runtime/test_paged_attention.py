"""A GPU's attention with gathered pages, on the CPU: equal to the CPU's own, eager and padded to graphs."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from runtime.attention import backend as backends
from runtime.attention.backend import GATHERED, Backend
from runtime.attention.cpu import CpuAttention
from runtime.attention.flashinfer import PagedAttention
from runtime.attention.wrappers import PINNED, Sizes, workspace_bytes
from runtime.batch import Batch
from runtime.device.staging import Staging
from runtime.kv_cache import KVCache
from runtime.model.config import ModelConfig
from tests.fake_accelerator import FakeAccelerator
from tests.runtime import flashinfer_0_6_13 as real
from tests.runtime.attention_batches import Slots

LAYERS, DIM = 2, 64
CONFIG = ModelConfig("LlamaForCausalLM", 100, 8, 8, LAYERS, 8, 2, DIM, 4096, 1e-5, 1e4)
FP8 = torch.float8_e4m3fn


def put(array: np.ndarray, into: torch.Tensor | None = None) -> torch.Tensor:
    new = torch.from_numpy(array.copy())
    if into is None:
        return new
    assert into.dtype == new.dtype and into.shape == new.shape
    return into.copy_(new)


class Pair:
    """The same steps on `PagedAttention` and on `CpuAttention`, each with a cache of its own."""

    def __init__(
        self, page_size: int, window: int | None = None, dtype: torch.dtype = torch.float32, backend: Backend = GATHERED
    ) -> None:
        torch.manual_seed(page_size)
        self.slots = Slots(8, 64 // page_size, page_size)
        self.config = replace(CONFIG, sliding_window=window)
        shape = (LAYERS, self.slots.num_pages, page_size, CONFIG.num_kv_heads, DIM)
        self.cache, self.other, self.gpu = KVCache(*shape, dtype), KVCache(*shape, dtype), FakeAccelerator()
        sizes = Sizes(8, 64 // page_size, 2)
        self.paged = PagedAttention(self.config, self.cache, self.gpu, backend, dtype, sizes)

    def inputs(self, tokens: int) -> list[torch.Tensor]:
        """Queries, keys and values, as views of what one product gives."""
        dtype, heads, kv_heads = self.cache.keys[0].dtype, CONFIG.num_heads, CONFIG.num_kv_heads
        whole = torch.randn(tokens, heads + 2 * kv_heads, DIM).to(dtype)
        return list(whole.split([heads, kv_heads, kv_heads], 1))

    def compare(self, batch: Batch, attention: Any, padding: int = 0, atol: float = 1e-5) -> None:
        """Every layer of a step whose tokens `attention` has been planned for; `padding` rows follow them."""
        tokens, reference = len(batch.kv_cells), CpuAttention(batch, self.other, self.config.sliding_window)
        for layer in range(LAYERS):
            inputs = self.inputs(tokens + padding)
            out = attention(layer, *inputs)
            expected = reference(layer, *(one[:tokens] for one in inputs))
            assert out.dtype == inputs[0].dtype and out.is_contiguous() and out.isfinite().all()
            torch.testing.assert_close(out[:tokens], expected, atol=atol, rtol=atol)
            for mine, other in ((self.cache.keys, self.other.keys), (self.cache.values, self.other.values)):
                assert torch.equal(mine[layer][1:], other[layer][1:])  # padding touches the scratch page alone

    def eager(self, batch: Batch) -> None:
        self.compare(batch, self.paged.plan(batch, put))


@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("page_size", [1, 16])
def test_mixed_steps(page_size: int, window: int | None) -> None:
    pair = Pair(page_size, window)
    step = pair.slots.step
    pair.eager(step([], [(1, 20), (2, 1)], [(1, 0), (2, 0)]))  # chunks alone
    pair.eager(step([1, 2], [(3, 17), (4, 3)], [(3, 0), (4, 0)]))  # both
    pair.eager(step([2, 4, 1], [(3, 15)]))  # a chunk that goes on, decode rows in another order
    pair.eager(step([1, 2, 3, 4]))  # decode rows alone
    pair.eager(step([1], [(2, 30)], [(2, 0)]))  # a slot taken anew


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("page_size", [1, 16])
def test_graphs_of_several_sizes_between_eager_steps(page_size: int, window: int | None) -> None:
    pair = Pair(page_size, window)
    graphs, step = {size: pair.paged.graph(size) for size in (2, 4, 8)}, pair.slots.step
    for graph in graphs.values():  # may be recorded before anything is planned
        graph(0, *pair.inputs(graph.size))
    pair.eager(step([], [(1, 20), (2, 16), (3, 15), (4, 1)], [(1, 0), (2, 0), (3, 0), (4, 0)]))
    for rows, size in (([1, 2, 3, 4], 4), ([1, 2, 3], 8), ([3, 1], 2), ([4], 2), ([4, 2, 1, 3], 8)):
        batch = step(rows)
        graphs[size].plan(batch, put)
        pair.compare(batch, graphs[size], size - len(rows))
        pair.eager(step([1], [(2, 2)]))
    with pytest.raises(ValueError, match="no chunk rows"):
        graphs[8].plan(step([1], [(2, 2)]), put)
    with pytest.raises(ValueError, match="3 rows do not fit a batch of 2"):
        graphs[2].plan(step([1, 2, 3]), put)


def test_what_a_graph_reads_stays_where_it_was_when_recorded() -> None:
    """Only its memory is written by a plan: tensors of its own would be those of the recording for ever."""
    pair = Pair(16)
    graph = pair.paged.graph(4)
    names = "_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf"
    before = [getattr(graph.wrapper, name).data_ptr() for name in names] + [graph.cells.data_ptr()]
    batch = pair.slots.step([1, 2], [], [(1, 16), (2, 31)])
    graph.plan(batch, put)
    assert [getattr(graph.wrapper, name).data_ptr() for name in names] + [graph.cells.data_ptr()] == before
    assert pair.paged.buffers[0][:5].tolist() == [0, 2, 4, 5, 6]
    assert pair.paged.buffers[1][:6].tolist() == [*batch.page_table.flatten().tolist(), 0, 0]
    assert graph.cells.tolist() == [*batch.kv_cells.tolist(), 0, 0]


def test_half_precision_keeps_its_dtype() -> None:
    pair = Pair(16, None, torch.bfloat16)
    batch = pair.slots.step([], [(1, 20)], [(1, 0)])
    pair.compare(batch, pair.paged.plan(batch, put), atol=0.02)


def test_keys_and_values_in_eight_bits() -> None:
    pair = Pair(16)
    pair.cache = KVCache(LAYERS, pair.slots.num_pages, 16, CONFIG.num_kv_heads, DIM, FP8)
    sizes, scales = Sizes(8, 4, 2), (0.01, 0.02)
    paged = PagedAttention(CONFIG, pair.cache, pair.gpu, GATHERED, torch.bfloat16, sizes, *scales)
    batch = pair.slots.step([1], [(2, 20)], [(1, 0), (2, 0)])
    queries, keys, values = (one.to(torch.bfloat16) for one in pair.inputs(21))
    keys[3], keys[4] = 100.0, -torch.inf  # beyond what eight bits hold at this scale
    out = paged.plan(batch, put)(0, queries, keys, values)
    keys[3], keys[4] = 448 * 0.01, -448 * 0.01
    assert out.dtype == torch.bfloat16 and pair.cache.keys[0].dtype == FP8
    reference = CpuAttention(batch, pair.other, None)(0, queries.float(), keys.float(), values.float())
    torch.testing.assert_close(out.float(), reference, atol=0.15, rtol=0.1)
    assert (out.float() - reference).abs().mean() < 0.02
    row = pair.cache.keys[0].flatten(0, 1)[int(batch.kv_cells[5])]
    assert torch.equal(row, (keys[5] / 0.01).to(FP8))


class Told:
    """A wrapper that binds its arguments to flashinfer's names, and then gathers."""

    names: Any
    made: list[Any]

    def __init__(self, *args: Any, **named: Any) -> None:
        inspect.signature(self.names.__init__).bind(self, *args, **named)
        setattr(self, PINNED, torch.zeros(1, dtype=torch.uint8))
        self.pinned, self.waits = [], []
        self.made.append(self)
        kept = inspect.signature(super().__init__).parameters
        super().__init__(*args, **{name: value for name, value in named.items() if name in kept})

    def reset_workspace_buffer(self, *args: Any, **named: Any) -> None:
        self.workspace = inspect.signature(self.names.reset_workspace_buffer).bind(self, *args, **named).arguments

    def plan(self, *args: Any, **named: Any) -> None:
        inspect.signature(self.names.plan).bind(self, *args, **named)
        self.pinned.append((getattr(self, PINNED).data_ptr(), named["seq_lens"].data_ptr()))
        self.told = named
        super().plan(*args, **named)  # type: ignore[misc]

    def run(self, *args: Any, **named: Any) -> Any:
        inspect.signature(self.names.run).bind(self, *args, **named)
        return super().run(*args, **named)  # type: ignore[misc]


def spied(monkeypatch: pytest.MonkeyPatch) -> tuple[Backend, list[Any]]:
    """A backend that passes for flashinfer's, and its wrappers as they are made."""
    made: list[Any] = []
    monkeypatch.setattr(backends, "INT_WORKSPACE", 256)
    monkeypatch.setattr(backends, "LEAST_FLOAT_WORKSPACE", 1024)
    decode = type("Decode", (Told, GATHERED.decode), {"names": real.Decode, "made": made})  # type: ignore[misc]
    prefill = type("Prefill", (Told, GATHERED.prefill), {"names": real.Prefill, "made": made})  # type: ignore[misc]
    return Backend("spied", decode, prefill, True), made


def test_flashinfer_is_called_by_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, made = spied(monkeypatch)
    pair = Pair(16, 9, torch.bfloat16, backend)
    graph = pair.paged.graph(4)
    pair.compare(
        pair_batch := pair.slots.step([1], [(2, 20)], [(1, 5), (2, 0)]), pair.paged.plan(pair_batch, put), 0, 0.02
    )
    batch = pair.slots.step([1, 2])
    graph.plan(batch, put)
    pair.compare(batch, graph, 2, 0.02)
    decode, prefill, recorded = made
    assert recorded.told["seq_lens"].tolist() == [7, 21, 1, 1] and prefill.told["max_token_per_sequence"] == 20
    for wrapper in made:
        assert wrapper.told["window_left"] == 8 and wrapper.told["sm_scale"] == DIM**-0.5
        assert wrapper.told["q_data_type"] == wrapper.told["o_data_type"] == torch.bfloat16
    assert decode.workspace["float_workspace_buffer"] is prefill.workspace["float_workspace_buffer"]
    places = [wrapper.workspace["int_workspace_buffer"].data_ptr() for wrapper in made]
    assert places[0] == places[2] != places[1]  # decode and prefill are both planned before either runs


@pytest.mark.parametrize("wrapper", ["decode", "prefill"])
def test_gathered_takes_its_arguments_in_flashinfers_order(wrapper: str) -> None:
    ours, theirs = getattr(GATHERED, wrapper), {"decode": real.Decode, "prefill": real.Prefill}[wrapper]
    for name in ("__init__", "plan", "run"):
        mine, other = (list(inspect.signature(getattr(kind, name)).parameters) for kind in (ours, theirs))
        assert [one for one in other if one in mine] == mine


def test_a_plan_is_not_written_where_one_may_still_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, made = spied(monkeypatch)
    pair = Pair(16, None, torch.float32, backend)  # two steps may be planned and not done: four blocks
    mixed = [pair.slots.step([1], [(2, 3)], [(1, 5), (2, 0)]), *(pair.slots.step([1], [(2, 3)]) for _ in range(3))]
    for at, batch in enumerate(mixed):
        pair.eager(batch)
        assert pair.gpu.waits == max(0, 2 * (at - 1))  # for the plans of the step before the last alone
    decode, prefill = made
    for places in zip(*(a + b for a, b in zip(decode.pinned, prefill.pinned, strict=True)), strict=True):
        assert len(set(places)) == len(places) / 2  # each used twice in four steps
    assert all(len(set(step)) == 4 for step in map(lambda a, b: a + b, decode.pinned, prefill.pinned))


def test_an_unknown_flashinfer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = spied(monkeypatch)
    with pytest.raises(RuntimeError, match=f"has no {PINNED}"):
        Pair(16, backend=replace(backend, decode=GATHERED.decode))


def test_arrays_go_through_staging() -> None:
    pair = Pair(16)
    staging = Staging(pair.gpu, 2, 64)
    graph = pair.paged.graph(4)
    for batch in (pair.slots.step([1, 2], [], [(1, 16), (2, 31)]), pair.slots.step([2])):
        staging.begin()
        graph.plan(batch, staging.put)
        assert graph.cells.tolist()[: len(batch.slots)] == batch.kv_cells.tolist()
        attention = pair.paged.plan(batch, staging.put)
        assert torch.equal(attention.cells, torch.from_numpy(batch.kv_cells))
        staging.end()


def test_workspace_is_counted() -> None:
    pair, sizes = Pair(16), Sizes(8, 4, 2)
    held = [pair.paged.wrappers.floats, pair.paged.wrappers.ints, pair.paged.cells, *pair.paged.buffers]
    assert workspace_bytes(CONFIG, GATHERED, sizes) == sum(one.nbytes for one in held)
    wide = replace(CONFIG, num_heads=64, num_kv_heads=8, head_dim=128)
    fused = replace(GATHERED, fused=True)
    assert fused.float_workspace(CONFIG, 8) == 128 << 20
    assert fused.float_workspace(wide, 1024) >= 64 * (1024 + 512) * 16 * (128 + 1) * 4  # tiles of a graph's decode rows
    assert fused.float_workspace(wide, 8) >= 64 * (320 // 8) * 128 * (128 + 1) * 4  # of a prefill
