"""How long a step takes on a named accelerator with a named model: the numbers behind the timed simulated device.

A roofline, written down: a step takes max(reading the weights, computing) + reading the KV + a fixed kernel overhead.
Figures of accelerators are those of NVIDIA's data sheets (H100 and H200 SXM, dense rates without sparsity); figures of
models follow from their config.json. Efficiencies and overheads are assumptions of ours, meant to be replaced through a
TOML file by what was measured somewhere. Knows no clock and no torch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

GB, TB, TERA = 1e9, 1e12, 1e12


@dataclass(frozen=True)
class Accelerator:
    memory: float  # bytes, of all devices together
    bandwidth: float  # bytes per second, together
    rate: float  # dense FLOP per second at 16 bits, together
    bandwidth_efficiency: float = 0.80  # assumed: what a good decode kernel reaches of the data sheet
    rate_efficiency: float = 0.60  # assumed: the same of a good matrix product
    memory_share: float = 0.90  # of the memory for weights and KV; the rest is activations and graphs


@dataclass(frozen=True)
class Model:
    dense_bytes: float  # weights that every step reads
    flops_per_token: float  # 2 for each active weight
    kv_bytes_per_token: float  # of all layers
    overhead_us: float  # of kernels that neither read much nor compute much, and of all-reduces; assumed
    launch_ms: float  # the host's work for one step with CUDA graphs; assumed
    max_model_len: int
    expert_bytes: float = 0.0  # weights of all routed experts; a step reads those its tokens need
    num_experts: int = 1
    experts_per_token: int = 0
    rate_factor: float = 1.0  # of the matrix products' number format against 16 bits: 2 for FP8


ACCELERATORS = {
    "h100": Accelerator(80 * GB, 3.35 * TB, 989.4 * TERA),
    "h200": Accelerator(141 * GB, 4.8 * TB, 989.4 * TERA),
    "8xh200": Accelerator(8 * 141 * GB, 8 * 4.8 * TB, 8 * 989.4 * TERA),
}
MODELS = {
    # 8.03e9 weights in bfloat16; KV 2 × 32 layers × 8 heads × 128 × 2 bytes
    "llama-3.1-8b": Model(16.06 * GB, 16.06e9, 131072, 500, 1.0, 8192),
    # 0.60e9 weights (0.44e9 without the embedding, which the tied head reads once more); KV 2 × 28 × 8 × 128 × 2
    "qwen3-0.6b": Model(1.19 * GB, 1.19e9, 114688, 400, 1.0, 8192),
    # 236e9 weights in FP8, 223e9 of them in 160 routed experts (6 a token) of 59 layers, 21e9 active;
    # KV of latent attention: 60 layers × (512 + 64) × 2 bytes, spread over the devices (data-parallel attention)
    "deepseek-v2.5-fp8": Model(13 * GB, 42e9, 69120, 2500, 1.0, 8192, 223 * GB, 160, 6, 2.0),
}


@dataclass(frozen=True)
class Roofline:
    """`name` is as it was asked for; `step_ns` is what a step costs the device."""

    name: str
    accelerator: Accelerator
    model: Model

    def step_ns(self, num_tokens: int, kv_tokens: int) -> int:
        """Nanoseconds for a step of `num_tokens` that reads the KV of `kv_tokens` tokens."""
        chip, model = self.accelerator, self.model
        bandwidth = chip.bandwidth * chip.bandwidth_efficiency
        read = 1 - (1 - model.experts_per_token / model.num_experts) ** num_tokens  # share of the experts needed
        weights = (model.dense_bytes + model.expert_bytes * read) / bandwidth
        compute = num_tokens * model.flops_per_token / (chip.rate * chip.rate_efficiency * model.rate_factor)
        kv = kv_tokens * model.kv_bytes_per_token / bandwidth
        return int((max(weights, compute) + kv) * 1e9 + model.overhead_us * 1e3)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits beside the weights."""
        room = self.accelerator.memory * self.accelerator.memory_share - self.weight_bytes
        return int(room / self.model.kv_bytes_per_token)

    @property
    def weight_bytes(self) -> int:
        return int(self.model.dense_bytes + self.model.expert_bytes)


def names() -> list[str]:
    return [f"{chip}-{model}" for chip in ACCELERATORS for model in MODELS]


def roofline(name: str) -> Roofline:
    """By name (`h100-llama-3.1-8b`) or from a TOML file with the tables [accelerator] and [model].

    Raises `ValueError` that says what is wrong with it.
    """
    if name.endswith(".toml"):
        return _checked(_from_file(name))
    chip, _, model = name.partition("-")
    if chip not in ACCELERATORS or model not in MODELS:
        raise ValueError(f"no simulated device {name!r}; there are {', '.join(names())}, or a file ending in .toml")
    return _checked(Roofline(name, ACCELERATORS[chip], MODELS[model]))


def _from_file(name: str) -> Roofline:
    tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        tables = tomllib.loads(Path(name).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from None
    unknown = set(tables) - {"accelerator", "model"}
    if unknown:
        raise ValueError(f"{name}: unknown table [{min(unknown)}]; there are [accelerator] and [model]")
    return Roofline(
        Path(name).stem, _table(name, "accelerator", tables, Accelerator), _table(name, "model", tables, Model)
    )


def _table(name: str, key: str, tables: dict[str, Any], kind: type) -> Any:
    given = tables.get(key, {})
    wrong = [k for k, v in given.items() if isinstance(v, bool) or not isinstance(v, (int, float)) or not v >= 0]
    for unfit in (set(given) - {field.name for field in fields(kind)}, wrong):
        if unfit:
            raise ValueError(f"{name}: [{key}] {min(unfit)} is not one of its figures, or is no number of at least 0")
    try:
        return kind(**given)
    except TypeError as error:
        raise ValueError(f"{name}: [{key}]{str(error).partition('()')[2]}") from None


def _checked(found: Roofline) -> Roofline:
    chip, model = found.accelerator, found.model
    if not (chip.bandwidth * chip.bandwidth_efficiency and chip.rate * chip.rate_efficiency * model.rate_factor):
        raise ValueError(f"{found.name}: bandwidth, rate and their efficiencies must be above 0")
    if not (model.kv_bytes_per_token and 0 <= model.experts_per_token <= model.num_experts and model.max_model_len > 1):
        raise ValueError(f"{found.name}: kv_bytes_per_token, num_experts or max_model_len cannot be")
    if found.kv_tokens < 16:
        raise ValueError(f"{found.name}: {found.weight_bytes / 1e9:.0f} GB of weights leave no memory for KV")
    return found
