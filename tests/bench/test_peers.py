"""Peers side by side: two simulated servers over HTTP, ratios within a round, answers of another length refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from bench import peers
from bench.peers import WORKLOADS, Run, _jobs, _line, _refuse_others
from bench.serving import Outcome
from bench.workloads import Job
from proc.__main__ import main
from proc.settings import UsageError, settings_from
from proc.supervisor import Supervisor


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """The options that name two servers, `one` and `two`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIDESTEP_RUN_DIR", str(tmp_path_factory.mktemp("run")))
        settings = settings_from(device="sim", procs="1", port=0)
        with Supervisor(settings, http=1) as first, Supervisor(settings, http=1) as second:
            yield ("--url", f"one={first.url}", "--url", f"two={second.url}/v1")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four requests of each workload, at once."""
    small = {name: replace(work, num_prompts=4, output_len=8) for name, work in WORKLOADS.items()}
    monkeypatch.setattr(peers, "WORKLOADS", small)
    monkeypatch.setattr(peers, "REST", 0.0)


@pytest.mark.usefixtures("tiny")
def test_rounds_go_through_all_workloads_and_each_through_all_servers(
    two: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "peers", *two, "--repeats", "1", "--vocab-size", "256"]) == 0
    lines = capsys.readouterr().out.splitlines()
    order = [f"1/1 {workload} {server}" for workload in "ABC" for server in ("one", "two")]
    assert [line.partition(":")[0] for line in lines[:6]] == order
    assert lines[6] == "medians of 1, x is over one" and len(lines) == 6 + 2 + 6 + 1
    report = json.loads(lines[-1])
    assert report["base"] == "one" and [line["workload"] for line in report["results"]] == list("AABBCC")
    for one, other in zip(report["results"][::2], report["results"][1::2], strict=True):
        assert one["input_tokens"] == other["input_tokens"]
        ratio = other["output_throughput"] / one["output_throughput"]
        assert one["output_throughput_over_base"] == 1 and other["output_throughput_over_base"] == pytest.approx(ratio)
        assert min(other["median_ttft_ms"], other["median_tpot_ms"]) > 0
    assert report["results"][-1]["input_tokens"] == 4 * 544


@pytest.mark.usefixtures("tiny")
def test_only_the_json_line_with_another_base(two: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ("--workload", "B", "--base", "two", "--seed", "7", "--repeats", "2", "--json", "--vocab-size", "256")
    assert main(["bench", "peers", *two, *wanted]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["base"], report["seed"], report["repeats"]) == ("two", 7, 2)
    assert [len(line["output_throughputs"]) for line in report["results"]] == [2, 2]


@pytest.mark.usefixtures("tiny")
def test_a_server_that_refuses_the_ids_gets_words(two: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "peers", *two[:2], "--workload", "B", "--repeats", "1"]) == 0  # its vocabulary is the bytes
    assert capsys.readouterr().out.startswith("one takes no token ids: its prompts are words\n")


def test_each_round_has_prompts_of_its_own() -> None:
    first, again, other = (_jobs(WORKLOADS["C"], np.random.default_rng([3, n, 67]), 32_000) for n in (1, 1, 2))
    assert first == again and first[0].prompt[:512] == first[63].prompt[:512] != other[0].prompt[:512]
    lengths = [len(job.prompt) for job in _jobs(WORKLOADS["A"], np.random.default_rng(0), 32_000)]
    assert len(lengths) == 64 and 16 <= min(lengths) < 40 and 230 < max(lengths) <= 256


def test_ratios_are_taken_within_a_round() -> None:
    def run(server: str, speed: float, tpot: float | None = 1.0) -> Run:
        figures = {"output_throughput": speed, "median_ttft_ms": 1.0, "median_tpot_ms": tpot, "total_input_tokens": 9}
        return Run("A", server, figures)

    runs = [
        run(name, speed) for pair in ((10, 20), (100, 90), (30, 33)) for name, speed in zip("xy", pair, strict=True)
    ]
    line = _line(runs, "A", "y", "x")
    assert line["output_throughput"] == 33 and line["output_throughput_over_base"] == pytest.approx(1.1)
    assert line["output_throughputs"] == [20, 90, 33]
    assert _line([run("x", 1.0, None)], "A", "x", "x")["median_tpot_ms_over_base"] is None


def test_answers_of_another_length_are_refused() -> None:
    _refuse_others("one", [Outcome(Job("a", 5), output_tokens=5)])
    with pytest.raises(UsageError, match="one answered 3 tokens where 5 were asked for"):
        _refuse_others("one", [Outcome(Job("a", 5), output_tokens=3)])
    with pytest.raises(UsageError, match="one failed a request: HTTP 500"):
        _refuse_others("one", [Outcome(Job("a", 5), error="HTTP 500")])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--url", "one=http://127.0.0.1:1", "--url", "one=http://127.0.0.1:2"), "the same name"),
        (("--url", "one=http://127.0.0.1:1", "--base", "two"), "the servers are one"),
        (("--url", "one=http://127.0.0.1:1"), "no answer to /v1/models"),
    ],
)
def test_options_that_cannot_be(options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "peers", *options]) == 2
    assert words in capsys.readouterr().err


def test_a_url_needs_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "peers", "--url", "http://127.0.0.1:1/?a=b"])
    assert "is not NAME=URL" in capsys.readouterr().err
