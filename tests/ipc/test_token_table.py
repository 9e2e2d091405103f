"""The TokenTable's contract, for each backing."""

from __future__ import annotations

import numpy as np
import pytest

from ipc.token_table import Shape, TableError, TokenTable

SHAPE = Shape(slots=6, ring=3, rows=4, width=2)
ROWS, SLOTS = np.array([0, 2], np.int32), np.array([5, 1], np.int32)


@pytest.fixture(params=["local", "shm"])
def tables(request: pytest.FixtureRequest) -> tuple[TokenTable, TokenTable]:
    """(writer, reader)"""
    if request.param == "shm":
        fd = TokenTable.create_fd(SHAPE)
        return TokenTable(SHAPE, fd), TokenTable(SHAPE, fd)
    table = TokenTable(SHAPE)
    table.stamp[:] = -1
    return table, table


def test_what_is_published_is_read(tables: tuple[TokenTable, TokenTable]) -> None:
    writer, reader = tables
    writer.poison(4, ROWS)
    writer.publish(4, ROWS, SLOTS, np.array([[7, 8], [9, 10]], np.int32))
    ids, counts = reader.read(4, ROWS)
    assert ids.tolist() == [[7, 8], [9, 10]] and counts.tolist() == [2, 2]
    assert reader.next.tolist() == [0, 10, 0, 0, 0, 8]


def test_unwritten_and_overwritten_ids_raise(tables: tuple[TokenTable, TokenTable]) -> None:
    writer, reader = tables
    writer.poison(1, ROWS)
    with pytest.raises(TableError, match="before they were written"):
        reader.read(1, ROWS)
    with pytest.raises(TableError, match="holds step 1"):
        reader.read(4, ROWS)
