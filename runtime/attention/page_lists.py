"""A batch's page table as the flat lists that paged attention kernels read. Pure numpy: no torch, no device.

Row r's pages are `kv_indices[kv_indptr[r]:kv_indptr[r + 1]]`, the last of them filled up to `last_page_len[r]`, and its
queries are `qo_indptr[r]:qo_indptr[r + 1]`, the last of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.batch import Batch

I32 = NDArray[np.int32]


@dataclass(frozen=True)
class PageLists:
    """Of R rows, each of at least one token, with n pages in all."""

    qo_indptr: I32  # [R + 1]
    kv_indptr: I32  # [R + 1]
    kv_indices: I32  # [n]
    last_page_len: I32  # [R] from 1 to the page's size
    seq_lens: I32  # [R]

    @classmethod
    def of(cls, batch: Batch, begin: int, end: int, page_size: int) -> PageLists:
        """Of the batch's rows `begin` to `end`; queries count from the first of these."""
        lengths = batch.seq_lens[begin:end]
        pages = -(-lengths // page_size)
        held = np.arange(batch.page_table.shape[1]) < pages[:, None]
        last = lengths - (pages - 1) * page_size
        indices = batch.page_table[begin:end][held]
        return cls(_indptr(batch.query_lens[begin:end]), _indptr(pages), indices, last, lengths)

    @classmethod
    def none(cls) -> PageLists:
        """Of no rows."""
        begin, empty = np.zeros(1, np.int32), np.zeros(0, np.int32)
        return cls(begin, begin, empty, empty, empty)

    def padded(self, size: int) -> PageLists:
        """With rows of one query that read the first token of the scratch page, up to `size` rows.

        Raises `ValueError` where there are more rows than that.
        """
        count = size - len(self.seq_lens)
        if count < 0:
            raise ValueError(f"{len(self.seq_lens)} rows do not fit a batch of {size}")
        more, one = np.arange(1, count + 1, dtype=np.int32), np.ones(count, np.int32)
        return PageLists(
            np.concatenate((self.qo_indptr, self.qo_indptr[-1] + more)),
            np.concatenate((self.kv_indptr, self.kv_indptr[-1] + more)),
            np.concatenate((self.kv_indices, np.zeros(count, np.int32))),
            np.concatenate((self.last_page_len, one)),
            np.concatenate((self.seq_lens, one)),
        )


def _indptr(counts: I32) -> I32:
    """[R] to [R + 1]: where each row begins, and the end."""
    return np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))
