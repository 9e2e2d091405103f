"""A GPU as a worker's device, built from the settings: what is loaded, how its memory is divided, what is recorded."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ipc.cuda_runtime import Cudart, CudaRuntime
from ipc.device_table import DeviceTable
from ipc.token_table import TokenTable
from proc.devices import Built, model_len, named_processors, progress, rank_weights, slot_tables
from proc.halves import Halves
from proc.settings import Settings, UsageError
from proc.shapes import num_slots
from runtime.attention.backend import GATHERED, Backend, choose
from runtime.attention.flashinfer import PagedAttention
from runtime.attention.wrappers import Sizes, workspace_bytes
from runtime.collective import Alone, Collective, Together
from runtime.device.accelerator import Accelerator, CudaAccelerator
from runtime.device.base import DeviceInfo
from runtime.device.budget import Budget, graphs_bytes
from runtime.device.cuda import CudaDevice
from runtime.device.device_tokens import DeviceTokens
from runtime.device.filters import FlashinferFilters, TorchFilters
from runtime.device.graphs import graph_sizes, recorded
from runtime.device.histories import bytes_per_history
from runtime.device.warm_up import largest_step, warm_up
from runtime.kv_cache import KVCache, bytes_per_block
from runtime.model.coded_linears import Device, Packer, cuda_version
from runtime.model.config import read_config
from runtime.model.layer_ops import FlashinferLayerOps, TorchLayerOps
from runtime.model.linears import dtype_of
from runtime.model.llama import Llama
from runtime.model.sharding import Rank, config_of
from runtime.sampling_on_device import DeviceSampler
from runtime.slot_sampling import SlotSampling

Tensor = torch.Tensor
SHARE = 0.9  # of all memory, for this server
COLLECTIVE = "nccl"
log = logging.getLogger(__name__)


def machine(index: int) -> tuple[Accelerator, CudaRuntime]:
    """The GPU of a server's worker `index`. Raises `UsageError` where there is none."""
    if not torch.cuda.is_available():
        made_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
        raise UsageError(f"--device cuda: torch is built for {made_for} and sees no GPU; --device cpu needs none")
    if index >= torch.cuda.device_count():
        raise UsageError(f"--procs: worker {index} has no GPU, torch sees {torch.cuda.device_count()}")
    return CudaAccelerator(index), Cudart()


def build(
    settings: Settings, folder: Path, table: TokenTable, halves: Halves, rank: Rank, index: int, meeting: str
) -> Built:
    """The device of worker `index`. Raises `UsageError` or `ConfigError` with one clear line."""
    if settings.quantization != "none":
        raise UsageError(f"--quantization {settings.quantization} is for the CPU; add --device cpu")
    gpu, cuda = machine(index)
    ranks = Together(rank, meeting, COLLECTIVE, gpu.device) if rank.size > 1 else Alone()
    with gpu.launching(), torch.inference_mode():
        try:
            return _Building(settings, folder, gpu, ranks).built(table, cuda, halves)
        except torch.OutOfMemoryError as error:
            words = str(error).splitlines()[0]
            raise UsageError(f"{words}; lower --gpu-memory-utilization or --max-num-batched-tokens") from None


