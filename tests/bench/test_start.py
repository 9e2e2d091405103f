"""`sidestep bench start` with the device that loads nothing, and a server that does not come up."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from bench.start import main, start
from proc.settings import UsageError


def test_the_seconds_of_each_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(Namespace(options=["--device", "sim"], repeats=1, json=True)) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["options"] == ["--device", "sim"] and len(line["seconds"]) == 1
    assert line["median_s"] == line["seconds"][0] > 0


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(UsageError, match="/nope: no such folder"):
        start(["--model", "/nope"])
