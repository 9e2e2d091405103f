"""The Llama family in torch: Llama, Mistral, Qwen2 and Qwen3. Attention is handed in; knows no pages, no batch.

One rank's part is computed like the whole: what a rank has of the heads, features and ids is in the shapes of its
weights (`runtime.model.sharding`), and what the ranks have to add up or put together goes through a `Collective`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import embedding, linear, silu

from runtime.collective import Alone, Collective
from runtime.model.config import ModelConfig
from runtime.model.rope import Rope, rotate

Tensor = torch.Tensor
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm in float32 (Zhang and Sennrich 2019); same dtype as x."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class Llama:
    """`weights` are named as in the checkpoint; those of one rank where `ranks` has several."""

    def __init__(
        self, config: ModelConfig, weights: dict[str, Tensor], max_len: int, ranks: Collective | None = None
    ) -> None:
        self.config, self.weights, self.ranks = config, weights, ranks or Alone()
        self.rope = Rope(config, max_len)
        self.head = weights["model.embed_tokens.weight" if config.tied else "lm_head.weight"]

    def forward(self, input_ids: Tensor, positions: Tensor, reach: Tensor, attention: Attention) -> Tensor:
        """int64[T] each (`reach`: see `Rope.at`) to the normed hidden states [T, hidden_size]."""
        weights, eps = self.weights, self.config.rms_norm_eps
        x = self._embed(input_ids)
        turn = self.rope.at(positions, reach, x.dtype)
        for layer in range(self.config.num_layers):
            name = f"model.layers.{layer}."
            normed = rms_norm(x, weights[name + "input_layernorm.weight"], eps)
            x = x + self._attend(layer, name + "self_attn.", normed, turn, attention)
            normed = rms_norm(x, weights[name + "post_attention_layernorm.weight"], eps)
            x = x + self._mlp(name + "mlp.", normed)
        return rms_norm(x, weights["model.norm.weight"], eps)

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

    def _attend(self, layer: int, name: str, x: Tensor, turn: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        config, weights = self.config, self.weights
        parts = (
            linear(x, weights[f"{name}{part}_proj.weight"], weights.get(f"{name}{part}_proj.bias")) for part in "qkv"
        )
        query, key, value = (part.view(len(x), -1, config.head_dim) for part in parts)
        if config.qk_norm:
            query = rms_norm(query, weights[name + "q_norm.weight"], config.rms_norm_eps)
            key = rms_norm(key, weights[name + "k_norm.weight"], config.rms_norm_eps)
        query, key = rotate(query, *turn), rotate(key, *turn)
        attended = attention(layer, query, key, value).flatten(1)
        return self.ranks.sum(linear(attended, weights[name + "o_proj.weight"]))

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        weights = self.weights
        gated = silu(linear(x, weights[name + "gate_proj.weight"])) * linear(x, weights[name + "up_proj.weight"])
        return self.ranks.sum(linear(gated, weights[name + "down_proj.weight"]))
