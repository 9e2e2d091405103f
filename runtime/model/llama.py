"""The Llama family in torch: Llama, Mistral, Qwen2 and Qwen3. Attention is handed in; knows no pages, no batch.

One rank's part is computed like the whole: what a rank has of the heads, features and ids is in the shapes of its
weights (`runtime.model.sharding`), and what the ranks have to add up or put together goes through a `Collective`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch.nn.functional import embedding, linear

from runtime.collective import Alone, Collective
from runtime.model.config import ModelConfig
from runtime.model.layer_ops import LayerOps, TorchLayerOps, Turn
from runtime.model.rope import Rope

Tensor = torch.Tensor
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


TOGETHER = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def put_together(config: ModelConfig, weights: dict[str, Tensor]) -> None:
    """Projections of the same input become one, in place and a layer at a time, so that memory holds no second copy."""
    for layer in range(config.num_layers):
        for (whole, parts), kind in product(TOGETHER.items(), ("weight", "bias")):
            names = [f"model.layers.{layer}.{part}.{kind}" for part in parts]
            if names[0] in weights:
                weights[f"model.layers.{layer}.{whole}.{kind}"] = torch.cat([weights.pop(name) for name in names])


class Llama:
    """`weights` are named as in the checkpoint, and are taken over; those of one rank where `ranks` has several.

    They stand on the device that computes.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        max_len: int,
        ranks: Collective | None = None,
        ops: LayerOps | None = None,
    ) -> None:
        self.config, self.weights, self.ranks, self.ops = config, weights, ranks or Alone(), ops or TorchLayerOps()
        put_together(config, weights)
        self.rope = Rope(config, max_len, weights["model.norm.weight"].device)
        self.head = weights["model.embed_tokens.weight" if config.tied else "lm_head.weight"]

    def forward(self, input_ids: Tensor, positions: Tensor, reach: Tensor, attention: Attention) -> Tensor:
        """int64[T] each (`reach`: see `Rope.at`) to the normed hidden states [T, hidden_size]."""
        weights, eps, ops = self.weights, self.config.rms_norm_eps, self.ops
        residual = self._embed(input_ids)
        turn = ops.turn(self.rope, positions, reach, residual.dtype)
        normed = ops.norm(residual, weights["model.layers.0.input_layernorm.weight"], eps)
        for layer in range(self.config.num_layers):
            name, last = f"model.layers.{layer}.", layer + 1 == self.config.num_layers
            x = self._attend(layer, name + "self_attn.", normed, turn, attention)
            normed = ops.add_norm(x, residual, weights[name + "post_attention_layernorm.weight"], eps)
            follows = "model.norm.weight" if last else f"model.layers.{layer + 1}.input_layernorm.weight"
            normed = ops.add_norm(self._mlp(name + "mlp.", normed), residual, weights[follows], eps)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden_size] to float32[S, vocab_size]."""
        return self.ranks.gather(linear(hidden, self.head).float())[:, : self.config.vocab_size]

    def _embed(self, input_ids: Tensor) -> Tensor:
        """Each rank's own ids, zeros for the others'."""
        table = self.weights["model.embed_tokens.weight"]
        own = input_ids - self.ranks.rank.index * len(table)
        other = (own < 0) | (own >= len(table))
        rows = embedding(own.masked_fill(other, 0), table)
        return self.ranks.sum(rows.masked_fill(other[:, None], 0.0))

    def _attend(self, layer: int, name: str, x: Tensor, turn: Turn, attention: Attention) -> Tensor:
        config, weights, ops = self.config, self.weights, self.ops
        heads, kv_heads = config.num_heads, config.num_kv_heads
        whole = linear(x, weights[name + "qkv_proj.weight"], weights.get(name + "qkv_proj.bias"))
        query, key, value = torch.split(whole.view(len(x), -1, config.head_dim), [heads, kv_heads, kv_heads], 1)
        if config.qk_norm:
            query = ops.norm(query, weights[name + "q_norm.weight"], config.rms_norm_eps)
            key = ops.norm(key, weights[name + "k_norm.weight"], config.rms_norm_eps)
        query, key = turn(query, key)
        attended = attention(layer, query, key, value).flatten(1)
        return self.ranks.sum(linear(attended, weights[name + "o_proj.weight"]))

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        gated = self.ops.gate(linear(x, self.weights[name + "gate_up_proj.weight"]))
        return self.ranks.sum(linear(gated, self.weights[name + "down_proj.weight"]))
