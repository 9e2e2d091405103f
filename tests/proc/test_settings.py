"""Flags made from the dataclass: aliases, nearest names, impossible values named."""

from __future__ import annotations

from typing import Any

import pytest

from proc.__main__ import parser
from proc.settings import Settings, UsageError, from_arguments, non_defaults, settings_from


def read(*arguments: str) -> Settings:
    return from_arguments(parser().parse(["serve", *arguments]))


def test_defaults_and_the_positional_model() -> None:
    assert read() == Settings()
    assert read("folder") == read("--model", "folder") == Settings(model="folder")
    with pytest.raises(UsageError, match="two models"):
        read("one", "--model", "two")


def test_aliases_of_the_field() -> None:
    ours = Settings(
        max_model_len=64, max_num_seqs=8, max_num_batched_tokens=32, block_size=4, disable_radix_cache=True, seed=3
    )
    assert ours == read(
        *("--context-length", "64", "--max-running-requests", "8", "--chunked-prefill-size", "32", "--page-size", "4"),
        *("--no-enable-prefix-caching", "--random-seed", "3"),
    )
    assert read("--tp", "2") == read("--tp-size", "2") == Settings(tensor_parallel_size=2)
    assert read("--disable-overlap").depth == 0 and read("--overlap-depth", "2").depth == 2


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"overlap_depth": 3}, "--overlap-depth"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_num_batched_tokens": 8}, "--max-num-batched-tokens"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization"),
        ({"max_model_len": 1}, "--max-model-len"),
        ({"seed": -1}, "--seed"),
        ({"device": "tpu"}, "--device"),
        ({"num_blocks": 1}, "--num-blocks"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size"),
        ({"quantization": "int8", "device": "sim"}, "--quantization"),
        ({"quantization": "gguf", "load_format": "dummy"}, "--quantization"),
        ({"quantization": "int9"}, "--quantization must be none, int8, int4, gguf"),
        ({"dtype": "half"}, "--dtype must be auto, float32"),
        ({"log_level": None}, "--log-level"),
    ],
)
def test_impossible_values_name_their_flag(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        Settings(**changes)


def test_unknown_names_are_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="did you mean overlap_depth"):
        settings_from(overlap_deptj=1)
    with pytest.raises(SystemExit) as caught:
        read("--max-num-seq-s", "4")
    assert caught.value.code == 2
    assert "unknown argument --max-num-seq-s (did you mean --max-num-seqs?)" in capsys.readouterr().err


def test_what_differs_is_one_line() -> None:
    assert non_defaults(Settings()) == "all defaults"
    assert non_defaults(Settings(procs="2", seed=1)) == "procs=2 seed=1"


def test_simulated_devices_by_name() -> None:
    assert read("--device", "sim:h100-llama-3.1-8b", "--sim-launch-ms", "6").timing == "h100-llama-3.1-8b"
    assert read("--device", "sim").simulated and not read("--device", "sim").timing
    for arguments, words in (
        (("--device", "sim:h100-llama"), "no simulated device 'h100-llama'"),
        (("--device", "simulated"), "--device must be"),
        (("--device", "sim", "--sim-launch-ms", "1"), "--sim-launch-ms must be left out"),
        (("--device", "sim:h100-llama-3.1-8b", "--sim-launch-ms", "-1"), "--sim-launch-ms must be at least 0"),
    ):
        with pytest.raises(UsageError, match=words):
            read(*arguments)
