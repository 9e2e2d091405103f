"""The sampler, on torch and on each set of C kernels, against numpy, transformers, and the distributions asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from runtime.device.base import MaskSet
from runtime.kernels.library import every
from runtime.kernels.sampling import KernelOps
from runtime.logprobs import Raw
from runtime.sampler import sample as sample_by
from runtime.sampling import Sampling
from runtime.sampling_on_torch import TorchOps
from runtime.sampling_ops import SamplingOps
from runtime.slot_sampling import SampleBatch, SlotSampling

Sample = Callable[..., np.ndarray]
NO_IDS = np.zeros(0, np.int32)
OPS: dict[str, SamplingOps] = {"torch": TorchOps(), **{one.name: KernelOps(one, 2) for one in every()}}


@pytest.fixture(params=OPS)
def ops(request: pytest.FixtureRequest) -> SamplingOps:
    return OPS[request.param]


@pytest.fixture
def sample(ops: SamplingOps) -> Sample:
    return lambda logits, how, masks=None, processors=None: sample_by(logits, how, masks, processors or {}, ops)


def how(*wishes: Sampling, ids: Any = (), num_prompt: int = 0, length: int = 9) -> SampleBatch:
    """A step in which each row has its own wishes; all have the same known ids."""
    slots = SlotSampling(len(wishes))
    for slot, wish in enumerate(wishes):
        slots.admit(slot, wish, num_prompt, np.array(ids, np.int32) if wish.needs_history else NO_IDS)
    return slots.batch(np.arange(len(wishes), dtype=np.int32), np.full(len(wishes), length))


def seeded(rows: int, **fields: Any) -> SampleBatch:
    return how(*(Sampling(**({"temperature": 1.0} | fields), seed=row) for row in range(rows)))


def allowed(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The distribution that is asked for, written down plainly; ids with equal logits share their fate."""
    weights = np.exp((logits.astype(float) - logits.max()) / temperature)
    weights[weights < min_p] = 0
    if top_k:
        weights[logits < np.sort(logits)[-top_k]] = 0
    weights /= weights.sum()
    if top_p < 1:
        before = np.array([weights[logits > one].sum() for one in logits])
        weights[before >= top_p] = 0
    return weights / weights.sum()


FILTERS = ("temperature", "top_k", "top_p", "min_p")
CASES = [(1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.2), (0.9, 8, 0.9, 0.05)]


@pytest.mark.parametrize("filters", CASES)
def test_draws_follow_the_distribution(sample: Sample, filters: tuple[float, int, float, float]) -> None:
    logits = np.random.default_rng(1).normal(0, 1.5, 24).astype(np.float32)
    expected = allowed(logits, *filters)
    rows = 20_000
    drawn = sample(torch.from_numpy(logits).repeat(rows, 1), seeded(rows, **dict(zip(FILTERS, filters, strict=True))))
    counts = np.bincount(drawn, minlength=24)
    assert not counts[expected == 0].any()
    likely = expected * rows > 5
    distance = ((counts - expected * rows)[likely] ** 2 / (expected * rows)[likely]).sum()
    assert distance < 60  # chi-square, at most 23 degrees of freedom, p < 1e-4


@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize("tied", [False, True])
def test_a_large_vocabulary_is_cut_where_it_should_be(sample: Sample, spread: float, tied: bool) -> None:
    """Every way to find the cut-off: few best ids, many, all; with ids that tie across it."""
    draw = np.random.default_rng(3)
    logits = draw.normal(0, spread, 3000).astype(np.float32)
    logits = np.round(logits * 2) / 2 if tied else logits
    for filters in [
        (1.0, 50, 1.0, 0.0),
        (0.8, 50, 0.9, 0.0),
        (1.0, 300, 0.95, 0.0),
        (1.0, 2500, 0.9, 0.0),
        (1.0, 0, 0.3, 0.0),
        (1.0, 0, 0.9, 0.0),
        (1.5, 0, 0.99, 0.01),
        (1.0, 0, 1.0, 0.3),
        (1.0, 0, 1.0, 0.0),
    ]:
        expected = allowed(logits, *filters)
        wishes = seeded(400, **dict(zip(FILTERS, filters, strict=True)))
        drawn = sample(torch.from_numpy(logits).repeat(400, 1), wishes)
        edges = np.cumsum(expected)
        assert (expected[drawn] > 0).all(), filters
        assert (np.abs(np.searchsorted(edges, wishes.uniform * edges[-1], "right") - drawn) <= 1).mean() > 0.99, filters


def test_a_row_does_not_depend_on_its_neighbours(sample: Sample) -> None:
    draw = np.random.default_rng(2)
    logits = torch.from_numpy(np.round(draw.normal(0, 2, (64, 5000)) * 4).astype(np.float32) / 4)
    wishes = [
        Sampling(
            float(draw.choice([0.0, 0.5, 1.0])), int(draw.choice([0, 1, 10, 70, 2000])),
            float(draw.choice([1.0, 0.9, 0.2])), float(draw.choice([0.0, 0.1])), row,
        )
        for row in range(64)
    ]  # fmt: skip
    together = sample(logits.clone(), how(*wishes))
    alone = [int(sample(logits[row : row + 1].clone(), how(one))[0]) for row, one in enumerate(wishes)]
    assert together.tolist() == alone


