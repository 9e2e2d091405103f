"""The contract tests of the kernels once more, on a build with AddressSanitizer and UndefinedBehaviorSanitizer.

That build also runs the AVX-512 source, in whatever instructions this machine has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.kernels import library

SOURCES = Path(library.__file__).parent / "csrc"
ROOT = SOURCES.parents[2]
FLAGS = "-O1 -g -fPIC -std=gnu11 -Wall -Wextra -Wno-psabi -Wno-unused-parameter -DSIDESTEP_ANY_TARGET"
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
TESTS = ("tests/runtime/kernels/test_kernels.py", "tests/runtime/test_sampler.py")


def runtimes() -> str:
    """The sanitizers' libraries as the compiler names them."""
    names = ("libasan.so", "libubsan.so")
    found = [subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip() for name in names]
    if not all(os.path.isabs(path) for path in found):
        pytest.skip("the compiler has no sanitizers")
    return " ".join(found)


def build(folder: Path) -> Path:
    """All sources in one library, compiled side by side."""

    def compiled(source: Path) -> str:
        made = folder / f"{source.stem}.o"
        command = ["gcc", *FLAGS.split(), *SANITIZERS.split(), "-c", str(source), "-o", str(made)]
        subprocess.run(command, check=True, timeout=200)
        return str(made)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sorted(SOURCES.glob("*.c"), key=lambda path: -path.stat().st_size)))
    built = folder / "_native.so"
    subprocess.run(["gcc", "-shared", *SANITIZERS.split(), *objects, "-o", str(built), "-lm"], check=True, timeout=60)
    return built


@pytest.mark.timeout(480)
@pytest.mark.skipif(shutil.which("gcc") is None or sys.platform != "linux", reason="needs gcc")
def test_kernels_under_sanitizers(tmp_path: Path) -> None:
    """Without OpenMP, whose threads the sanitizers do not know: one thread walks all stages."""
    environment = os.environ | {
        "LD_PRELOAD": runtimes(),
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",
        library.LIBRARY: str(build(tmp_path)),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    chosen = ["-k", "not 4100 and not 200 and not torch and not (large_vocabulary and not avx2)"]

    def tested(file: str) -> subprocess.CompletedProcess[str]:
        whole = [*command, *chosen, file]
        return subprocess.run(whole, capture_output=True, text=True, env=environment, timeout=360, cwd=ROOT)

    with ThreadPoolExecutor() as pool:
        for done in pool.map(tested, TESTS):
            assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "avx512bf16 avx512 " in subprocess.check_output(
        [sys.executable, "-c", "from runtime.kernels.library import every; print(*(one.name for one in every()))"],
        env=environment,
        text=True,
        cwd=ROOT,
    )
