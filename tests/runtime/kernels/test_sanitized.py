"""The contract tests of the kernels once more, on a build with AddressSanitizer and UndefinedBehaviorSanitizer.

That build also runs the AVX-512 source, in whatever instructions this machine has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.kernels import library

SOURCES = Path(library.__file__).parent / "csrc"
ROOT = SOURCES.parents[2]
FLAGS = "-O1 -g -fPIC -shared -std=gnu11 -Wall -Wextra -Wno-psabi -Wno-unused-parameter -DSIDESTEP_ANY_TARGET"


def runtimes() -> str:
    """The sanitizers' libraries as the compiler names them."""
    names = ("libasan.so", "libubsan.so")
    found = [subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip() for name in names]
    if not all(os.path.isabs(path) for path in found):
        pytest.skip("the compiler has no sanitizers")
    return " ".join(found)


@pytest.mark.timeout(480)
@pytest.mark.skipif(shutil.which("gcc") is None or sys.platform != "linux", reason="needs gcc")
def test_kernels_under_sanitizers(tmp_path: Path) -> None:
    """Without OpenMP, whose threads the sanitizers do not know: one thread walks all stages."""
    preload, built = runtimes(), tmp_path / "_native.so"
    sources = [str(path) for path in SOURCES.glob("*.c")]
    command = ["gcc", *FLAGS.split(), "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", *sources]
    subprocess.run([*command, "-o", str(built), "-lm"], check=True, timeout=100)
    environment = os.environ | {
        library.LIBRARY: str(built),
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",
    }
    tests = [str(Path(__file__).parent / "test_kernels.py"), str(ROOT / "tests/runtime/test_sampler.py")]
    arguments = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        "not 4100 and not 200 and not torch",
        *tests,
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=360, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "avx512bf16 avx512 " in subprocess.check_output(
        [sys.executable, "-c", "from runtime.kernels.library import every; print(*(one.name for one in every()))"],
        env=environment,
        text=True,
        cwd=ROOT,
    )
