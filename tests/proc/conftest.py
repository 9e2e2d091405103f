"""A folder of its own for the sockets of each test, in which nothing may be left; and a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import transformers


@pytest.fixture(autouse=True)
def run_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("SIDESTEP_RUN_DIR", str(folder))
    yield folder
    assert not list(folder.iterdir()), "sockets were left behind"


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.LlamaForCausalLM]:
    """A tiny float32 model with a tokenizer of bytes, as a folder and as transformers has it."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

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
