"""One quick run of `bench device` on the CPU: every figure is there, and the floors are those of the shape."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from bench.device import main, prefill_flops, read_bytes
from bench.gpu_check import compared, missing, verdicts
from bench.options import add_device_flags
from bench.shapes import write
from proc.settings import UsageError
from runtime.model.config import read_config

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(("shape", "billions", "embedding"), [("llama-3.1-8b", 8.03, 0.525), ("qwen3-0.6b", 0.596, 0)])
def test_floors_are_those_of_the_model(tmp_path: Path, shape: str, billions: float, embedding: float) -> None:
    """Parameters as the models' cards have them."""
    write(shape, tmp_path)
    config = read_config(tmp_path)
    assert read_bytes(config, 2, 1, 0) == pytest.approx(2e9 * (billions - embedding), rel=0.01)
    more = read_bytes(config, 2, 3, 10) - read_bytes(config, 2, 0, 0)
    assert more == 2 * 2 * config.num_layers * 8 * 128 * 30
    assert prefill_flops(config, 1) == pytest.approx(read_bytes(config, 2, 1, 0), rel=0.01)
    assert prefill_flops(config, 8192) > 8192 * prefill_flops(config, 1) * 0.7


def run(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    add_device_flags(parser)
    shape = ["--shape", "tiny", "--rows", "1", "4", "--tokens", "24", "--prefill", "256"]
    return main(parser.parse_args([*shape, *flags]))


def test_a_quick_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--device", "cpu", "--layouts", "3:1", "3:0") == 0
    *table, line = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert len(table) == 7 and "tokens_differ" not in report
    assert [(row["depth"], row["rows"]) for row in report["decode"]] == [(1, 1), (1, 4), (0, 1), (0, 4)]
    for row in report["decode"]:
        assert (
            row["step_ms"] > row["floor_ms"] > 0
            and row["seen_us"] > 0
            and 0 <= row["idle_fraction"] < 1
            and row["tokens_per_s"] > 0
        )
    assert report["prefill_tflops"] > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--device cpu --token-table pinned", "--token-table pinned is for GPUs"),
        pytest.param("", "torch is built for .* and sees no GPU", marks=NO_GPU),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_printed(
    capsys: pytest.CaptureFixture[str], flags: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        run(*flags.split())
    assert not capsys.readouterr().out


def test_what_was_aimed_at_is_judged() -> None:
    row = {"procs": "3", "rows": 64, "over_floor": 1.2, "idle_fraction": 0.01}
    decode = [row | {"depth": 1, "tokens_per_s": 112.0}, row | {"depth": 0, "tokens_per_s": 100.0}]
    report = {"shape": "qwen3-0.6b", "prefill_tflops": 300.0, "decode": decode}
    assert all(reached for _, reached in verdicts(report))
    slow = [row | {"depth": 1, "over_floor": 1.3, "idle_fraction": 0.1, "tokens_per_s": 105.0}, decode[1]]
    worse = report | {"decode": slow, "tokens_differ": [["3", 0, 1], ["3", 0, 64]]}
    missed = [words for words, reached in verdicts(worse) if not reached]
    assert len(missed) == 4
    large = [reached for _, reached in verdicts(report | {"shape": "llama-3.1-8b"})]
    assert large.count(False) == 1  # the prefill


def test_both_token_tables_are_told_apart() -> None:
    one = {"decode": [{"step_ms": 2.5, "seen_us": 61.4}], "used_mb": 9000}
    other = {"decode": [{"step_ms": 2.4, "seen_us": 40.0}], "used_mb": 8600}
    assert compared(one, other).endswith(
        "2.500 / 2.400 ms, ids seen after 61 / 40 us, memory of the scheduler's context 400 MiB"
    )


def test_this_installation_lacks_nothing() -> None:
    assert missing() == []
