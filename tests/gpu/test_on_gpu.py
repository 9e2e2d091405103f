"""The GPU worker on a GPU: what a stand-in cannot show. `make gpu-check` runs it where there is one.

Tokens in bfloat16 cannot be equal to another path's; each one must be the best, or nearly, of the float32 logits that
the CPU computes for what was said before it.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ipc.cuda_runtime import Cudart
from ipc.device_table import DeviceReader, DeviceTable
from ipc.shared_memory import Shape
from ipc.token_table import TokenTable
from runtime.attention.backend import Backend, choose
from runtime.attention.cpu import CpuAttention
from runtime.attention.flashinfer import PagedAttention
from runtime.attention.wrappers import Sizes
from runtime.device.accelerator import Accelerator, CudaAccelerator
from runtime.device.filters import Filters, FlashinferFilters, TorchFilters
from runtime.device.staging import Staging
from runtime.kv_cache import KVCache
from runtime.limits import Limits
from runtime.model.coded_linears import Device, Packer, cuda_version
from runtime.model.config import ModelConfig
from runtime.model.layer_ops import FlashinferLayerOps, LayerOps, TorchLayerOps
from runtime.model.llama import Llama
from runtime.model.rope import Rope
from runtime.request import Request
from tests.coded_checkpoints import FORMATS
from tests.cuda_engine import CudaEngine
from tests.fakes import Engine, request
from tests.model.test_coded_linears import BIAS, KERNELS, X, layers, product
from tests.runtime.attention_batches import Slots
from tests.runtime.test_cpu_device import requests, weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
CONFIG = ModelConfig("LlamaForCausalLM", 512, 256, 256, 2, 4, 2, 64, 512, 1e-5, 1e4)
LIMITS = Limits(256, 16, 256, 8, 128, depth=1)
NEAR = 0.15  # of logits whose best is some units, in bfloat16


def backend(config: ModelConfig = CONFIG) -> Backend:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what flashinfer imports
        found, words = choose(config)
    if not found.fused:
        pytest.skip(words)
    return found


class Table(DeviceTable):
    """With its reader, in one process; `pinned`: a copy on the host is read."""

    pinned = False

    def __init__(self, shape: Shape) -> None:
        cuda = Cudart()
        super().__init__(cuda, shape, TokenTable(shape) if self.pinned else None)
        self.reader = self.host or DeviceReader.open(cuda, self.export(0), 0)

    def close(self) -> None:
        if isinstance(self.reader, DeviceReader):
            self.reader.close()
        super().close()

    def read(self, step: int, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        ids: NDArray[np.int32] = self.reader.read(step, rows)[0][:, 0]
        return ids


class PinnedTable(Table):
    pinned = True


class GpuEngine(CudaEngine):
    """In bfloat16 by flashinfer, with graphs."""

    config, dtype = CONFIG, torch.bfloat16
    kind: type[Table] = Table

    def accelerator(self) -> Accelerator:
        self.backend = backend()
        return CudaAccelerator(0)

    def ops(self) -> LayerOps:  # type: ignore[override]
        return FlashinferLayerOps()

    def filters(self) -> Filters:
        return FlashinferFilters("cuda")

    def table(self, shape: Shape) -> Any:
        return self.kind(shape)


class EagerGpuEngine(GpuEngine):
    sizes = staticmethod(lambda most: [])


class PinnedGpuEngine(GpuEngine):
    kind = PinnedTable


class TorchGpuEngine(CudaEngine):
    """In float32 with gathered pages."""

    config = CONFIG
    sizes = staticmethod(lambda most: [])

    def accelerator(self) -> Accelerator:
        return CudaAccelerator(0)

    def table(self, shape: Shape) -> Any:
        return Table(shape)


def run(kind: type[Engine], limits: Limits, asked: list[Request], spread: bool = False) -> Engine:
    engine = kind(limits)
    engine.serve(asked, spread)
    return engine


def shortfalls(engine: Engine, asked: list[Request]) -> list[float]:
    """By how much each greedy token's logit falls short of the best."""
    found: list[float] = []
    model = Llama(CONFIG, weights(CONFIG), 512)
    for one in asked:
        ids = np.concatenate((one.prompt_ids, engine.answers[one.id].ids)).astype(np.int32)
        slots = Slots(1, 32, 16)
        batch = slots.step([], [(0, len(ids))], [(0, 0)])
        cache = KVCache(CONFIG.num_layers, slots.num_pages, 16, CONFIG.num_kv_heads, CONFIG.head_dim, torch.float32)
        places = torch.from_numpy(batch.positions.astype(np.int64))
        with torch.inference_mode():
            hidden = model.forward(
                torch.from_numpy(ids.astype(np.int64)), places, places + 1, CpuAttention(batch, cache, None)
            )
            logits = model.logits(hidden)[len(one.prompt_ids) - 1 : -1]
        drawn = torch.from_numpy(ids[len(one.prompt_ids) :].astype(np.int64))[:, None]
        found += (logits.amax(-1) - logits.gather(-1, drawn)[:, 0]).tolist()
    return found


