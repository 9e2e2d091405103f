"""What only a TokenTable on a GPU has: waits, devices, handles and epochs. On a fake GPU, also between processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from ipc.cuda_runtime import CudaError
from ipc.device_table import DeviceReader
from ipc.internal import TableExport
from ipc.shared_memory import create_table
from ipc.token_table import TableError, TokenTable
from tests.fake_cuda import DEVICE, FakeCuda
from tests.ipc.gpu_worker import ROWS, SHAPE, SLOTS, VOCAB, GpuWriter, RealCuda

IDS = np.array([[7, 8], [9, 10]], np.int32)
NOBODY = 0  # no process has this id


def exported(writer: GpuWriter) -> TableExport:
    """As another process would have to open it."""
    return msgspec.structs.replace(writer.table.export(epoch=1), process=NOBODY)


@pytest.fixture
def writer() -> Iterator[GpuWriter]:
    writer = GpuWriter(FakeCuda())
    yield writer
    writer.close()
    cuda = writer.cuda
    assert not cuda.memory and not cuda.events and not cuda.host and list(cuda.streams) == [0]


@pytest.mark.parametrize("process", [os.getpid(), NOBODY], ids=["local", "ipc"])
def test_a_reader_gives_back_what_it_took_and_nothing_else(writer: GpuWriter, process: int) -> None:
    cuda = writer.cuda if process == os.getpid() else FakeCuda()
    before = [len(held) for held in (cuda.memory, cuda.events, cuda.host, cuda.streams)]
    export = msgspec.structs.replace(writer.table.export(epoch=1), process=process)
    DeviceReader.open(cuda, export, epoch=1).close()
    assert [len(held) for held in (cuda.memory, cuda.events, cuda.host, cuda.streams)] == before


def test_an_opening_that_fails_gives_back_what_it_took(writer: GpuWriter) -> None:
    export, cuda = exported(writer), FakeCuda()
    broken = msgspec.structs.replace(export, events=[*export.events[:-1], bytes(64)])
    with pytest.raises(CudaError, match="cudaIpcOpenEventHandle: invalid resource handle"):
        DeviceReader.open(cuda, broken, epoch=1)
    assert not cuda.memory and not cuda.events


def test_a_reader_waits_for_the_device(writer: GpuWriter) -> None:
    """Nothing but the read itself waits: the device has done nothing until then."""
    reader = DeviceReader.open(FakeCuda(), exported(writer), epoch=1)
    writer.poison(4, ROWS)
    writer.publish(4, ROWS, SLOTS, IDS)
    assert (writer.tokens.stamp == -1).all()
    assert reader.read(4, ROWS)[0].tolist() == IDS.tolist()
    reader.close()


def test_a_pinned_entry_is_there_once_it_was_waited_for() -> None:
    fd = create_table(SHAPE)
    writer, reader = GpuWriter(FakeCuda(), TokenTable(SHAPE, fd)), TokenTable(SHAPE, fd)
    os.close(fd)
    writer.poison(3, ROWS)
    writer.cuda.launch(writer.stream, lambda: writer.tokens.ids.fill_(7))
    writer.cuda.launch(writer.stream, lambda: writer.tokens.count.fill_(2))
    writer.table.commit(3, writer.stream)
    with pytest.raises(TableError, match="before they were written"):
        reader.read(3, ROWS)
    writer.table.wait(3)
    assert reader.read(3, ROWS)[0].tolist() == [[7, 7], [7, 7]]
    writer.close()
    assert not writer.cuda.host


@pytest.mark.parametrize("bad", [-1, VOCAB])
def test_who_reads_a_step_hears_that_it_began_with_ids_that_were_not_there(writer: GpuWriter, bad: int) -> None:
    reader = DeviceReader.open(FakeCuda(), exported(writer), epoch=1)
    writer.poison(1, ROWS)
    writer.publish(1, ROWS, SLOTS, np.array([[7], [bad]], np.int32))
    writer.poison(2, ROWS)
    writer.gather(2, SLOTS)
    writer.publish(2, ROWS, SLOTS, IDS)
    with pytest.raises(TableError, match="step 2 began with 1 ids that had not been written"):
        reader.read(2, ROWS)
    writer.poison(3, ROWS)
    writer.gather(3, SLOTS)
    writer.publish(3, ROWS, SLOTS, IDS)
    assert reader.read(3, ROWS)[0].tolist() == IDS.tolist()
    reader.close()


def test_both_sides_mean_the_same_device_whatever_they_see() -> None:
    other = "0000:a1:00.0"
    writer = GpuWriter(FakeCuda(visible=(other,)))
    export = exported(writer)
    cuda = FakeCuda(visible=(DEVICE, other))
    DeviceReader.open(cuda, export, epoch=1)
    assert cuda.current_device() == other
    with pytest.raises(CudaError, match="cudaDeviceGetByPCIBusId"):
        DeviceReader.open(FakeCuda(visible=(DEVICE,)), export, epoch=1)


def test_a_table_may_begin_anywhere_in_the_memory(writer: GpuWriter) -> None:
    export = msgspec.structs.replace(exported(writer), offset=SHAPE.entry_nbytes)
    reader = DeviceReader.open(FakeCuda(), export, epoch=1)
    writer.poison(1, ROWS)
    writer.poison(3, ROWS)  # the first entry, whose event stands for both
    with pytest.raises(TableError, match="holds step 1"):
        reader.read(0, ROWS)
    reader.close()


def test_ids_of_another_type_are_refused(writer: GpuWriter) -> None:
    with pytest.raises(TableError, match="ids of <i8"):
        DeviceReader.open(FakeCuda(), msgspec.structs.replace(exported(writer), dtype="<i8"), epoch=1)


def test_a_process_cannot_open_its_own_handle(writer: GpuWriter) -> None:
    """As in CUDA; what makes `process` of an export necessary."""
    with pytest.raises(CudaError, match="cudaIpcOpenMemHandle: invalid device context"):
        DeviceReader.open(writer.cuda, exported(writer), epoch=1)


def worker(cuda: FakeCuda | RealCuda, epoch: int, *fd: int) -> subprocess.Popen[str]:
    """`tests.ipc.gpu_worker` as a process; the context ends it."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.ipc.gpu_worker", type(cuda).__name__, str(epoch), *map(str, fd)],
        cwd=Path(__file__).parent.parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=fd,
    )


