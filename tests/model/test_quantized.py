"""Codes against the numbers they stand for, and ggml's blocks against the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from runtime.model.quantized import BLOCKS, from_blocks, quantize, together


@pytest.mark.parametrize(("bits", "steps"), [(8, 254), (4, 15)])
def test_codes_are_within_half_a_step(bits: int, steps: int) -> None:
    weight = torch.randn(20, 128, generator=torch.Generator().manual_seed(1))
    groups = weight.view(20, 4, 32)
    span = 2 * groups.abs().amax(-1) if bits == 8 else groups.amax(-1) - groups.amin(-1)
    error = (quantize(weight, bits).dequantized() - weight).view(20, 4, 32).abs().amax(-1)
    assert (error <= span / steps * 0.5 + span * 2**-9).all()  # float16 scales round too


def test_constant_groups_are_exact() -> None:
    weight = torch.cat((torch.zeros(1, 32), torch.full((1, 32), 0.5)), 1)
    assert torch.equal(quantize(weight, 4).dequantized(), weight)
    assert not quantize(weight, 8).dequantized()[:, :32].any()


def blocks(kind: str) -> np.ndarray:
    """As llama.cpp writes them; of Q4_K, which the package only reads, any bytes with finite scales."""
    draw = np.random.default_rng(3)
    if kind != "Q4_K":
        weight = draw.normal(0, 1, (6, 512)).astype(np.float32)
        return gguf.quantize(weight, gguf.GGMLQuantizationType[kind])
    raw = draw.integers(0, 256, (6, 2, 144), np.uint8)
    raw[..., :4] = np.abs(draw.normal(0, 0.01, (6, 2, 2))).astype(np.float16).view(np.uint8)
    return raw.reshape(6, -1)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_those_of_gguf(kind: str) -> None:
    raw = blocks(kind)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    got = from_blocks(kind, torch.from_numpy(raw)).dequantized().numpy()
    if kind == "Q4_K":  # its scales are products, rounded to float16 here
        assert np.abs(got - expected).max() < 2**-10 * np.abs(expected).max()
    else:
        assert np.array_equal(got, expected)


def test_layers_are_joined_in_order() -> None:
    parts = [quantize(torch.randn(n, 64), 4) for n in (3, 5)]
    assert torch.equal(together(parts).dequantized(), torch.cat([one.dequantized() for one in parts]))
