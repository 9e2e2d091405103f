"""Coded layers by the kernels a GPU would use. Of fp8 and int8 torch has them on the CPU too; the others stand in here,
as particular about their arguments as the originals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.model.coded import Coded, StoredLinear
from runtime.model.coded_linears import Device, Fp8, Fp8Blocks, Int4, Int8, Packer, kernel_for, together
from runtime.model.coding import Activations, Kind
from runtime.model.config import ModelConfig, read_config
from runtime.model.linears import Numbers, SideBySide
from runtime.model.weights import dummy_weights, load_weights
from tests.coded_checkpoints import FORMATS, Format, gptq, raw_of, write

Tensor = torch.Tensor
HOPPER = Device((9, 0), (12, 9), torch.bfloat16)
CONFIG = ModelConfig("Qwen2ForCausalLM", 96, 512, 256, 1, 4, 2, 64, 512, 1e-5, 1e4, qkv_bias=True)
LAYER = "model.layers.0."
QKV = [f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv"]
X = torch.randn(300, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
BIAS = torch.randn(512, generator=torch.Generator().manual_seed(2)).bfloat16()


@pytest.fixture(autouse=True, scope="module")
def int4_kernel() -> Iterator[None]:
    """tinygemm's two functions: codes are 8 above theirs, the even input in the upper half of a byte."""
    library = torch.library.Library("aten", "IMPL")

    def convert(pairs: Tensor, tiles: int) -> Tensor:
        assert pairs.dtype == torch.uint8 and pairs.is_contiguous() and tiles in (2, 4, 8)
        n, half = pairs.shape
        assert n % 8 == 0 and half * 2 % (tiles * 16) == 0
        return pairs.view(torch.int32).reshape(n // 8, half * 2 // (tiles * 16), 32, tiles // 2).clone()

    def multiply(x: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
        assert x.dtype == scales.dtype == torch.bfloat16 and x.is_contiguous() and group in (32, 64, 128, 256)
        n, k = packed.shape[0] * 8, x.shape[1]
        assert scales.shape == (k // group, n, 2) and scales.is_contiguous()
        pairs = packed.reshape(n, -1).view(torch.uint8)
        codes = torch.stack((pairs >> 4, pairs & 15), -1).flatten(1).float() - 8
        each = scales.float().repeat_interleave(group, 0).transpose(0, 1)
        return (x.float() @ (codes * each[..., 0] + each[..., 1]).t()).bfloat16()

    library.impl("_convert_weight_to_int4pack", convert, "CPU")
    library.impl("_weight_int4pack_mm", multiply, "CPU")
    yield
    library._destroy()


@pytest.fixture(autouse=True)
def fp8_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS' product of blocks, for which torch wants the scales laid out so (ScaledBlas.cpp, `is_blockwise_*`)."""
    plain = torch._scaled_mm

    def multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **given: Any) -> Tensor:
        if scale_a.shape[1] == 1:
            return plain(a, b, scale_a, scale_b, **given)
        m, n, blocks = len(a), b.shape[1], a.shape[1] // 128
        assert m % 4 == 0 and a.is_contiguous() and b.t().is_contiguous() and scale_a.dtype == scale_b.dtype
        assert (scale_a.shape, scale_a.stride()) == ((m, blocks), (1, m))
        assert scale_b.shape == (blocks, n // 128) and scale_b.stride() == (1, -(-blocks // 4) * 4)
        inputs, weights = a.float() * scale_a.repeat_interleave(128, 1), scale_b.repeat_interleave(128, 0)
        return (inputs @ (b.float() * weights.repeat_interleave(128, 1))).bfloat16()

    monkeypatch.setattr(torch, "_scaled_mm", multiply)


def in_codes(x: Tensor, group: int, most: float = 448, static: float | None = None) -> Tensor:
    """What fp8, or int8 with `most` 127, makes of inputs."""
    parts = x.float().unflatten(-1, (-1, group))
    scale = parts.abs().amax(-1, keepdim=True) / most if static is None else torch.tensor(static)
    codes = (parts / scale).clamp(-most, most)
    return ((codes.to(torch.float8_e4m3fn).float() if most == 448 else codes.round()) * scale).flatten(-2)


def layers(folder: Path, made: Format, device: str = "cpu") -> tuple[list[StoredLinear], Tensor]:
    """Queries, keys and values, and what their weights mean."""
    meaning = write(folder, raw_of(CONFIG), dummy_weights(CONFIG, torch.float32), made)
    loaded = load_weights(folder, read_config(folder), torch.bfloat16, device=device)
    stored = [one for one in (loaded[name] for name in QKV) if isinstance(one, StoredLinear)]
    return stored, torch.cat([meaning[name] for name in QKV])


def product(weight: Tensor, inputs: dict[str, float] | None) -> Tensor:
    """X times a weight plus BIAS; `inputs`: how they are coded."""
    x = X.float() if inputs is None else in_codes(X, **inputs)  # type: ignore[arg-type]
    return x @ weight.t() + BIAS.float()


KERNELS = [
    ("fp8", Fp8, {"group": 512}),
    ("fp8-static", Fp8, {"group": 512, "static": 0.02}),
    ("fp8-blocks", Fp8Blocks, {"group": 128}),
    ("compressed-fp8", Fp8, {"group": 512}),
    ("compressed-fp8-static", Fp8, {"group": 512, "static": 0.02}),
    ("compressed-int8", Int8, {"group": 512, "most": 127}),
    ("packed", Int4, None),
    ("awq", Int4, None),
    ("awq-64", Int4, None),
    ("gptq", Int4, None),
    ("gptq-actorder", Int4, None),
]


@pytest.mark.parametrize(("name", "kind", "inputs"), KERNELS)
def test_a_kernel_computes_what_the_codes_mean(tmp_path: Path, name: str, kind: type, inputs: dict[str, float]) -> None:
    stored, weight = layers(tmp_path, FORMATS[name])
    packer = Packer(HOPPER)
    linear = packer([*stored], BIAS)
    assert isinstance(linear, kind) and packer.words == f"{kind.words} (1)"  # type: ignore[attr-defined]
    expected = product(weight, inputs)
    for rows in (1, 5, 40, 300):
        torch.testing.assert_close(linear(X[:rows]).float(), expected[:rows], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["packed-8", "packed-channel", "gptq-8", "gptq-channel"])
def test_what_no_kernel_takes_becomes_numbers(tmp_path: Path, name: str) -> None:
    stored, weight = layers(tmp_path, FORMATS[name])
    packer = Packer(HOPPER)
    linear = packer([*stored], None)
    assert isinstance(linear, Numbers) and "as bfloat16, for want of a kernel" in packer.words
    assert torch.equal(linear.weight, weight.bfloat16())


def test_spared_layers_and_other_orders_stand_side_by_side(tmp_path: Path) -> None:
    stored, weight = layers(tmp_path, gptq(shuffled=True))
    keys = stored[1]
    moved = replace(keys, parts=keys.parts | {"g_idx": keys.parts["g_idx"].flip(0)})
    spared = weight[384:].bfloat16()
    for weights in ([stored[0], moved, stored[2]], [stored[0], keys, spared]):
        linear = Packer(HOPPER)([*weights], BIAS)
        assert isinstance(linear, SideBySide) and linear(X).shape == (300, 512)
        assert linear.nbytes == sum(one.nbytes for one in linear.linears)
    torch.testing.assert_close(linear(X).float(), X.float() @ weight.t() + BIAS.float(), rtol=0.02, atol=0.02)


def coded(kind: Kind, block: tuple[int, int], n: int = 256, k: int = 256, bits: int = 8) -> Coded:
    scale = torch.ones(-(-n // (block[0] or n)), -(-k // (block[1] or k)))
    return Coded(kind, bits, torch.zeros(n, k, dtype=torch.uint8), scale, block)


DYNAMIC, ALONE = Activations.DYNAMIC, Activations.NUMBERS


@pytest.mark.parametrize(
    ("layer", "activations", "device", "kernel"),
    [
        (coded(Kind.FP8, (0, 0)), DYNAMIC, HOPPER, Fp8),
        (coded(Kind.FP8, (1, 0)), DYNAMIC, replace(HOPPER, capability=(8, 9), cuda=(12, 6)), Fp8),
        (coded(Kind.FP8, (1, 0)), DYNAMIC, replace(HOPPER, capability=(8, 6)), None),
        (coded(Kind.FP8, (1, 0)), ALONE, HOPPER, None),
        (coded(Kind.FP8, (1, 0)), DYNAMIC, replace(HOPPER, dtype=torch.float16), None),
        (coded(Kind.FP8, (1, 0), n=200), DYNAMIC, HOPPER, None),
        (coded(Kind.FP8, (64, 0)), DYNAMIC, HOPPER, None),
        (coded(Kind.FP8, (128, 128), k=512), DYNAMIC, HOPPER, Fp8Blocks),
        (coded(Kind.FP8, (128, 128), n=192, k=512), DYNAMIC, HOPPER, None),
        (coded(Kind.FP8, (128, 128), k=256), DYNAMIC, HOPPER, None),
        (coded(Kind.FP8, (128, 128), k=512), DYNAMIC, replace(HOPPER, cuda=(12, 8)), None),
        (coded(Kind.FP8, (128, 128), k=512), DYNAMIC, replace(HOPPER, capability=(10, 0)), None),
        (coded(Kind.INT8, (128, 128), k=512), DYNAMIC, HOPPER, None),
        (coded(Kind.FP8, (64, 64)), DYNAMIC, HOPPER, None),
        (coded(Kind.INT8, (1, 0)), DYNAMIC, replace(HOPPER, capability=(8, 0)), Int8),
        (coded(Kind.INT8, (1, 0)), ALONE, HOPPER, None),
        (coded(Kind.CODES, (1, 128), bits=4), ALONE, replace(HOPPER, capability=(8, 0)), Int4),
        (coded(Kind.CODES, (1, 128), bits=4), ALONE, replace(HOPPER, capability=(7, 5)), None),
        (coded(Kind.CODES, (1, 128), bits=8), ALONE, HOPPER, None),
        (coded(Kind.CODES, (1, 64), k=192, bits=4), ALONE, HOPPER, Int4),
        (coded(Kind.CODES, (1, 64), k=240, bits=4), ALONE, HOPPER, None),
    ],
)
def test_which_kernel_a_layer_gets(layer: Coded, activations: Activations, device: Device, kernel: type | None) -> None:
    assert kernel_for(layer, activations, device) is kernel


def test_blocks_that_end_elsewhere_are_not_put_together() -> None:
    odd, even = coded(Kind.FP8, (128, 128), n=192), coded(Kind.FP8, (128, 128))
    assert together([odd, even]) is None
    whole = together([even, odd])
    assert whole is not None and whole.codes.shape == (448, 256) and whole.scale.shape == (4, 2)
