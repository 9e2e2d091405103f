"""What each rank holds: together the whole model and no more, read part by part, and computing what the whole does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runtime.collective import Collective
from runtime.model import weights as weights_module
from runtime.model.config import ConfigError, ModelConfig
from runtime.model.llama import Llama
from runtime.model.shapes import expected_shapes
from runtime.model.sharding import Rank, config_of
from runtime.model.weights import dummy_weights, load_weights
from tests.model.test_llama import CASES, oracle, ours

CONFIG = ModelConfig("Qwen2ForCausalLM", 97, 32, 48, 2, 8, 4, 4, 64, 1e-6, 1e4, qkv_bias=True)
SIZES = [1, 2, 4, 8]
FILE = "model.safetensors"


class Threads:
    """`Collective` of ranks that are threads of one process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.parts: list[Any] = [None] * size

    def run(self, rank: Callable[[Collective], Any]) -> list[Any]:
        """What `rank` returns for each of them."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda index: rank(_OneOf(self, Rank(index, self.size))), range(self.size)))


class _OneOf:
    def __init__(self, all_of_them: Threads, rank: Rank) -> None:
        self.threads, self.rank = all_of_them, rank

    def _all(self, part: Any) -> list[Any]:
        threads = self.threads
        threads.parts[self.rank.index] = part
        threads.barrier.wait()
        parts = list(threads.parts)
        threads.barrier.wait()
        return parts

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = torch.stack(self._all(part)).sum(0)
        return total

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(part), -1)

    def least(self, number: int) -> int:
        return int(min(self._all(number)))


def joined(name: str, parts: list[torch.Tensor], config: ModelConfig) -> torch.Tensor:
    """The whole tensor out of the ranks' parts; KV heads that several hold are compared, then taken once."""
    if name.endswith("norm.weight"):
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    if "k_proj" in name or "v_proj" in name:
        copies = max(1, len(parts) // config.num_kv_heads)
        assert all(torch.equal(part, parts[at // copies * copies]) for at, part in enumerate(parts))
        parts = parts[::copies]
    return torch.cat(parts, 1 if "o_proj" in name or "down_proj" in name else 0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
def test_the_parts_are_the_whole(size: int, kv_heads: int) -> None:
    config = replace(CONFIG, num_kv_heads=kv_heads)
    whole = dummy_weights(config, torch.float32)
    parts = [dummy_weights(config, torch.float32, rank=Rank(index, size)) for index in range(size)]
    for name, tensor in whole.items():
        found = joined(name, [part[name] for part in parts], config)
        assert torch.equal(found[: len(tensor)], tensor) and not found[len(tensor) :].any()
        assert len(found) - len(tensor) < size  # padding, of the vocabulary alone
    held = expected_shapes(config_of(config, Rank(0, size)))
    ids = -(-config.vocab_size // size)
    for part in parts:
        for name, tensor in part.items():
            assert tuple(tensor.shape) == ((ids, *held[name][1:]) if held[name][0] == 97 else held[name])


def test_a_rank_without_ids_holds_padding() -> None:
    last = dummy_weights(replace(CONFIG, vocab_size=9), torch.float32, rank=Rank(7, 8))
    assert last["lm_head.weight"].shape == (2, 32) and not last["lm_head.weight"].any()


@pytest.mark.parametrize(
    ("change", "size", "words"),
    [
        ({"num_heads": 9, "num_kv_heads": 3}, 2, "--tensor-parallel-size 2: the model's 9 attention heads"),
        ({"intermediate_size": 50}, 4, "--tensor-parallel-size 4: the model's 50 intermediate features"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, "--tensor-parallel-size 4: the model's 6 KV heads"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_option(change: dict[str, int], size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of(replace(CONFIG, **change), Rank(0, size))  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [0, 3])
def test_a_rank_reads_its_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    read: dict[str, int] = {}

    class Watched:
        """An opened file that gives slices only, and counts their bytes."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.file = real(*arguments, **options)

        def __enter__(self) -> Watched:
            self.file.__enter__()
            return self

        def __exit__(self, *what: Any) -> None:
            self.file.__exit__(*what)

        def keys(self) -> list[str]:
            return list(self.file.keys())

        def get_slice(self, name: str) -> WatchedSlice:
            return WatchedSlice(name, self.file.get_slice(name))

    class WatchedSlice:
        def __init__(self, name: str, stored: Any) -> None:
            self.name, self.stored = name, stored
            self.get_shape = stored.get_shape

        def __getitem__(self, at: Any) -> torch.Tensor:
            tensor: torch.Tensor = self.stored[at]
            read[self.name] = read.get(self.name, 0) + tensor.nbytes
            return tensor

    whole = dummy_weights(CONFIG, torch.float32)
    save_file(whole, tmp_path / FILE)
    real = weights_module.safe_open
    monkeypatch.setattr(weights_module, "safe_open", Watched)
    rank = Rank(index, 4)
    loaded = load_weights(tmp_path, CONFIG, None, rank=rank)
    assert read.keys() == loaded.keys()
    made = dummy_weights(CONFIG, torch.float32, rank=rank)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, made[name]) and tensor.is_contiguous()
        padding = 3 * 32 * 4 if index == 3 and tensor.shape == (25, 32) else 0
        assert read[name] == tensor.nbytes - padding


@pytest.mark.parametrize(("case", "size"), [(case, 2) for case in CASES] + [("llama", 4), ("qwen2", 4)])
def test_ranks_together_draw_transformers_tokens(tmp_path: Path, case: str, size: int) -> None:
    """97 ids, so that the last rank's part is padded; with four ranks each of two KV heads is held twice."""
    model, config = oracle(case)
    names = expected_shapes(config)
    save_file({name: one.contiguous() for name, one in model.state_dict().items() if name in names}, tmp_path / FILE)
    prompt = torch.randint(1, 97, (23,), generator=torch.Generator().manual_seed(1)).tolist()
    reference = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16, pad_token_id=0)

    @torch.inference_mode()
    def answer(ranks: Collective) -> list[int]:
        held = load_weights(tmp_path, config, None, rank=ranks.rank)
        return ours(Llama(config_of(config, ranks.rank), held, 128, ranks), prompt, 16, 10)

    assert Threads(size).run(answer) == [reference[0, 23:].tolist()] * size
