"""One quick run of the kernels' benchmark: every figure is there, finite and positive; no kernels is a clear error."""

from __future__ import annotations

import argparse
import json
import math

import pytest
import torch

from bench.kernels import main
from bench.options import add_kernels_flags
from proc.settings import UsageError
from runtime.kernels.library import VARIABLE, every

FIGURES = {"ms", "torch_ms", "torch_over_kernel", "floor_ms", "over_floor"}
STARTS = (
    "linear bfloat16",
    "linear float32",
    "decode step",
    "prefill",
    "decode attention",
    "prefill attention",
    "rms_norm",
)


def given(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_kernels_flags(parser)
    return parser.parse_args([*flags, "--quick", "--repeats", "2", "--threads", str(torch.get_num_threads())])


@pytest.mark.skipif(not list(every()), reason="the C library is not built here")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_quick_run(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given("--json", "--dtype", dtype)) == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert report["dtype"] == dtype
    kernels = report["kernels"]
    assert {name.split(",")[0] for name in kernels} == set(STARTS)
    figures = [report["decode_step_over_floor"], report["prefill_over_floor"]]
    figures += [kernel[name] for kernel in kernels.values() for name in FIGURES]
    figures += [*report["read_gb_per_s"].values(), *report["peak_gflop_per_s"].values()]
    assert all(math.isfinite(figure) and figure > 0 for figure in figures)


@pytest.mark.skipif(not list(every()), reason="the C library is not built here")
def test_the_table_has_a_line_for_each_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    main(given())
    *table, line = capsys.readouterr().out.splitlines()
    assert "over floor" in table[3] and len(table) == 4 + len(json.loads(line)["kernels"])


def test_no_kernels_are_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "torch")
    with pytest.raises(UsageError, match="no C kernels here"):
        main(given())


@pytest.mark.skipif(not list(every()), reason="the C library is not built here")
def test_a_folder_without_a_model_is_named() -> None:
    with pytest.raises(UsageError, match="--model: nowhere"):
        main(given("--model", "nowhere"))
