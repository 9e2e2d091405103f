"""config.json read in both of its spellings, and what cannot be served refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.model.config import ConfigError, parse_config, read_config

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def test_a_plain_llama() -> None:
    config = parse_config(SMOLLM2)
    assert (config.head_dim, config.num_kv_heads, config.eos_ids, config.tied) == (64, 3, (2,), True)
    assert config.rope["rope_type"] == "default" and config.rope_theta == 100_000.0


def test_both_spellings_of_rope() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    old = parse_config(SMOLLM2 | {"rope_scaling": scaling})
    new = parse_config(SMOLLM2 | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}})
    assert old.rope["rope_type"] == new.rope["rope_type"] == "linear"
    assert (old.rope_theta, new.rope_theta) == (1e5, 5e5)


def test_a_window_counts_only_where_it_is_used() -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 16}
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "use_sliding_window": False}
    assert parse_config(SMOLLM2 | mistral).sliding_window == 16
    assert parse_config(SMOLLM2 | qwen).sliding_window is None


def test_several_eos_ids() -> None:
    assert parse_config(SMOLLM2 | {"eos_token_id": [2, 7]}).eos_ids == (2, 7)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["BertModel"]}, "supported are LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type longrope"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized by bitsandbytes"),
    ],
)
def test_what_cannot_be_served_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(SMOLLM2 | change)


def test_a_missing_key_and_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lacks 'hidden_size'"):
        parse_config({key: value for key, value in SMOLLM2.items() if key != "hidden_size"})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    assert read_config(tmp_path) == parse_config(SMOLLM2)
