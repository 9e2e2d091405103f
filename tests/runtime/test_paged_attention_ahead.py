"""Steps launched ahead of a device, eager and replayed, against the CPU's attention: on a GPU where there is one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from runtime.attention.backend import GATHERED, Backend, choose
from runtime.attention.cpu import CpuAttention
from runtime.attention.flashinfer import PagedAttention
from runtime.attention.wrappers import Sizes
from runtime.batch import Batch
from runtime.device.accelerator import CudaAccelerator
from runtime.device.staging import Staging
from runtime.kv_cache import KVCache
from runtime.model.config import ModelConfig
from tests.fake_accelerator import FakeAccelerator
from tests.runtime.attention_batches import Slots

DIM, PAGES, SIZE, ROWS, STEPS = 128, 64, 16, 8, 3
CONFIG = ModelConfig("LlamaForCausalLM", 100, 8, 8, 1, 8, 2, DIM, 4096, 1e-5, 1e4)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CASES = [(False, GATHERED), pytest.param(True, GATHERED, marks=GPU), pytest.param(True, None, marks=GPU)]


class Device:
    """Steps whose inputs, KV and results stay on the device until all are launched."""

    def __init__(self, real: bool, backend: Backend | None, config: ModelConfig, kv_dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.gpu: Any = CudaAccelerator(0) if real else FakeAccelerator()
        if backend is None:
            backend, told = choose(config)
            if not backend.fused:
                pytest.skip(told)
        self.config, self.backend = config, backend
        self.slots = Slots(ROWS, PAGES, SIZE)
        shape = (1, self.slots.num_pages, SIZE, config.num_kv_heads, DIM)
        self.cache, self.other = KVCache(*shape, kv_dtype), KVCache(*shape, torch.float32)
        for part in (self.cache.keys, self.cache.values):
            part[0] = part[0].to(self.gpu.device)
        sizes = Sizes(ROWS, PAGES, STEPS)
        with self.gpu.launching():
            self.paged = PagedAttention(config, self.cache, self.gpu, backend, torch.bfloat16, sizes)
        self.staging = Staging(self.gpu, STEPS, 1 << 16)
        self.results: list[tuple[torch.Tensor, torch.Tensor]] = []

    def inputs(self, tokens: int) -> list[torch.Tensor]:
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        whole = torch.randn(tokens, heads + 2 * kv_heads, DIM).to(torch.bfloat16)
        return list(whole.split([heads, kv_heads, kv_heads], 1))

    def expect(self, batch: Batch, inputs: list[torch.Tensor], out: torch.Tensor) -> None:
        reference = CpuAttention(batch, self.other, self.config.sliding_window)
        tokens = len(batch.kv_cells)
        self.results.append((out, reference(0, *(one[:tokens].float() for one in inputs))))

    def eager(self, batch: Batch) -> None:
        inputs = self.inputs(len(batch.kv_cells))
        self.staging.begin()
        out = self.paged.plan(batch, self.staging.put)(0, *(one.to(self.gpu.device) for one in inputs))
        self.staging.end()
        self.expect(batch, inputs, out)

    def recorded(self, size: int) -> Any:
        graph = self.paged.graph(size)
        static = [one.to(self.gpu.device) for one in self.inputs(size)]
        out = torch.empty_like(static[0].contiguous())
        replay = self.gpu.recorded(lambda: out.copy_(graph(0, *static)))

        def run(batch: Batch) -> None:
            inputs = self.inputs(size)
            for place, new in zip(static, inputs, strict=True):
                place.copy_(new)
            self.staging.begin()
            graph.plan(batch, self.staging.put)
            replay()
            self.staging.end()
            self.expect(batch, inputs, out[: len(batch.slots)].clone())

        return run

    def check(self, atol: float) -> None:
        self.gpu.close()
        for out, expected in self.results:
            torch.testing.assert_close(out.float().cpu(), expected, atol=atol, rtol=0.02)


@pytest.mark.timeout(900)  # flashinfer builds its kernels when they are first planned
@pytest.mark.parametrize(("real", "backend"), CASES)
@pytest.mark.parametrize(
    ("kv_heads", "window", "kv_dtype", "atol"),
    [
        (2, None, torch.bfloat16, 0.02),
        (8, 9, torch.bfloat16, 0.02),
        (1, 9, torch.bfloat16, 0.02),  # eight query heads of one KV head: on tensor cores
        (2, None, torch.float8_e4m3fn, 0.15),
    ],
)
def test_steps_ahead_of_the_device(
    real: bool, backend: Backend | None, kv_heads: int, window: int | None, kv_dtype: torch.dtype, atol: float
) -> None:
    config = replace(CONFIG, num_kv_heads=kv_heads, sliding_window=window)
    device = Device(real, backend, config, kv_dtype)
    step = device.slots.step
    run = device.recorded(4) if device.backend.fused or not real else device.eager
    with device.gpu.launching():
        device.eager(step([], [(1, 300), (2, 17), (3, 1)], [(1, 0), (2, 0), (3, 0)]))
        device.eager(step([1, 3], [(4, 100), (2, 40)], [(4, 0)]))
        for rows in ([1, 2, 3], [4, 1], [2], [3, 4, 1, 2], [1, 2, 3], [4]):
            run(step(rows))
        device.eager(step([1, 2], [(3, 50)]))
        run(step([1, 2, 3, 4]))
    device.check(atol)