def heard(process: subprocess.Popen[str]) -> TableExport:
    """What a worker exports, once it has published step 4."""
    assert process.stdout is not None
    export = msgspec.msgpack.decode(bytes.fromhex(process.stdout.readline()), type=TableExport)
    assert process.stdout.readline() == "committed\n"
    return export


@pytest.fixture(params=[FakeCuda, RealCuda])
def cuda(request: pytest.FixtureRequest) -> FakeCuda | RealCuda:
    if request.param is RealCuda and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    made: FakeCuda | RealCuda = request.param()
    return made


def test_another_process_publishes_through_page_locked_memory(cuda: FakeCuda | RealCuda) -> None:
    fd = create_table(SHAPE)
    reader = TokenTable(SHAPE, fd)
    with worker(cuda, 1, fd) as process:
        os.close(fd)
        heard(process)
        assert reader.read(4, ROWS)[0].tolist() == IDS.tolist()


def test_a_restarted_worker_has_another_table_and_the_old_one_is_refused(cuda: FakeCuda | RealCuda) -> None:
    with worker(cuda, 1) as process:
        old = heard(process)
        reader = DeviceReader.open(cuda, old, epoch=1)
        assert reader.read(4, ROWS)[0].tolist() == IDS.tolist()
        process.kill()
    reader.close()
    with pytest.raises(TableError, match=r"epoch 1 .* expected epoch 2"):
        DeviceReader.open(cuda, old, epoch=2)
    with pytest.raises(CudaError, match="cudaIpcOpenMemHandle"):
        DeviceReader.open(cuda, old, epoch=1)
    with worker(cuda, 2) as process:
        reader = DeviceReader.open(cuda, heard(process), epoch=2)
        assert reader.read(4, ROWS)[0].tolist() == IDS.tolist()
        with pytest.raises(TableError, match="holds step 4"):
            reader.read(1, ROWS)
        reader.close()
    assert isinstance(cuda, RealCuda) or not (cuda.memory or cuda.events or cuda.host)
