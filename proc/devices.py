"""A worker's device built from the settings: how long a request may be, how many KV pages fit, what is loaded.

torch is imported only for a device that computes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ipc.internal import TableExport
from ipc.token_table import TokenTable
from proc.cores import share, spread
from proc.halves import Halves
from proc.role import ProcessSpec
from proc.settings import Settings, UsageError
from proc.shapes import num_slots
from runtime.batch import SlotTables
from runtime.device.base import Device, DeviceInfo
from runtime.device.launch import launch_work
from runtime.device.roofline import roofline
from runtime.device.sim import HashModel, SimDevice
from runtime.device.timed import TimedSimDevice
from runtime.model.sharding import Rank

if TYPE_CHECKING:
    import torch

    from runtime.collective import Collective
    from runtime.device.cpu import CpuModel
    from runtime.model.config import ModelConfig
    from runtime.sampling_ops import SamplingOps

SIM_BLOCKS, SIM_MODEL_LEN = 8192, 4096
T = TypeVar("T")
CPU_SHARE = 0.3  # of the free memory, for KV


@dataclass(frozen=True)
class Built:
    device: Device
    info: DeviceInfo
    export: TableExport | None = None  # where the ids are, if on the device


def build(spec: ProcessSpec, table: TokenTable, halves: Halves, rank: Rank, index: int, meeting: str) -> Built:
    """The device of worker `index`; `meeting` is the file through which the ranks of a replica find one another.

    Raises `UsageError` or `runtime.model.config.ConfigError` with one clear line.
    """
    settings, folder = spec.settings, Path(spec.folder)
    on_gpu = not settings.simulated and (settings.device == "cuda" or (settings.device == "auto" and _sees_gpu()))
    if on_gpu:
        from proc.gpu import build as on_device

        return on_device(settings, folder, table, halves, rank, index, meeting)
    if settings.for_gpus:
        here = "a simulated device" if settings.simulated else "the CPU"
        raise UsageError(f"{settings.for_gpus[0]} is for GPUs, and this is {here}")
    if settings.simulated:
        return _sim(settings, folder if spec.folder else None, table, halves)
    return _cpu(spec, table, halves, rank, index, meeting)


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def model_len(settings: Settings, longest: int, num_blocks: int) -> int:
    """Tokens a request may have: what was asked for, or what the model and the pages allow."""
    room = (num_blocks - 1) * settings.block_size
    asked = settings.max_model_len
    if asked is None:
        return min(longest, room)
    if asked > longest:
        raise UsageError(f"--max-model-len {asked}: the model was made for {longest} tokens")
    if asked > room:
        raise UsageError(
            f"--max-model-len {asked} does not fit the KV cache of {room} tokens; lower it, or raise "
            "--gpu-memory-utilization or --num-blocks"
        )
    return asked


def slot_tables(settings: Settings, longest: int) -> SlotTables:
    return SlotTables(num_slots(settings), -(-longest // settings.block_size), settings.block_size)


def _sim(settings: Settings, folder: Path | None, table: TokenTable, halves: Halves) -> Built:
    """Without a model folder the vocabulary is bytes; with a timing, memory and context are those of what it names."""
    from runtime.tokenizer import ByteTokenizer

    config = json.loads((folder / "config.json").read_text()) if folder else {}
    vocab = config.get("vocab_size", ByteTokenizer.vocab_size)
    timing = roofline(settings.timing) if settings.timing else None
    blocks = settings.num_blocks or (timing.kv_tokens // settings.block_size if timing else SIM_BLOCKS)
    made_for = timing.model.max_model_len if timing else config.get("max_position_embeddings", SIM_MODEL_LEN)
    longest = model_len(settings, made_for, blocks)
    model = HashModel(slot_tables(settings, longest), table, blocks, vocab)
    if timing is None:
        info = DeviceInfo(blocks, longest, vocab, 0, 0, True, "simulated device, untimed")
        return Built(SimDevice(model, halves.open(vocab)), info)
    launch_ms = timing.model.launch_ms if settings.sim_launch_ms is None else settings.sim_launch_ms
    work = launch_work(settings.sim_launch_work, launch_ms)
    words = f"simulated {timing.name}, {launch_ms:g} ms of {settings.sim_launch_work} work per launch"
    kv_bytes = int(blocks * settings.block_size * timing.model.kv_bytes_per_token)
    info = DeviceInfo(blocks, longest, vocab, timing.weight_bytes, kv_bytes, True, words)
    return Built(TimedSimDevice(model, halves.open(vocab), timing, work), info)


def _cpu(spec: ProcessSpec, table: TokenTable, halves: Halves, rank: Rank, index: int, meeting: str) -> Built:
    import torch

    from runtime.device.cpu import CpuDevice
    from runtime.kernels.library import compute_threads
    from runtime.kv_cache import bytes_per_block
    from runtime.model.config import read_config
    from runtime.model.sharding import config_of

    settings, folder, workers = spec.settings, Path(spec.folder), spec.num_workers
    torch.set_num_threads(share(torch.get_num_threads(), workers))
    config = read_config(folder)
    held = config_of(config, rank)
    ranks = _join(rank, meeting)
    model, path = _model(
        settings.quantization,
        held,
        rank_weights(settings, folder, config, rank, torch.device("cpu"), torch.float32),
        ranks,
    )
    # the weights are there before the memory that is left is counted
    block = bytes_per_block(held.num_layers, settings.block_size, held.num_kv_heads, held.head_dim, model.dtype)
    blocks = ranks.least(settings.num_blocks or _blocks_that_fit(settings, block, config.max_model_len, workers))
    longest = model_len(settings, config.max_model_len, blocks)
    masks, processors = halves.open(config.vocab_size), named_processors(settings.processors, ranks)
    device = CpuDevice(model, _sampling_ops(), slot_tables(settings, longest), table, masks, blocks, processors)
    threads = torch.get_num_threads()
    placed = spread(compute_threads(threads), index, workers)
    many = ("1 thread", "on a core of its own") if threads == 1 else (f"{threads} threads", "a core each")
    words = ", ".join(("cpu", str(model.dtype).removeprefix("torch."), *many[: 1 + placed], path))
    shared = config.shares_prefixes
    return Built(device, DeviceInfo(blocks, longest, config.vocab_size, model.nbytes, blocks * block, shared, words))


def _join(rank: Rank, meeting: str) -> Collective:
    from runtime.collective import Alone, Together

    return Together(rank, meeting) if rank.size > 1 else Alone()


def rank_weights(
    settings: Settings, folder: Path, config: ModelConfig, rank: Rank, device: torch.device, made: torch.dtype
) -> dict[str, Any]:
    """A rank's part, on `device`; dummy weights are of the type `made` unless the settings name one."""
    import torch

    from runtime.model.weights import dummy_weights, load_codes, load_weights

    dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    if config.coding:
        _accept_coded(settings, config.coding.name)
        dtype = dtype or torch.bfloat16  # what kernels for codes take, and what is left to them
    codes: dict[str, Any] = load_codes(folder, config) if settings.quantization == "gguf" else {}
    if settings.load_format == "dummy":
        return dummy_weights(config, dtype or made, settings.seed or 0, rank, device)
    bar = list if rank.index else shards
    return codes | load_weights(folder, config, dtype, bar, [*codes], rank, device)


