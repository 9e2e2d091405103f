"""The two clients of docs/PROTOCOL.md, which use nothing of ours, give the same text as our own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc.client import Client
from proc.settings import Settings
from proc.supervisor import Supervisor

CLIENTS = Path(__file__).parent.parent / "docs" / "clients"
PROMPT = "héllo 🙂"


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setenv("SIDESTEP_RUN_DIR", str(tmp_path_factory.mktemp("run")))
    with Supervisor(Settings(device="sim", startup_timeout=30.0)) as server:
        yield server


def expected(server: Supervisor) -> bytes:
    with Client(server.addresses[0]) as client:
        return client.generate(PROMPT, temperature=0.0, max_tokens=32).text.encode() + b"\n"


def run(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, timeout=60, cwd=cwd)


def test_they_are_short() -> None:
    for file in CLIENTS.iterdir():
        assert len(file.read_text().splitlines()) < 60, file.name


def test_python(server: Supervisor) -> None:
    done = run(sys.executable, str(CLIENTS / "client.py"), server.addresses[0], PROMPT)
    assert (done.returncode, done.stdout) == (0, expected(server)), done.stderr
    refused = run(sys.executable, str(CLIENTS / "client.py"), server.addresses[0], "")
    assert refused.returncode == 1 and b"invalid_request: the prompt is empty" in refused.stderr


def test_node(server: Supervisor, tmp_path_factory: pytest.TempPathFactory) -> None:
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node")
    shutil.copy(CLIENTS / "client.mjs", folder)
    installed = run("npm", "install", "--no-audit", "--no-fund", "zeromq@6.5.0", "@msgpack/msgpack@3.1.2", cwd=folder)
    if installed.returncode:
        pytest.skip(f"npm cannot install zeromq: {installed.stderr.decode()[-200:]}")
    done = run("node", "client.mjs", server.addresses[0], PROMPT, cwd=folder)
    assert (done.returncode, done.stdout) == (0, expected(server)), done.stderr
