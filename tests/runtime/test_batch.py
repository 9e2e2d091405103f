"""Plans unfolded: positions, cells and tables as a device sees them, and plans that cannot be."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.batch import SlotTables
from runtime.sampling import Sampling, uniform
from runtime.step import SlotAdmission, StepPlan


def slots(*values: int) -> bytes:
    return np.array(values, "<u2").tobytes()


def ints(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def prefill(step: int = 0, epoch: int = 0) -> StepPlan:
    """Slot 3 with one cached page and a chunk of five ids; pages 7 and 8 are new."""
    admission = SlotAdmission(3, 4, 9, ints(5), Sampling(temperature=0.5, seed=11, min_tokens=2, stop_ids=(1,)))
    return StepPlan(
        epoch, step, b"", slots(3), ints(5), b"\x01", ints(10, 11, 12, 13, 14), slots(3, 3), ints(7, 8), [admission]
    )


def test_a_chunk_after_a_cached_prefix() -> None:
    batch = SlotTables(8, 4, 4).apply(prefill())
    assert batch.positions.tolist() == [4, 5, 6, 7, 8]
    assert batch.kv_cells.tolist() == [28, 29, 30, 31, 32]
    assert batch.page_table.tolist() == [[5, 7, 8]]
    assert batch.seq_lens.tolist() == [9] and batch.last_tokens.tolist() == [4]
    assert batch.sample.banned == [(0, (1,))]


def test_a_decode_row_follows_without_ids() -> None:
    tables = SlotTables(8, 4, 4)
    tables.apply(prefill())
    batch = tables.apply(StepPlan(0, 1, slots(3)))
    assert batch.num_decode == 1 and batch.input_ids.tolist() == [0]
    assert batch.positions.tolist() == [9] and batch.kv_cells.tolist() == [33]
    third = tables.apply(StepPlan(0, 2, slots(3)))
    assert third.sample.banned == []  # two tokens are out, stop ids may be drawn


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (prefill(step=1), "step 1, expected 0"),
        (prefill(epoch=2), "epoch 2, expected 0"),
        (StepPlan(0, 0, slots(2)), "beyond the pages"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(plan: StepPlan, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SlotTables(8, 4, 4).apply(plan)


def test_random_numbers_depend_on_seed_and_position_alone() -> None:
    seeds, positions = np.array([1, 2, 1], np.uint64), np.array([5, 5, 6])
    drawn = uniform(seeds, positions)
    assert len(set(drawn.tolist())) == 3 and ((drawn >= 0) & (drawn < 1)).all()
    assert uniform(seeds[1:2], positions[1:2])[0] == drawn[1]


def test_random_numbers_are_uniform() -> None:
    drawn = uniform(np.full(20_000, 99, np.uint64), np.arange(20_000))
    counts = np.histogram(drawn, 100, (0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 149  # chi-square, 99 degrees of freedom, p = 0.001
