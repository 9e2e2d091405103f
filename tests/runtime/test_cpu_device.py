"""A tiny float32 model on the CPU device: the same tokens at every depth, chunk size and page count.

The smallest gap between the two best logits along the runs is printed and asserted, so that a difference would be a
fault and never rounding.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import runtime.device.cpu as cpu
from bench.kernel_cases import batch_of
from runtime.batch import SlotTables
from runtime.kernels.library import Kernels, every
from runtime.kernels.sampling import KernelOps
from runtime.kv_cache import KVCache
from runtime.limits import Limits
from runtime.model.config import ModelConfig
from runtime.model.on_torch import TorchModel
from runtime.model.packed import PackedLlama
from runtime.model.shapes import expected_shapes
from runtime.request import Request
from runtime.sampling_on_torch import TorchOps
from runtime.sampling_ops import SamplingOps
from runtime.slot_sampling import SampleBatch
from tests.fakes import Answer, Engine, request

CONFIG = ModelConfig("LlamaForCausalLM", 64, 32, 48, 2, 4, 2, 8, 128, 1e-5, 1e4)
LIMITS = Limits(num_blocks=256, block_size=4, max_model_len=96, max_num_seqs=8, max_num_batched_tokens=128, depth=0)


def weights(config: ModelConfig = CONFIG) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in expected_shapes(config).items()}


def models() -> dict[str, cpu.CpuModel]:
    """The torch path, and the C kernels for each instruction set of this machine."""
    packed = {one.name: PackedLlama(CONFIG, weights(), one) for one in every()}
    return {"torch": TorchModel(CONFIG, weights()), **packed}


class CpuEngine(Engine):
    """`Engine` with the CPU device in place of the simulated one."""

    def __init__(self, limits: Limits, seed: int = 0, path: str = "torch") -> None:
        super().__init__(limits, seed)
        pages = -(-limits.max_model_len // limits.block_size)
        tables = SlotTables(limits.slots, pages, limits.block_size)
        self.device = cpu.CpuDevice(  # type: ignore[assignment]
            MODELS[path], OPS[path], tables, self.tokens, self.grammar, limits.num_blocks, {}
        )


MODELS = models()
OPS: dict[str, SamplingOps] = {"torch": TorchOps(), **{one.name: KernelOps(one, 2) for one in every()}}


@pytest.mark.parametrize("kernels", list(every()), ids=lambda one: one.name)
def test_gates_far_from_zero_are_closed_or_open(kernels: Kernels) -> None:
    """silu of hundreds, of either sign: its exponential is beyond float32."""
    far = weights()
    for layer in range(CONFIG.num_layers):
        far[f"model.layers.{layer}.mlp.gate_proj.weight"] *= 200
    batch, hidden = batch_of(1, 20, chunk=True), []
    ids = np.arange(20, dtype=np.int32)
    for model in (TorchModel(CONFIG, dict(far)), PackedLlama(CONFIG, dict(far), kernels)):
        cache = KVCache(CONFIG.num_layers, 2, 16, CONFIG.num_kv_heads, CONFIG.head_dim, torch.float32)
        model.attach(cache, 32)
        hidden.append(model.forward(batch, ids))
    gates = torch.nn.functional.linear(hidden[0], far["model.layers.1.mlp.gate_proj.weight"])
    assert gates.min() < -100 and gates.max() > 100
    assert torch.allclose(hidden[1], hidden[0], rtol=1e-3, atol=1e-3)


def requests() -> list[Request]:
    draw = random.Random(3)
    shared = [draw.randrange(64) for _ in range(16)]
    return [
        request(
            number,
            shared[: draw.choice([0, 8, 16])] + [draw.randrange(64) for _ in range(draw.choice([1, 3, 20]))],
            draw.choice([1, 6, 16]),
            temperature=draw.choice([0.0, 0.0, 0.8]),
            top_k=draw.choice([0, 5]),
            seed=number,
            stop_ids=(7,),
        )
        for number in range(24)
    ]


def run(limits: Limits, seed: int = 0, spread: bool = False, path: str = "torch") -> dict[int, Answer]:
    engine = CpuEngine(limits, seed, path)
    engine.serve(requests(), spread)
    return engine.answers


@pytest.fixture(scope="module")
def expected() -> dict[int, Answer]:
    return run(replace(LIMITS, max_num_seqs=1, prefix_cache=False))


@pytest.mark.parametrize("path", MODELS)
@pytest.mark.parametrize(
    ("depth", "radix", "chunk", "blocks", "spread"),
    [
        (0, True, 128, 256, False),
        (1, True, 128, 256, False),
        (2, True, 16, 256, False),
        (1, False, 16, 26, False),
        (2, True, 16, 26, False),
        (1, True, 128, 256, True),
    ],
)
def test_tokens_do_not_depend_on_the_layout(
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[int, Answer],
    depth: int,
    radix: bool,
    chunk: int,
    blocks: int,
    spread: bool,
    path: str,
) -> None:
    gaps: list[float] = []

    def watched(logits: torch.Tensor, how: SampleBatch, *more: Any) -> np.ndarray:
        best = logits.topk(2).values
        gaps.extend((best[:, 0] - best[:, 1])[torch.from_numpy(how.temperature == 0)].tolist())
        return real(logits, how, *more)

    real = cpu.sample
    monkeypatch.setattr(cpu, "sample", watched)
    limits = replace(LIMITS, depth=depth, prefix_cache=radix, max_num_batched_tokens=chunk, num_blocks=blocks)
    assert run(limits, depth, spread, path) == expected
    print(f"smallest top-2 gap {min(gaps):.2e} over {len(gaps)} greedy tokens")
    assert min(gaps) > 1e-3
