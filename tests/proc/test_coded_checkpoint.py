"""A quantized checkpoint through real processes, on both devices, against transformers on what its codes mean."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ipc.sampling_params import SamplingParams
from proc.llm import LLM
from proc.settings import Settings, UsageError
from proc.supervisor import Supervisor
from runtime.kernels.library import kernels
from tests.coded import as_coded
from tests.coded_checkpoints import FORMATS, write
from tests.proc.test_tiny_model import smallest_gap

ROOT = Path(__file__).parent.parent.parent
Oracle = tuple[Path, transformers.LlamaForCausalLM]
NEAR = 0.05  # scales in float16, and inputs between two codes
BF16_NEAR = 0.3  # of logits that reach 20, after two layers in bfloat16


def coded(oracle: Oracle, folder: Path, name: str) -> Oracle:
    """The tiny model in a format, and transformers' on its meaning."""
    source, model = oracle
    meant = copy.deepcopy(model)
    raw = json.loads((source / "config.json").read_text())
    meaning = write(folder, raw, {key: one for key, one in model.state_dict().items()}, FORMATS[name])
    meant.load_state_dict(meaning)
    shutil.copy(source / "tokenizer.json", folder)
    return folder, meant


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gptq-channel", {"device": "cpu", "tensor_parallel_size": 2}),
        ("fp8-blocks", {"device": "cpu"}),
        ("gptq-actorder", {"device": "cpu"}),
        ("compressed-fp8", {"device": "cuda"}),
        ("packed-channel", {"device": "cuda", "procs": "worker=2"}),
        ("awq", {"device": "cuda"}),
    ],
    ids=str,
)
def test_where_codes_become_numbers_tokens_are_the_greedy_ones(
    oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, layout: dict[str, Any]
) -> None:
    """In float32, for which only the CPU's kernels have codes."""
    monkeypatch.setenv("SIDESTEP_KERNELS", "torch")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests/proc/stand_in:{ROOT}")
    assert smallest_gap(coded(oracle, tmp_path, name), {"dtype": "float32"} | layout) > 3e-5


@pytest.mark.skipif(kernels() is None, reason="the C library is not built here")
@pytest.mark.parametrize(
    "name", ["gptq", "awq", "packed-zeros", "packed-8", "packed-channel", "compressed-int8", "fp8"]
)
def test_the_cpu_multiplies_by_the_checkpoints_codes(oracle: Oracle, tmp_path: Path, name: str) -> None:
    folder, meant = coded(oracle, tmp_path, name)
    for part in meant.model.modules():
        if isinstance(part, torch.nn.Linear) and name != "fp8":  # whose codes the kernels have
            part.register_forward_pre_hook(lambda _, inputs: (as_coded(inputs[0]),))
    with LLM(str(folder), dtype="float32", num_blocks=200, block_size=4, max_model_len=96) as llm:
        output = llm.generate("some words", SamplingParams(temperature=0.0, max_tokens=20, logprobs=0), use_tqdm=False)[
            0
        ]
    prompt, ids, told = output.prompt_token_ids, output.outputs[0].token_ids, output.outputs[0].logprobs
    assert told is not None
    with torch.inference_mode():
        expected = meant(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    said = expected.gather(1, torch.tensor(ids)[:, None])[:, 0]
    got = torch.tensor([entry[token].logprob for token, entry in zip(ids, told, strict=True)])
    assert (got - said).abs().max() < NEAR and (expected.amax(-1) - said).max() < NEAR


@pytest.mark.parametrize(("name", "words"), [("compressed-fp8", "fp8 by torch"), ("compressed-int8", "int8 by torch")])
def test_a_gpu_multiplies_by_codes_in_bfloat16(
    oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    """Inputs are coded too, so that tokens are only nearly the best."""
    folder, meant = coded(oracle, tmp_path, name)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests/proc/stand_in:{ROOT}")
    settings = Settings(str(folder), device="cuda", num_blocks=200, block_size=4, max_model_len=96)
    with Supervisor(settings) as server:
        info = server.worker_info()
        assert "bfloat16, attention gathers pages in torch" in info["device"] and words in info["device"]
    with LLM(str(folder), device="cuda", num_blocks=200, block_size=4, max_model_len=96) as llm:
        output = llm.generate("some words", SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)[0]
    prompt, ids = output.prompt_token_ids, output.outputs[0].token_ids
    with torch.inference_mode():
        logits = meant(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    lost = logits.amax(-1) - logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert lost.max() < BF16_NEAR


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        (
            "gptq",
            {"quantization": "int8"},
            "the checkpoint is quantized already, by gptq with 4 bits",
        ),
        ("awq", {"load_format": "dummy"}, "--load-format dummy makes no weights quantized by awq"),
        ("fp8-blocks", {"tensor_parallel_size": 2}, "--tensor-parallel-size 2.*groups of o_proj"),
    ],
)
def test_what_excludes_a_quantized_checkpoint_is_named(
    oracle: Oracle, tmp_path: Path, name: str, settings: dict[str, Any], words: str
) -> None:
    folder, _ = coded(oracle, tmp_path, name)
    with pytest.raises(UsageError, match=words):
        Supervisor(Settings(str(folder), device="cpu", **settings)).start()
