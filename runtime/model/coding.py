"""How a checkpoint's linear layers are coded, read from `quantization_config`. Knows no torch, no file.

Methods: `fp8` (per tensor, or in blocks as DeepSeek and Qwen publish it), `compressed-tensors` (fp8, int8, and 4 or 8
bits of weights alone), `awq` and `gptq`. What is none of these is refused by its name. Which layers are coded, the
checkpoint's tensors tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

OUT, IN = 0, 1  # dimensions of a weight [n, k]
ALL = 0  # as many as there are


class CodingError(ValueError):
    """A coding that cannot be read; the message is one clear line."""


class Kind(Enum):
    FP8 = "fp8"  # float8_e4m3fn
    INT8 = "int8"  # signed, of weights and activations
    CODES = "codes"  # unsigned, of weights alone


class Packing(Enum):
    """Where in an int32 which code stands; the lowest bits first."""

    NONE = "none"
    ALONG = "along"  # consecutive inputs of an output; zero points: outputs of a group
    GPTQ = "gptq"  # consecutive inputs, one row for each output's; zero points: consecutive outputs
    AWQ = "awq"  # eight outputs, even ones first


class Activations(Enum):
    """What a layer's inputs become before they are multiplied."""

    NUMBERS = "numbers"
    STATIC = "static"  # codes, by the one scale of `input_scale`
    DYNAMIC = "dynamic"  # codes, by a scale for each token, or for each of its blocks of inputs


@dataclass(frozen=True)
class Axis:
    """A dimension of a stored tensor: it runs along `dim` of the weight, one entry for `per` of it."""

    dim: int
    per: int = 1


Axes = tuple[Axis, ...]


