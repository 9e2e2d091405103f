"""The GPU's device on the CPU: the tokens of the CPU's own device, at every depth, with graphs and without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.cuda_engine import CudaEngine, EagerEngine
from tests.fakes import Answer
from tests.runtime.test_cpu_device import LIMITS, CpuEngine, requests, run
from tests.runtime.test_features import LAYOUTS, NAMES, alone, assert_same_logprobs
from tests.runtime.test_features import requests as asking
from tests.runtime.test_features import run as laid_out


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Several only wait for one another on so small a model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def expected() -> dict[int, Answer]:
    return run(replace(LIMITS, max_num_seqs=1, prefix_cache=False))


@pytest.mark.parametrize("kind", [CudaEngine, EagerEngine])
@pytest.mark.parametrize(
    ("depth", "radix", "chunk", "blocks", "size", "spread"),
    [
        (0, True, 128, 256, 4, False),
        (1, True, 128, 256, 4, False),
        (2, True, 16, 256, 4, False),
        (1, False, 16, 26, 4, False),
        (2, True, 16, 26, 4, False),
        (1, True, 128, 600, 1, True),
        (2, True, 40, 40, 16, True),
    ],
)
def test_tokens_are_those_of_the_cpu(
    expected: dict[int, Answer],
    kind: type[CudaEngine],
    depth: int,
    radix: bool,
    chunk: int,
    blocks: int,
    size: int,
    spread: bool,
) -> None:
    limits = replace(
        LIMITS, depth=depth, prefix_cache=radix, max_num_batched_tokens=chunk, num_blocks=blocks, block_size=size
    )
    engine = kind(limits, depth)
    engine.serve(requests(), spread)
    assert engine.answers == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_feature_gives_what_it_gives_on_the_cpu(name: str) -> None:
    asked = asking((name,))
    reference = {one.id: alone(CpuEngine, one) for one in asked}
    for layout in LAYOUTS:
        answers = laid_out(CudaEngine, asked, layout, 8).answers
        for number, answer in reference.items():
            assert (answers[number].ids, answers[number].finish) == (answer.ids, answer.finish), (layout, number)
            assert_same_logprobs(answers[number], answer)
