"""Weights of the Llama family: read from safetensors (one file or shards), or made up for `--load-format dummy`.

Every tensor the model uses must be there with its shape, as numbers, in the checkpoint's coding or as a GGUF file's
codes; what is there beyond them is refused by name, since it would mean another model than the one we compute. Of a
tensor that ranks share, a rank reads its own part alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.functional import pad

from runtime.model.coded import StoredLinear
from runtime.model.coded_layers import CodedLayers, Stored
from runtime.model.config import ConfigError, ModelConfig
from runtime.model.quantized import Quantized
from runtime.model.shapes import expected_shapes
from runtime.model.sharding import ALONE, Part, Rank, part_of

Tensor = torch.Tensor
Progress = Callable[[list[Path]], Iterable[Path]]
CODES = "quantized.safetensors"
EMPTY = torch.empty(0)
KV_SCALES = ("k_scale", "v_scale", "q_scale", "prob_scale", "output_scale")
IGNORED = "rotary_emb.inv_freq"  # older checkpoints carry the derived frequencies


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype | None,
    progress: Progress = list,
    known: Collection[str] = (),
    rank: Rank = ALONE,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor | StoredLinear]:
    """A rank's part of all tensors of the checkpoint but `known` ones, as `dtype` (None: as stored), on `device`.

    Each goes there by itself, so that the host holds one at a time. Coded layers stay as they are.
    Raises `ConfigError` with one clear line. `progress` wraps the list of files, as tqdm does.
    """
    shapes = expected_shapes(config)
    weights: dict[str, Tensor | StoredLinear] = {}
    coded = CodedLayers(config, shapes, rank, device)
    for file in progress(_files(folder)):
        for name, stored in _stored(file):
            if IGNORED in name or name in known or (config.tied and name.startswith("lm_head.")):
                continue
            if coded.take(name, stored) or (name not in shapes and _says_nothing(name, stored, config)):
                continue
            if name not in shapes:
                raise ConfigError(f"{file.name}: tensor {name} is none of the model's")
            shape = tuple(stored.get_shape())
            if shape != shapes[name]:
                raise ConfigError(f"{file.name}: tensor {name} is {shape}, expected {shapes[name]}")
            tensor = _cut(stored, part_of(name, config, shape, rank))
            weights[name] = tensor.to(device, dtype)
    weights |= coded.layers()
    missing = [name for name in shapes if name not in weights and name not in known]
    if missing:
        raise ConfigError(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
    return weights


def _says_nothing(name: str, stored: Stored, config: ModelConfig) -> bool:
    """A bias of zeros, which AutoGPTQ gives to each layer that it codes, or a scale of keys and values in fp8."""
    kind = name.rpartition(".")[2]
    return config.coding is not None and (kind in KV_SCALES or (kind == "bias" and not stored[:].any()))


def load_codes(folder: Path, config: ModelConfig) -> dict[str, Quantized]:
    """What a GGUF file's blocks were, kept beside the folder's weights when it was converted. Raises `ConfigError`."""
    file = folder / CODES
    if not file.exists():
        raise ConfigError(f"--quantization gguf: {folder} holds no codes of a GGUF file")
    parts = {name: stored[:] for name, stored in _stored(file)}
    names = [key.removesuffix(".codes") for key in parts if key.endswith(".codes")]
    if not names:
        raise ConfigError(f"--quantization gguf: nothing in {folder} was quantized")
    shapes = expected_shapes(config) | {"lm_head.weight": (config.vocab_size, config.hidden_size)}
    coded = {}
    for name in names:
        one = Quantized(parts[name + ".codes"], parts.get(name + ".scale", EMPTY), parts.get(name + ".offset"))
        if not one.fits(shapes.get(name, ())):
            raise ConfigError(f"{file.name}: {name} has not the model's shape")
        coded[name] = one
    return coded


def save_codes(folder: Path, coded: Mapping[str, Quantized]) -> None:
    parts = {(name, part): getattr(one, part) for name, one in coded.items() for part in ("codes", "scale", "offset")}
    save_file(
        {f"{name}.{part}": tensor for (name, part), tensor in parts.items() if tensor is not None}, folder / CODES
    )


def dummy_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    seed: int = 0,
    rank: Rank = ALONE,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """A rank's part of random weights of the right shapes, made on `device`; norms are 1."""
    generator = torch.Generator(device).manual_seed(seed)

    def made(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        whole = torch.randn(shape, generator=generator, device=device)
        return (_cut(whole, part_of(name, config, shape, rank)) * 0.02).to(dtype)

    return {name: made(name, shape) for name, shape in expected_shapes(config).items()}


def _cut(whole: Stored | Tensor, held: Part) -> Tensor:
    found = whole[held.index]
    return pad(found, (0, 0, 0, held.padding)) if held.padding else found.contiguous()


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index.name} cannot be read: {error!r}") from None
        return [folder / name for name in names]
    return [folder / "model.safetensors"]


def _stored(file: Path) -> Iterator[tuple[str, Stored]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                yield name, opened.get_slice(name)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
