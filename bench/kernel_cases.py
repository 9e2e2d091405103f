"""What `sidestep bench kernels` measures: each kernel beside its torch reference, and the work that neither can avoid.

Keys and weights are those of all layers wherever a step would read them from memory, so that no cache flatters.
"""

from __future__ import annotations

from ctypes import Structure, byref
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch.nn.functional import linear

from bench.machine import Run, Work, room, seconds
from runtime.attention.cpu import CpuAttention
from runtime.batch import Batch, SlotTables
from runtime.device.cpu import CpuModel
from runtime.kernels.library import PART, Kernels, Step
from runtime.kv_cache import KVCache
from runtime.model.config import ModelConfig
from runtime.model.layer_ops import TorchLayerOps
from runtime.model.on_torch import TorchModel
from runtime.model.packed import PackedLlama
from runtime.sampling import Sampling
from runtime.step import ID_DTYPE, SLOT_DTYPE, SlotAdmission, StepPlan

Tensor = torch.Tensor
BLOCK = 16  # tokens of a page
PROBE = 16  # rows by which torch's faster type is found


@dataclass(frozen=True)
class Case:
    """`torch` runs in `torch_dtype`, which need not be the kernel's."""

    name: str
    kernel: Run
    torch: Run
    torch_dtype: str
    work: Work


class Subject:
    """A model in one type: packed, in torch, and the keys and values of `tokens` tokens, which both use."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        kernels: Kernels,
        tokens: int,
        wider: Subject | None = None,
    ) -> None:
        self.config, self.kernels, self.weights = config, kernels, weights
        self.packed, self.torch = PackedLlama(config, dict(weights), kernels), TorchModel(config, dict(weights))
        self.dtype, self.threads = self.packed.dtype, self.packed.threads
        self.choices, self.references = [self, wider] if wider else [self], dict[int, Subject]()
        self.cache = _filled(config, tokens, self.dtype)
        for model in (self.packed, self.torch):
            model.attach(self.cache, tokens)

    def reference(self, rows: int) -> Subject:
        """In whose type torch runs the linear layers faster, this one's or the wider: its bfloat16 can be slow."""
        rows = min(rows, PROBE)
        if rows not in self.references:
            runs = [torch_linears(one, rows) for one in self.choices]
            times = [min(seconds(run) for _ in range(3)) for run in runs]
            self.references[rows] = self.choices[times.index(min(times))]
        return self.references[rows]

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @cached_property
    def matrices(self) -> list[Tensor]:
        return [weight for name, weight in self.weights.items() if name.endswith("proj.weight")]

    @property
    def layers(self) -> list[Structure]:
        """The packed linear layers, head left out."""
        return [getattr(layer, part) for layer in self.packed.layers for part in ("qkv", "out", "gate_up", "down")]

    def linear_work(self, rows: int, sampled: int = 0) -> Work:
        """All linear layers once for `rows` tokens, and the head for `sampled` of them."""
        head = self.config.vocab_size * self.config.hidden_size
        count = sum(weight.numel() for weight in self.matrices)
        read = count + (head if sampled else 0)
        return Work(read * self.dtype.itemsize, 2.0 * (count * rows + head * sampled))

    def attention_work(self, batch: Batch, layers: int) -> Work:
        """Each key and value that is seen at all is read once; two products for each pair that is seen."""
        config, window = self.config, self.config.sliding_window or 2**30
        keys = np.minimum(batch.seq_lens, window + batch.query_lens).sum()
        pairs = np.minimum(batch.positions.astype(np.int64) + 1, window).sum()
        size = 2 * config.num_kv_heads * config.head_dim * self.dtype.itemsize
        return Work(float(layers * keys * size), float(layers * pairs * 4 * config.num_heads * config.head_dim))


def linear_case(subject: Subject, rows: int) -> Case:
    """Every layer of a step, one call for each matrix."""
    kernels, threads, layers, reference = subject.kernels, subject.threads, subject.layers, subject.reference(rows)
    inputs = {layer.k: torch.randn(rows, layer.k) for layer in layers}
    out = torch.empty(rows, max(layer.n for layer in layers))
    memory = room(max(kernels.linear_size(byref(layer), rows, threads) for layer in layers))

    def run() -> None:
        for layer in layers:
            where = (inputs[layer.k].data_ptr(), rows, out.data_ptr(), memory.data_ptr())
            kernels.linear(byref(layer), *where, threads)

    theirs = torch_linears(reference, rows)
    return Case(f"linear {subject.name}, rows={rows}", run, theirs, reference.name, subject.linear_work(rows))


def torch_linears(subject: Subject, rows: int) -> Run:
    matrices = subject.matrices
    inputs = {k: torch.randn(rows, k).to(subject.dtype) for k in {matrix.shape[1] for matrix in matrices}}
    return lambda: [linear(inputs[matrix.shape[1]], matrix) for matrix in matrices]


def decode_attention_case(subject: Subject, rows: int, keys: int) -> Case:
    """Every layer of a step."""
    name = f"decode attention, rows={rows}, keys={keys}"
    return _attention_case(name, subject, batch_of(rows, keys), subject.config.num_layers)


def chunk_attention_case(subject: Subject, tokens: int) -> Case:
    """One layer."""
    return _attention_case(f"prefill attention, layers=1, tokens={tokens}", subject, batch_of(1, tokens, chunk=True), 1)


