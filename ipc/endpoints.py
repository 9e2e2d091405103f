"""Where a process listens: a function of (role, index, incarnation, channel) inside one private folder.

A restarted process has another incarnation, hence another address, so nothing queued for the dead one reaches it. Each
running server has a folder of its own below `home()`, with a file `server.json` by which the user's clients find it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

LONGEST_PATH = 100  # a Unix socket's path has at most 107 bytes


def home() -> Path:
    """The user's private folder of running servers: $SIDESTEP_RUN_DIR, else below $XDG_RUNTIME_DIR or /tmp."""
    chosen = os.environ.get("SIDESTEP_RUN_DIR")
    if chosen:
        return Path(chosen)
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime_dir) / "sidestep" if runtime_dir else Path(tempfile.gettempdir()) / f"sidestep-{os.getuid()}"


def create_run_dir() -> Path:
    """A new folder that only this user can enter. Raises `OSError` when the user's folder belongs to another."""
    parent = home()
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if parent.stat().st_uid != os.getuid():
        raise PermissionError(f"{parent} belongs to another user")
    _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=parent))
    if len(str(folder)) > LONGEST_PATH - 30:
        shutil.rmtree(folder)
        raise OSError(f"{parent} is too long a path for sockets; set SIDESTEP_RUN_DIR to a shorter one")
    return folder


def _sweep(parent: Path) -> None:
    """Remove what servers that were killed left behind."""
    for folder in parent.iterdir():
        owner = folder.name.partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)


def address(run_dir: str, role: str, index: int, channel: str, incarnation: int = 0) -> str:
    return f"ipc://{run_dir}/{role}{index}.{incarnation}.{channel}"


def announce(run_dir: Path, model: str, addresses: list[str]) -> None:
    """Let `discover` find the server of this process."""
    part = run_dir / "server.part"
    part.write_text(json.dumps({"pid": os.getpid(), "model": model, "addresses": addresses}))
    part.rename(run_dir / "server.json")


def discover() -> list[dict[str, Any]]:
    """The living servers of this user: pid, model, addresses."""
    found = []
    for file in sorted(home().glob("*/server.json")):
        try:
            server = json.loads(file.read_text())
            os.kill(server["pid"], 0)
        except (OSError, ValueError, KeyError):
            continue
        found.append(server)
    return found
