"""Checkpoints read whole or in shards, and broken ones refused in one line that names the tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.model.config import ConfigError, ModelConfig
from runtime.model.weights import dummy_weights, load_weights

CONFIG = ModelConfig("Qwen3ForCausalLM", 11, 8, 12, 2, 2, 1, 4, 64, 1e-6, 1e4, qk_norm=True)
WEIGHTS = dummy_weights(CONFIG, torch.float32)


def test_one_file_and_shards(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    whole = load_weights(tmp_path, CONFIG, None)
    assert all(torch.equal(whole[name], tensor) for name, tensor in WEIGHTS.items()) and len(whole) == len(WEIGHTS)
    names = list(WEIGHTS)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: WEIGHTS[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    halves = load_weights(tmp_path, CONFIG, torch.bfloat16)
    assert set(halves) == set(WEIGHTS) and {tensor.dtype for tensor in halves.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lm_head.weight": None}, "1 tensors are missing, the first is lm_head.weight"),
        ({"model.norm.weight": torch.ones(9)}, r"model.norm.weight is \(9,\), expected \(8,\)"),
        ({"visual.weight": torch.ones(1)}, "visual.weight is none of the model's"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: dict[str, torch.Tensor | None], words: str) -> None:
    tensors = {name: tensor for name, tensor in (WEIGHTS | change).items() if tensor is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=words):
        load_weights(tmp_path, CONFIG, None)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_weights(tmp_path, CONFIG, None)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{garbage")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_weights(tmp_path, CONFIG, None)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"index\.json cannot be read"):
        load_weights(tmp_path, CONFIG, None)
