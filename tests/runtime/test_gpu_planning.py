"""What is decided before a GPU is used: the batch sizes of graphs and where its memory goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.device.budget import MIB, Budget, graphs_bytes
from runtime.device.graphs import graph_sizes, size_for
from runtime.device.warm_up import scratch_batches

BUDGET = Budget(80_000 * MIB, 63_000 * MIB, 16_000 * MIB, 1_500 * MIB, 800 * MIB, 256 * MIB, 100 * MIB, 0.9)


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 8, 9, 64, 100, 255, 256, 257, 300, 1024])
def test_every_batch_has_a_graph_and_little_padding(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes[-1] == most and sizes == sorted(set(sizes))
    for rows in range(1, most + 1):
        size = size_for(sizes, rows)
        assert size is not None and rows <= size <= max(2 * rows - 1, rows + 7, rows + 15 if rows > 256 else 0)
    assert size_for(sizes, most + 1) is None and size_for([], 1) is None


def test_what_is_left_is_for_keys_and_values() -> None:
    assert BUDGET.others == 1_000 * MIB
    assert BUDGET.kv == (72_000 - 1_000 - 16_000 - 1_500 - 800 - 256 - 100) * MIB
    assert BUDGET.blocks(2 * MIB, 10**9) == BUDGET.kv // (2 * MIB)
    assert BUDGET.blocks(2 * MIB, 77) == 77
    whole = replace(BUDGET, share=1.0)
    assert whole.kv == (63_000 - 1_500 - 800 - 256 - 100) * MIB  # never more than is free


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"share": 0.2}, "raise --gpu-memory-utilization"),
        ({"free": 10_000 * MIB}, "others use 54000 MiB"),
        ({"peak": 70_000 * MIB}, "lower --max-num-batched-tokens"),
    ],
)
def test_no_room_is_told_with_the_table_and_the_flag(changed: dict[str, float], words: str) -> None:
    with pytest.raises(MemoryError, match=words) as caught:
        replace(BUDGET, **changed).blocks(2 * MIB, 100)  # type: ignore[arg-type]
    told = str(caught.value)
    for line in ("weights", "left for KV", "--max-num-batched-tokens", "--enforce-eager"):
        assert line in told
    assert len({len(line) for line in told.splitlines()[1:-1]}) == 1  # a table


def test_graphs_take_more_the_more_there_are() -> None:
    assert graphs_bytes([], 4096, 2) == 0
    assert graphs_bytes([1, 2], 4096, 2) < graphs_bytes([1, 2, 4], 4096, 2)


@pytest.mark.parametrize("block_size", [1, 16])
def test_what_is_run_before_it_is_ready_is_of_every_kind_and_on_scratch(block_size: int) -> None:
    batches = scratch_batches(block_size)
    assert [(batch.num_decode, len(batch.slots)) for batch in batches] == [(0, 3), (3, 3), (1, 3)]
    for batch in batches:
        assert (batch.kv_cells < block_size).all() and not batch.page_table.any() and len(batch.sample_rows) == 3
