"""Checkpoints as other tools write them: each weight's tensors and what they mean, written code by code.

Rounded to the nearest; the layouts are those of AutoFP8 and DeepSeek (fp8), compressed-tensors, AutoAWQ and AutoGPTQ.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from runtime.model.config import ModelConfig

Tensor = torch.Tensor
Stored = tuple[dict[str, Tensor], Tensor]  # by suffix; float32[n, k]
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Format:
    """`store` makes a layer's tensors of its weight."""

    config: dict[str, Any]
    store: Callable[[Tensor], Stored]


def _blocks(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """The largest of each block, [ceil(n / rows), ceil(k / columns)], and that as [n, k]."""
    n, k = weight.shape
    most = torch.stack(
        [
            torch.stack([weight[r : r + rows, c : c + columns].abs().max() for c in range(0, k, columns)])
            for r in range(0, n, rows)
        ]
    )
    return most, most[torch.arange(n) // rows][:, torch.arange(k) // columns]


def _fp8(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales of the blocks, and what they mean."""
    most, each = _blocks(weight, rows, columns)
    codes = (weight / (each / 448)).to(FP8)
    return codes, most / 448, codes.float() * (each / 448)


def fp8_tensor(static: bool = False) -> Format:
    def store(weight: Tensor) -> Stored:
        codes, scale, meaning = _fp8(weight, *weight.shape)
        tensors = {"weight": codes, "weight_scale": scale.reshape(())}
        return tensors | ({"input_scale": torch.tensor(0.02)} if static else {}), meaning

    return Format({"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}, store)


def fp8_blocks(size: int = 128) -> Format:
    def store(weight: Tensor) -> Stored:
        codes, scale, meaning = _fp8(weight, size, size)
        return {"weight": codes, "weight_scale_inv": scale}, meaning

    return Format({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [size, size]}, store)


def _compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def compressed_fp8(dynamic: bool = True) -> Format:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    by_token = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    inputs = by_token if dynamic else by_token | {"strategy": "tensor", "dynamic": False}

    def store(weight: Tensor) -> Stored:
        codes, scale, meaning = _fp8(weight, 1, weight.shape[1])
        tensors = {"weight": codes, "weight_scale": scale}
        return tensors | ({} if dynamic else {"input_scale": torch.tensor([0.02])}), meaning

    return Format(_compressed("float-quantized", weights, inputs), store)


def compressed_int8() -> Format:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}

    def store(weight: Tensor) -> Stored:
        most, each = _blocks(weight, 1, weight.shape[1])
        codes = (weight / (each / 127)).round().to(torch.int8)
        codes[0, 0] = -128  # which tools do write
        return {"weight": codes, "weight_scale": (most / 127)}, codes.float() * (each / 127)

    return Format(_compressed("int-quantized", weights, inputs), store)


@dataclass(frozen=True)
class Grouped:
    codes: NDArray[np.int64]  # [n, k]
    zeros: NDArray[np.int64]  # [n, groups]
    scales: Tensor  # float16[n, groups]
    groups: NDArray[np.int64]  # [k]: of each input

    @property
    def meaning(self) -> Tensor:
        codes = torch.from_numpy(self.codes - self.zeros[:, self.groups])
        return codes.float() * self.scales.float()[:, self.groups]


def _grouped(weight: Tensor, bits: int, group: int, symmetric: bool, shuffled: bool = False) -> Grouped:
    n, k = weight.shape
    size, most = group if group > 0 else k, (1 << bits) - 1
    groups = np.arange(k) // size
    if shuffled:
        groups = np.random.default_rng(3).permutation(groups)
    scales, zeros = torch.zeros(n, groups.max() + 1), np.zeros((n, groups.max() + 1), np.int64)
    for at in range(groups.max() + 1):
        part = weight[:, groups == at]
        low, high = part.amin(1), part.amax(1)
        if symmetric:
            scales[:, at], zeros[:, at] = part.abs().amax(1) / (most // 2), (most + 1) // 2
        else:
            scales[:, at] = (high - low) / most
            zeros[:, at] = (-low / scales[:, at]).round().clamp(1, most).numpy()
    held = scales.half()
    codes = (weight / held.float()[:, groups]).round().numpy().astype(np.int64) + zeros[:, groups]
    return Grouped(codes.clip(0, most), zeros, held, groups)


def _words(codes: NDArray[np.int64], bits: int, order: list[int] | None = None) -> Tensor:
    """[..., count] of codes as int32[..., count * bits / 32]; `order`: which of a word's codes stands where."""
    per = 32 // bits
    whole = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per)])
    words = np.zeros((*whole.shape[:-1], whole.shape[-1] // per), np.int64)
    for at in range(per):
        words |= whole[..., at::per] << bits * (at if order is None else order.index(at))
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def gptq(bits: int = 4, group: int = 32, shuffled: bool = False, v2: bool = False, symmetric: bool = False) -> Format:
    def store(weight: Tensor) -> Stored:
        made = _grouped(weight, bits, group, symmetric, shuffled)
        tensors = {
            "qweight": _words(made.codes, bits).t().contiguous(),
            "qzeros": _words(made.zeros.T - (0 if v2 else 1), bits),
            "scales": made.scales.t().contiguous(),
            "g_idx": torch.from_numpy(made.groups).int(),  # which some tools leave out
            "bias": torch.zeros(len(weight)).half(),
        }
        return tensors, made.meaning

    layout = "gptq_v2" if v2 else "gptq"
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": shuffled, "sym": symmetric}
    return Format(config | {"checkpoint_format": layout}, store)


def awq(group: int = 32) -> Format:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def store(weight: Tensor) -> Stored:
        made = _grouped(weight, 4, group, False)
        tensors = {
            "qweight": _words(made.codes.T, 4, order),
            "qzeros": _words(made.zeros.T, 4, order),
            "scales": made.scales.t().contiguous(),
        }
        return tensors, made.meaning

    return Format({"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}, store)


def packed(bits: int = 4, group: int = 32, symmetric: bool = True, actorder: str | None = None) -> Format:
    weights = {
        "num_bits": bits,
        "type": "int",
        "strategy": "group" if group > 0 else "channel",
        "group_size": group if group > 0 else None,
        "symmetric": symmetric,
        "actorder": actorder,
    }

    def store(weight: Tensor) -> Stored:
        made = _grouped(weight, bits, group, symmetric, actorder == "group")
        tensors = {
            "weight_packed": _words(made.codes, bits),
            "weight_scale": made.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = _words(made.zeros.T, bits).t().contiguous()
        if actorder == "group":
            tensors["weight_g_idx"] = torch.from_numpy(made.groups).int()
        return tensors, made.meaning

    return Format(_compressed("pack-quantized", weights, None), store)


FORMATS: dict[str, Format] = {
    "fp8": fp8_tensor(),
    "fp8-static": fp8_tensor(static=True),
    "fp8-blocks": fp8_blocks(),
    "compressed-fp8": compressed_fp8(),
    "compressed-fp8-static": compressed_fp8(dynamic=False),
    "compressed-int8": compressed_int8(),
    "packed": packed(),
    "packed-zeros": packed(symmetric=False),
    "packed-channel": packed(group=-1),
    "packed-8": packed(bits=8),
    "packed-actorder": packed(actorder="group"),
    "awq": awq(),
    "awq-64": awq(64),
    "gptq": gptq(),
    "gptq-actorder": gptq(shuffled=True),
    "gptq-v2": gptq(v2=True),
    "gptq-8": gptq(bits=8, symmetric=True),
    "gptq-channel": gptq(group=-1),
}


def write(folder: Path, raw: dict[str, Any], weights: dict[str, Tensor], made: Format) -> dict[str, Tensor]:
    """A model folder of `weights` with its projections coded; what all tensors mean. `raw`: of config.json."""
    tensors, meaning = {}, {}
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            stored, meaning[name] = made.store(weight.float())
            known = {"bias"} if name.replace("weight", "bias") in weights else set()
            tensors |= {name.removesuffix("weight") + part: one for part, one in stored.items() if part not in known}
        else:
            tensors[name] = meaning[name] = weight
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": made.config}))
    return meaning


def raw_of(config: ModelConfig) -> dict[str, Any]:
    """What config.json says of such a model."""
    return {
        "architectures": [config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.made_for,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
    }