def _attention_case(name: str, subject: Subject, batch: Batch, layers: int) -> Case:
    """The reference writes the step's keys and values too."""
    reference, work = subject.reference(len(batch.input_ids)), subject.attention_work(batch, layers)
    return Case(name, _attend(subject, batch, layers), _attend_torch(reference, batch, layers), reference.name, work)


def rms_norm_case(subject: Subject, rows: int) -> Case:
    """Far more rows than a step has: fewer stay in the cache, which has no floor here. float32, as activations are."""
    size, eps = subject.config.hidden_size, subject.config.rms_norm_eps
    x, weight = torch.randn(rows, size), torch.ones(size)
    out = torch.empty(rows, size)

    def run() -> None:
        where = (x.data_ptr(), weight.data_ptr(), eps, rows, size, out.data_ptr(), subject.threads)
        subject.kernels.rms_norm(*where)

    work = Work(2.0 * x.nbytes, 4.0 * x.numel())
    return Case(f"rms_norm, rows={rows}", run, lambda: TorchLayerOps().norm(x, weight, eps), "float32", work)


def decode_step_case(subject: Subject, rows: int, keys: int) -> Case:
    """A whole step with its logits. The floor is that of the linear layers; attention comes on top."""
    return _step_case(f"decode step, rows={rows}", subject, batch_of(rows, keys), subject.linear_work(rows, rows))


def prefill_case(subject: Subject, tokens: int) -> Case:
    """A whole prompt with the logits of its last token. The floor is arithmetic, attention's included."""
    batch = batch_of(1, tokens, chunk=True)
    attention = subject.attention_work(batch, subject.config.num_layers)
    work = Work(0.0, subject.linear_work(tokens, 1).flops + attention.flops)
    return _step_case(f"prefill, tokens={tokens}", subject, batch, work)


def _step_case(name: str, subject: Subject, batch: Batch, work: Work) -> Case:
    reference, last = subject.reference(len(batch.input_ids)), torch.from_numpy(batch.last_tokens)

    def step(model: CpuModel) -> Run:
        return lambda: model.logits(model.forward(batch, batch.input_ids)[last])

    return Case(name, step(subject.packed), step(reference.torch), reference.name, work)


def batch_of(rows: int, length: int, chunk: bool = False) -> Batch:
    """A step of `rows` rows of `length` tokens, on shuffled pages: all of them are computed, or the last one."""
    pages = -(-length // BLOCK)
    table = np.random.default_rng(rows).permutation(rows * pages).astype(ID_DTYPE).reshape(rows, pages)
    start = 0 if chunk else length - 1
    admitted = [SlotAdmission(row, start, length, table[row].tobytes(), Sampling()) for row in range(rows)]
    slots = np.arange(rows, dtype=SLOT_DTYPE).tobytes()
    if not chunk:
        return SlotTables(rows, pages, BLOCK).apply(StepPlan(0, 0, slots, admitted=admitted))
    lens, samples = np.full(rows, length, ID_DTYPE).tobytes(), np.ones(rows, np.uint8).tobytes()
    ids = np.zeros(rows * length, ID_DTYPE).tobytes()
    return SlotTables(rows, pages, BLOCK).apply(StepPlan(0, 0, b"", slots, lens, samples, ids, admitted=admitted))


def _filled(config: ModelConfig, tokens: int, dtype: torch.dtype) -> KVCache:
    """Random keys and values in every layer: memory that was never written would be one page, read again and again."""
    cache = KVCache(config.num_layers, -(-tokens // BLOCK), BLOCK, config.num_kv_heads, config.head_dim, dtype)
    first = cache.keys[0].normal_()
    for part in (*cache.keys[1:], *cache.values):
        part.copy_(first)
    return cache


def _attend(subject: Subject, batch: Batch, layers: int) -> Run:
    config, kernels, model, threads = subject.config, subject.kernels, subject.packed.model, subject.threads
    tokens, rows, parts = len(batch.input_ids), len(batch.slots), -(-int(batch.seq_lens.max()) // PART)
    qkv = torch.randn(tokens, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
    out = torch.empty(tokens, config.num_heads * config.head_dim)
    arrays = (batch.query_lens, batch.seq_lens, np.ascontiguousarray(batch.page_table))
    memory = room(kernels.scratch_size(byref(model), tokens, rows, parts, threads))

    def run() -> None:
        pointers = [array.ctypes.data for array in arrays]
        step = Step(tokens, rows, batch.num_decode, batch.page_table.shape[1], parts, *(None,) * 4, *pointers)
        for layer in range(layers):
            where = (qkv.data_ptr(), qkv.shape[1], out.data_ptr(), memory.data_ptr())
            kernels.attend(byref(model), byref(step), layer, *where, threads)

    return run


def _attend_torch(subject: Subject, batch: Batch, layers: int) -> Run:
    config, tokens = subject.config, len(batch.input_ids)
    attention = CpuAttention(batch, subject.cache, config.sliding_window)
    shapes = ((tokens, heads, config.head_dim) for heads in (config.num_heads, *(config.num_kv_heads,) * 2))
    query, key, value = (torch.randn(shape).to(subject.dtype) for shape in shapes)
    return lambda: [attention(layer, query, key, value) for layer in range(layers)]
