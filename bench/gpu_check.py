"""`make gpu-check`: what the GPU worker consists of is tested, and where there is a GPU, proven and measured on it.

Needs no network and no installation beyond this project's dependencies; those that are missing are named. The exit code
is 0 where everything that could run has passed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TESTS = (
    *(f"tests/runtime/test_{name}.py" for name in ("page_lists", "gathered", "guarded_ring", "attention_backend")),
    *(f"tests/runtime/test_{name}.py" for name in ("paged_attention", "paged_attention_ahead", "staging")),
    *(f"tests/runtime/test_{name}.py" for name in ("device_times", "gpu_planning", "device_tokens", "cuda_device")),
    *(f"tests/runtime/test_{name}.py" for name in ("filters", "histories", "sampling_on_device")),
    "tests/model/test_layer_ops.py",
    "tests/ipc/test_cuda_runtime.py",
    "tests/ipc/test_device_table.py",
    "tests/gpu",
)
BENCHES = (
    ("--shape", "qwen3-0.6b", "--layouts", "3:1", "3:0", "1:1"),
    ("--shape", "llama-3.1-8b", "--layouts", "3:1", "3:0", "--rows", "1", "16", "64"),
)
LIMIT_S = {"tests": 240, "bench": 150}
H200_FLOPS = 790.0  # TFLOP/s in bfloat16, as seen


def missing() -> list[str]:
    """Distributions that this project depends on here and that are not installed."""
    from packaging.requirements import Requirement

    tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = map(Requirement, [*project["dependencies"], "pytest", "hypothesis"])
    needed = [one.name for one in wanted if one.marker is None or one.marker.evaluate()]
    return [name for name in needed if not _installed(name)]


def _installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def environment() -> str:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    flashinfer = version("flashinfer-python") if find_spec("flashinfer") else "missing"
    compiler = shutil.which("nvcc") or "missing"
    python = ".".join(map(str, sys.version_info[:3]))
    return f"python {python}, torch {torch.__version__}, {gpu}, flashinfer {flashinfer}, nvcc {compiler}"


def run(kind: str, *command: str) -> tuple[int, str]:
    """Exit code and last line of output, which is shown as it comes; 124 past the limit."""
    last = ""
    began = time.monotonic()
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=settings
    ) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), True)
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            last = line.strip() or last
            if time.monotonic() - began > LIMIT_S[kind]:
                process.kill()
                return 124, f"not done in {LIMIT_S[kind]} s"
    return process.returncode, last


def verdicts(report: dict[str, Any]) -> list[tuple[str, bool]]:
    """What was aimed at, and whether it was reached, of one shape."""
    small = report["shape"] == "qwen3-0.6b"
    most_idle = 0.05 if small else 0.02
    rows = {(row["procs"], row["depth"], row["rows"]): row for row in report["decode"]}
    found = [("equal tokens in all layouts", "tokens_differ" not in report)]
    for (procs, depth, count), row in rows.items():
        if (procs, depth) == ("3", 1) and count <= 64:
            found.append(
                (f"decode step over floor at {count}: {row['over_floor']:.2f} <= 1.25", row["over_floor"] <= 1.25)
            )
            idle = row["idle_fraction"]
            found.append((f"idle at depth 1, {count} rows: {idle:.1%} <= {most_idle:.0%}", idle <= most_idle))
    share = report["prefill_tflops"] / H200_FLOPS
    if not small:
        found.append((f"prefill {share:.0%} of {H200_FLOPS:.0f} TFLOP/s >= 55%", share >= 0.55))
    if small:
        gain = rows["3", 1, 64]["tokens_per_s"] / rows["3", 0, 64]["tokens_per_s"]
        found.append((f"depth 1 over depth 0 at 64 rows: {gain:.2f} >= 1.10", gain >= 1.10))
    return found


def main() -> int:
    if lacking := missing():
        print(f"cannot check: {', '.join(lacking)} missing; pip install {' '.join(lacking)}")
        return 2
    import torch

    print(environment())
    existing = [name for name in TESTS if (ROOT / name).exists()]
    code, closing = run("tests", "-m", "pytest", "-q", "-rs", *existing)
    if not torch.cuda.is_available():
        print(f"no GPU here: the host's side of the GPU worker is checked ({closing}), nothing ran on a device")
        return code
    print(f"tests: {closing}")
    passed = code == 0
    for options in BENCHES:
        code, closing = run("bench", "-m", "proc", "bench", "device", *options)
        if code != 0:
            print(f"bench device {' '.join(options)} ended with {code}")
            passed = False
            continue
        for words, reached in verdicts(json.loads(closing)):
            print(f"{'pass' if reached else 'MISS'}  {words}")
            passed = passed and reached
    print("gpu-check passed" if passed else "gpu-check failed")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
