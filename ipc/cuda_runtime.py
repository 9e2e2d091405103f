"""The CUDA runtime as far as a TokenTable needs it: a protocol, and its one member that calls libcudart by ctypes.

Knows no table and no torch; what torch allocates and launches in the same process is in the same context all the same.
Pointers, streams and events are plain numbers. A call that fails raises `CudaError`, which names it. Calls leave the
interpreter lock, so a thread that waits keeps nobody else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

DEFAULT_STREAM = 0
SONAMES = ("libcudart.so.13", "libcudart.so.12")
HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE
MEMCPY_DEFAULT = 4  # the direction follows from the pointers
STREAM_NON_BLOCKING = 1  # does not wait for the default stream
EVENT_BLOCKING_SYNC, EVENT_DISABLE_TIMING, EVENT_INTERPROCESS = 1, 2, 4
IPC_LAZY_PEER_ACCESS = 1  # the only flag that opening memory takes


class CudaError(RuntimeError):
    """A call that failed, and the runtime's word for why; or there is no runtime."""


class CudaRuntime(Protocol):
    """One process's view of its GPUs. A device is named by its PCI bus id, which no CUDA_VISIBLE_DEVICES changes."""

    def current_device(self) -> str:
        """The bus id of the calling thread's device."""

    def select_device(self, bus_id: str) -> None:
        """Make it the calling thread's device; fails where this process cannot see it."""

    def malloc(self, nbytes: int) -> int: ...

    def free(self, memory: int) -> None: ...

    def register_host(self, address: int, nbytes: int) -> None:
        """Lock the pages, so that a copy from or to them need not wait."""

    def unregister_host(self, address: int) -> None: ...

    def create_stream(self) -> int: ...

    def destroy_stream(self, stream: int) -> None: ...

    def create_event(self, interprocess: bool = False) -> int:
        """Whoever waits for it sleeps."""

    def destroy_event(self, event: int) -> None: ...

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Once all before it in `stream` is done."""

    def record(self, event: int, stream: int) -> None:
        """The event stands for all that is in `stream` now."""

    def stream_wait(self, stream: int, event: int) -> None:
        """What follows in `stream` comes after what `event` stands for now."""

    def synchronize(self, event: int) -> None:
        """Return once all is done that `event` stands for."""

    def export_memory(self, memory: int) -> bytes:
        """A handle with which another process may open what `malloc` returned; never this process itself."""

    def open_memory(self, handle: bytes) -> int: ...

    def close_memory(self, memory: int) -> None: ...

    def export_event(self, event: int) -> bytes: ...

    def open_event(self, handle: bytes) -> int: ...


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t and cudaIpcEventHandle_t; passed by value."""

    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


_int, _uint, _size, _pointer, _text = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
_int_out, _pointer_out, _handle_out = (ctypes.POINTER(kind) for kind in (_int, _pointer, IpcHandle))
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudaGetDevice": (_int_out,),
    "cudaSetDevice": (_int,),
    "cudaDeviceGetPCIBusId": (_text, _int, _int),
    "cudaDeviceGetByPCIBusId": (_int_out, _text),
    "cudaMalloc": (_pointer_out, _size),
    "cudaFree": (_pointer,),
    "cudaHostRegister": (_pointer, _size, _uint),
    "cudaHostUnregister": (_pointer,),
    "cudaStreamCreateWithFlags": (_pointer_out, _uint),
    "cudaStreamDestroy": (_pointer,),
    "cudaStreamWaitEvent": (_pointer, _pointer, _uint),
    "cudaMemcpyAsync": (_pointer, _pointer, _size, _int, _pointer),
    "cudaEventCreateWithFlags": (_pointer_out, _uint),
    "cudaEventDestroy": (_pointer,),
    "cudaEventRecord": (_pointer, _pointer),
    "cudaEventSynchronize": (_pointer,),
    "cudaIpcGetMemHandle": (_handle_out, _pointer),
    "cudaIpcOpenMemHandle": (_pointer_out, IpcHandle, _uint),
    "cudaIpcCloseMemHandle": (_pointer,),
    "cudaIpcGetEventHandle": (_handle_out, _pointer),
    "cudaIpcOpenEventHandle": (_pointer_out, IpcHandle),
}


