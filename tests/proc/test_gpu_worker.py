"""`--device cuda` through real processes, where the GPU is the CPU: the table's handles, its reader, the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from proc.settings import Settings, UsageError
from proc.supervisor import Supervisor
from tests.proc.test_tiny_model import smallest_gap

ROOT = Path(__file__).parent.parent.parent
Oracle = tuple[Path, transformers.LlamaForCausalLM]


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests/proc/stand_in:{ROOT}")


@pytest.mark.usefixtures("no_gpu_needed")
@pytest.mark.parametrize(
    "layout",
    [
        {"procs": "1"},
        {"procs": "3"},
        {"procs": "3", "token_table": "pinned", "overlap_depth": 2},
        {"procs": "2", "overlap_depth": 0, "num_blocks": None, "block_size": 16},
        {"procs": "scheduler=2", "num_blocks": 25, "max_num_batched_tokens": 16},
        {"procs": "worker=2"},
        {"tensor_parallel_size": 2, "token_table": "pinned", "attention_backend": "torch"},
    ],
    ids=str,
)
def test_the_tokens_are_the_greedy_ones(oracle: Oracle, layout: dict[str, Any]) -> None:
    def described(server: Supervisor) -> None:
        device = server.worker_info()["device"]
        assert "attention gathers pages in torch" in device and "float32" in device

    assert smallest_gap(oracle, {"device": "cuda"} | layout, described) > 1e-3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "cuda"}, "--device cuda: torch is built for .* --device cpu"),
        ({"device": "cuda", "quantization": "int8"}, "--quantization int8"),
        ({"device": "cpu", "token_table": "pinned"}, "--token-table pinned"),
        ({"device": "sim", "attention_backend": "torch"}, "--attention-backend torch"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_its_option(oracle: Oracle, settings: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Supervisor(Settings(model=str(oracle[0]), **settings)).start()  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_gpu_needed")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attention_backend": "flashinfer"}, "--attention-backend flashinfer: "),
        (
            {"max_num_batched_tokens": 4096, "gpu_memory_utilization": 0.0001},
            "left for KV(.|\n)*--gpu-memory-utilization",
        ),
    ],
    ids=str,
)
def test_what_a_gpu_lacks_is_refused_with_the_remedy(oracle: Oracle, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Supervisor(Settings(model=str(oracle[0]), device="cuda", **settings)).start()
