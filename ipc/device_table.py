"""The TokenTable on a GPU: the worker owns it (`DeviceTable`), the scheduler copies what it needs (`DeviceReader`).

The block is plain cudaMalloc's and nothing else stands in it: torch's allocator would export whatever shares its block.
The scheduler opens it over CUDA IPC; a process cannot open what it exported itself, so there it uses the same pointer.
Or the worker copies each entry to host memory, page-locked and shared, where the scheduler reads a plain `TokenTable`
and needs no CUDA at all. What writes the table is `runtime.device.device_tokens`.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ipc.cuda_runtime import DEFAULT_STREAM, CudaRuntime
from ipc.internal import TableExport
from ipc.shared_memory import Field, Shape
from ipc.token_table import I32, TableError, TokenTable

PAGE = 1 << 21  # bytes; CUDA cuts smaller allocations from blocks that it would export whole
DTYPE = "<i4"  # of ids


@dataclass(frozen=True)
class DeviceArray:
    """A field of the table in device memory. torch.as_tensor takes it as it is, without a copy."""

    address: int
    field: Field

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        field = self.field
        place = {"data": (self.address, False), "shape": field.shape, "strides": field.strides}
        return {"version": 3, "typestr": field.dtype, **place}


class DeviceTable:
    """The worker's side, on the calling thread's device; `host`, if any, receives each entry that is committed.

    Each entry of the ring has an event, so no two steps in flight record the same. One thread commits, another waits.
    """

    def __init__(self, cuda: CudaRuntime, shape: Shape, host: TokenTable | None = None) -> None:
        self.cuda, self.shape, self.host = cuda, shape, host
        self.device = cuda.current_device()
        self._undo = ExitStack()
        self.block = cuda.malloc(-(-shape.nbytes // PAGE) * PAGE)
        self._undo.callback(cuda.free, self.block)
        self.events = [cuda.create_event(interprocess=True) for _ in range(shape.ring)]
        for event in self.events:
            self._undo.callback(cuda.destroy_event, event)
        if host is not None:
            cuda.register_host(host.address, shape.nbytes)
            self._undo.callback(cuda.unregister_host, host.address)
        self._clear()

    @property
    def arrays(self) -> dict[str, DeviceArray]:
        """By the names of `Shape.fields`."""
        return {name: DeviceArray(self.block + field.offset, field) for name, field in self.shape.fields.items()}

    def commit(self, step: int, stream: int) -> None:
        """All that writes the step's entry is in `stream`. Does not wait."""
        entry = step % self.shape.ring
        if self.host is not None:
            offset, nbytes = entry * self.shape.entry_nbytes, self.shape.entry_nbytes
            self.cuda.copy(self.host.address + offset, self.block + offset, nbytes, stream)
        self.cuda.record(self.events[entry], stream)

    def wait(self, step: int) -> None:
        """Until a committed step's ids are where the scheduler reads them; only then may it be told."""
        self.cuda.synchronize(self.events[step % self.shape.ring])

    def export(self, epoch: int) -> TableExport:
        """What the scheduler needs to open the table, sent once for each epoch."""
        return TableExport(
            epoch,
            self.device,
            self.cuda.export_memory(self.block),
            0,
            DTYPE,
            self.shape,
            [self.cuda.export_event(event) for event in self.events],
            os.getpid(),
            self.block,
            self.events,
        )

    def close(self) -> None:
        """Readers have closed theirs before."""
        self._undo.close()

    def _clear(self) -> None:
        blank = TokenTable(self.shape)
        self.cuda.copy(self.block, blank.address, self.shape.nbytes, DEFAULT_STREAM)
        self.cuda.record(self.events[0], DEFAULT_STREAM)
        self.cuda.synchronize(self.events[0])


class DeviceReader:
    """The scheduler's side of the table at `block`; `events` are those of its entries, all of this process.

    An entry is copied out whole into page-locked memory that is a table of one entry. For the thread that made it.
    """

    def __init__(self, cuda: CudaRuntime, shape: Shape, block: int, events: list[int]) -> None:
        self.cuda, self.shape, self.block, self.events = cuda, shape, block, events
        self._undo = ExitStack()
        self._entry = TokenTable(Shape(0, 1, shape.rows, shape.width))
        cuda.register_host(self._entry.address, shape.entry_nbytes)
        self._undo.callback(cuda.unregister_host, self._entry.address)
        self._stream, self._copied = cuda.create_stream(), cuda.create_event()
        self._undo.callback(cuda.destroy_stream, self._stream)
        self._undo.callback(cuda.destroy_event, self._copied)

    @classmethod
    def open(cls, cuda: CudaRuntime, export: TableExport, epoch: int) -> DeviceReader:
        """The table of a worker. Raises `TableError` for one of another epoch than `epoch`."""
        if (export.epoch, export.dtype) != (epoch, DTYPE):
            raise TableError(
                f"a table of epoch {export.epoch} with ids of {export.dtype}, expected epoch {epoch} and {DTYPE}"
            )
        cuda.select_device(export.device)
        if export.process == os.getpid():
            return cls(cuda, export.shape, export.address, export.local_events)
        with ExitStack() as undo:
            memory = cuda.open_memory(export.memory)
            undo.callback(cuda.close_memory, memory)
            events = []
            for handle in export.events:
                events.append(cuda.open_event(handle))
                undo.callback(cuda.destroy_event, events[-1])
            reader = cls(cuda, export.shape, memory + export.offset, events)
            reader._undo.push(undo.pop_all())
            return reader

    def read(self, step: int, rows: I32) -> tuple[I32, I32]:
        """As `TokenTable.read`; the step has been committed, and its copy waits for the device."""
        entry, nbytes = step % self.shape.ring, self.shape.entry_nbytes
        self.cuda.stream_wait(self._stream, self.events[entry])
        self.cuda.copy(self._entry.address, self.block + entry * nbytes, nbytes, self._stream)
        self.cuda.record(self._copied, self._stream)
        self.cuda.synchronize(self._copied)
        return self._entry.read(step, rows)

    def close(self) -> None:
        self._undo.close()