def _accept_coded(settings: Settings, coding: str) -> None:
    """Raises `UsageError` for what a checkpoint that is coded already excludes."""
    if settings.quantization != "none":
        raise UsageError(f"--quantization {settings.quantization}: the checkpoint is quantized already, by {coding}")
    if settings.load_format == "dummy":
        raise UsageError(f"--load-format dummy makes no weights quantized by {coding}")


def _model(quantization: str, config: ModelConfig, weights: dict[str, Any], ranks: Collective) -> tuple[CpuModel, str]:
    """On the C kernels where there are some for it, else in torch; and which path that is."""
    from runtime.kernels.library import kernels
    from runtime.kernels.pack import Unsupported
    from runtime.model.on_torch import TorchModel
    from runtime.model.packed import PackedLlama

    was = f", {config.coding.name} as numbers" if config.coding else ""
    if ranks.rank.size > 1:  # a step of the kernels is one call, in which ranks could not meet
        return TorchModel(config, weights, ranks), f"plain torch, rank {ranks.rank.index} of {ranks.rank.size}{was}"
    reason = ""
    try:
        found = kernels()
        if found is not None:
            packed = PackedLlama(config, weights, found, {"int8": 8, "int4": 4}.get(quantization, 0))
            codes = "gguf" if quantization == "gguf" else packed.words
            return packed, f"{found.name} kernels{f', {codes}' if codes else ''}"
    except Unsupported as error:
        reason = f" (no kernels for {error})"
    except ValueError as error:
        raise UsageError(str(error)) from None
    if quantization != "none":
        reason = reason or ", which are not built here or switched off by SIDESTEP_KERNELS"
        raise UsageError(f"--quantization {quantization} needs the C kernels{reason}")
    return TorchModel(config, weights), f"plain torch{reason}{was}"


def _sampling_ops() -> SamplingOps:
    import torch

    from runtime.kernels.library import kernels
    from runtime.kernels.sampling import KernelOps
    from runtime.sampling_on_torch import TorchOps

    found = kernels()
    return TorchOps() if found is None else KernelOps(found, torch.get_num_threads())


def named_processors(named: dict[str, str], ranks: Collective) -> dict[str, Any]:
    """The callables of --logits-processors. Raises `UsageError` for one that cannot be had."""
    from runtime.logits import of_first_rank

    found = {}
    for name, place in named.items():
        module, _, function = place.partition(":")
        try:
            processor = getattr(import_module(module), function)
            found[name] = processor if ranks.rank.size == 1 else of_first_rank(processor, ranks)
        except (ImportError, AttributeError, ValueError) as error:
            raise UsageError(f"--logits-processors {name}={place}: {error}") from None
    return found


def shards(files: list[Path]) -> Iterable[Path]:
    return progress(files, "Loading safetensors checkpoint shards")


def progress(things: list[T], words: str) -> Iterable[T]:
    """A bar where people watch, nothing elsewhere."""
    from tqdm import tqdm

    return tqdm(things, desc=words, disable=None)


def _blocks_that_fit(settings: Settings, block_bytes: int, longest: int, workers: int) -> int:
    """Pages in a worker's part of the share of the free memory, at most what the rows of a step could ever fill."""
    available = _available_memory()
    part = settings.gpu_memory_utilization or CPU_SHARE
    blocks = int(available * part) // workers // block_bytes
    if blocks < 2:
        raise UsageError(
            f"no memory for the KV cache: {available >> 20} MiB are free, a page takes {block_bytes >> 10} KiB; "
            "raise --gpu-memory-utilization"
        )
    pages = -(-(settings.max_model_len or longest) // settings.block_size)
    return min(blocks, 1 + settings.max_num_seqs * pages)


def _available_memory() -> int:
    """Bytes, from /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise UsageError("/proc/meminfo names no available memory; give --num-blocks")
