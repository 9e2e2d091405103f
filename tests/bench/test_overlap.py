"""The overlap benchmark: workloads as published, equal tokens demanded, and one whole small run through processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.overlap import Run, _equal
from bench.overlap_workloads import STREAMS, sharegpt_lengths, workload
from bench.picture import idle_by_mode
from proc.settings import UsageError
from tests.runtime.test_roofline import FILE

ROOT = Path(__file__).parent.parent.parent
KEYS = {
    *("mode", "request_throughput", "output_throughput", "makespan_s", "device_busy_s", "makespan_over_busy"),
    *("idle_with_work_fraction", "mean_ttft_ms", "median_itl_ms", "p99_itl_ms", "cpu_s_by_role"),
}


def test_sharegpt_has_the_published_sums_and_a_long_tail() -> None:
    inputs, outputs = sharegpt_lengths()
    assert (len(inputs), inputs.sum(), outputs.sum()) == (3000, 673_672, 581_627)
    assert min(inputs.min(), outputs.min()) >= 4 and max(inputs.max(), outputs.max()) <= 1024
    assert sorted(inputs)[1500] < inputs.mean() * 0.6  # most are short, few are long


def test_small_steps_are_streams_of_one_length() -> None:
    work = workload("small-steps", 4 * STREAMS, 100, 0)
    sums = [sum(ask.output_len for ask in work.asks[stream::STREAMS]) for stream in range(STREAMS)]
    assert len(set(sums)) == 1 and min(ask.output_len for ask in work.asks) > 0
    assert [ask.after for ask in work.asks[: STREAMS + 2]] == [None] * STREAMS + [0, 1]
    with pytest.raises(UsageError, match="multiple"):
        workload("small-steps", 100, 100, 0)


def test_the_same_seed_asks_the_same() -> None:
    for name in ("sharegpt-3000", "shared-prefix", "poisson"):
        assert workload(name, 8, 100, 3) == workload(name, 8, 100, 3) != workload(name, 8, 100, 4)


def test_tokens_that_differ_are_noticed() -> None:
    one, other, short = ([b"a", b"b"], [b"a", b"c"], [b"a"])
    assert _equal([Run("", "depth0", {}, one), Run("", "depth1", {}, one), Run("", "depth2", {}, short)])
    assert not _equal([Run("", "depth0", {}, one), Run("", "depth1", {}, other)])


def test_a_run_of_three_modes(tmp_path: Path) -> None:
    device = tmp_path / "small.toml"
    device.write_text(
        FILE.replace("max_model_len = 64", "max_model_len = 2100").replace("launch_ms = 2", "launch_ms = 0.2")
    )
    command = [sys.executable, "-m", "proc", "bench", "overlap", "--workload", "sharegpt-3000", "--num-prompts", "6"]
    command += ["--modes", "threads,depth0,depth1", "--model", "bytes", "--device", f"sim:{device}", "--json"]
    done = subprocess.run(
        [*command, "--trace", str(tmp_path)], capture_output=True, text=True, timeout=100, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["mode"] for line in lines] == ["threads", "depth0", "depth1"]
    for line in lines:
        assert set(line) >= KEYS and line["equal_tokens"] and line["simulated"]
        assert line["makespan_s"] >= line["device_busy_s"] > 0 and 0 <= line["idle_with_work_fraction"] < 1
    assert lines[1]["planned_ahead_fraction"] == 0 and lines[2]["planned_ahead_fraction"] > 0.5
    assert lines[2]["idle_with_work_fraction"] < lines[1]["idle_with_work_fraction"]
    assert set(lines[0]["cpu_s_by_role"]) == {"tokenizer-0", "scheduler-0", "worker-0", "grammar-0", "shared", "client"}
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_an_unknown_mode_is_refused() -> None:
    command = [sys.executable, "-m", "proc", "bench", "overlap", "--modes", "depth9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 2 and "--modes: 'depth9' is none of threads" in done.stderr


def test_a_picture_of_the_idle_share(tmp_path: Path) -> None:
    line = {"workload": "small-steps", "device": "sim:x", "variant": ""}
    lines = [
        line | {"mode": mode, "idle_with_work_fraction": share} for mode, share in (("depth0", 0.4), ("depth1", 0.01))
    ]
    idle_by_mode(lines, tmp_path / "idle.svg")
    words = (tmp_path / "idle.svg").read_text()
    assert words.startswith("<?xml") and "<svg" in words
