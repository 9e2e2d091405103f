"""The same jobs for a seed, lengths as asked for, files read or refused; the report in the field's words."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench.options import add_serving_flags
from bench.report import Sample, print_report, summary
from bench.workloads import Job, jobs
from proc.settings import UsageError


def given(**changes: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_serving_flags(parser)
    return argparse.Namespace(**(vars(parser.parse_args([])) | changes))


def test_random_lengths_follow_the_ratio() -> None:
    found = jobs(given(num_prompts=200, random_input_len=100, random_output_len=10, random_range_ratio=0.5), 50)
    assert found == jobs(given(num_prompts=200, random_input_len=100, random_output_len=10, random_range_ratio=0.5), 50)
    assert {50 <= len(job.prompt) <= 150 and 5 <= job.output_len <= 15 for job in found} == {True}
    assert min(len(job.prompt) for job in found) < 60 and max(len(job.prompt) for job in found) > 140
    assert all(0 <= token < 50 for job in found for token in job.prompt if isinstance(token, int))
    exact = jobs(given(num_prompts=3, random_input_len=7), 50)
    assert [len(job.prompt) for job in exact] == [7, 7, 7]


def test_files(tmp_path: Path) -> None:
    custom, shared = tmp_path / "c.jsonl", tmp_path / "s.json"
    custom.write_text('{"prompt": "a", "output_len": 3}\n\n{"prompt": "b"}\n')
    found = jobs(given(dataset_name="custom", dataset_path=str(custom), num_prompts=4), 50)
    assert sorted((job.prompt, job.output_len) for job in found) == [("a", 3), ("a", 3), ("b", 64), ("b", 64)]
    turns = [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "because " * 10}]
    shared.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    assert jobs(given(dataset_name="sharegpt", dataset_path=str(shared), num_prompts=1), 50) == [
        Job("why?", 20, "because " * 10)
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_prompts": 0}, "--num-prompts"),
        ({"request_rate": 0.0}, "--request-rate"),
        ({"random_range_ratio": 1.0}, "--random-range-ratio"),
        ({"dataset_name": "custom"}, "needs --dataset-path"),
        ({"dataset_name": "custom", "dataset_path": "/nowhere"}, "cannot be read"),
    ],
)
def test_options_that_do_not_fit(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        jobs(given(**changes), 50)


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    sample = Sample("sidestep", 2.0, 3, 30, 60, None, 1.5, 0.5, [1.0, 2.0, 3.0], [0.1, 0.2, 0.3], [0.01], [0.01, 0.02])
    figures = summary(sample, given(num_prompts=4))
    assert (figures["completed"], figures["failed"], figures["output_throughput"]) == (3, 1, 30.0)
    assert figures["mean_ttft_ms"] == pytest.approx(200) and figures["p99_itl_ms"] == pytest.approx(19.9)
    print_report(figures)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============" and lines[-1] == "=" * 50
    assert "Successful requests:                     3         " in lines
    assert "---------------Time to First Token----------------" in lines
    assert "Idle with work (%):                      25.00     " in lines
    json.dumps(figures, allow_nan=False)
    empty = summary(Sample("openai", 2.0, 0, 0, 0, None, math.nan, math.nan, [], [], [], []), given(num_prompts=4))
    json.dumps(empty, allow_nan=False)
    print_report(empty)
    assert "Device" not in capsys.readouterr().out
