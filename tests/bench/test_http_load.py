"""`sidestep bench http`: both ways and the bare application, with every figure."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from bench.http_load import main


def test_every_way_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(Namespace(streams=32, tokens=64, step_ms=1.0, json=False)) == 0
    *table, line = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert figures["http"]["http_us_per_token"] > figures["zmq"]["http_us_per_token"]
    assert 0 < figures["bare_us_per_token"] < figures["http"]["http_us_per_token"] * 2
    assert [row.split()[0] for row in table] == ["tokens/s", "zmq", "http", "a"]
