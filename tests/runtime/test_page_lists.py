"""Page lists against a loop that reads the table row by row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.attention.page_lists import PageLists
from tests.runtime.attention_batches import batch_of

ROWS = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), max_size=12)  # computed before, computed now
SIZES = st.sampled_from([1, 2, 16])


@given(ROWS, st.integers(0, 12), SIZES)
def test_equal_to_a_loop_over_rows(rows: list[tuple[int, int]], decode: int, size: int) -> None:
    batch = batch_of(rows, min(decode, len(rows)), size)
    for begin, end in ((0, batch.num_decode), (batch.num_decode, len(rows)), (0, len(rows))):
        lists = PageLists.of(batch, begin, end, size)
        pages, queries, lasts = [], [0], []
        for row in range(begin, end):
            length = int(batch.seq_lens[row])
            mine = [int(batch.page_table[row, at // size]) for at in range(0, length, size)]
            assert lists.kv_indices[lists.kv_indptr[row - begin] : lists.kv_indptr[row - begin + 1]].tolist() == mine
            pages += mine
            lasts.append((length - 1) % size + 1)
            queries.append(queries[-1] + int(batch.query_lens[row]))
        assert lists.kv_indices.tolist() == pages and lists.last_page_len.tolist() == lasts
        assert lists.qo_indptr.tolist() == queries and lists.kv_indptr[-1] == len(pages)
        assert lists.seq_lens.tolist() == batch.seq_lens[begin:end].tolist()
        assert {getattr(lists, name).dtype for name in vars(lists)} == {np.dtype(np.int32)}


@given(ROWS, st.integers(0, 5), SIZES)
def test_padding_is_one_token_of_the_scratch_page(rows: list[tuple[int, int]], more: int, size: int) -> None:
    batch = batch_of(rows, len(rows), size)
    lists = PageLists.of(batch, 0, len(rows), size)
    padded = lists.padded(len(rows) + more)
    for name in vars(lists):
        kept, whole = getattr(lists, name), getattr(padded, name)
        assert whole.dtype == np.int32 and whole[: len(kept)].tolist() == kept.tolist()
    assert len(padded.last_page_len) == len(rows) + more and len(padded.kv_indptr) == len(rows) + more + 1
    for row in range(len(rows), len(rows) + more):
        assert padded.kv_indices[padded.kv_indptr[row] : padded.kv_indptr[row + 1]].tolist() == [0]
        assert padded.qo_indptr[row + 1] - padded.qo_indptr[row] == 1
        assert padded.last_page_len[row] == padded.seq_lens[row] == 1


def test_too_many_rows_are_refused() -> None:
    lists = PageLists.of(batch_of([(3, 1), (4, 1)], 2, 16), 0, 2, 16)
    with pytest.raises(ValueError, match="2 rows do not fit a batch of 1"):
        lists.padded(1)
