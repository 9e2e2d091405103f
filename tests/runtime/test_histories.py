"""Histories on a device: rows are taken and given back, pools grow and keep what they hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.device.histories import Counts, Pool, Tails, bytes_per_history, words


def put(array: np.ndarray, into: torch.Tensor | None = None) -> torch.Tensor:
    return torch.from_numpy(array.copy())


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_only_who_needs_a_row_has_one_and_rows_are_used_again() -> None:
    pool = Pool(100, 7, 0, torch.int32, "cpu")
    assert pool.rows.numel() == 0
    for slot in (50, 3, 99):
        pool.take(slot)
    assert pool.row[[50, 3, 99, 4]].tolist() == [0, 1, 2, -1] and pool.rows.shape == (4, 7)
    pool.give_back(3)
    pool.give_back(3)
    pool.give_back(4)
    pool.take(8)
    assert pool.row[[3, 8]].tolist() == [-1, 1] and len(pool.rows) == 4


def test_a_pool_holds_all_slots_and_not_more() -> None:
    pool = Pool(6, 1, 0, torch.int32, "cpu")
    for turn in range(3):
        for slot in range(6):
            pool.take(slot).fill_(slot + turn)
        assert pool.rows[:, 0].tolist() == [*range(turn, 6 + turn)] if not turn else len(pool.rows) == 6
        for slot in range(6):
            pool.give_back(slot)


def test_counts_are_of_prompt_and_output() -> None:
    counts = Counts(8, 5, "cpu")
    counts.admit(2, 3, ids(1, 1, 4, 4, 0), put)
    counts.admit(5, 0, ids(), put)
    counts.told(torch.tensor([0, 1]), torch.tensor([4, 2]))
    for slot in (0, 1, 3, 4):
        counts.admit(slot, 1, ids(3), put)  # grows
    assert counts.rows[0].tolist() == [2, 1, 0, 0, 5] and counts.rows[1].tolist() == [0, 0, 2, 0, 0]
    counts.give_back(2)
    counts.admit(7, 0, ids(2), put)
    assert counts.rows[counts.row[7]].tolist() == [0, 0, 2, 0, 0]
    assert counts.rows.nbytes == 8 * bytes_per_history(5)


@pytest.mark.parametrize("known", [0, 1, 2, 9])
def test_tails_end_with_the_output_however_wide_they_are(known: int) -> None:
    tails = Tails(4, "cpu")
    tails.admit(1, 2, np.arange(known, dtype=np.int32), put)
    tails.told(torch.tensor([0]), torch.tensor([70]))
    tails.admit(2, 5, ids(1, 2, 3), put)  # widens
    tails.told(torch.tensor([0, 1]), torch.tensor([71, 72]))
    assert tails.rows[0].tolist() == [-1, -1, known - 1, 70, 71] and tails.rows[1].tolist() == [-1, 1, 2, 3, 72]


def test_words_are_aligned_to_their_last_id() -> None:
    found = words(((1,), (2, 3), (4, 5, 6), (7, 9)), 9)
    assert found.last.tolist() == [1, 3, 6] and found.before.tolist() == [[-1, -1], [-1, 2], [4, 5]]
    tails = Tails(2, "cpu")
    tails.admit(0, 2, ids(9, 2), put)
    before = torch.from_numpy(found.before)
    assert tails.missing(torch.zeros(3, dtype=torch.int64), before).tolist() == [False, False, True]
    assert words(((9,),), 9).before.shape == (0, 0)
