"""GGUF files written on the spot, converted, and equal to what went in; broken and foreign ones refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from runtime.model.config import ConfigError, read_config
from runtime.model.gguf import convert
from runtime.model.quantized import Quantized
from runtime.model.weights import load_codes, load_weights, save_codes
from runtime.tokenizer import Tokenizer

HIDDEN, INNER, HEADS, KV = 64, 64, 4, 2
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def tensors(draw: np.random.Generator) -> dict[str, np.ndarray]:
    def matrix(rows: int) -> np.ndarray:
        return draw.normal(0, 1, (rows, HIDDEN)).astype(np.float32)

    blk = {
        "attn_q": matrix(HIDDEN),
        "attn_k": matrix(HIDDEN // HEADS * KV),
        "attn_v": matrix(HIDDEN // HEADS * KV),
        "attn_output": matrix(HIDDEN),
        "ffn_gate": matrix(INNER),
        "ffn_up": matrix(INNER),
        "ffn_down": matrix(HIDDEN),
    }
    norms = {name: np.ones(HIDDEN, np.float32) for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")}
    return {"token_embd": matrix(len(ALPHABET) + 3)} | {f"blk.0.{name}": value for name, value in blk.items()} | norms


def write(file: Path, kind: str = "F32", arch: str = "llama", **change: Any) -> dict[str, np.ndarray]:
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(change.get("model", "gpt2"))
    writer.add_tokenizer_pre(change.get("pre", "smollm"))
    writer.add_token_list([*ALPHABET, "11", "<s>", "</s>"])
    writer.add_token_types([1] * (len(ALPHABET) + 1) + [3, 3])
    writer.add_token_merges(["1 1"])
    writer.add_eos_token_id(len(ALPHABET) + 2)
    writer.add_chat_template("{{ messages[0].content }}")
    values = tensors(np.random.default_rng(1))
    quantized = gguf.GGMLQuantizationType[kind]
    for name, value in values.items():
        plain = value.ndim == 1
        data = value if plain else gguf.quantize(value, quantized)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=None if plain else quantized)
    for name in change.get("extra", ()):
        writer.add_tensor(name, np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.mark.parametrize(
    ("kind", "error"), [("F32", 0.01), ("F16", 0.01), ("BF16", 0.01), ("Q8_0", 0.03), ("Q4_1", 0.3)]
)
def test_weights_survive(tmp_path: Path, kind: str, error: float) -> None:
    values = write(tmp_path / "m.gguf", kind)
    convert(tmp_path / "m.gguf", tmp_path / "hf")
    config = read_config(tmp_path / "hf")
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.tied) == (HEADS, KV, 16, True)
    weights = load_weights(tmp_path / "hf", config, torch.float32)
    for ours, theirs in (("self_attn.v_proj", "attn_v"), ("mlp.down_proj", "ffn_down")):
        got = weights[f"model.layers.0.{ours}.weight"].numpy()
        assert np.abs(got - values[f"blk.0.{theirs}"]).max() < error * 4


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_codes_are_the_files_own(tmp_path: Path, kind: str) -> None:
    """What is kept beside the weights is what the file says, rotations put back."""
    write(tmp_path / "m.gguf", kind)
    convert(tmp_path / "m.gguf", tmp_path / "hf")
    config = read_config(tmp_path / "hf")
    coded, weights = load_codes(tmp_path / "hf", config), load_weights(tmp_path / "hf", config, torch.float32)
    assert {name for name in weights if "_proj." in name} | {"lm_head.weight"} == set(coded)
    for name, one in coded.items():
        weight = weights.get(name, weights["model.embed_tokens.weight"])
        assert (one.dequantized() - weight).abs().max() <= weight.abs().max() * 2**-8  # bfloat16's rounding
    assert not load_weights(tmp_path / "hf", config, None, known=coded.keys()).keys() & coded.keys()


def test_an_earlier_versions_folder_is_replaced_and_anothers_kept(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "Q4_1")
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    convert(tmp_path / "m.gguf", folder)
    assert load_codes(folder, read_config(folder)) and (folder / "config.json").read_text() != "{}"
    (folder / "config.json").write_text("first")
    convert(tmp_path / "m.gguf", folder)
    assert (folder / "config.json").read_text() == "first"


def test_folders_without_codes_say_so(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "hf")
    config = read_config(tmp_path / "hf")
    with pytest.raises(ConfigError, match="holds no codes"):
        load_codes(tmp_path, config)
    with pytest.raises(ConfigError, match=r"nothing in .* was quantized"):
        load_codes(tmp_path / "hf", config)


def test_codes_of_another_shape_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "Q8_0")
    convert(tmp_path / "m.gguf", tmp_path / "hf")
    config = read_config(tmp_path / "hf")
    good = load_codes(tmp_path / "hf", config)["lm_head.weight"]
    for name, one in (
        ("lm_head.weight", Quantized(good.codes[:, :32].contiguous(), good.scale)),
        ("lm_head.weight", Quantized(good.codes, good.scale.float())),
        ("model.norm.weight", good),
        ("another", good),
    ):
        save_codes(tmp_path / "hf", {name: one})
        with pytest.raises(ConfigError, match=name):
            load_codes(tmp_path / "hf", config)


def test_rotations_are_put_back(tmp_path: Path) -> None:
    """llama.cpp stores row pairs (2i, 2i+1) of a head where the checkpoint has (i, i + half)."""
    values = write(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "hf")
    weights = load_weights(tmp_path / "hf", read_config(tmp_path / "hf"), torch.float32)
    got = weights["model.layers.0.self_attn.q_proj.weight"].numpy()[:16]
    stored = values["blk.0.attn_q"][:16]
    assert np.abs(got - np.concatenate((stored[0::2], stored[1::2]))).max() < 0.02


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "hf")
    tokenizer = Tokenizer(tmp_path / "hf")
    assert tokenizer.eos_ids == (len(ALPHABET) + 2,)
    assert len(tokenizer.encode("11")) == 2  # smollm: digits one by one, though the vocabulary has a "11"
    assert tokenizer.decode(tokenizer.encode("<s>héllo 🙂")) == "héllo 🙂"
    assert tokenizer.render([{"role": "user", "content": "hi"}]) == "hi"


def test_other_pre_tokenizers_merge_digits(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", pre="llama-bpe")
    convert(tmp_path / "m.gguf", tmp_path / "hf")
    assert len(Tokenizer(tmp_path / "hf").encode("11")) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arch": "mamba"}, "architecture mamba is not supported"),
        ({"pre": "strange"}, "pre-tokenizer strange is not supported"),
        ({"model": "bert"}, "tokenizer bert is not supported"),
        ({"extra": ["blk.0.ssm.weight"]}, "blk.0.ssm.weight is none of"),
        ({"kind": "Q5_0"}, "is Q5_0; supported are F32"),
    ],
)
def test_what_is_not_supported_is_named_and_leaves_nothing(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    write(tmp_path / "m.gguf", **change)
    with pytest.raises(ConfigError, match=words):
        convert(tmp_path / "m.gguf", tmp_path / "out" / "hf")
    assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True


def test_broken_files(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF nonsense that is long enough to be a header")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        convert(tmp_path / "m.gguf", tmp_path / "hf")
    write(tmp_path / "n.gguf")
    (tmp_path / "n.gguf").write_bytes((tmp_path / "n.gguf").read_bytes()[:-5000])
    with pytest.raises(ConfigError, match="not a GGUF file"):
        convert(tmp_path / "n.gguf", tmp_path / "hf")
