"""What launches a GPU's steps names no operation that would wait for the device; `tests/gpu` proves it on one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parent.parent.parent / "runtime"
PATH = (
    *(f"device/{name}.py" for name in ("cuda", "graphs", "staging", "put", "histories", "changes", "filters", "told")),
    *(f"attention/{name}.py" for name in ("flashinfer", "wrappers", "page_lists")),
    *(f"model/{name}.py" for name in ("llama", "layer_ops", "rope")),
    "device/device_tokens.py",
    "sampling_on_device.py",
)
WAITS = {"item", "cpu", "nonzero", "masked_select", "is_nonzero", "synchronize"}
MAY = {  # for events of steps that are long done, or where nothing is launched
    ("device/cuda.py", "_report"),
    ("device/cuda.py", "__init__"),
    ("device/staging.py", "begin"),
}


def waits(file: Path) -> set[tuple[str, str]]:
    """(function, call) of all calls that would wait."""
    found = set()
    for function in ast.walk(ast.parse(file.read_text())):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
                    found.add((function.name, node.func.attr))
    return found


@pytest.mark.parametrize("name", PATH)
def test_nothing_waits(name: str) -> None:
    assert {(function, call) for function, call in waits(RUNTIME / name) if (name, function) not in MAY} == set()


def test_a_call_that_waits_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def draw(ids):\n    return ids.argmax().item()\n")
    assert waits(tmp_path / "one.py") == {("draw", "item")}
