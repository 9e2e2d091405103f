"""What must be quick stays quick: the client and the command load nothing heavy; our import names are ours."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = "{'torch', 'transformers', 'numpy'}"


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    ).stdout


@pytest.mark.parametrize("name", ["ipc", "ipc.client", "ipc.async_client", "ipc.messages", "proc.supervisor"])
def test_clients_and_the_command_load_nothing_heavy(name: str) -> None:
    assert python(f"import sys, {name}\nprint({HEAVY} & set(sys.modules))").strip() == "set()"


@pytest.mark.parametrize("role", ["tokenizer", "scheduler", "grammar", "http.role", "worker"])
def test_no_role_loads_torch_before_its_device_is_known(role: str) -> None:
    assert python(f"import sys, proc.child, proc.{role}\nprint('torch' in sys.modules)").strip() == "False"


def test_the_front_door_opens_late() -> None:
    code = f"import sys, sidestep\nsidestep.Client, sidestep.InvalidRequest\nprint({HEAVY} & set(sys.modules))"
    assert python(code).strip() == "set()"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        import sidestep

        sidestep.Nothing  # noqa: B018


def test_importing_the_client_takes_at_most_150_ms() -> None:
    """Best of seven beyond the interpreter's own start; on a slow machine at most twice what its libraries take."""
    bare, libraries, ours = "pass", "import zmq, msgspec", "import ipc, ipc.client"
    best = dict.fromkeys((bare, libraries, ours), math.inf)
    for _ in range(7):
        for code in best:
            began = time.perf_counter()
            python(code)
            best[code] = min(best[code], time.perf_counter() - began)
    assert best[ours] - best[bare] <= max(0.150, 2 * (best[libraries] - best[bare]))


def test_help_is_quick() -> None:
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "proc", "--help"], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 0 and b"serve" in done.stdout
    assert time.perf_counter() - began < 1.0


@pytest.mark.parametrize("name", ["runtime", "proc", "ipc", "bench", "sidestep"])
def test_these_names_are_ours(name: str) -> None:
    assert Path(python(f"import {name}; print({name}.__file__)").strip()).is_relative_to(ROOT)


def test_rooms_have_names() -> None:
    vague = {"utils.py", "helpers.py", "common.py", "misc.py", "manager.py"}
    houses = ("runtime", "proc", "ipc", "bench")
    assert not [path for house in houses for path in (ROOT / house).rglob("*.py") if path.name in vague]