class Cudart:
    """libcudart. Raises `CudaError` where there is none."""

    def __init__(self) -> None:
        self._library = _load()
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        for name, arguments in SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments

    def current_device(self) -> str:
        ordinal, bus_id = ctypes.c_int(), ctypes.create_string_buffer(32)
        self._call("cudaGetDevice", ctypes.byref(ordinal))
        self._call("cudaDeviceGetPCIBusId", bus_id, len(bus_id), ordinal)
        return bus_id.value.decode()

    def select_device(self, bus_id: str) -> None:
        ordinal = ctypes.c_int()
        self._call("cudaDeviceGetByPCIBusId", ctypes.byref(ordinal), bus_id.encode())
        self._call("cudaSetDevice", ordinal)

    def malloc(self, nbytes: int) -> int:
        return self._made("cudaMalloc", nbytes)

    def free(self, memory: int) -> None:
        self._call("cudaFree", memory)

    def register_host(self, address: int, nbytes: int) -> None:
        self._call("cudaHostRegister", address, nbytes, 0)

    def unregister_host(self, address: int) -> None:
        self._call("cudaHostUnregister", address)

    def create_stream(self) -> int:
        return self._made("cudaStreamCreateWithFlags", STREAM_NON_BLOCKING)

    def destroy_stream(self, stream: int) -> None:
        self._call("cudaStreamDestroy", stream)

    def create_event(self, interprocess: bool = False) -> int:
        flags = EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING | (EVENT_INTERPROCESS if interprocess else 0)
        return self._made("cudaEventCreateWithFlags", flags)

    def destroy_event(self, event: int) -> None:
        self._call("cudaEventDestroy", event)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cudaMemcpyAsync", to, source, nbytes, MEMCPY_DEFAULT, stream)

    def record(self, event: int, stream: int) -> None:
        self._call("cudaEventRecord", event, stream)

    def stream_wait(self, stream: int, event: int) -> None:
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def synchronize(self, event: int) -> None:
        self._call("cudaEventSynchronize", event)

    def export_memory(self, memory: int) -> bytes:
        return self._handle("cudaIpcGetMemHandle", memory)

    def open_memory(self, handle: bytes) -> int:
        return self._made("cudaIpcOpenMemHandle", _from_bytes(handle), IPC_LAZY_PEER_ACCESS)

    def close_memory(self, memory: int) -> None:
        self._call("cudaIpcCloseMemHandle", memory)

    def export_event(self, event: int) -> bytes:
        return self._handle("cudaIpcGetEventHandle", event)

    def open_event(self, handle: bytes) -> int:
        return self._made("cudaIpcOpenEventHandle", _from_bytes(handle))

    def _made(self, name: str, *arguments: Any) -> int:
        made = ctypes.c_void_p()
        self._call(name, ctypes.byref(made), *arguments)
        return made.value or 0

    def _handle(self, name: str, of: int) -> bytes:
        handle = IpcHandle()
        self._call(name, ctypes.byref(handle), of)
        return bytes(handle)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise CudaError(f"{name}: {self._library.cudaGetErrorString(code).decode()}")


def _from_bytes(handle: bytes) -> IpcHandle:
    if len(handle) != HANDLE_BYTES:
        raise ValueError(f"a CUDA IPC handle has {HANDLE_BYTES} bytes, not {len(handle)}")
    return IpcHandle.from_buffer_copy(handle)


def _load() -> ctypes.CDLL:
    """The runtime that came with torch, else the loader's."""
    for path in (*_in_wheels(), *SONAMES):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise CudaError(
        f"there is no CUDA runtime ({' or '.join(SONAMES)}), neither in an nvidia package beside torch "
        "nor where the loader looks (LD_LIBRARY_PATH)"
    )


def _in_wheels() -> Iterator[str]:
    """Of the packages that torch depends on; found without importing them."""
    spec = find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for name in SONAMES:
            yield from map(str, Path(folder).glob(f"*/lib/{name}"))
