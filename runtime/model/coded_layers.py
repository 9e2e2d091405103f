"""The coded layers of a checkpoint put together from its tensors, wherever those stand in its files."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import Protocol

import torch

from runtime.model.coded import StoredLinear
from runtime.model.coding import IN, Axes, Axis, Coding, Kind, stored_shape
from runtime.model.config import ConfigError, ModelConfig
from runtime.model.sharding import Part, Rank, part_of, stored_part

Tensor = torch.Tensor
NUMBERS = ("F32", "F16", "BF16")
CODES = {Kind.FP8: ("F8_E4M3",), Kind.INT8: ("I8",), Kind.CODES: ("I32",)}
PACKED = ("qweight", "qzeros", "weight_packed", "weight_zero_point")


class Stored(Protocol):
    """A tensor in a file, of which what is asked for is read."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor: ...


class CodedLayers:
    """Of the layers in `shapes` (whole weights, by name), those whose tensors are handed to `take`: a rank's parts."""

    def __init__(
        self, config: ModelConfig, shapes: dict[str, tuple[int, ...]], rank: Rank, device: torch.device | str
    ) -> None:
        self.config, self.shapes, self.rank, self.device = config, shapes, rank, device
        self._parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
        self._spared: set[str] = set()  # weights that are numbers

    def take(self, name: str, stored: Stored) -> bool:
        """Whether the tensor is a coded layer's, and therefore taken. Raises `ConfigError` for one that cannot be."""
        coding, (layer, _, suffix) = self.config.coding, name.rpartition(".")
        weight = layer + ".weight"
        if coding is None or len(self.shapes.get(weight, ())) != 2 or weight == "model.embed_tokens.weight":
            return False
        kind = stored.get_dtype()
        if suffix == "weight" and kind in NUMBERS:
            self._spared.add(weight)
            return False
        axes = {**coding.tensors, coding.order: (Axis(IN),)}.get(suffix)
        if axes is None:
            return suffix in coding.ignored
        _check(name, kind, tuple(stored.get_shape()), coding, stored_shape(axes, self.shapes[weight]))
        if suffix == coding.order and self.rank.size > 1 and (stored[()].diff() < 0).any():
            raise ConfigError(
                f"--tensor-parallel-size {self.rank.size}: groups of {weight} do not stand in order (desc_act)"
            )
        index = self._part(weight, axes).index if axes else ()
        self._parts[weight][suffix] = stored[index].contiguous().to(self.device)
        return True

    def layers(self) -> dict[str, StoredLinear]:
        """By the name of the weight. Raises `ConfigError` for a layer of which something is missing."""
        coding = self.config.coding
        return {} if coding is None else {weight: self._layer(coding, weight) for weight in self._parts}

    def _layer(self, coding: Coding, weight: str) -> StoredLinear:
        parts = self._parts[weight]
        if weight in self._spared:
            raise ConfigError(f"tensor {weight} is numbers, but {next(iter(parts))} of the layer is there too")
        if missing := [suffix for suffix in coding.tensors if suffix not in parts]:
            raise ConfigError(f"tensor {weight.removesuffix('weight')}{missing[0]} is missing")
        n, k = self.shapes[weight]
        held = self._held(weight)
        size = held.stop - held.start
        return StoredLinear(weight, coding, (size, k) if held.dim == 0 else (n, size), parts)

    def _part(self, weight: str, axes: Axes) -> Part:
        found = stored_part(axes, self._held(weight), self.shapes[weight])
        if found is None:
            raise ConfigError(f"--tensor-parallel-size {self.rank.size} cuts through the groups of {weight}")
        return found

    def _held(self, weight: str) -> Part:
        held = part_of(weight, self.config, self.shapes[weight], self.rank)
        if held.padding:
            raise ConfigError(f"--tensor-parallel-size {self.rank.size} leaves a rank's part of {weight} uneven")
        return held


def _check(name: str, kind: str, shape: tuple[int, ...], coding: Coding, expected: tuple[int, ...]) -> None:
    suffix = name.rpartition(".")[2]
    codes = suffix == "weight" or suffix in PACKED
    known = CODES[coding.kind] if codes else ("I32", "I64") if suffix == coding.order else NUMBERS
    if kind not in known:
        raise ConfigError(f"tensor {name} is {kind}, expected {' or '.join(known)}")
    if shape != expected and not (expected == () and prod(shape) == 1):
        raise ConfigError(f"tensor {name} is {shape}, expected {expected}")
