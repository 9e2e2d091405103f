"""The TokenTable's contract, for each backing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from ipc.device_table import DeviceReader
from ipc.shared_memory import create_table
from ipc.token_table import TableError, TokenTable
from tests.fake_cuda import FakeCuda
from tests.ipc.gpu_worker import ROWS, SHAPE, SLOTS, GpuWriter, RealCuda

Writer = TokenTable | GpuWriter
Reader = TokenTable | DeviceReader


def tables_on_host(fd: int | None) -> tuple[TokenTable, TokenTable]:
    if fd is None:
        table = TokenTable(SHAPE)
        return table, table
    writer, reader = TokenTable(SHAPE, fd), TokenTable(SHAPE, fd)
    os.close(fd)
    return writer, reader


def pinned(cuda: FakeCuda | RealCuda) -> tuple[GpuWriter, TokenTable]:
    writer, reader = tables_on_host(create_table(SHAPE))
    return GpuWriter(cuda, writer), reader


def on_gpu(cuda: FakeCuda | RealCuda, other: FakeCuda | None = None) -> tuple[GpuWriter, DeviceReader]:
    """Read by the runtime of the same process, or of an `other`, which no process id matches."""
    writer = GpuWriter(cuda)
    export = writer.table.export(epoch=1)
    if other is None:
        return writer, DeviceReader.open(cuda, export, epoch=1)
    return writer, DeviceReader.open(other, msgspec.structs.replace(export, process=0), epoch=1)


BACKINGS: dict[str, Callable[[], tuple[Writer, Reader]]] = {
    "local": lambda: tables_on_host(None),
    "shm": lambda: tables_on_host(create_table(SHAPE)),
    "pinned": lambda: pinned(FakeCuda()),
    "cuda-ipc": lambda: on_gpu(FakeCuda(), FakeCuda()),
    "cuda-local": lambda: on_gpu(FakeCuda()),
    "pinned, real": lambda: pinned(RealCuda()),
    "cuda-local, real": lambda: on_gpu(RealCuda()),
}


@pytest.fixture(params=BACKINGS)
def tables(request: pytest.FixtureRequest) -> tuple[Writer, Reader]:
    """(writer, reader)"""
    if "real" in request.param and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return BACKINGS[request.param]()


def test_what_is_published_is_read(tables: tuple[Writer, Reader]) -> None:
    writer, reader = tables
    writer.poison(4, ROWS)
    writer.publish(4, ROWS, SLOTS, np.array([[7, 8], [9, 10]], np.int32))
    ids, counts = reader.read(4, ROWS)
    assert ids.tolist() == [[7, 8], [9, 10]] and counts.tolist() == [2, 2]
    assert writer.next.tolist() == [0, 10, 0, 0, 0, 8]


def test_unwritten_and_overwritten_ids_raise(tables: tuple[Writer, Reader]) -> None:
    writer, reader = tables
    with pytest.raises(TableError, match="holds step -1"):
        reader.read(1, ROWS)
    writer.poison(1, ROWS)
    with pytest.raises(TableError, match="before they were written"):
        reader.read(1, ROWS)
    with pytest.raises(TableError, match="holds step 1"):
        reader.read(4, ROWS)


def test_the_ring_wraps_and_what_was_read_stays(tables: tuple[Writer, Reader]) -> None:
    writer, reader = tables
    read = []
    for step in range(3 * SHAPE.ring):
        writer.poison(step, ROWS)
        writer.publish(step, ROWS, SLOTS, np.array([[step], [step + 1]], np.int32))
        read.append(reader.read(step, ROWS))
        if step >= SHAPE.ring:
            with pytest.raises(TableError, match=f"holds step {step}"):
                reader.read(step - SHAPE.ring, ROWS)
    assert [ids[:, 0].tolist() for ids, _ in read] == [[step, step + 1] for step in range(3 * SHAPE.ring)]
    assert [counts.tolist() for _, counts in read] == [[1, 1]] * (3 * SHAPE.ring)


def test_steps_in_flight_are_read_in_their_order(tables: tuple[Writer, Reader]) -> None:
    writer, reader = tables
    for step in range(SHAPE.ring):
        writer.poison(step, ROWS)
        writer.publish(step, ROWS, SLOTS, np.array([[step, 7], [step, 8]], np.int32))
    for step in range(SHAPE.ring):
        assert reader.read(step, ROWS)[0].tolist() == [[step, 7], [step, 8]]


def test_a_row_that_did_not_sample_shows_no_older_ids(tables: tuple[Writer, Reader]) -> None:
    writer, reader = tables
    writer.poison(1, ROWS)
    writer.publish(1, ROWS, SLOTS, np.array([[7], [9]], np.int32))
    writer.poison(4, ROWS[:1])  # the same entry of the ring
    writer.publish(4, ROWS[:1], SLOTS[:1], np.array([[3]], np.int32))
    assert reader.read(4, ROWS[:1])[0][0, 0] == 3
    with pytest.raises(TableError, match="before they were written"):
        reader.read(4, ROWS)


def test_each_token_counted_must_be_there(tables: tuple[Writer, Reader]) -> None:
    writer, reader = tables
    writer.poison(1, ROWS)
    writer.publish(1, ROWS, SLOTS, np.array([[7, -1], [9, 8]], np.int32))
    with pytest.raises(TableError, match="before they were written"):
        reader.read(1, ROWS)


def test_slot_0_stays_0(tables: tuple[Writer, Reader]) -> None:
    writer, _ = tables
    writer.poison(1, ROWS)
    writer.publish(1, ROWS, np.array([0, 3], np.int32), np.array([[7], [9]], np.int32))
    assert writer.next.tolist() == [0, 0, 0, 9, 0, 0]


def test_ids_published_for_another_step_are_not_read(tables: tuple[Writer, Reader]) -> None:
    """The host refuses to write them. A device cannot."""
    writer, reader = tables
    writer.poison(1, ROWS)
    with pytest.raises(TableError, match="holds step 1"):
        writer.publish(4, ROWS, SLOTS, np.array([[7], [9]], np.int32))
        reader.read(4, ROWS)


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
