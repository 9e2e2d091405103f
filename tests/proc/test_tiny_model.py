"""A tiny float32 model through real processes: the same tokens under every layout, equal to transformers' greedy ones.

The smallest gap between the two best logits along the answers is printed and asserted, so that a difference is a fault
and never rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ipc.client import Client
from proc.settings import Settings
from proc.supervisor import Supervisor

PROMPTS = [f"{'shared beginning ' * (n % 3)}prompt number {n}" for n in range(12)]
LAYOUTS: list[dict[str, Any]] = [
    {"procs": "1", "overlap_depth": 0},
    {"procs": "1"},
    {"procs": "2", "overlap_depth": 2},
    {"procs": "3", "overlap_depth": 0, "disable_radix_cache": True},
    {"procs": "3"},
    {"procs": "3", "overlap_depth": 2, "max_num_batched_tokens": 16, "num_blocks": 25},
    {"procs": "tokenizer=2", "num_blocks": 25},
    {"procs": "scheduler=2"},
]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.LlamaForCausalLM]:
    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = transformers.LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=7,
        bos_token_id=None,
    )
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder, model


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_gives_the_greedy_tokens(
    oracle: tuple[Path, transformers.LlamaForCausalLM], layout: dict[str, Any]
) -> None:
    folder, model = oracle
    settings = Settings(
        **({"model": str(folder), "num_blocks": 200, "block_size": 4, "max_num_seqs": 8, "max_model_len": 96} | layout)
    )
    smallest = float("inf")
    with Supervisor(settings) as server, Client(server.addresses[0]) as client:
        streams = [client.stream(prompt, temperature=0.0, max_tokens=24, return_prompt_ids=True) for prompt in PROMPTS]
        for stream in streams:
            assert len(list(stream)) >= 1
            done = stream.result
            assert done is not None and done.prompt_token_ids is not None
            start = len(done.prompt_token_ids)
            with torch.inference_mode():
                logits = model(torch.tensor([done.prompt_token_ids + done.token_ids])).logits[0, start - 1 : -1]
            assert logits.argmax(-1).tolist() == done.token_ids
            assert (done.finish_reason == "stop") == (done.token_ids[-1] == 7)
            best = logits.topk(2).values
            smallest = min(smallest, float((best[:, 0] - best[:, 1]).min()))
    print(f"smallest top-2 gap {smallest:.2e}")
    assert smallest > 1e-3
