"""A model's shape, read from a Hugging Face `config.json`. Knows no torch and no transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.model.coding import Coding, CodingError, read_coding

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


class ConfigError(ValueError):
    """A model that cannot be served; the message is one clear line."""


@dataclass(frozen=True)
class ModelConfig:
    """The Llama family. `rope` holds `rope_type` and that type's parameters as the checkpoint names them."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    made_for: int  # max_position_embeddings
    rms_norm_eps: float
    rope_theta: float
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    eos_ids: tuple[int, ...] = ()
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default"})
    coding: Coding | None = None  # of its linear layers, where they are not numbers

    @property
    def max_model_len(self) -> int:
        """Tokens a request may have: what the model was made for, stretched by linear and dynamic scaling."""
        stretched = self.rope["rope_type"] in ("linear", "dynamic")
        return int(self.made_for * self.rope["factor"]) if stretched else self.made_for

    @property
    def shares_prefixes(self) -> bool:
        """Whether a prefix has the same keys in every request: not with dynamic RoPE, where its length counts."""
        return bool(self.rope["rope_type"] != "dynamic")


def read_config(folder: Path) -> ModelConfig:
    """Raises `ConfigError` for a missing or broken file, an unknown architecture or an unknown rope type."""
    raw = _json(folder / "config.json")
    for method, name in (("gptq", "quantize_config.json"), ("awq", "quant_config.json")):  # where older tools write it
        if "quantization_config" not in raw and (folder / name).exists():
            raw["quantization_config"] = {"quant_method": method} | _json(folder / name)
    return parse_config(raw)


def _json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file.parent}: {file.name} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file.parent}: {file.name} is no object")
    return raw


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture {architecture} is not supported; supported are {', '.join(ARCHITECTURES)}")
    if raw.get("mlp_bias") or (raw.get("attention_bias") and architecture != "Qwen2ForCausalLM"):
        raise ConfigError("mlp_bias and attention_bias are not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {raw['hidden_act']} is not supported; only silu is")
    if raw.get("use_sliding_window"):  # Qwen: windows in some layers only
        raise ConfigError("use_sliding_window is not supported")
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    if rope["rope_type"] not in ROPE_KINDS:
        raise ConfigError(f"rope type {rope['rope_type']} is not supported; supported are {', '.join(ROPE_KINDS)}")
    try:
        return _shape(raw, architecture, rope)
    except KeyError as error:
        raise ConfigError(f"config.json lacks {error}") from None


def _shape(raw: dict[str, Any], architecture: str, rope: dict[str, Any]) -> ModelConfig:
    heads = raw["num_attention_heads"]
    windowed = architecture == "MistralForCausalLM"
    eos = raw.get("eos_token_id")
    return ModelConfig(
        architecture,
        raw["vocab_size"],
        raw["hidden_size"],
        raw["intermediate_size"],
        raw["num_hidden_layers"],
        heads,
        raw.get("num_key_value_heads") or heads,
        raw.get("head_dim") or raw["hidden_size"] // heads,
        raw["max_position_embeddings"],
        raw["rms_norm_eps"],
        float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        bool(raw.get("tie_word_embeddings", False)),
        architecture == "Qwen2ForCausalLM",
        architecture == "Qwen3ForCausalLM",
        raw.get("sliding_window") if windowed else None,
        tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        rope,
        _coding(raw),
    )


def _coding(raw: dict[str, Any]) -> Coding | None:
    """Older files of compressed-tensors call it compression_config."""
    coded = raw.get("quantization_config") or raw.get("compression_config")
    try:
        return read_coding(coded) if coded else None
    except CodingError as error:
        raise ConfigError(str(error)) from None
