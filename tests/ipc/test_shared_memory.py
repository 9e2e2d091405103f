"""What is inherited looks as its readers expect it before anything has been written."""

from __future__ import annotations

import os

import pytest

from ipc.mask_ring import MaskRing
from ipc.shared_memory import MOST_IDS, Shape, create_masks, create_table
from ipc.token_table import TableError, TokenTable
from tests.ipc.test_token_table import ROWS


def test_a_new_table_has_no_step_and_no_ids() -> None:
    shape = Shape(slots=6, ring=3, rows=4, width=2)
    fd = create_table(shape)
    assert os.get_inheritable(fd) and os.fstat(fd).st_size == shape.nbytes
    table = TokenTable(shape, fd)
    os.close(fd)
    assert (table.stamp == -1).all() and (table.ids == -1).all()
    assert not table.next.any() and not table.count.any()
    with pytest.raises(TableError, match="holds step -1"):
        table.read(0, ROWS)


def test_a_mask_ring_has_room_for_any_vocabulary() -> None:
    fd = create_masks(ring=3, rows=2)
    assert os.get_inheritable(fd)
    ring = MaskRing(3, 2, MOST_IDS, fd)
    os.close(fd)
    assert ring.bits.shape == (3, 2, MOST_IDS // 32)