def test_all_paths_draw_the_same() -> None:
    draw = np.random.default_rng(8)
    for spread, size in ((0.0, 40), (0.2, 5000), (3.0, 5000), (3.0, 1), (8.0, 1300)):
        logits = torch.from_numpy(draw.normal(0, spread, (64, size)).astype(np.float32))
        wishes = [
            Sampling(
                float(draw.choice([0.0, 0.5, 1.0, 20.0])), int(draw.choice([0, 1, 10, 70, 2000, 9000])),
                float(draw.choice([1.0, 0.999, 0.9, 0.2])), float(draw.choice([0.0, 0.001, 0.1])), row,
            )
            for row in range(64)
        ]  # fmt: skip
        drawn = [sample_by(logits.clone(), how(*wishes), None, {}, ops) for ops in OPS.values()]
        assert all((one == drawn[0]).mean() > 0.98 for one in drawn), (
            spread,
            size,
        )  # rounding moves an edge now and then


def test_greedy_takes_the_best_that_is_not_banned(sample: Sample) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0]])
    assert sample(logits.clone(), how(Sampling())).tolist() == [1]
    assert sample(logits.clone(), how(Sampling(min_tokens=3, stop_ids=(1,)), num_prompt=7)).tolist() == [2]
    assert sample(logits.clone(), how(Sampling(min_tokens=2, stop_ids=(1,)), num_prompt=7)).tolist() == [1]


def test_padding_of_the_head_is_never_drawn(sample: Sample) -> None:
    logits = torch.zeros(2000, 8)
    logits[:, 6:] = 50.0
    assert set(sample(logits.clone(), seeded(2000, vocab=6)).tolist()) == set(range(6))
    assert sample(logits[:2].clone(), how(Sampling(vocab=6), Sampling())).tolist() == [0, 6]


def test_biases_and_allowed_ids(sample: Sample) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    assert sample(logits.clone(), how(Sampling(logit_bias=((0, 3.5), (1, -1.0))))).tolist() == [0]
    assert sample(logits.clone(), how(Sampling(logit_bias=((1, -100.0),)))).tolist() == [2]
    assert sample(logits.clone(), how(Sampling(allowed_ids=(0, 3)))).tolist() == [3]
    drawn = sample(logits.repeat(500, 1), seeded(500, allowed_ids=(0, 3)))
    assert set(drawn.tolist()) == {0, 3}


def test_bad_words_are_not_completed(sample: Sample) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    words = ((1,), (5, 7, 2), (6, 3))
    assert sample(logits.clone(), how(Sampling(bad_words=words), ids=[1, 5, 7], num_prompt=1)).tolist() == [3]
    assert sample(logits.clone(), how(Sampling(bad_words=words), ids=[1, 5, 7], num_prompt=2)).tolist() == [
        2
    ]  # output only
    history = how(Sampling(bad_words=words), ids=[1, 9], num_prompt=1)
    assert sample(torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 9.0]]), history).tolist() == [5]
    assert history.edits[0][1].history.ends_with((9, 5))  # type: ignore[union-attr]  # told by the sampler itself


def test_bans_that_leave_nothing_are_left_out(sample: Sample) -> None:
    logits = torch.tensor([[1.0, 3.0]])
    assert sample(logits.clone(), how(Sampling(bad_words=((0,), (1,))))).tolist() == [1]
    only = MaskSet(np.array([0]), np.array([[0b10]], np.uint32), 0, 0, 0)
    assert sample(logits.clone(), how(Sampling(min_tokens=99, stop_ids=(1,), constrained=True)), only).tolist() == [1]


def test_masks_reach_their_rows_alone(sample: Sample) -> None:
    logits = torch.zeros(3, 70)
    logits[:, 69] = 5.0
    bits = np.zeros((1, 3), np.uint32)
    bits[0, 1] = 1 << 4  # id 36
    assert sample(logits, how(*[Sampling()] * 3), MaskSet(np.array([1]), bits, 0, 0, 0)).tolist() == [69, 36, 69]


def test_penalties_are_those_of_transformers(ops: SamplingOps) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    draw = np.random.default_rng(4)
    ids = draw.integers(0, 40, 60)
    logits = torch.from_numpy(draw.normal(0, 3, (1, 50)).astype(np.float32))
    wishes = how(Sampling(repetition_penalty=1.3), ids=ids, num_prompt=20)
    mine = logits.clone()
    ops.penalise(mine, wishes.edits)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.from_numpy(ids[None]), logits.clone())
    assert torch.allclose(mine, theirs)


