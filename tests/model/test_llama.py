"""Greedy tokens equal to transformers in float32, token for token, prefilled whole and in chunks over paged KV."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from runtime.attention.cpu import CpuAttention
from runtime.batch import SlotTables
from runtime.kv_cache import KVCache
from runtime.limits import Limits
from runtime.model.config import ModelConfig, parse_config
from runtime.model.llama import Llama
from runtime.request import NO_IDS, Request
from runtime.sampling import Sampling
from runtime.scheduler import Scheduler

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 1e4,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-mha": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-dynamic": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
            "max_position_embeddings": 32,
        },
    ),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral-window": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def oracle(case: str) -> tuple[Any, ModelConfig]:
    family, change = CASES[case]
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | change), attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model, parse_config(config.to_dict() | {"architectures": [f"{family}ForCausalLM"]})


def ours(model: Llama, prompt: list[int], count: int, chunk: int) -> list[int]:
    limits = Limits(64, 4, 128, 1, chunk, None, 0)
    scheduler, tables = Scheduler(limits), SlotTables(limits.slots, 32, 4)
    config = model.config
    cache = KVCache(config.num_layers, 64, 4, config.num_kv_heads, config.head_dim, torch.float32)
    scheduler.admit(Request(1, np.array(prompt, np.int32), Sampling(), count, NO_IDS))
    found: list[int] = []
    while (plan := scheduler.plan()) is not None:
        batch = tables.apply(plan)
        ids = torch.from_numpy(batch.input_ids.astype(np.int64))
        if batch.num_decode:
            ids[0] = found[-1]
        attention = CpuAttention(batch, cache, config.sliding_window)
        positions, reach = (torch.from_numpy(part.astype(np.int64)) for part in (batch.positions, batch.reach))
        hidden = model.forward(ids, positions, reach, attention)
        drawn = model.logits(hidden[torch.from_numpy(batch.last_tokens)]).argmax(-1).numpy().astype(np.int32)
        found += scheduler.commit(plan.step, drawn).ids.tolist()
    return found


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_tokens_equal_transformers(case: str) -> None:
    draw = np.random.default_rng(3)
    for length in (1, 4, 23, 40):
        model, config = oracle(case)  # anew: transformers' dynamic RoPE remembers the longest request it has seen
        mine = Llama(config, dict(model.state_dict()), 128)
        prompt = draw.integers(1, 97, length).tolist()
        reference = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, pad_token_id=0)
        for chunk in (64, 5):
            assert ours(mine, prompt, 24, chunk) == reference[0, length:].tolist()
