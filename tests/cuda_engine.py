"""`Engine` with the GPU's device, on an accelerator that is the CPU: the same code but for the kernels."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ipc.shared_memory import Shape
from ipc.token_table import TokenTable
from runtime.attention.backend import GATHERED
from runtime.attention.flashinfer import PagedAttention
from runtime.attention.wrappers import Sizes
from runtime.batch import SlotTables
from runtime.device.accelerator import Accelerator
from runtime.device.cuda import CudaDevice
from runtime.device.device_tokens import DeviceTokens
from runtime.device.filters import Filters, TorchFilters
from runtime.device.graphs import graph_sizes, recorded
from runtime.kv_cache import KVCache
from runtime.limits import Limits
from runtime.model.layer_ops import TorchLayerOps
from runtime.model.llama import Llama
from runtime.sampling_on_device import DeviceSampler
from runtime.step import StepPlan, StepResult
from tests.fake_accelerator import FakeAccelerator
from tests.fakes import Engine
from tests.runtime.test_cpu_device import CONFIG, weights

LOST_S = 20


class HostTable:
    """What stands behind the ids: here they are where the scheduler reads them as soon as they are written."""

    def __init__(self, shape: Shape) -> None:
        self.host = TokenTable(shape)
        self.arrays = {name: getattr(self.host, name) for name in shape.fields}
        self.committed: list[int] = []

    def commit(self, step: int, stream: int) -> None:
        self.committed.append(step)

    def wait(self, step: int) -> None:
        assert step in self.committed

    def close(self) -> None: ...

    def read(self, step: int, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        ids: NDArray[np.int32] = self.host.read(step, rows)[0][:, 0]
        return ids


class CudaEngine(Engine):
    """With graphs of all sizes; `EagerEngine` has none."""

    sizes: Callable[[int], list[int]] = staticmethod(graph_sizes)
    config, dtype, backend, ops = CONFIG, torch.float32, GATHERED, TorchLayerOps

    def __init__(self, limits: Limits, seed: int = 0) -> None:
        super().__init__(limits, seed)
        self.gpu = self.accelerator()
        with self.gpu.launching():
            self._build(limits)

    def _build(self, limits: Limits) -> None:
        config, size = self.config, limits.block_size
        table = self.table(Shape(limits.slots, limits.depth + 2, limits.max_num_seqs))
        tokens, steps = DeviceTokens.over(table.arrays, self.gpu.tensor), limits.depth + 1
        tables = SlotTables(limits.slots, -(-limits.max_model_len // size), size)
        held = {name: tensor.to(self.gpu.device, self.dtype) for name, tensor in weights(config).items()}
        model = Llama(config, held, tables.max_len, ops=self.ops())
        shape = config.num_layers, limits.num_blocks, size, config.num_kv_heads, config.head_dim
        cache = KVCache(*shape, self.dtype, self.gpu.device)
        most = Sizes(limits.max_num_seqs, tables.pages.shape[1], steps + 1)
        attention = PagedAttention(config, cache, self.gpu, self.backend, self.dtype, most)
        graphs = recorded(self.sizes(limits.max_num_seqs)[::-1], self.gpu, model, attention, tokens)
        sampler = DeviceSampler(limits.slots, config.vocab_size, str(self.gpu.device), self.filters())
        self.cuda = CudaDevice(self.gpu, model, attention, sampler, tables, tokens, table, self.grammar, graphs, steps)
        self.device, self.tokens = self, table  # type: ignore[assignment]
        self.done: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        self.out = 0  # steps launched whose results have not been taken

    def accelerator(self) -> Accelerator:
        return FakeAccelerator()

    def table(self, shape: Shape) -> Any:
        return HostTable(shape)

    def filters(self) -> Filters:
        return TorchFilters()

    def launch(self, plan: StepPlan, done: object) -> None:
        self.out += 1
        self.cuda.launch(plan, self.done.put)

    def turn(self) -> bool:
        """As before, but a result is there once the device has told of it; waited for where there is nothing else."""
        while not self.done.empty():
            self._take()
        if super().turn():
            return True
        if self.out:
            self._take()
        return bool(self.results)

    def run(self) -> None:
        super().run()
        self.cuda.close()
        assert self.cuda.failed is None

    def _take(self) -> None:
        try:
            self.results.append(self.done.get(timeout=LOST_S))
        except queue.Empty:
            raise AssertionError("a step was launched and never reported") from self.cuda.failed
        self.out -= 1


class EagerEngine(CudaEngine):
    sizes = staticmethod(lambda most: [])
