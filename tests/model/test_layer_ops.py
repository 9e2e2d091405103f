"""flashinfer's calls, answered by a stand-in that does in float64 what its documentation says of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from runtime.model.layer_ops import FlashinferLayerOps, TorchLayerOps
from runtime.model.rope import Rope
from tests.runtime.test_cpu_device import CONFIG

Tensor = torch.Tensor


class Kernels:
    """The four functions; what they change they change in place."""

    def rmsnorm(self, input: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert input.dim() == 2
        wide = input.double()
        return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight).to(input.dtype)

    def fused_add_rmsnorm(self, input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        residual += input
        input.copy_(self.rmsnorm(residual, weight, eps))

    def silu_and_mul(self, input: Tensor) -> Tensor:
        size = input.shape[-1] // 2
        gates = input[..., :size].double()
        return (gates / (1 + (-gates).exp()) * input[..., size:]).to(input.dtype)

    def apply_rope_with_cos_sin_cache_inplace(
        self, positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor
    ) -> None:
        assert cos_sin_cache.dtype == torch.float32 and cos_sin_cache.shape[1] == head_size
        cos, sin = cos_sin_cache[positions, None].double().chunk(2, -1)
        for flat in (query, key):
            heads = flat.view(len(flat), -1, head_size)
            low, high = (half.double() for half in heads.clone().chunk(2, -1))
            heads.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), -1))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> FlashinferLayerOps:
    monkeypatch.setattr("runtime.model.layer_ops.import_module", lambda name: Kernels())
    return FlashinferLayerOps()


def test_norms_and_gates_are_the_same(fused: FlashinferLayerOps) -> None:
    plain = TorchLayerOps()
    x, weight = torch.randn(5, 3, 8), torch.randn(8)
    assert torch.allclose(fused.norm(x, weight, 1e-5), plain.norm(x, weight, 1e-5), atol=1e-6)
    residuals = [torch.randn(5, 8)] * 2
    residuals = [one.clone() for one in residuals]
    answers = [
        ops.add_norm(x[:, 0].clone(), one, weight, 1e-5) for ops, one in zip((fused, plain), residuals, strict=True)
    ]
    assert torch.allclose(*answers, atol=1e-6) and torch.equal(*residuals)
    both = torch.randn(5, 12) * 4
    assert torch.allclose(fused.gate(both), plain.gate(both), atol=1e-6)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_rotation_is_the_same(fused: FlashinferLayerOps, rope: dict[str, object]) -> None:
    turns = Rope(replace(CONFIG, rope=rope, made_for=32), 128)
    positions = torch.tensor([0, 3, 31, 100])
    reach = positions + 1
    whole = torch.randn(4, 6, CONFIG.head_dim)
    queries, keys = whole[:, :4], whole[:, 4:]  # views of one product, as in a layer
    results = [
        ops.turn(turns, positions, reach, torch.float32)(queries.clone(), keys.clone())
        for ops in (fused, TorchLayerOps())
    ]
    for mine, reference in zip(*results, strict=True):
        assert torch.allclose(mine, reference, atol=1e-6)
    before = whole.clone()
    fused.turn(turns, positions, reach, torch.float32)(queries, keys)
    assert torch.equal(whole, before)  # a product whose values are still to be read
