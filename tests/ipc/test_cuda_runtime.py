"""How libcudart is called, against a library that only notes what it is given: widths, structs by value, errors."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from ipc import cuda_runtime
from ipc.cuda_runtime import SIGNATURES, CudaError, Cudart, IpcHandle

FAR = 0x7F12_3456_789A  # a pointer that no int holds
DISABLE_TIMING, INTERPROCESS, BLOCKING = 2, 4, 1
SOURCE = """
#include <stddef.h>
#include <string.h>
typedef struct { char reserved[64]; } Handle;
char given[512];
const char *cudaGetErrorString(int code) { return code == 2 ? "out of memory" : "something else"; }
int cudaMalloc(void **made, size_t size) { *made = (void *)(size + 1); return size > 1L << 40 ? 2 : 0; }
int cudaIpcGetMemHandle(Handle *handle, void *memory) {
    for (int i = 0; i < 64; i++) handle->reserved[i] = i % 3 ? i : 0;
    memcpy(given, &memory, 8);
    return 0;
}
int cudaIpcOpenMemHandle(void **made, Handle handle, unsigned flags) {
    memcpy(given, handle.reserved, 64);
    *made = (void *)(0x7F1200000000 + flags);
    return 0;
}
int cudaIpcOpenEventHandle(void **made, Handle handle) { memcpy(given, handle.reserved, 64); *made = made; return 0; }
int cudaEventCreateWithFlags(void **made, unsigned flags) { *made = (void *)(size_t)flags; return 0; }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    size_t all[] = {(size_t)to, (size_t)from, size, (size_t)kind, (size_t)stream};
    memcpy(given, all, sizeof all);
    return 0;
}
int cudaGetDevice(int *device) { *device = 3; return 0; }
int cudaDeviceGetPCIBusId(char *id, int size, int device) {
    memcpy(id, "0000:65:00.0", size < 13 ? size : 13);
    id[11] = '0' + device;
    return 0;
}
int cudaDeviceGetByPCIBusId(int *device, const char *id) { *device = id[11] - '0'; return 0; }
int cudaSetDevice(int device) { given[0] = device; return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("cudart")
    defined = {line.split("(")[0].split()[-1].lstrip("*") for line in SOURCE.splitlines() if "(" in line}
    rest = "".join(f"int {name}(void) {{ return 1; }}\n" for name in SIGNATURES if name not in defined)
    (folder / "cudart.c").write_text(SOURCE + rest)
    built = folder / "libcudart.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", built, folder / "cudart.c"], check=True, timeout=60)
    return built


@pytest.fixture
def cuda(library: Path, monkeypatch: pytest.MonkeyPatch) -> Cudart:
    monkeypatch.setattr(cuda_runtime, "SONAMES", (str(library),))
    return Cudart()


def given(library: Path, nbytes: int) -> bytes:
    return bytes((ctypes.c_char * 512).in_dll(ctypes.CDLL(str(library)), "given"))[:nbytes]


def test_a_handle_keeps_its_64_bytes_both_ways(cuda: Cudart, library: Path) -> None:
    handle = cuda.export_memory(FAR)
    assert ctypes.sizeof(IpcHandle) == len(handle) == 64
    assert handle == bytes(i if i % 3 else 0 for i in range(64))
    assert int.from_bytes(given(library, 8), "little") == FAR
    assert cuda.open_memory(handle) == 0x7F12_0000_0001 and given(library, 64) == handle
    assert cuda.open_event(handle[::-1]) and given(library, 64) == handle[::-1]


@pytest.mark.parametrize("nbytes", [0, 63, 65])
def test_a_handle_of_another_size_is_refused(cuda: Cudart, nbytes: int) -> None:
    with pytest.raises(ValueError, match="64 bytes"):
        cuda.open_memory(bytes(nbytes))


def test_pointers_and_sizes_are_wide(cuda: Cudart, library: Path) -> None:
    cuda.copy(FAR, FAR + 1, 1 << 33, FAR + 2)
    expected = (FAR, FAR + 1, 1 << 33, 4, FAR + 2)
    assert given(library, 40) == b"".join(number.to_bytes(8, "little") for number in expected)
    assert cuda.malloc(1 << 35) == (1 << 35) + 1


def test_events_sleep_and_keep_no_time(cuda: Cudart) -> None:
    assert cuda.create_event() == BLOCKING | DISABLE_TIMING
    assert cuda.create_event(interprocess=True) == BLOCKING | DISABLE_TIMING | INTERPROCESS


def test_a_device_is_named_by_its_bus_id(cuda: Cudart, library: Path) -> None:
    assert cuda.current_device() == "0000:65:00.3"
    cuda.select_device("0000:65:00.5")
    assert given(library, 1) == b"\5"


def test_an_error_names_the_call_and_the_reason(cuda: Cudart) -> None:
    with pytest.raises(CudaError, match=r"^cudaMalloc: out of memory$"):
        cuda.malloc(1 << 41)
    with pytest.raises(CudaError, match=r"^cudaEventSynchronize: something else$"):
        cuda.synchronize(FAR)


def test_without_a_runtime_it_is_said_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runtime, "SONAMES", ("libcudart.so.none",))
    with pytest.raises(CudaError, match=r"no CUDA runtime \(libcudart.so.none\).*torch.*LD_LIBRARY_PATH"):
        Cudart()


def test_the_runtime_beside_torch_comes_first(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "nvidia" / "cu13" / "lib"
    inside.mkdir(parents=True)
    shutil.copy(library, inside / "libcudart.so.13")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(cuda_runtime._in_wheels()) == [str(inside / "libcudart.so.13")]
    assert Cudart().current_device() == "0000:65:00.3"
