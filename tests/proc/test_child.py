"""A child process while it loads, without the process."""

from __future__ import annotations

import gc
import io
import socket

import pytest

from proc.child import Child
from proc.role import ProcessSpec
from proc.settings import Settings
from proc.topology import Role


def test_garbage_is_collected_again_when_the_last_role_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: called.append("freeze"))
    monkeypatch.setattr(gc, "enable", lambda: called.append("enable"))
    spec = ProcessSpec([Role("http", 0), Role("worker", 0)], Settings(), "", "", [], [], 1, -1)
    with socket.socket() as supervisor:
        child = Child(spec, supervisor, io.BytesIO())
        child.loaded()
        assert called == []
        child.loaded()
    assert called == ["freeze", "enable"]
