"""The TokenTable's contract, for each backing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ipc.shared_memory import Shape, create_table
from ipc.token_table import TableError, TokenTable

SHAPE = Shape(slots=6, ring=3, rows=4, width=2)
ROWS, SLOTS = np.array([0, 2], np.int32), np.array([5, 1], np.int32)


@pytest.fixture(params=["local", "shm"])
def tables(request: pytest.FixtureRequest) -> tuple[TokenTable, TokenTable]:
    """(writer, reader)"""
    if request.param == "shm":
        fd = create_table(SHAPE)
        return TokenTable(SHAPE, fd), TokenTable(SHAPE, fd)
    table = TokenTable(SHAPE)
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


def test_a_row_that_did_not_sample_shows_no_older_ids(tables: tuple[TokenTable, TokenTable]) -> None:
    writer, reader = tables
    writer.poison(1, ROWS)
    writer.publish(1, ROWS, SLOTS, np.array([[7], [9]], np.int32))
    writer.poison(4, ROWS[:1])  # the same entry of the ring
    writer.publish(4, ROWS[:1], SLOTS[:1], np.array([[3]], np.int32))
    assert reader.read(4, ROWS[:1])[0][0, 0] == 3
    with pytest.raises(TableError, match="before they were written"):
        reader.read(4, ROWS)


def test_each_token_counted_must_be_there(tables: tuple[TokenTable, TokenTable]) -> None:
    writer, reader = tables
    writer.poison(1, ROWS)
    writer.publish(1, ROWS, SLOTS, np.array([[7, -1], [9, 8]], np.int32))
    with pytest.raises(TableError, match="before they were written"):
        reader.read(1, ROWS)


def test_slot_0_stays_0_and_a_stale_publish_raises(tables: tuple[TokenTable, TokenTable]) -> None:
    writer, reader = tables
    writer.poison(1, ROWS)
    writer.publish(1, ROWS, np.array([0, 3], np.int32), np.array([[7], [9]], np.int32))
    assert reader.next.tolist() == [0, 0, 0, 9, 0, 0]
    with pytest.raises(TableError, match="holds step 1"):
        writer.publish(4, ROWS, SLOTS, np.array([[7], [9]], np.int32))


def test_another_process_writes_through_the_inherited_memfd() -> None:
    fd = create_table(SHAPE)
    program = (
        "import sys, numpy as np\n"
        "from ipc.shared_memory import Shape\nfrom ipc.token_table import TokenTable\n"
        "table, rows = TokenTable(Shape(6, 3, 4, 2), int(sys.argv[1])), np.array([0, 2], np.int32)\n"
        "table.poison(4, rows)\n"
        "table.publish(4, rows, np.array([5, 1], np.int32), np.array([[7, 8], [9, 10]], np.int32))\n"
    )
    root = Path(__file__).parent.parent.parent
    subprocess.run([sys.executable, "-c", program, str(fd)], pass_fds=[fd], cwd=root, timeout=60, check=True)
    reader = TokenTable(SHAPE, fd)
    os.close(fd)
    assert reader.read(4, ROWS)[0].tolist() == [[7, 8], [9, 10]] and reader.next.tolist() == [0, 10, 0, 0, 0, 8]
