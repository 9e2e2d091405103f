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
    order: str = ""  # the tensor that names the group of each input, where a layer has one
    zero_is_less: int = 0  # by which stored zero points are too small
    ignored: tuple[str, ...] = ()  # further tensors of a layer, which say nothing new

    @property
    def name(self) -> str:
        if self.method == "fp8":
            return self.method
        return f"{self.method} with {'fp8' if self.kind is Kind.FP8 else f'{self.bits} bits'}"


def read_coding(raw: dict[str, Any]) -> Coding:
    """`raw` is what `config.json` calls quantization_config. Raises `CodingError`."""
    readers = {"fp8": _fp8, "compressed-tensors": _compressed, "awq": _awq, "gptq": _gptq}
    method = raw.get("quant_method") if isinstance(raw, dict) else None
    if not isinstance(method, str) or method not in readers:
        raise CodingError(
            f"a checkpoint quantized by {method or 'something unnamed'} is not supported; what is: "
            f"{', '.join(readers)}, the original in float32, bfloat16 or float16, or a GGUF file"
        )
    try:
        return readers[method](raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise CodingError(f"quantization_config of {method} cannot be read: {error!r}") from None


def _want(method: str, name: str, value: object, *known: object) -> None:
    if not any(type(value) is type(one) and value == one for one in known):
        words = ", ".join(str(one) for one in known)
        raise CodingError(f"quantization_config of {method}: {name} {value} is not supported; supported is {words}")


def _size(method: str, name: str, value: object) -> int:
    """Of a block or group; -1 is all."""
    if type(value) is not int or not (value == -1 or 0 < value < 1 << 31):
        raise CodingError(f"quantization_config of {method}: {name} {value} is not a size")
    return ALL if value == -1 else value


def _block(method: str, name: str, value: Any) -> tuple[int, int]:
    """As a list, or as compressed-tensors once wrote it: 128x128."""
    sizes = [int(one) for one in value.split("x") if one.isdecimal()] if isinstance(value, str) else value
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise CodingError(f"quantization_config of {method}: {name} {value} is not two sizes")
    return _size(method, name, sizes[0]), _size(method, name, sizes[1])


def _fp8(raw: dict[str, Any]) -> Coding:
    scheme = raw.get("activation_scheme", "dynamic")
    _want("fp8", "activation_scheme", scheme, "dynamic", "static")
    _want("fp8", "fmt", raw.get("fmt", "e4m3"), "e4m3", "float8_e4m3fn")
    weight: Axes = Axis(OUT), Axis(IN)
    if raw.get("weight_block_size") is not None:
        _want("fp8", "activation_scheme of blocks", scheme, "dynamic")
        block = _block("fp8", "weight_block_size", raw["weight_block_size"])
        in_blocks = {"weight": weight, "weight_scale_inv": _axes(block)}
        return Coding("fp8", Kind.FP8, 8, block, in_blocks, Activations.DYNAMIC)
    tensors: dict[str, Axes] = {"weight": weight, "weight_scale": ()} | (
        {"input_scale": ()} if scheme == "static" else {}
    )
    return Coding("fp8", Kind.FP8, 8, (ALL, ALL), tensors, Activations(scheme), ignored=("input_scale",))


def _axes(block: tuple[int, int]) -> Axes:
    return Axis(OUT, block[OUT]), Axis(IN, block[IN])


def _compressed(raw: dict[str, Any]) -> Coding:
    method, groups = "compressed-tensors", list(raw["config_groups"].values())
    _want(method, "number of config_groups", len(groups), 1)
    _want(method, "targets", groups[0]["targets"], ["Linear"])
    _want(method, "output_activations", groups[0].get("output_activations"), None)
    _want(method, "sparsity_config", (raw.get("sparsity_config") or {}).get("format", "dense"), "dense")
    _want(method, "transform_config", raw.get("transform_config") or None, None)
    layout, weights, inputs = raw["format"], groups[0]["weights"], groups[0].get("input_activations")
    types = {
        "float-quantized": ("float",),
        "int-quantized": ("int",),
        "naive-quantized": ("float", "int"),
        "pack-quantized": ("int",),
    }
    _want(method, "format", layout, *types)
    packed = layout == "pack-quantized"
    _want(method, "type of weights", weights["type"], *types[layout])
    _want(method, "num_bits of weights", weights["num_bits"], *((4, 8) if packed else (8,)))
    _want(method, "symmetric of weights", weights.get("symmetric", True), True, *((False,) if packed else ()))
    block = _compressed_block(weights, packed)
    return _packed(weights, inputs, block) if packed else _whole(weights, inputs, block)


def _compressed_block(weights: dict[str, Any], packed: bool) -> tuple[int, int]:
    strategy = weights["strategy"]
    known = ("group", "channel") if packed else ("tensor", "channel", "block")
    _want("compressed-tensors", "strategy of weights", strategy, *known)
    if strategy == "block":
        return _block("compressed-tensors", "block_structure", weights["block_structure"])
    if strategy == "group":
        return 1, _size("compressed-tensors", "group_size", weights.get("group_size"))
    return (1 if strategy == "channel" else ALL), ALL


def _whole(weights: dict[str, Any], inputs: dict[str, Any] | None, block: tuple[int, int]) -> Coding:
    kind = Kind.FP8 if weights["type"] == "float" else Kind.INT8
    by_tensor = block == (ALL, ALL)
    tensors: dict[str, Axes] = {"weight": (Axis(OUT), Axis(IN)), "weight_scale": () if by_tensor else _axes(block)}
    activations = _activations(inputs, weights["type"], block[IN])
    if activations is Activations.STATIC:
        tensors["input_scale"] = ()
    return Coding("compressed-tensors", kind, 8, block, tensors, activations)


def _activations(inputs: dict[str, Any] | None, kind: str, group: int) -> Activations:
    method = "compressed-tensors"
    if inputs is None:
        return Activations.NUMBERS
    _want(method, "type of input_activations", inputs["type"], kind)
    _want(method, "num_bits of input_activations", inputs["num_bits"], 8)
    _want(method, "symmetric of input_activations", inputs.get("symmetric", True), True)
    dynamic = inputs.get("dynamic", False)
    _want(method, "dynamic of input_activations", dynamic, True, False)
    strategy = inputs.get("strategy") or "tensor"
    known = ("group",) if group else ("token", "tensor") if dynamic else ("tensor",)
    _want(method, "strategy of input_activations", strategy, *known)
    if group:
        _want(method, "group_size of input_activations", inputs.get("group_size"), group)
    return Activations.DYNAMIC if dynamic else Activations.STATIC


def _packed(weights: dict[str, Any], inputs: dict[str, Any] | None, block: tuple[int, int]) -> Coding:
    method, bits = "compressed-tensors", weights["num_bits"]
    _want(method, "input_activations of packed weights", inputs, None)
    tensors: dict[str, Axes] = {"weight_packed": (Axis(OUT), Axis(IN, 32 // bits)), "weight_scale": _axes(block)}
    if not weights.get("symmetric", True):
        tensors["weight_zero_point"] = (Axis(OUT, 32 // bits), Axis(IN, block[1]))
    packing, ignored = Packing.ALONG, ("weight_shape",)
    order = "weight_g_idx"
    return Coding(method, Kind.CODES, bits, block, tensors, packing=packing, order=order, ignored=ignored)


def _awq(raw: dict[str, Any]) -> Coding:
    bits = raw.get("bits", raw.get("w_bit"))
    _want("awq", "bits", bits, 4)
    _want("awq", "version", str(raw.get("version") or raw.get("format") or "gemm").lower(), "gemm")
    _want("awq", "zero_point", raw.get("zero_point", True), True)
    block = 1, _size("awq", "group_size", raw.get("group_size", raw.get("q_group_size")))
    tensors: dict[str, Axes] = {
        "qweight": (Axis(IN), Axis(OUT, 8)),
        "qzeros": (Axis(IN, block[1]), Axis(OUT, 8)),
        "scales": (Axis(IN, block[1]), Axis(OUT)),
    }
    return Coding("awq", Kind.CODES, 4, block, tensors, packing=Packing.AWQ)


def _gptq(raw: dict[str, Any]) -> Coding:
    """Modules that `dynamic` leaves out the file tells."""
    bits, block = raw["bits"], (1, _size("gptq", "group_size", raw["group_size"]))
    _want("gptq", "bits", bits, 4, 8)
    changed = [rule for rule in raw.get("dynamic") or {} if not rule.startswith("-:")]
    _want("gptq", "dynamic", changed, [])
    layout = raw.get("checkpoint_format") or raw.get("format") or "gptq"
    _want("gptq", "checkpoint_format", layout, "gptq", "gptq_v2")
    tensors: dict[str, Axes] = {
        "qweight": (Axis(IN, 32 // bits), Axis(OUT)),
        "qzeros": (Axis(IN, block[1]), Axis(OUT, 32 // bits)),
        "scales": (Axis(IN, block[1]), Axis(OUT)),
    }
    less, packing = int(layout == "gptq"), Packing.GPTQ
    return Coding("gptq", Kind.CODES, bits, block, tensors, packing=packing, order="g_idx", zero_is_less=less)
