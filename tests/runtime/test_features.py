"""Every sampling feature, and random pairs of them: the same tokens, log probabilities and ends whatever the layout.

On the simulated device, where a wrong mask or a stale history changes the answer, and on a tiny float32 model, whose
log probabilities may differ by what another order of additions makes of them.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.limits import Limits
from runtime.request import Request
from tests.fakes import Answer, Engine, request
from tests.runtime.test_cpu_device import CpuEngine

FEATURES: dict[str, dict[str, Any]] = {
    "seed": {"temperature": 1.0, "seed": 12345},
    "top_k": {"temperature": 0.9, "top_k": 7},
    "top_p": {"temperature": 0.9, "top_p": 0.8},
    "min_p": {"temperature": 0.9, "min_p": 0.1},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.4},
    "logit_bias": {"logit_bias": ((5, -100.0), (9, 2.0))},
    "allowed_ids": {"allowed_ids": tuple(range(3, 60, 2))},
    "bad_words": {"bad_words": ((11,), (13, 17), (19, 23, 29), *((a, b) for a in range(0, 60, 3) for b in range(9)))},
    "min_tokens": {"min_tokens": 6, "stop_ids": tuple(range(0, 64, 3))},
    "stop_ids": {"stop_ids": tuple(range(0, 64, 4))},
    "vocab": {"vocab": 50},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "grammar": {"constrained": True},
}
NAMES = sorted(FEATURES)
# (depth, prefix cache, tokens of a step, pages, requests spread out)
LAYOUTS = [(1, True, 64, 512, False), (2, True, 16, 512, True), (0, False, 16, 20, False), (2, True, 16, 20, False)]


def requests(names: tuple[str, ...]) -> list[Request]:
    """The features on every request but the third ones, in prompts that share beginnings."""
    draw = random.Random(" ".join(names))
    wishes = {key: value for name in names for key, value in FEATURES[name].items()}
    shared = [draw.randrange(50) for _ in range(16)]
    made = []
    for number in range(8):
        prompt = shared[: draw.choice([0, 8, 16])] + [draw.randrange(50) for _ in range(draw.choice([1, 5, 19]))]
        mine: dict[str, Any] = {"seed": number} | wishes if number % 3 else {"vocab": 60}
        made.append(request(number, prompt, 20, **mine))
    return made


def run(kind: type[Engine], asked: list[Request], layout: tuple[int, bool, int, int, bool], seqs: int) -> Engine:
    depth, radix, chunk, blocks, spread = layout
    limits = Limits(blocks, 4, 72, seqs, max(chunk, seqs), None, depth, radix)
    engine = kind(limits, seed=depth)
    engine.serve(asked, spread)
    return engine


def alone(kind: type[Engine], one: Request) -> Answer:
    return run(kind, [one], (0, False, 128, 64, False), 1).answers[one.id]


def assert_same(kind: type[Engine], names: tuple[str, ...], layouts: list[tuple[int, bool, int, int, bool]]) -> None:
    asked = requests(names)
    expected = {one.id: alone(kind, one) for one in asked}
    for layout in layouts:
        answers = run(kind, asked, layout, 8).answers
        for number, answer in expected.items():
            mine = answers[number]
            assert (mine.ids, mine.finish) == (answer.ids, answer.finish), (names, layout, number)
            assert_same_logprobs(mine, answer)


def assert_same_logprobs(mine: Answer, other: Answer) -> None:
    assert mine.logprobs.keys() == other.logprobs.keys()
    for index, (ids, values, rank) in mine.logprobs.items():
        there = other.logprobs[index]
        assert (ids, rank) == (there[0], there[2])
        assert np.allclose(np.frombuffer(values, "<f4"), np.frombuffer(there[1], "<f4"), atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [Engine, CpuEngine])
def test_a_feature_gives_the_same_in_every_layout(kind: type[Engine], name: str) -> None:
    assert_same(kind, (name,), LAYOUTS)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.sampled_from(list(itertools.combinations(NAMES, 2))), st.sampled_from(LAYOUTS))
def test_pairs_of_features_give_the_same_in_every_layout(
    pair: tuple[str, str], layout: tuple[int, bool, int, int, bool]
) -> None:
    assert_same(Engine, pair, [layout])
    assert_same(CpuEngine, pair, [layout])


def test_the_layouts_preempt_and_mix_masks() -> None:
    asked = requests(("grammar",))
    assert run(Engine, asked, LAYOUTS[3], 8).scheduler.num_preemptions > 0
    assert run(Engine, asked, LAYOUTS[0], 8).grammar.busiest > 3


def test_prompt_logprobs_cover_the_prompt_once() -> None:
    """All positions but the first, though the prefix is cached and the request was preempted."""
    asked = requests(("prompt_logprobs",))
    for layout in LAYOUTS:
        answers = run(Engine, asked, layout, 8).answers
        for one in asked:
            wanted = set(range(1 - len(one.prompt_ids), 0)) if one.sampling.prompt_logprobs >= 0 else set()
            assert set(answers[one.id].logprobs) == wanted


def test_a_step_without_constrained_rows_waits_for_no_mask() -> None:
    engine = Engine(replace(Limits(512, 4, 72, 8, 64), depth=1))
    engine.admit(request(1, [1, 2, 3], 9, constrained=True))
    engine.admit(request(2, [1, 2, 3], 40))
    masked = []
    while engine.turn():
        masked += [plan.masked for plan in list(engine.plans)[-1:]]
    assert True in masked and False in masked and engine.scheduler.idle
