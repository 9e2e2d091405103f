"""`make gpu-check`: what the GPU worker consists of is tested, and where there is a GPU, proven and measured on it.

Needs no network and no installation beyond this project's dependencies; those that are missing are named. The exit code
is 0 where everything that could run has passed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
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
    "tests/model/test_coded_linears.py",
    "tests/ipc/test_cuda_runtime.py",
    "tests/ipc/test_device_table.py",
    "tests/gpu",
)
TEST = ("-m", "pytest", "-q", "-rs", "--timeout=0")
BENCHES = (
    ("--shape", "qwen3-0.6b", "--layouts", "3:1", "3:0", "1:1"),
    ("--shape", "llama-3.1-8b", "--layouts", "3:1", "3:0", "--rows", "1", "16", "64"),
)
TABLES = ("--shape", "qwen3-0.6b", "--layouts", "3:1", "--rows", "64", "--prefill", "512", "--json")
LIMIT_S = {"tests": 120, "bench": 130, "tables": 50}  # 8 minutes in all; kernels are built in the first bench
H200_FLOPS = 790.0  # TFLOP/s in bfloat16, as seen


def missing() -> list[str]:
    """Distributions that this project depends on here and that are not installed."""
    if find_spec("packaging") is None:
        return ["packaging"]
    from packaging.requirements import Requirement

    tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = map(Requirement, [*project["dependencies"], "pytest", "pytest-timeout", "hypothesis"])
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
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    settings = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=settings
    ) as process:
        assert process.stdout is not None
        alarm = threading.Timer(LIMIT_S[kind], process.kill)
        alarm.start()
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
        alarm.cancel()
    killed = process.returncode == -signal.SIGKILL
    return (124, f"not done in {LIMIT_S[kind]} s") if killed else (process.returncode, last)


def verdicts(report: dict[str, Any]) -> list[tuple[str, bool]]:
    """What was aimed at, and whether it was reached, of one shape."""
    small = report["shape"] == "qwen3-0.6b"
    most_idle = 0.05 if small else 0.02
    rows = {(row["procs"], row["depth"], row["rows"]): row for row in report["decode"]}
    alone = [layout for layout in report.get("tokens_differ", []) if layout[2] == 1]
    found = [("one request's tokens are equal in all layouts", not alone)]
    for (procs, depth, count), row in rows.items():
        if (procs, depth) == ("3", 1) and count <= 64:
            found.append(
                (f"decode step over floor at {count} rows: {row['over_floor']:.2f} <= 1.25", row["over_floor"] <= 1.25)
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


def fused() -> bool:
    """Whether flashinfer will be used; what is missing is told."""
    from bench.shapes import SHAPES
    from runtime.attention.backend import choose
    from runtime.model.config import parse_config

    backend, words = choose(parse_config(SHAPES["llama-3.1-8b"]))
    print(words)
    return backend.fused


def benched(options: tuple[str, ...], judged: bool) -> bool:
    """Measure one shape; where the ids cannot go over CUDA IPC, through pinned memory."""
    for more in ((), ("--token-table", "pinned")):
        code, closing = run("bench", "-m", "proc", "bench", "device", *options, *more)
        if code == 0:
            break
        print(f"bench device {' '.join((*options, *more))} ended with {code}: {closing}")
    if code != 0:
        return False
    found = verdicts(json.loads(closing)) if judged else []
    for words, reached in found:
        print(f"{'pass' if reached else 'MISS'}  {words}")
    return not more and all(reached for _, reached in found)


def tables() -> bool:
    """Both ways that ids take to the scheduler, side by side; whether both could be had."""
    found = {}
    for kind in ("cuda-ipc", "pinned"):
        code, closing = run("tables", "-m", "proc", "bench", "device", *TABLES, "--token-table", kind)
        if code != 0:
            print(f"--token-table {kind} ended with {code}: {closing}")
            return False
        found[kind] = json.loads(closing)
    print(compared(found["cuda-ipc"], found["pinned"]))
    return True


def compared(ipc: dict[str, Any], pinned: dict[str, Any]) -> str:
    """Of one layout each, with KV of the same size: what a second context takes is what lies between their memory."""
    (by_ipc,), (by_pinned,) = ipc["decode"], pinned["decode"]
    return (
        f"token table, cuda-ipc against pinned: step {by_ipc['step_ms']:.3f} / {by_pinned['step_ms']:.3f} ms, "
        f"ids seen after {by_ipc['seen_us']:.0f} / {by_pinned['seen_us']:.0f} us, "
        f"memory of the scheduler's context {ipc['used_mb'] - pinned['used_mb']} MiB"
    )


def main() -> int:
    if lacking := missing():
        print(f"cannot check: {', '.join(lacking)} missing; pip install {' '.join(lacking)}")
        return 2
    import torch

    print(environment())
    if not torch.cuda.is_available():
        code, closing = run("tests", *TEST, *TESTS)
        print(f"no GPU here: the host's side of the GPU worker is checked ({closing}), nothing ran on a device")
        return code
    passed = fused()
    judged = "H200" in torch.cuda.get_device_name()
    for options in BENCHES:
        passed = benched(options, judged) and passed
    passed = tables() and passed
    code, closing = run("tests", *TEST, *TESTS[::-1])  # the GPU's own first
    print(f"tests: {closing}")
    passed = passed and code == 0
    print("gpu-check passed" if passed else "gpu-check failed")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
