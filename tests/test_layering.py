"""The walls between the houses: proc imports runtime and ipc, and those two know neither each other nor proc."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {"runtime": {"ipc", "proc", "zmq", "socket", "subprocess"}, "ipc": {"runtime", "proc", "torch"}}
TORCH_FREE = (
    "sampling",
    "request",
    "step",
    "batch",
    "slots",
    "block_pool",
    "prefix_cache",
    "scheduler",
    "device.sim",
    "text",
)


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("house", FORBIDDEN)
def test_houses_keep_their_walls(house: str) -> None:
    broken = {str(path): imported(path) & FORBIDDEN[house] for path in (ROOT / house).rglob("*.py")}
    assert not {path: names for path, names in broken.items() if names}


def test_the_engine_loads_no_torch() -> None:
    code = (
        "import sys\n"
        + "".join(f"import runtime.{name}\n" for name in TORCH_FREE)
        + "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