def stored_shape(axes: Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a tensor that belongs to a weight of `shape`."""
    return tuple(1 if axis.per == ALL else -(-shape[axis.dim] // axis.per) for axis in axes)


@dataclass(frozen=True)
class Coding:
    """`tensors`: what a coded layer consists of, by the suffix of its name."""

    method: str
    kind: Kind
    bits: int
    block: tuple[int, int]  # outputs and inputs that share a scale
    tensors: dict[str, Axes]
    activations: Activations = Activations.NUMBERS
    packing: Packing = Packing.NONE
    ordered: bool = True  # else `g_idx` names the group of each input
    zero_is_less: int = 0  # by which stored zero points are too small
    ignored: tuple[str, ...] = ()  # further tensors of a layer, which say nothing new

    @property
    def name(self) -> str:
        bits = "" if self.kind is Kind.FP8 else f" with {self.bits} bits"
        return self.method + bits


def read_coding(raw: dict[str, Any]) -> Coding:
    """`raw` is what `config.json` calls quantization_config. Raises `CodingError`."""
    readers = {"fp8": _fp8, "compressed-tensors": _compressed, "awq": _awq, "gptq": _gptq}
    method = raw.get("quant_method")
    if method not in readers:
        raise CodingError(
            f"a checkpoint quantized by {method or 'something unnamed'} is not supported; what is: "
            f"{', '.join(readers)}, the original in float32, bfloat16 or float16, or a GGUF file"
        )
    try:
        return readers[method](raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise CodingError(f"quantization_config of {method} cannot be read: {error!r}") from None


def _want(method: str, name: str, value: object, *known: object) -> None:
    if value not in known:
        words = ", ".join(str(one) for one in known)
        raise CodingError(f"quantization_config of {method}: {name} {value} is not supported; supported is {words}")


def _fp8(raw: dict[str, Any]) -> Coding:
    scheme = raw.get("activation_scheme", "dynamic")
    _want("fp8", "activation_scheme", scheme, "dynamic", "static")
    _want("fp8", "fmt", raw.get("fmt", "e4m3"), "e4m3", "float8_e4m3fn")
    weight: Axes = Axis(OUT), Axis(IN)
    if size := raw.get("weight_block_size"):
        _want("fp8", "activation_scheme of blocks", scheme, "dynamic")
        in_blocks = {"weight": weight, "weight_scale_inv": _blocks(size)}
        return Coding("fp8", Kind.FP8, 8, (size[0], size[1]), in_blocks, Activations.DYNAMIC)
    tensors: dict[str, Axes] = {"weight": weight, "weight_scale": ()} | (
        {"input_scale": ()} if scheme == "static" else {}
    )
    return Coding("fp8", Kind.FP8, 8, (ALL, ALL), tensors, Activations(scheme), ignored=("input_scale",))


def _blocks(size: Any) -> Axes:
    return Axis(OUT, size[0]), Axis(IN, size[1])


def _compressed(raw: dict[str, Any]) -> Coding:
    method, groups = "compressed-tensors", list(raw["config_groups"].values())
    _want(method, "number of config_groups", len(groups), 1)
    _want(method, "targets", groups[0]["targets"], ["Linear"])
    _want(method, "kv_cache_scheme", raw.get("kv_cache_scheme"), None)
    _want(method, "output_activations", groups[0].get("output_activations"), None)
    _want(method, "sparsity_config", (raw.get("sparsity_config") or {}).get("format", "dense"), "dense")
    _want(method, "transform_config", raw.get("transform_config") or None, None)
    layout, weights, inputs = raw["format"], groups[0]["weights"], groups[0].get("input_activations")
    _want(method, "format", layout, "float-quantized", "int-quantized", "pack-quantized")
    packed = layout == "pack-quantized"
    _want(method, "type of weights", weights["type"], "float" if layout == "float-quantized" else "int")
    _want(method, "num_bits of weights", weights["num_bits"], *((4, 8) if packed else (8,)))
    _want(method, "symmetric of weights", weights.get("symmetric", True), *((True, False) if packed else (True,)))
    block = _compressed_block(weights, packed)
    return _packed(weights, inputs, block) if packed else _whole(layout, weights, inputs, block)


def _compressed_block(weights: dict[str, Any], packed: bool) -> tuple[int, int]:
    strategy = weights["strategy"]
    known = ("group", "channel") if packed else ("tensor", "channel", "block")
    _want("compressed-tensors", "strategy of weights", strategy, *known)
    if strategy == "block":
        rows, columns = weights["block_structure"]
        return rows, columns
    return {"tensor": (ALL, ALL), "channel": (1, ALL), "group": (1, weights.get("group_size") or ALL)}[strategy]


def _whole(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None, block: tuple[int, int]) -> Coding:
    kind = Kind.FP8 if layout == "float-quantized" else Kind.INT8
    by_tensor = block == (ALL, ALL)
    tensors: dict[str, Axes] = {"weight": (Axis(OUT), Axis(IN)), "weight_scale": () if by_tensor else _blocks(block)}
    activations = _activations(inputs, weights["type"], weights["strategy"])
    if activations is Activations.STATIC:
        tensors["input_scale"] = ()
    return Coding("compressed-tensors", kind, 8, block, tensors, activations)


def _activations(inputs: dict[str, Any] | None, kind: str, weights: str) -> Activations:
    method = "compressed-tensors"
    if inputs is None:
        return Activations.NUMBERS
    _want(method, "type of input_activations", inputs["type"], kind)
    _want(method, "num_bits of input_activations", inputs["num_bits"], 8)
    _want(method, "symmetric of input_activations", inputs.get("symmetric", True), True)
    dynamic = inputs.get("dynamic", False)
    _want(method, "dynamic of input_activations", dynamic, True, False)
    strategy = inputs.get("strategy") or "tensor"
    by_block = weights == "block"
    known = ("group",) if by_block else ("token", "tensor") if dynamic else ("tensor",)
    _want(method, "strategy of input_activations", strategy, *known)
    return Activations.DYNAMIC if dynamic else Activations.STATIC


def _packed(weights: dict[str, Any], inputs: dict[str, Any] | None, block: tuple[int, int]) -> Coding:
    method, bits = "compressed-tensors", weights["num_bits"]
    _want(method, "input_activations of packed weights", inputs, None)
    _want(method, "actorder", weights.get("actorder"), None, "weight", "static", "group")
    tensors: dict[str, Axes] = {"weight_packed": (Axis(OUT), Axis(IN, 32 // bits)), "weight_scale": _blocks(block)}
    if not weights.get("symmetric", True):
        tensors["weight_zero_point"] = (Axis(OUT, 32 // bits), Axis(IN, block[1]))
    ordered = weights.get("actorder") != "group" or block[1] == ALL
    if not ordered:
        tensors["weight_g_idx"] = (Axis(IN),)
    kind, packing, ignored = Kind.CODES, Packing.ALONG, ("weight_shape", "weight_g_idx")
    return Coding(method, kind, bits, block, tensors, packing=packing, ordered=ordered, ignored=ignored)


def _awq(raw: dict[str, Any]) -> Coding:
    bits = raw.get("bits", raw.get("w_bit"))
    _want("awq", "bits", bits, 4)
    _want("awq", "version", str(raw.get("version", "gemm")).lower(), "gemm")
    _want("awq", "zero_point", raw.get("zero_point", True), True)
    block = 1, _group_size(raw.get("group_size", raw.get("q_group_size")))
    tensors: dict[str, Axes] = {
        "qweight": (Axis(IN), Axis(OUT, 8)),
        "qzeros": (Axis(IN, block[1]), Axis(OUT, 8)),
        "scales": (Axis(IN, block[1]), Axis(OUT)),
    }
    return Coding("awq", Kind.CODES, 4, block, tensors, packing=Packing.AWQ)


def _gptq(raw: dict[str, Any]) -> Coding:
    bits, block = raw["bits"], (1, _group_size(raw["group_size"]))
    _want("gptq", "bits", bits, 4, 8)
    _want("gptq", "dynamic", raw.get("dynamic") or None, None)
    layout = raw.get("checkpoint_format") or "gptq"
    _want("gptq", "checkpoint_format", layout, "gptq", "gptq_v2")
    tensors: dict[str, Axes] = {
        "qweight": (Axis(IN, 32 // bits), Axis(OUT)),
        "qzeros": (Axis(IN, block[1]), Axis(OUT, 32 // bits)),
        "scales": (Axis(IN, block[1]), Axis(OUT)),
    }
    ordered = not raw.get("desc_act", False) or block[1] == ALL
    if not ordered:
        tensors["g_idx"] = (Axis(IN),)
    less, ignored = int(layout == "gptq"), ("g_idx",)
    packing = Packing.GPTQ
    return Coding(
        "gptq", Kind.CODES, bits, block, tensors, packing=packing, ordered=ordered, zero_is_less=less, ignored=ignored
    )


def _group_size(size: Any) -> int:
    if not isinstance(size, int) or size == 0 or size < -1:
        raise CodingError(f"quantization_config: group_size {size} is not supported")
    return ALL if size == -1 else size