def greedy() -> list[Request]:
    return [replace(one, sampling=replace(one.sampling, temperature=0.0)) for one in requests()]


@pytest.mark.parametrize("kind", [GpuEngine, EagerGpuEngine, PinnedGpuEngine, TorchGpuEngine])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("spread", [False, True])
def test_greedy_tokens_are_the_best(kind: type[Engine], depth: int, spread: bool) -> None:
    asked = greedy()
    engine = run(kind, replace(LIMITS, depth=depth, num_blocks=40 if spread else 256), asked, spread)
    short = shortfalls(engine, asked)
    print(f"{len(short)} tokens, {sum(one > 0 for one in short)} not the best, by {max(short):.3f} at most")
    assert max(short) < (1e-3 if kind is TorchGpuEngine else NEAR)


def test_float32_gives_the_same_at_every_depth() -> None:
    """Draws, penalties and masks among them."""
    asked = [
        *requests()[:8],
        request(30, [1, 2, 3], 12, presence_penalty=1.2, repetition_penalty=1.3),
        request(31, [1, 2, 3], 12, bad_words=((5,), (7, 9)), logit_bias=((4, 3.0),)),
        request(32, [4, 5], 12, constrained=True, temperature=0.8, seed=4),
        request(33, [4, 5], 12, logprobs=2, prompt_logprobs=1, min_p=0.1, temperature=0.7, seed=5),
    ]
    answers = [run(TorchGpuEngine, replace(LIMITS, depth=depth), asked).answers for depth in (0, 1, 2)]
    for other in answers[1:]:
        assert {n: (one.ids, one.finish) for n, one in other.items()} == {
            n: (one.ids, one.finish) for n, one in answers[0].items()
        }


