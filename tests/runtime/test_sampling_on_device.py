"""Draws on a device that nobody waits for, against `runtime.sampler` on torch and the distribution written plainly.

Uniform numbers are moved to the middle of what they draw, so that no order of summation decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from runtime.batch import Batch, PromptRow
from runtime.device.base import MaskSet
from runtime.device.told import told_of_prompts
from runtime.logits import edit
from runtime.logprobs import Raw, of_prompts
from runtime.sampler import sample
from runtime.sampling import Sampling
from runtime.sampling_on_device import DeviceSampler
from runtime.sampling_on_torch import TorchOps
from runtime.slot_sampling import SampleBatch, SlotSampling

NO_IDS = np.zeros(0, np.int32)


def put(array: np.ndarray, into: torch.Tensor | None = None) -> torch.Tensor:
    return torch.from_numpy(array.copy())


def weights(logits: np.ndarray, how: SampleBatch, row: int) -> np.ndarray:
    """What a row may draw, against its best id; ids with equal logits share their fate."""
    share = np.exp((logits.astype(float) - logits.max()) / how.temperature[row])
    share[share < how.min_p[row]] = 0
    if 0 < how.top_k[row] < len(logits):
        share[logits < np.sort(logits)[-how.top_k[row]]] = 0
    if how.top_p[row] < 1:
        order = np.argsort(-logits, kind="stable")
        before = np.cumsum(share[order]) - share[order]
        share[logits < logits[order][before < how.top_p[row] * share.sum()].min()] = 0
    return share


def moved(logits: torch.Tensor, how: SampleBatch) -> SampleBatch:
    """Uniform numbers away from edges, by logits that have been edited."""
    numbers = how.uniform.copy()
    for row, one in enumerate(logits.numpy()):
        if how.temperature[row] > 0 and np.isfinite(one.max()):
            edges = np.cumsum(share := weights(one, how, row))
            at = int(np.searchsorted(edges, numbers[row] * edges[-1], "right"))
            at = at if share[min(at, len(one) - 1)] > 1e-4 * edges[-1] else int(share.argmax())
            numbers[row] = (edges[at] - share[at] / 2) / edges[-1]
    return replace(how, uniform=numbers)


class Both:
    """A worker's slots, with a device's sampler beside the reference."""

    def __init__(self, vocab: int, slots: int = 8, processors: Any = None) -> None:
        self.slots, self.ops, self.vocab, self.processors = SlotSampling(slots), TorchOps(), vocab, processors or {}
        self.device = DeviceSampler(slots, vocab, "cpu", processors=self.processors)
        self.lengths = np.zeros(slots, np.int64)

    def admit(self, slot: int, wish: Sampling, num_prompt: int = 0, ids: Any = ()) -> None:
        known = np.array(ids, np.int32)
        self.slots.admit(slot, wish, num_prompt, known if wish.needs_history else NO_IDS)
        self.device.admit(slot, wish, num_prompt, known if wish.needs_history else NO_IDS, put)
        self.lengths[slot] = len(known)

    def step(self, logits: torch.Tensor, slots: Any, masks: MaskSet | None = None) -> list[int]:
        """One draw each, equal with both; log probabilities too."""
        rows = np.array(slots, np.int32)
        how = self.slots.batch(rows, self.lengths[rows])
        edited = logits.clone()
        edit(edited, how, masks, self.processors, self.ops)
        how = moved(edited, how)
        asked = self.device.prepare(how, put)
        mine = logits.clone()
        raw = self.device.raw(mine, asked)
        drawn = self.device.draw(mine, asked, masks, put)
        told = [] if raw is None else self.device.told(raw, asked, drawn).logprobs
        expected = sample(logits.clone(), how, masks, self.processors, self.ops)
        assert torch.equal(mine.nan_to_num(7), edited.nan_to_num(7))
        assert drawn.dtype == torch.int32 and drawn.tolist() == expected.tolist()
        if raw is not None:
            assert told(self.device.told(raw, asked, drawn).packed.numpy()) == Raw(logits, how).of(expected, self.ops)
        self.lengths[rows] += 1
        return drawn.tolist()


WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "nothing": {},
    "top_k": {"top_k": 5},
    "top_k beyond": {"top_k": 9999},
    "top_k of one": {"top_k": 1},
    "top_p": {"top_p": 0.7},
    "top_p of nearly none": {"top_p": 1e-12},
    "top_p of nearly all": {"top_p": 1 - 1e-9},
    "min_p": {"min_p": 0.1},
    "all filters": {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 1.7},
    "repetition": {"repetition_penalty": 1.8},
    "frequency": {"frequency_penalty": 1.1},
    "presence": {"presence_penalty": -1.5},
    "penalties": {"repetition_penalty": 0.6, "frequency_penalty": -0.4, "presence_penalty": 2.0, "top_k": 4},
    "bad words": {"bad_words": ((1,), (2, 3), (4, 4, 5), (0, 1, 2, 3, 4, 5)), "top_k": 4},
    "min_tokens": {"min_tokens": 6, "stop_ids": (0, 3)},
    "bias": {"logit_bias": ((1, 4.0), (7, -100.0))},
    "allowed": {"allowed_ids": (2, 3, 5, 30)},
    "all banned": {"allowed_ids": (2, 3), "bad_words": ((2,), (3,)), "min_tokens": 3, "stop_ids": (2,)},
    "padding": {"vocab": 30},
    "logprobs": {"logprobs": 4, "presence_penalty": 3.0},
    "logprobs of its own": {"logprobs": 0, "vocab": 33},
}


def wish(name: str, seed: int) -> Sampling:
    return Sampling(**({"temperature": 1.0} | WISHES[name]), seed=seed)


def logits_of(draw: np.random.Generator, rows: int, vocab: int) -> torch.Tensor:
    """Some with ties, few distinct values; some wide, some flat."""
    found = draw.normal(0, draw.choice([0.3, 2.0, 6.0], (rows, 1)), (rows, vocab))
    tied = draw.random((rows, 1)) < 0.4
    return torch.from_numpy(np.where(tied, np.round(found * 2) / 2, found).astype(np.float32))


@pytest.mark.parametrize("name", WISHES)
def test_each_wish_alone_and_beside_rows_without(name: str) -> None:
    draw = np.random.default_rng(sum(name.encode()))
    both = Both(40)
    for slot in range(8):
        both.admit(slot, wish(name if slot < 5 else "nothing", slot), 3, draw.integers(0, 8, 3 + slot % 4))
    for step in range(25):
        both.step(logits_of(draw, 5 if step % 2 else 8, 40), np.arange(5 if step % 2 else 8))


@pytest.mark.parametrize("vocab", [40, 700])
@pytest.mark.parametrize("seed", range(6))
def test_wishes_mixed_while_slots_are_used_again(vocab: int, seed: int) -> None:
    """Each slot at its own pace, with two wishes at once, masks, and rows that overflowed."""
    draw, names = np.random.default_rng(seed), list(WISHES)
    both = Both(vocab)
    constrained = np.zeros(8, bool)
    for step in range(60):
        for slot in range(8) if step == 0 else np.flatnonzero(draw.random(8) < 0.08).tolist():
            first, second = (WISHES[names[at]] for at in draw.integers(0, len(names), 2))
            constrained[slot] = draw.random() < 0.3
            made = Sampling(**({"temperature": 1.0} | first | second), seed=slot, constrained=bool(constrained[slot]))
            both.admit(slot, made, 4, draw.integers(0, 8, 4 + int(draw.integers(0, 12))))
        slots = draw.permutation(8)[: draw.integers(1, 9)]
        logits = logits_of(draw, len(slots), vocab)
        logits[:, :8] += 2.0  # so that histories matter
        for row in np.flatnonzero(draw.random(len(slots)) < 0.05):
            logits[row, draw.integers(0, vocab, 5)] = float(draw.choice([np.nan, np.inf]))
        masked = np.flatnonzero(constrained[slots])
        bits = draw.integers(0, 2**32, (len(masked), -(-vocab // 32)), np.uint32) | np.uint32(1 << 5)
        both.step(logits, slots, MaskSet(masked, bits, 0, 0, 0) if len(masked) else None)


def test_bad_words_are_found_in_what_was_known_and_what_was_drawn() -> None:
    both = Both(6)
    both.admit(0, Sampling(bad_words=((1, 2), (3, 4, 5, 0))), 2, [0, 1])
    both.admit(1, Sampling(bad_words=((1, 2),)), 1, [0, 1])
    likes_2 = torch.tensor([[0.0, 0, 9, 0, 0, 1]]).repeat(2, 1)
    assert both.step(likes_2, [0, 1]) == [2, 5]  # a prompt is no output
    both.admit(1, Sampling(bad_words=tuple((*range(at), 0) for at in range(1, 6))), 0, [0, 1, 2, 3, 4])
    assert both.step(torch.tensor([[1.0, 0, 0, 0, 0, 0]]), [1]) == [1]
    for wanted in (3, 4, 5):
        assert both.step(torch.nn.functional.one_hot(torch.tensor([wanted]), 6).float(), [0]) == [wanted]
    assert both.step(torch.tensor([[9.0, 0, 0, 7, 0, 0]]), [0]) == [3]


def test_processors_are_given_what_the_host_knows_by_then() -> None:
    def not_again(prompt: Any, output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[output] = -torch.inf
        return logits

    def broken(prompt: Any, output: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise RuntimeError

    both = Both(5, processors={"not again": not_again, "broken": broken})
    both.admit(0, Sampling(processors=("broken", "not again")))
    both.admit(1, Sampling(presence_penalty=1.0))
    likes_4 = torch.arange(5.0).repeat(2, 1) / 2
    assert [both.step(likes_4, [0, 1]) for _ in range(3)] == [[4, 4], [3, 3], [2, 2]]
    how = both.slots.batch(np.array([1, 0], np.int32), both.lengths[[1, 0]])
    assert both.device.prepare(how, put).needs_host
    assert not both.device.prepare(both.slots.batch(np.array([1], np.int32), both.lengths[[1]]), put).needs_host


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    draw, names = np.random.default_rng(2), list(WISHES)
    both, alone = (Both(900, len(names)) for _ in range(2))
    for slot, name in enumerate(names):
        for one in (both, alone):
            one.admit(slot, wish(name, slot), 1, [1, 2, 3])
    for _ in range(4):
        logits = logits_of(draw, len(names), 900)
        together = both.step(logits, np.arange(len(names)))
        assert together == [alone.step(logits[[slot]], [slot])[0] for slot in range(len(names))]


def test_a_row_without_a_distribution_gives_an_id_all_the_same() -> None:
    both = Both(6)
    for slot in range(8):
        both.admit(slot, Sampling(temperature=float(slot % 2), top_k=3, top_p=0.5, seed=slot))
    logits = torch.zeros(8, 6)
    logits[:2] = torch.nan
    logits[2:4, 2], logits[2:4, 3] = torch.inf, torch.nan
    logits[4:6] = torch.tensor([torch.nan, 0.0, 5.0, 5.0, torch.nan, -torch.inf])
    logits[6:] = torch.tensor([torch.nan, -torch.inf, torch.nan, torch.nan, torch.nan, torch.nan])
    assert both.step(logits, np.arange(8)) == [0, 0, 2, 2, 2, 2, 0, 0]


def test_slots_are_used_again_for_ever_and_a_request_without_wishes_holds_nothing() -> None:
    both = Both(6, slots=2)
    for _ in range(5):
        both.admit(0, Sampling(presence_penalty=1.0, bad_words=((1, 2),)))
        both.step(torch.zeros(1, 6), [0])
        assert both.device.counts.row.tolist() == both.device.tails.row.tolist() == [0, -1]
    both.admit(0, Sampling())
    assert both.device.counts.row.tolist() == both.device.tails.row.tolist() == [-1, -1]


def test_an_early_stop_id_that_the_head_does_not_have_is_none_to_ban() -> None:
    slots, device = SlotSampling(1), DeviceSampler(1, 4, "cpu")
    slots.admit(0, Sampling(min_tokens=9, stop_ids=(3, 10**6)), 0, NO_IDS)
    device.admit(0, Sampling(), 0, NO_IDS, put)
    asked = device.prepare(slots.batch(np.zeros(1, np.int32), np.ones(1, np.int64)), put)
    assert device.draw(torch.arange(4.0)[None], asked, None, put).tolist() == [2]


def test_nothing_is_a_step_too_and_ids_that_are_not_there_are_refused() -> None:
    both = Both(6)
    assert both.step(torch.zeros(0, 6), []) == []
    for strange in (Sampling(allowed_ids=(6,)), Sampling(logit_bias=((-1, 1.0),)), Sampling(presence_penalty=1.0)):
        with pytest.raises(ValueError, match="among the 6"):
            both.device.admit(0, strange, 1, np.array([6], np.int32), put)


def test_a_transfer_is_made_only_for_what_has_changed() -> None:
    count = 0

    def counted(array: np.ndarray, into: torch.Tensor | None = None) -> torch.Tensor:
        nonlocal count
        count += 1
        return torch.from_numpy(array.copy())

    def steps(*wishes: Sampling) -> list[int]:
        nonlocal count
        slots, device, made = SlotSampling(8), DeviceSampler(8, 40, "cpu"), []
        for slot, one in enumerate(wishes):
            for admitting in (slots.admit, lambda *a: device.admit(*a, put)):
                admitting(slot, one, 0, NO_IDS)
        for length in range(3):
            count = 0
            how = slots.batch(np.arange(len(wishes), dtype=np.int32), np.full(len(wishes), length))
            device.draw(torch.zeros(len(wishes), 40), device.prepare(how, counted), None, counted)
            made.append(count)
        return made

    assert steps(Sampling(), Sampling(vocab=40)) == [0, 0, 0]
    assert steps(Sampling(vocab=30), Sampling(vocab=30)) == [0, 0, 0]
    assert steps(Sampling(vocab=30), Sampling(vocab=20)) == [1, 1, 1]
    assert steps(Sampling(), Sampling(temperature=1.0, top_p=0.5)) == [1, 1, 1]
    assert steps(Sampling(presence_penalty=1.0, bad_words=((1, 2),))) == [2, 0, 0]
    assert steps(Sampling(temperature=1.0, min_tokens=2, stop_ids=(1,))) == [2, 1, 1]


def test_prompts_are_told_as_the_reference_tells_them() -> None:
    draw = np.random.default_rng(3)
    lens = np.array([1, 150, 7], np.int32)
    rows = [
        PromptRow(row, 5, draw.integers(0, 50, lens[row] - (row == 2)).astype(np.int32), 3 * row - 3) for row in (1, 2)
    ]
    fields = dict.fromkeys(Batch.__dataclass_fields__, None)
    batch = Batch(**fields | {"query_lens": lens, "slots": np.array([3, 1, 2]), "prompts": rows})  # type: ignore[arg-type]
    hidden = torch.from_numpy(draw.normal(0, 1, (158, 16)).astype(np.float32))
    head = torch.nn.Linear(16, 50).requires_grad_(False)
    vocab = np.array([0, 40, 0, 0])
    found = [told.logprobs(told.packed.numpy()) for told in told_of_prompts(batch, vocab, hidden, head, put)]
    assert [one for (one,) in found] == of_prompts(batch, vocab, hidden, head, TorchOps())


class NoQuestions(TorchDispatchMode):
    """Refuses what would wait for a GPU: values asked for, shapes that depend on them, copies from the host."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "lift_fresh", "scalar_tensor",
             "item", "equal", "allclose", "bincount", "repeat_interleave")  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        flat = [one for arg in args for one in (arg if isinstance(arg, list | tuple) else [arg])]
        tensors = [one for one in flat if isinstance(one, torch.Tensor)]
        asks = any(name.strip("_").startswith(one.strip("_")) for one in self.NAMES)
        asks |= name.startswith("index") and any(one.dtype in (torch.bool, torch.uint8) for one in tensors[1:2])
        asks |= name == "where" and (len(tensors) < 3 or any(one.ndim == 0 for one in tensors))
        if asks:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def several_steps(device: str, copy: Callable[..., torch.Tensor]) -> None:
    """Everything that can be asked for, on `device`."""
    slots, sampler = SlotSampling(32), DeviceSampler(32, 40, device)
    everyone = np.arange(len(WISHES), dtype=np.int32)
    for slot, name in enumerate(WISHES):
        made, ids = wish(name, slot), np.array([1, 2, 3], np.int32)
        slots.admit(slot, made, 1, ids if made.needs_history else NO_IDS)
        sampler.admit(slot, made, 1, ids if made.needs_history else NO_IDS, copy)
    for rows in (everyone, everyone[:1], everyone[:2], everyone[7:9], everyone):
        masks = MaskSet(np.array([0]), np.ones((1, 2), np.uint32), 0, 0, 0)
        asked = sampler.prepare(slots.batch(rows, np.full(len(rows), 3)), copy)
        logits = torch.zeros(len(rows), 40, device=device)
        raw = sampler.raw(logits, asked)
        drawn = sampler.draw(logits, asked, masks, copy)
        assert drawn.device.type == device and drawn.shape == (len(rows),)
        if raw is not None:
            assert sampler.told(raw, asked, drawn).packed.dtype == torch.int32


def test_nothing_is_asked_of_the_device() -> None:
    def unseen(array: np.ndarray, into: torch.Tensor | None = None) -> torch.Tensor:
        with _disable_current_modes():
            return put(array)

    with NoQuestions():
        several_steps("cpu", unseen)


def test_no_shape_depends_on_a_value() -> None:
    """On tensors without contents; one that was left on the host cannot meet them."""
    several_steps("meta", lambda array, into=None: torch.from_numpy(array.copy()).to("meta"))


QUESTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "mask": lambda x: x[x > 0],
    "masked assignment": lambda x: x.__setitem__(x > 0, torch.zeros(3)),
    "nonzero": lambda x: x.nonzero(),
    "branch": lambda x: bool((x > 0).any()),
    "where with a number": lambda x: torch.where(x > 0, x, 0.0),
    "tensor from a list": lambda x: torch.tensor([1, 2]),
    "masked_select": lambda x: x.masked_select(x > 0),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_would_be_noticed(name: str) -> None:
    ones = torch.ones(3)
    with pytest.raises(AssertionError, match="waits"), NoQuestions(), torch.inference_mode():
        QUESTIONS[name](ones)
