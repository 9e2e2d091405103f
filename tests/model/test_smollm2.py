"""The real SmolLM2 in float32: greedy tokens equal to transformers, and the same answers at depth 0 and 1.

`make test` fetches the model first; without it these tests are skipped, visibly.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from ipc.sampling_params import SamplingParams
from proc.llm import LLM, RequestOutput
from proc.models import cache

FOLDER = cache() / "smollm2"
pytestmark = [
    pytest.mark.skipif(not (FOLDER / "config.json").exists(), reason="SmolLM2 is not in the cache: make model"),
    pytest.mark.timeout(300),
]
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colours are",
    "In 1969,",
    "To make a cup of tea, first",
    "Le chat est",
    "1, 2, 3, 4,",
    "The mitochondria",
    "Dear Sir or Madam,",
    "A haiku about autumn:\n",
    "The quick brown fox",
    "SELECT name FROM",
    "Photosynthesis is the process by which",
    "My favourite book is",
    "The opposite of hot is",
    "Newton's first law states that",
    "🙂 means",
    "If all cats are animals, then",
]


@pytest.fixture(autouse=True)
def run_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTEP_RUN_DIR", str(tmp_path_factory.mktemp("run")))


def answers(prompts: list[str], max_tokens: int, depth: int) -> list[RequestOutput]:
    with LLM(str(FOLDER), dtype="float32", overlap_depth=depth, max_num_seqs=32, max_model_len=1024) as llm:
        return llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False)


@pytest.fixture(scope="module")
def oracle() -> Iterator[transformers.PreTrainedModel]:
    yield transformers.AutoModelForCausalLM.from_pretrained(Path(FOLDER), dtype=torch.float32)


def test_tokens_equal_transformers(oracle: transformers.PreTrainedModel) -> None:
    """One forward pass over prompt and answer: each token is the argmax after those before it, so all are greedy's."""
    smallest = float("inf")
    for output in answers(PROMPTS, 64, depth=1):
        ids = output.outputs[0].token_ids
        with torch.inference_mode():
            logits = oracle(torch.tensor([output.prompt_token_ids + ids])).logits[0, len(output.prompt_token_ids) - 1 :]
        best = logits[: len(ids)].topk(2).values
        smallest = min(smallest, float((best[:, 0] - best[:, 1]).min()))
        assert logits[: len(ids)].argmax(-1).tolist() == ids, output.prompt
    print(f"smallest top-2 gap {smallest:.2e}")


def problems() -> list[str]:
    draw = random.Random(8)
    kinds = [
        "Tom has {a} apples and buys {b} more. How many apples does he have?",
        "A train goes {a} km each hour. How far does it go in {b} hours?",
        "Ann had {c} coins and gave away {b}. How many coins are left?",
        "There are {b} boxes with {a} pens each. How many pens are there in all?",
        "A book of {c} pages is read {b} pages a day. How many pages are left after one day?",
    ]
    found = []
    for n in range(50):
        a, b = draw.randrange(3, 40), draw.randrange(2, 12)
        found.append("Question: " + kinds[n % 5].format(a=a, b=b, c=a + 50) + "\nAnswer:")
    return found


def test_word_problems_are_answered_alike_at_depth_0_and_1() -> None:
    first, second = (answers(problems(), 32, depth) for depth in (0, 1))
    assert [output.outputs[0].text for output in first] == [output.outputs[0].text for output in second]
    assert [output.outputs[0].token_ids for output in first] == [output.outputs[0].token_ids for output in second]