@pytest.mark.parametrize(
    ("dtype", "page_size", "window", "heads", "kv_heads", "dim"),  # each is kernels to be built
    [
        (torch.bfloat16, 16, None, 4, 2, 64),
        (torch.bfloat16, 16, None, 8, 2, 128),
        (torch.bfloat16, 1, 40, 14, 2, 128),
        (torch.float8_e4m3fn, 16, None, 8, 2, 128),
    ],
    ids=str,
)
def test_flashinfer_attends_as_float64_does(
    dtype: torch.dtype, page_size: int, window: int | None, heads: int, kv_heads: int, dim: int
) -> None:
    """A prefill, a step of both kinds, decode steps eager and padded in a graph's memory."""
    config = replace(CONFIG, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, sliding_window=window)
    gpu, kind = CudaAccelerator(0), torch.bfloat16 if dtype.itemsize == 1 else dtype
    slots = Slots(6, 160 // page_size, page_size)
    shape = config.num_layers, slots.num_pages, page_size, kv_heads, dim
    exact = KVCache(*shape, torch.float64)
    with gpu.launching():
        cache = KVCache(*shape, dtype, gpu.device)
        paged = PagedAttention(config, cache, gpu, backend(config), kind, Sizes(8, 160 // page_size, 2))
        staging, graph = Staging(gpu, 2, 1 << 16), paged.graph(8)
    steps = [
        slots.step([], [(0, 100), (1, 17)], [(0, 0), (1, 0)]),
        slots.step([0, 1], [(2, 33)], [(2, 0)]),
        slots.step([0, 1, 2]),
        slots.step([2, 1, 0]),
    ]
    for number, batch in enumerate(steps):
        padding = 5 if number == 3 else 0
        tokens = len(batch.kv_cells)
        whole = torch.randn(tokens + padding, heads + 2 * kv_heads, dim).to(kind)
        parts = whole.split([heads, kv_heads, kv_heads], 1)
        staging.begin()
        with gpu.launching(), torch.inference_mode():
            if padding:
                graph.plan(batch, staging.put)
            attention: Any = graph if padding else paged.plan(batch, staging.put)
            mine = [attention(layer, *(part.to(gpu.device) for part in parts)) for layer in range(config.num_layers)]
            staging.end()
        torch.cuda.synchronize()
        stored = [part[:tokens].to(dtype).double() for part in parts[1:]]
        dense = CpuAttention(batch, exact, window)
        for layer, answer in enumerate(mine):
            wanted = dense(layer, parts[0][:tokens].double(), *stored)
            assert torch.allclose(answer[:tokens].cpu().double(), wanted, atol=2e-2, rtol=2e-2)


def test_fused_layers_are_torchs() -> None:
    backend()
    fused, plain, eps = FlashinferLayerOps(), TorchLayerOps(), 1e-5

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def near(one: torch.Tensor, other: torch.Tensor) -> bool:
        return torch.allclose(one.float(), other.float(), atol=3e-2, rtol=2e-2)

    weight, x = random(256), random(7, 256)
    assert near(fused.norm(x, weight, eps), plain.norm(x, weight, eps))
    heads = random(7, 6, 64)
    assert near(fused.norm(heads[:, :4], weight[:64], eps), plain.norm(heads[:, :4], weight[:64], eps))
    residuals = [random(7, 256)] * 2
    residuals = [one.clone() for one in residuals]
    normed = [ops.add_norm(x.clone(), one, weight, eps) for ops, one in zip((fused, plain), residuals, strict=True)]
    assert near(*normed) and near(*residuals)
    both = random(7, 512)
    assert near(fused.gate(both), plain.gate(both))
    rope, positions = Rope(CONFIG, 512, "cuda"), torch.arange(0, 490, 70, device="cuda")
    turned = [
        ops.turn(rope, positions, positions + 1, torch.bfloat16)(heads[:, :4].clone(), heads[:, 4:].clone())
        for ops in (fused, plain)
    ]
    assert all(near(one, other) for one, other in zip(*turned, strict=True))


def test_filters_cut_where_torch_does() -> None:
    backend()
    logits = torch.randn(16, 4000, device="cuda") * 3
    weights_ = (logits - logits.amax(-1, keepdim=True)).exp()
    top_k = torch.tensor([1, 5, 50, 4000] * 4, device="cuda")
    top_p = torch.tensor([0.1, 0.5, 0.9, 1.0], device="cuda", dtype=torch.float64).repeat_interleave(4)
    for k, p in ((top_k, None), (None, top_p), (top_k, top_p)):
        mine, reference = (
            filters.cut(logits, weights_.clone(), k, p, 4000) for filters in (FlashinferFilters("cuda"), TorchFilters())
        )
        differ = ((mine > 0) != (reference > 0)).sum(-1)
        assert int(differ.max()) <= 1  # the id at the border, by rounding
        assert torch.equal(mine[(mine > 0) & (reference > 0)], weights_[(mine > 0) & (reference > 0)])


def test_no_step_waits_for_the_device() -> None:
    """While steps of all kinds are launched, torch is told to raise where it would synchronize."""
    engine = GpuEngine(LIMITS)
    for one in requests():
        engine.admit(one)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        while engine.turn():
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.run()
    assert all(len(answer.ids) for answer in engine.answers.values())


@pytest.mark.parametrize(("name", "kind", "inputs"), KERNELS)
def test_codes_are_multiplied_eagerly_and_in_a_graph(
    tmp_path: Path, name: str, kind: type, inputs: dict[str, float] | None
) -> None:
    """By the kernel that this GPU has, or as numbers where it has none."""
    gpu = CudaAccelerator(0)
    with gpu.launching(), torch.inference_mode():
        packer = Packer(Device(gpu.capability, cuda_version(), torch.bfloat16))
        stored, weight = layers(tmp_path, FORMATS[name], "cuda")
        linear, x, out = packer([*stored], BIAS.cuda()), X.cuda(), torch.zeros(300, 512, device="cuda").bfloat16()
        replay = gpu.recorded(lambda: _into(out, linear(x)))
        out.zero_()
        replay()
        eager = [linear(x[:rows]) for rows in (1, 5, 40)]
    gpu.close()
    print(packer.words)
    expected = product(weight, inputs if isinstance(linear, kind) else None)
    torch.testing.assert_close(out.float().cpu(), expected, rtol=0.02, atol=0.03)
    for one in eager:
        torch.testing.assert_close(one.float().cpu(), expected[: len(one)], rtol=0.02, atol=0.03)


def _into(out: torch.Tensor, found: torch.Tensor) -> None:
    out.copy_(found)
