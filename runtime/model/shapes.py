"""What tensors a model of the Llama family consists of. Knows no torch."""

from __future__ import annotations

from runtime.model.config import ModelConfig


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor of the model."""
    hidden, dim = config.hidden_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}."
        shapes[name + "input_layernorm.weight"] = shapes[name + "post_attention_layernorm.weight"] = (hidden,)
        shapes[name + "self_attn.o_proj.weight"] = (hidden, config.num_heads * dim)
        shapes[name + "mlp.down_proj.weight"] = (hidden, config.intermediate_size)
        for part in ("gate", "up"):
            shapes[f"{name}mlp.{part}_proj.weight"] = (config.intermediate_size, hidden)
        for part, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
            shapes[f"{name}self_attn.{part}_proj.weight"] = (heads * dim, hidden)
            if config.qkv_bias:
                shapes[f"{name}self_attn.{part}_proj.bias"] = (heads * dim,)
        if config.qk_norm:
            shapes[name + "self_attn.q_norm.weight"] = shapes[name + "self_attn.k_norm.weight"] = (dim,)
    return shapes