class _Building:
    """What is known of a device while it is built, in the order in which it becomes known."""

    def __init__(self, settings: Settings, folder: Path, gpu: Accelerator, ranks: Collective) -> None:
        self.settings, self.gpu, self.ranks = settings, gpu, ranks
        self.config = read_config(folder)
        self.held = config_of(self.config, ranks.rank)
        weights = rank_weights(settings, folder, self.config, ranks.rank, gpu.device, torch.bfloat16)
        self.dtype = dtype_of(weights)
        self.backend, self.words = self.chosen()
        fused = self.backend.fused
        packer = Packer(Device(gpu.capability, cuda_version(), self.dtype))
        ops = FlashinferLayerOps() if fused else TorchLayerOps()
        self.model = Llama(self.held, weights, self.longest, ranks, ops, packer)
        self.words += f"; {packer.words}" if packer.words else ""
        filters = FlashinferFilters(str(gpu.device)) if fused else TorchFilters()
        found = named_processors(settings.processors, ranks)
        self.sampler = DeviceSampler(num_slots(settings), self.config.vocab_size, str(gpu.device), filters, found)
        self.sizes = graph_sizes(settings.max_num_seqs) if fused and not settings.enforce_eager else []

    def chosen(self) -> tuple[Backend, str]:
        """The kernels of attention, and a sentence about them. Raises `UsageError` for ones that are missing."""
        asked = self.settings.attention_backend
        if asked == "torch":
            return GATHERED, "attention gathers pages in torch, as asked for, without CUDA graphs"
        backend, words = choose(self.held)
        if asked == "flashinfer" and not backend.fused:
            raise UsageError(f"--attention-backend flashinfer: {words}")
        if backend.fused and self.dtype == torch.float32:
            if asked == "flashinfer":
                raise UsageError("--attention-backend flashinfer is for --dtype bfloat16 or float16")
            return GATHERED, "attention gathers pages in torch: flashinfer has no float32"
        return backend, words

    @property
    def longest(self) -> int:
        """Tokens of a request, if there are pages for them."""
        return min(self.settings.max_model_len or self.config.max_model_len, self.config.max_model_len)

    def most(self, longest: int) -> Sizes:
        """What attention must hold for requests of `longest` tokens."""
        settings = self.settings
        return Sizes(settings.max_num_seqs, -(-longest // settings.block_size), settings.depth + 2)

    @property
    def kv_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.settings.kv_cache_dtype == "fp8" else self.dtype

    def built(self, table: TokenTable, cuda: CudaRuntime, halves: Halves) -> Built:
        settings, held, gpu = self.settings, self.held, self.gpu
        page = bytes_per_block(held.num_layers, settings.block_size, held.num_kv_heads, held.head_dim, self.kv_dtype)
        blocks = self.ranks.least(settings.num_blocks or self.pages_that_fit(page))
        longest = model_len(settings, self.config.max_model_len, blocks)
        shape = held.num_layers, blocks, settings.block_size, held.num_kv_heads, held.head_dim
        tables = slot_tables(settings, longest)
        cache = KVCache(*shape, self.kv_dtype, gpu.device)
        attention = PagedAttention(held, cache, gpu, self.backend, self.dtype, self.most(longest))
        warm_up(self.model, attention, self._put)
        pinned = settings.token_table == "pinned"
        ids = DeviceTable(cuda, table.shape, table if pinned else None)
        tokens = DeviceTokens.over(ids.arrays, gpu.tensor)
        masks = halves.open(self.config.vocab_size)
        graphs = recorded(progress(self.sizes[::-1], "Capturing CUDA graphs"), gpu, self.model, attention, tokens)
        device = CudaDevice(
            gpu, self.model, attention, self.sampler, tables, tokens, ids, masks, graphs, settings.depth + 1
        )
        words = f"{gpu.device}, {str(self.dtype).removeprefix('torch.')}, {self.words}"
        shared = self.config.shares_prefixes
        info = DeviceInfo(
            blocks, longest, self.config.vocab_size, self.model.nbytes, blocks * page, shared, words, not pinned
        )
        return Built(device, info, None if pinned else ids.export(tables.epoch))

    def pages_that_fit(self, page: int) -> int:
        """KV pages in what the largest step leaves free, at most what the rows of a step could ever fill."""
        settings, longest = self.settings, self.longest
        peak = self.gpu.peak_bytes(self.largest_step)  # it loads kernels, which take memory too
        free, total = self.gpu.memory()
        histories = num_slots(settings) * bytes_per_history(self.config.vocab_size) * 3 // 2  # while they grow
        budget = Budget(
            total,
            free,
            self.model.nbytes,
            peak,
            graphs_bytes(self.sizes, self.held.hidden_size, self.dtype.itemsize),
            workspace_bytes(self.held, self.backend, self.most(longest)),
            histories,
            settings.gpu_memory_utilization or SHARE,
        )
        log.info("memory\n%s", budget)
        try:
            return budget.blocks(page, 1 + settings.max_num_seqs * -(-longest // settings.block_size))
        except MemoryError as error:
            raise UsageError(str(error)) from None

    def largest_step(self) -> None:
        """As many tokens and rows as a step may have, all of which draw by top_p; without pages."""
        put, rows = self._put, self.settings.max_num_seqs
        hidden = largest_step(self.model, self.settings.max_num_batched_tokens, put)
        slots = SlotSampling(rows)
        slots.temperature[:], slots.top_p[:] = 1.0, 0.9
        how = slots.batch(np.arange(rows, dtype=np.int32), np.ones(rows, np.int64))
        self.sampler.draw(self.model.logits(hidden[:rows]), self.sampler.prepare(how, put), None, put)

    def _put(self, array: Any, into: Tensor | None = None) -> Tensor:
        return torch.from_numpy(array).to(self.gpu.device) if into is None else into.copy_(torch.from_numpy(array))