def test_frequency_and_presence_count_the_output_alone(ops: SamplingOps) -> None:
    draw = np.random.default_rng(5)
    ids = draw.integers(0, 40, 60)
    logits = draw.normal(0, 3, 50).astype(np.float32)
    counts = np.bincount(ids[20:], minlength=50)
    expected = logits - 0.7 * counts - 0.4 * (counts > 0)
    wish = Sampling(frequency_penalty=0.7, presence_penalty=0.4)
    mine = torch.from_numpy(np.stack((logits, logits)))
    ops.penalise(mine, how(wish, Sampling(), ids=ids, num_prompt=20).edits)
    assert np.allclose(mine[0], expected, atol=1e-6) and np.array_equal(mine[1], logits)


def test_penalties_follow_what_was_drawn(sample: Sample) -> None:
    """A strong penalty walks through the vocabulary, whoever the neighbour is."""
    logits = torch.arange(200, dtype=torch.float32)
    wishes = how(Sampling(presence_penalty=500.0), Sampling(), ids=[1], num_prompt=1)
    drawn = [sample(logits.repeat(2, 1), wishes).tolist() for _ in range(150)]
    assert drawn == [[199 - step, 199] for step in range(150)]


def test_processors_change_their_rows_and_may_fail(sample: Sample) -> None:
    def third(prompt: Any, output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[2] += 100.0 * (len(output) > 0)
        return logits

    def broken(prompt: Any, output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits * float("nan")

    known = {"third": third, "broken": broken}
    wishes = how(Sampling(processors=("third", "broken")), Sampling(), ids=[7], num_prompt=1)
    logits = torch.tensor([[0.0, 3.0, 2.0]]).repeat(2, 1)
    assert [sample(logits.clone(), wishes, None, known).tolist() for _ in range(2)] == [[1, 1], [2, 1]]


def test_logprobs_are_the_models_own(sample: Sample, ops: SamplingOps) -> None:
    draw = np.random.default_rng(6)
    logits = torch.from_numpy(draw.normal(0, 3, (3, 50)).astype(np.float32))
    wishes = how(
        Sampling(logprobs=4, temperature=0.5, presence_penalty=9.0), Sampling(), Sampling(logprobs=0, vocab=40)
    )
    raw = Raw(logits, wishes)
    expected = torch.log_softmax(logits, -1)
    drawn = sample(logits.clone(), wishes)
    first, last = raw.of(drawn, ops)
    ids, values = np.frombuffer(first.ids, "<i4"), np.frombuffer(first.values, "<f4")
    assert (first.slot, first.first, first.width, last.slot, last.width) == (0, 9, 5, 2, 1)
    assert ids[0] == drawn[0] and ids[1:].tolist() == expected[0].topk(4)[1].tolist()
    assert np.allclose(values, expected[0, ids.astype(np.int64)], atol=1e-5)
    assert np.frombuffer(first.ranks, "<i4")[0] == (expected[0] > expected[0, int(drawn[0])]).sum() + 1
    assert np.frombuffer(last.ids, "<i4").tolist() == [drawn[2]]


def test_logprobs_of_a_row_without_a_distribution_name_ids(ops: SamplingOps) -> None:
    ids, _, _ = ops.told(torch.full((1, 40), torch.nan), np.array([3], np.int32), 5, 30)
    assert ids[0, 0] == 3 and ((ids >= 0) & (ids < 30)).all()


EXTREMES = [
    {"temperature": 1e-5},
    {"temperature": 100.0},
    {"repetition_penalty": 0.001},
    {"repetition_penalty": 1000.0},
    {"min_p": 1.0},
    {"top_p": 1e-12},
    {"top_k": 300, "allowed_ids": (3, 4)},
    {"frequency_penalty": 2.0, "presence_penalty": -2.0, "logit_bias": ((1, -100.0), (2, 100.0))},
]


@pytest.mark.parametrize("fields", EXTREMES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_whatever_is_asked_an_id_of_the_vocabulary_is_drawn(
    sample: Sample, fields: dict[str, Any], scale: float
) -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, scale, (8, 300)).astype(np.float32))
    wishes = (Sampling(**({"temperature": 1.0, "vocab": 290} | fields), seed=row) for row in range(8))
    drawn = sample(logits, how(*wishes, ids=[1, 2, 2, 5]))
    assert ((drawn >= 0) & (drawn < 290)).all()
    if "allowed_ids" in fields:
        assert set(drawn.tolist()) <= {3, 4}


def test_a_row_without_a_distribution_gives_an_id_all_the_same(sample: Sample) -> None:
    logits = torch.zeros(3, 6)
    logits[0] = torch.nan
    logits[1, 2], logits[1, 3] = torch.inf, torch.nan
    drawn = sample(logits.clone(), seeded(3))
    assert ((drawn >= 0) & (drawn < 6)).all() and drawn[1] == 2
    logits[2] = torch.tensor([torch.nan, 0.0, 5.0, 5.0, torch.nan, -torch.inf])
    assert sample(logits, how(*[Sampling()] * 3)).tolist() == [0, 2, 2]
