"""The Llama family on the C kernels: a whole step is one call. The torch model (`llama.py`) is its reference.

Weights are packed once; activations are float32, and codes where a layer's weights are, so that a step differs from the
torch path's in bfloat16 by being more exact; where the machine multiplies pairs of bfloat16, a layer's inputs are
rounded as torch rounds them. Knows no slots and no plans.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from ctypes import byref

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.batch import Batch
from runtime.kernels.library import PART, Kernels, Layer, Model, Step
from runtime.kernels.pack import Packed, Unsupported, Weight, kind_of_dtype, pack, pack_gated, pack_together
from runtime.kv_cache import KVCache
from runtime.model.coded import StoredLinear, in_words
from runtime.model.config import ModelConfig
from runtime.model.quantized import GROUP, Quantized, quantize
from runtime.model.rope import Rope

Tensor = torch.Tensor
Held = Weight | StoredLinear


class PackedLlama:
    """`weights` are named as in the checkpoint, and taken out of the dictionary as they are packed.

    Layers that the checkpoint codes stay codes where the kernels have such codes, and become numbers elsewhere.
    `bits` 8 or 4 makes codes of those of linear layers that are none yet; the head's are never fewer than 8.
    Raises `Unsupported` for what the kernels cannot do; nothing has been taken then.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Held], kernels: Kernels, bits: int = 0) -> None:
        self.config, self.kernels, self.bits = config, kernels, bits
        self.threads = torch.get_num_threads()
        self.scratch = torch.empty(0, dtype=torch.uint8)
        self.held: Counter[str] = Counter()  # what the checkpoint's coded layers became
        self.kept: list[Tensor | Packed] = []  # what the structures below point into
        self.embedding = _check(config, weights, bits)
        self.dtype = self.embedding.dtype
        (head,) = self._read([weights.pop("lm_head.weight", self.embedding)])
        self.head = pack(_coded(head, bits and 8))
        self.layers = (Layer * config.num_layers)(*(self._layer(weights, i) for i in range(config.num_layers)))
        self.model = Model(
            layers=config.num_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            window=config.sliding_window or 0,
            kv_kind=kind_of_dtype(self.dtype),
            embedding_kind=kind_of_dtype(self.dtype),
            eps=config.rms_norm_eps,
            layer=self.layers,
            embedding=self.embedding.data_ptr(),
            norm=self._vector(weights["model.norm.weight"]),
        )

    @property
    def words(self) -> str:
        """How the weights are held, where they are not numbers."""
        return f"int{self.bits}" if self.bits else in_words(self.held)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as they are held."""
        return self.embedding.nbytes + self.head.nbytes + sum(one.nbytes for one in self.kept)

    def attach(self, cache: KVCache, max_len: int) -> None:
        """Keys and values of requests of up to `max_len` tokens are kept in `cache` from now on."""
        self.rope, self.cache = Rope(self.config, max_len), cache  # the structures below hold addresses alone
        self.model.block_size = cache.block_size
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()

    def forward(self, batch: Batch, input_ids: NDArray[np.int32]) -> Tensor:
        """The normed states of the step's tokens, float32[T, hidden_size]; `input_ids` int32[T]."""
        tokens, rows, window = len(input_ids), len(batch.slots), self.config.sliding_window
        positions, reach = (torch.from_numpy(part.astype(np.int64)) for part in (batch.positions, batch.reach))
        cos, sin = (part.contiguous() for part in self.rope.at(positions, reach, torch.float32))
        longest = int(batch.seq_lens[: batch.num_decode].max(initial=0))
        parts = -(-min(longest, window or longest) // PART)
        table, arrays = np.ascontiguousarray(batch.page_table), (input_ids, batch.kv_cells)
        step = Step(
            *(tokens, rows, batch.num_decode, table.shape[1], parts),
            *(array.ctypes.data for array in arrays),
            *(cos.data_ptr(), sin.data_ptr()),
            *(array.ctypes.data for array in (batch.query_lens, batch.seq_lens, table)),
        )
        hidden = torch.empty(tokens, self.config.hidden_size)
        size = self.kernels.scratch_size(byref(self.model), tokens, rows, parts, self.threads)
        self.kernels.forward(byref(self.model), byref(step), hidden.data_ptr(), self._room(size), self.threads)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[S, hidden_size] to float32[S, vocab_size]."""
        hidden = hidden.contiguous()
        out = torch.empty(len(hidden), self.config.vocab_size)
        room = self._room(self.kernels.linear_size(byref(self.head.struct), len(hidden), self.threads))
        self.kernels.linear(byref(self.head.struct), hidden.data_ptr(), len(hidden), out.data_ptr(), room, self.threads)
        return out

    def _room(self, size: int) -> int:
        """Address of `size` bytes at a multiple of 64; kept from step to step."""
        if self.scratch.nbytes < size + 64:
            self.scratch = torch.empty(size + 64, dtype=torch.uint8)
        return -(-self.scratch.data_ptr() // 64) * 64

    def _read(self, weights: list[Held]) -> list[Weight]:
        """Layers that lie together; none is coded beside one that the checkpoint spares."""
        spares = any(isinstance(one, Tensor) for one in weights)
        return [self._as_held(one, spares) if isinstance(one, StoredLinear) else one for one in weights]

    def _as_held(self, stored: StoredLinear, as_numbers: bool) -> Weight:
        coded = stored.unpacked()
        codes = None if as_numbers else coded.quantized()
        kind = f"int{codes.bits}" if codes else str(self.dtype).removeprefix("torch.")
        self.held[f"{stored.coding.name} as {kind}"] += 1
        return codes or coded.dequantized().to(self.dtype)

    def _layer(self, weights: dict[str, Held], index: int) -> Layer:
        name = f"model.layers.{index}."

        def take(*parts: str) -> list[Weight]:
            taken = self._read([weights.pop(f"{name}{part}_proj.weight") for part in parts])
            return [_coded(one, self.bits) for one in taken]

        biases = [weights.pop(f"{name}self_attn.{part}_proj.bias", None) for part in "qkv"]
        bias = torch.cat([one for one in biases if isinstance(one, Tensor)]) if biases[0] is not None else None
        norms = (weights.pop(f"{name}self_attn.{part}_norm.weight", None) for part in "qk")
        return Layer(
            self._vector(weights.pop(name + "input_layernorm.weight")),
            self._vector(weights.pop(name + "post_attention_layernorm.weight")),
            *(None if norm is None else self._vector(norm) for norm in norms),
            self._packed(pack_together(take("self_attn.q", "self_attn.k", "self_attn.v"), bias)),
            self._packed(pack(take("self_attn.o")[0])),
            self._packed(pack_gated(*take("mlp.gate", "mlp.up"))),
            self._packed(pack(take("mlp.down")[0])),
        )

    def _vector(self, tensor: Held) -> int:
        assert isinstance(tensor, Tensor)
        vector = tensor.float().contiguous()
        self.kept.append(vector)
        return vector.data_ptr()

    def _packed(self, packed: Packed) -> ctypes.Structure:
        self.kept.append(packed)
        return packed.struct


def _coded(weight: Weight, bits: int) -> Weight:
    return quantize(weight, bits) if bits and isinstance(weight, Tensor) else weight


def _check(config: ModelConfig, weights: dict[str, Held], bits: int) -> Tensor:
    """The embedding. Raises `Unsupported` before anything is packed."""
    embedding = weights["model.embed_tokens.weight"]
    assert isinstance(embedding, Tensor)
    coded = bits > 0 or any(isinstance(one, Quantized) for one in weights.values())
    for dtype in {one.dtype for one in weights.values() if isinstance(one, Tensor)}:
        kind_of_dtype(dtype)
        if dtype != embedding.dtype:
            raise Unsupported("weights of several types")
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        size = getattr(config, name)
        if size % 2:
            raise Unsupported(f"an odd {name}")
        if coded and name != "head_dim" and size % GROUP:
            raise Unsupported(f"{name} {size} in groups of {GROUP}")
    if coded and config.num_heads * config.head_dim % GROUP:
        raise Unsupported(f"{config.num_heads} heads of {config.head_dim} in groups of {GROUP}")
    return embedding
