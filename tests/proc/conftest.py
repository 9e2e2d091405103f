"""A folder of its own for the sockets of each test, in which nothing may be left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def run_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("SIDESTEP_RUN_DIR", str(folder))
    yield folder
    assert not list(folder.iterdir()), "sockets were left behind"
