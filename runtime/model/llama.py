"""The Llama family in torch: Llama, Mistral, Qwen2 and Qwen3. Attention is handed in; knows no pages, no batch.

One rank's part is computed like the whole: what a rank has of the heads, features and ids is in the shapes of its
weights (`runtime.model.sharding`), and what the ranks have to add up or put together goes through a `Collective`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import embedding

from runtime.collective import Alone, Collective
from runtime.model.config import ModelConfig
from runtime.model.layer_ops import LayerOps, TorchLayerOps, Turn
from runtime.model.linears import Linear, Pack, Weight, pack_numbers
from runtime.model.rope import Rope

Tensor = torch.Tensor
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


PRODUCTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


def put_together(config: ModelConfig, weights: dict[str, Weight], pack: Pack) -> dict[str, Linear]:
    """The layers' products, those of the same inputs as one; taken out of `weights` one by one, so that memory holds
    no second copy."""
    linears = {}
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}."
        for whole, parts in PRODUCTS.items():
            biases = [weights.pop(f"{name}{part}.bias", None) for part in parts]
            found = [bias for bias in biases if isinstance(bias, Tensor)]
            taken = [weights.pop(f"{name}{part}.weight") for part in parts]
            linears[name + whole] = pack(taken, torch.cat(found) if found else None)
    return linears


class Llama:
    """`weights` are named as in the checkpoint, and are taken over; those of one rank where `ranks` has several.

    They stand on the device that computes. `pack` chooses what multiplies by them.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Weight],
        max_len: int,
        ranks: Collective | None = None,
        ops: LayerOps | None = None,
        pack: Pack = pack_numbers,
    ) -> None:
        self.config, self.ranks, self.ops = config, ranks or Alone(), ops or TorchLayerOps()
        self.linears = put_together(config, weights, pack)
        self.head = pack([weights["model.embed_tokens.weight"] if config.tied else weights.pop("lm_head.weight")], None)
        self.weights = {name: tensor for name, tensor in weights.items() if isinstance(tensor, Tensor)}
        self.reach(max_len)

    def reach(self, max_len: int) -> None:
        """Requests may have so many tokens from now on."""
        self.rope = Rope(self.config, max_len, self.weights["model.norm.weight"].device)

    @property
    def nbytes(self) -> int:
        """Of the weights as they are held."""
        head = 0 if self.config.tied else self.head.nbytes
        return head + sum(one.nbytes for held in (self.linears, self.weights) for one in held.values())

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
        return self.ranks.gather(self.head(hidden).float())[:, : self.config.vocab_size]

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
        whole = self.linears[name + "qkv_proj"](x)
        query, key, value = torch.split(whole.view(len(x), -1, config.head_dim), [heads, kv_heads, kv_heads], 1)
        if config.qk_norm:
            query = ops.norm(query, weights[name + "q_norm.weight"], config.rms_norm_eps)
            key = ops.norm(key, weights[name + "k_norm.weight"], config.rms_norm_eps)
        query, key = turn(query, key)
        attended = attention(layer, query, key, value).flatten(1)
        return self.ranks.sum(self.linears[name + "o_proj"](attended))

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        gated = self.ops.gate(self.linears[name + "gate_up_proj"](x))
        return self.ranks.sum(self.linears[name + "down_proj"](gated))
