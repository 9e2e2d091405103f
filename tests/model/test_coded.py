"""Quantized checkpoints: what each format's tensors mean, whole and by rank, and what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.kernels.library import Kernels, every
from runtime.model.coded import StoredLinear, as_numbers
from runtime.model.config import ConfigError, ModelConfig, parse_config, read_config
from runtime.model.packed import PackedLlama
from runtime.model.shapes import expected_shapes
from runtime.model.sharding import Rank, part_of
from runtime.model.weights import dummy_weights, load_weights
from tests.coded_checkpoints import FORMATS, fp8_blocks, gptq, raw_of, write

CONFIG = ModelConfig("Qwen2ForCausalLM", 96, 256, 256, 2, 4, 4, 64, 512, 1e-5, 1e4, qkv_bias=True)
RAW = raw_of(CONFIG)


def weights() -> dict[str, torch.Tensor]:
    return dummy_weights(CONFIG, torch.float16)


@pytest.mark.parametrize("name", FORMATS)
def test_codes_mean_what_their_format_says(tmp_path: Path, name: str) -> None:
    meaning = write(tmp_path, RAW, weights(), FORMATS[name])
    loaded = load_weights(tmp_path, read_config(tmp_path), torch.float32)
    coded = [one for one in loaded.values() if isinstance(one, StoredLinear)]
    assert len(coded) == 14
    as_numbers(loaded, torch.float32)
    for key, expected in meaning.items():
        torch.testing.assert_close(loaded[key], expected.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["gptq-actorder", "packed-actorder"])
def test_ranks_want_inputs_in_order(tmp_path: Path, name: str) -> None:
    write(tmp_path, RAW, weights(), FORMATS[name])
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 2: .* do not stand in order"):
        load_weights(tmp_path, read_config(tmp_path), None, rank=Rank(0, 2))


@pytest.mark.parametrize("name", [name for name in FORMATS if "actorder" not in name])
def test_a_rank_has_its_part_of_the_codes(tmp_path: Path, name: str) -> None:
    write(tmp_path, RAW, weights(), FORMATS[name])
    config = read_config(tmp_path)
    whole = load_weights(tmp_path, config, torch.float32)
    as_numbers(whole, torch.float32)
    for rank in (Rank(0, 2), Rank(1, 2)):
        held = load_weights(tmp_path, config, torch.float32, rank=rank)
        as_numbers(held, torch.float32)
        for key, shape in expected_shapes(config).items():
            assert torch.equal(held[key], whole[key][part_of(key, config, shape, rank).index]), key


def test_a_spared_layer_stays_numbers(tmp_path: Path) -> None:
    write(tmp_path, RAW, weights(), FORMATS["compressed-fp8"])
    spared = "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[spared.replace("weight", "weight_scale")]
    save_file(tensors | {spared: weights()[spared]}, tmp_path / "model.safetensors")
    loaded = load_weights(tmp_path, read_config(tmp_path), torch.bfloat16)
    assert (
        isinstance(loaded[spared], torch.Tensor) and sum(isinstance(one, StoredLinear) for one in loaded.values()) == 13
    )


@pytest.mark.parametrize("kernels", [*every()][:1], ids=lambda one: one.name)
def test_on_the_cpu_nothing_is_coded_beside_what_was_spared(tmp_path: Path, kernels: Kernels) -> None:
    write(tmp_path, RAW, weights(), FORMATS["packed"])
    loaded = load_weights(tmp_path, read_config(tmp_path), torch.bfloat16)
    loaded["model.layers.0.self_attn.k_proj.weight"] = weights()["model.layers.0.self_attn.k_proj.weight"].bfloat16()
    model = PackedLlama(CONFIG, loaded, kernels)
    assert model.held == {"compressed-tensors with 4 bits as int4": 11, "compressed-tensors with 4 bits as bfloat16": 2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qweight": None}, "o_proj.qweight is missing"),
        ({"weight": torch.ones(256, 256)}, "o_proj.weight is numbers, but .* is there too"),
        ({"scales": torch.ones(8, 255).half()}, r"o_proj.scales is \(8, 255\), expected \(8, 256\)"),
        ({"qweight": torch.ones(32, 256)}, "o_proj.qweight is F32, expected I32"),
        ({"bias": torch.ones(256)}, "o_proj.bias is none of the model's"),
        ({"lookup": torch.ones(2)}, "o_proj.lookup is none of the model's"),
    ],
)
def test_a_layer_that_does_not_fit_is_named(tmp_path: Path, change: dict[str, torch.Tensor | None], words: str) -> None:
    write(tmp_path, RAW, weights(), gptq())
    layer = "model.layers.1.self_attn.o_proj."
    changed = load_file(tmp_path / "model.safetensors") | {layer + part: one for part, one in change.items()}
    save_file({key: one for key, one in changed.items() if one is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=words):
        load_weights(tmp_path, read_config(tmp_path), None)


def test_groups_of_several_sizes_are_refused(tmp_path: Path) -> None:
    write(tmp_path, RAW, weights(), gptq(shuffled=True))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.g_idx"][0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_weights(tmp_path, read_config(tmp_path), None)
    with pytest.raises(ConfigError, match="g_idx"):
        as_numbers(loaded, torch.float32)


def test_the_last_block_may_be_cut_off(tmp_path: Path) -> None:
    config = ModelConfig("LlamaForCausalLM", 96, 192, 320, 1, 3, 1, 64, 512, 1e-5, 1e4)
    meaning = write(tmp_path, raw_of(config), dummy_weights(config, torch.float32), fp8_blocks())
    loaded = load_weights(tmp_path, read_config(tmp_path), None)
    as_numbers(loaded, torch.float32)
    assert all(torch.equal(loaded[name], one) for name, one in meaning.items())


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def compressed(change: dict[str, Any], weights: dict[str, Any] = WEIGHTS, **group: Any) -> dict[str, Any]:
    held = {"targets": ["Linear"], "weights": weights, "input_activations": None} | group
    known = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": held}}
    return known | change


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quantized by bitsandbytes is not supported; what is: fp8, compressed-tensors",
        ),
        ({"bits": 4}, "something unnamed"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme none"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt e5m2"),
        ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]}, "static"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "awq: bits 8 is not supported; supported is 4"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version gemv"),
        ({"quant_method": "awq", "bits": 4}, "group_size None"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4}, "gptq cannot be read: KeyError"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"}, "marlin"),
        (compressed({"format": "nvfp4-pack-quantized"}), "format nvfp4-pack-quantized"),
        ("gptq", "something unnamed"),
        ({"quant_method": ["gptq"]}, "is not supported; what is: fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size .* is not two sizes"),
        ({"quant_method": "fp8", "weight_block_size": ["128", "128"]}, "weight_block_size 128 is not a size"),
        ({"quant_method": "gptq", "bits": 4.0, "group_size": 32}, "bits 4.0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 10**13}, "group_size 10000000000000"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"+:up": {"bits": 8}}}, "dynamic"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "format": "gemv"}, "version gemv"),
        (compressed({}, WEIGHTS | {"group_size": "128"}), "group_size 128 is not a size"),
        (
            compressed({"format": "float-quantized"}, WEIGHTS | {"type": "float", "num_bits": 8, "strategy": "block"}),
            "block_structure",
        ),
        (compressed({"config_groups": {}}), "number of config_groups 0"),
        (compressed({"sparsity_config": {"format": "sparse-24-bitmask"}}), "sparsity_config"),
        (compressed({}, WEIGHTS | {"type": "float"}), "type of weights float"),
        (compressed({}, WEIGHTS | {"strategy": "block"}), "strategy of weights block"),
        (compressed({}, targets=["re:.*up_proj"]), "targets"),
        (compressed({}, input_activations={"num_bits": 8}), "input_activations of packed weights"),
    ],
)
def test_codings_that_cannot_be_served_are_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(RAW | {"quantization_config": config})


def test_the_file_says_whether_inputs_are_in_order(tmp_path: Path) -> None:
    """Whatever `desc_act` says, or was left out."""
    for name, shuffled in (("gptq", False), ("gptq-actorder", True)):
        write(tmp_path, RAW, weights(), FORMATS[name])
        raw = json.loads((tmp_path / "config.json").read_text())
        raw["quantization_config"]["desc_act"] = not shuffled
        (tmp_path / "config.json").write_text(json.dumps(raw))
        one = load_weights(tmp_path, read_config(tmp_path), None)["model.layers.0.mlp.up_proj.weight"]
        assert isinstance(one, StoredLinear) and (one.unpacked().order is not None) == shuffled


@pytest.mark.parametrize(("name", "file"), [("gptq", "quantize_config.json"), ("awq", "quant_config.json")])
def test_a_coding_in_a_file_of_its_own(tmp_path: Path, name: str, file: str) -> None:
    write(tmp_path, RAW, weights(), FORMATS[name])
    coding = {key: one for key, one in FORMATS[name].config.items() if key != "quant_method"}
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    (tmp_path / file).write_text(json.dumps(coding))
    found = read_config(tmp_path).coding
    assert found is not None and found.name == f"{name} with 4 bits"


def test_what_else_real_checkpoints_carry(tmp_path: Path) -> None:
    """Scales of keys and values, one scale in two dimensions, and the newest name of a plain layout."""
    write(tmp_path, RAW, weights(), FORMATS["fp8"])
    tensors = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.0.self_attn."
    scale = tensors[layer + "q_proj.weight_scale"].reshape(1, 1)
    further = {
        layer + "q_proj.weight_scale": scale,
        layer + "k_proj.output_scale": scale.clone(),
        layer + "attn.k_scale": scale.clone(),
    }
    save_file(tensors | further, tmp_path / "model.safetensors")
    assert len(load_weights(tmp_path, read_config(tmp_path), None)) == len(expected_shapes(CONFIG))
    raw = FORMATS["compressed-fp8"].config | {"format": "naive-quantized", "kv_cache_scheme": {"num_bits": 8}}
    coding = parse_config(RAW | {"quantization_config": raw}).coding
    assert coding is not None and coding.name == "compressed-tensors with fp8"


def test_the_older_name_of_compressed_tensors(tmp_path: Path) -> None:
    write(tmp_path, RAW, weights(), FORMATS["packed"])
    raw = json.loads((tmp_path / "config.json").read_text())
    coding = parse_config(RAW | {"compression_config": raw["quantization_config"]}).coding
    assert coding is not None and coding.name == "compressed-tensors with 4 bits"
