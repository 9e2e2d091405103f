"""The engine on the simulated device: the same tokens whatever the depth, the chunks, the pages and the arrivals."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from runtime.limits import Limits
from runtime.request import AdmissionError, Finish, Request
from tests.fakes import Answer, Engine, request

ROOMY = Limits(num_blocks=512, block_size=4, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64)


def mixed_requests(count: int = 64) -> list[Request]:
    """Shared and private prefixes, greedy and seeded, every way to end, whole-page prompts among them."""
    draw = random.Random(7)
    shared = [draw.randrange(512) for _ in range(32)]
    found = []
    for number in range(count):
        own = [draw.randrange(512) for _ in range(draw.choice([0, 1, 3, 4, 8, 17, 30]))]
        prompt = shared[: draw.choice([0, 4, 8, 16, 32])] + own or [number]
        stops = tuple(draw.sample(range(512), draw.choice([0, 1, 40])))
        found.append(
            request(
                number,
                prompt,
                draw.choice([1, 2, 9, 24]),
                temperature=draw.choice([0.0, 1.0]),
                seed=draw.randrange(2**64),
                min_tokens=draw.choice([0, 0, 3]),
                stop_ids=stops,
            )
        )
    return found


def alone(one: Request) -> Answer:
    engine = Engine(replace(ROOMY, depth=0, prefix_cache=False, max_num_seqs=1))
    engine.admit(one)
    engine.run()
    return engine.answers[one.id]


@pytest.fixture(scope="module")
def expected() -> dict[int, Answer]:
    return {one.id: alone(one) for one in mixed_requests()}


def test_the_workload_ends_in_both_ways(expected: dict[int, Answer]) -> None:
    assert {answer.finish for answer in expected.values()} == {Finish.STOP, Finish.LENGTH}


MATRIX = list(itertools.product((0, 1, 2), (True, False), (16, 64, 4096), (512, 33), (1, 8, 64), (False, True)))


@pytest.mark.parametrize(("depth", "radix", "chunk", "blocks", "seqs", "spread"), MATRIX)
def test_tokens_do_not_depend_on_the_layout(
    expected: dict[int, Answer], depth: int, radix: bool, chunk: int, blocks: int, seqs: int, spread: bool
) -> None:
    limits = Limits(blocks, 4, 128, seqs, max(chunk, seqs), None, depth, radix)
    engine = Engine(limits, seed=depth)
    engine.serve(mixed_requests(), spread)
    assert engine.answers == expected
    assert engine.most_in_flight <= depth + 1
    assert_all_returned(engine)


def assert_all_returned(engine: Engine) -> None:
    scheduler = engine.scheduler
    assert sorted(scheduler.slots.free) == list(range(1, engine.limits.slots))
    assert scheduler.cache.num_available == engine.limits.num_blocks - 1
    assert not scheduler.cache.pool.refs[1:].any()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("radix", [True, False])
def test_preempted_requests_come_back_with_the_same_tokens(depth: int, radix: bool) -> None:
    long = [request(n, [n] * 8, 100, temperature=1.0, seed=n) for n in range(8)]
    engine = Engine(replace(ROOMY, num_blocks=33, depth=depth, prefix_cache=radix), seed=depth)
    for one in long:
        engine.admit(one)
    engine.run()
    assert engine.answers == {one.id: alone(one) for one in long}
    assert engine.scheduler.num_preemptions > 0
    assert_all_returned(engine)


def test_a_pool_of_one_slot_waits(expected: dict[int, Answer]) -> None:
    for depth in (0, 1, 2):
        engine = Engine(replace(ROOMY, depth=depth, num_slots=2), seed=depth)
        for one in mixed_requests():
            engine.admit(one)
        engine.run()
        assert engine.answers == expected


def test_the_next_plan_is_made_before_the_result() -> None:
    engine = Engine(replace(ROOMY, depth=1))
    engine.admit(request(1, [1, 2, 3], 8))
    first, second = engine.scheduler.plan(), engine.scheduler.plan()
    assert first is not None and second is not None and engine.scheduler.plan() is None
    assert len(second.decode_slots) == 2 and not second.chunk_ids  # a slot, no token


def test_length_is_predicted() -> None:
    engine = Engine(replace(ROOMY, depth=2))
    engine.admit(request(1, [1, 2, 3], 2))
    plans = [engine.scheduler.plan() for _ in range(3)]
    assert [plan is not None for plan in plans] == [True, True, False]


def test_a_decode_plan_of_256_rows_is_small() -> None:
    import msgspec

    limits = Limits(4096, 16, 512, 256, 4096)
    engine = Engine(limits)
    for number in range(256):
        engine.admit(request(number, [number, 1], 100))
    sizes = []
    for _ in range(20):
        plan = engine.scheduler.plan()
        assert plan is not None
        sizes.append(len(msgspec.msgpack.encode(plan)))
        engine.plans.append(plan)
        engine.device.launch(engine.plans.popleft(), engine.results.append)
        engine._commit(engine.results.popleft())
    assert sorted(sizes)[10] <= 700


def test_a_burst_with_one_prefix_computes_it_once() -> None:
    engine = Engine(replace(ROOMY, max_num_seqs=16, max_num_batched_tokens=128))
    prefix = list(range(100, 164))
    for number in range(16):
        engine.admit(request(number, [*prefix, number], 1))
    engine.run()
    assert engine.computed_tokens == 64 + 16


def test_resuming_from_half_an_answer_continues_it(expected: dict[int, Answer]) -> None:
    for one in mixed_requests():
        answer = expected[one.id]
        if len(answer.ids) < 2:
            continue
        engine = Engine(ROOMY)
        engine.admit(replace(one, output_ids=np.array(answer.ids[: len(answer.ids) // 2], np.int32)))
        engine.run()
        assert engine.answers[one.id] == answer


@pytest.mark.parametrize("seed", range(20))
def test_random_aborts_leave_nothing_behind(expected: dict[int, Answer], seed: int) -> None:
    draw = random.Random(seed)
    engine = Engine(Limits(draw.choice([33, 60]), 4, 128, 8, 32, None, seed % 3), seed)
    todo, aborted = mixed_requests(), set()
    while todo or not engine.scheduler.idle:
        if todo and draw.random() < 0.2:
            engine.admit(todo.pop())
        elif engine.answers and draw.random() < 0.05:
            victim = draw.choice(list(engine.answers))
            if engine.scheduler.cancel(victim):
                aborted.add(victim)
        engine.turn()
    for number, answer in expected.items():
        got = engine.answers[number]
        assert got == answer if number not in aborted else got.ids == answer.ids[: len(got.ids)]
    assert aborted
    assert_all_returned(engine)


def test_priority_goes_first_then_first_come() -> None:
    engine = Engine(replace(ROOMY, depth=0, max_num_seqs=1))
    for number, priority in ((1, 0), (2, 0), (3, -1)):
        engine.admit(replace(request(number, [number], 1), priority=priority))
    order = []
    while (plan := engine.scheduler.plan()) is not None:
        order.append(np.frombuffer(plan.chunk_ids, "<i4")[0])
        engine.device.launch(plan, engine.results.append)
        engine._commit(engine.results.popleft())
    assert order == [3, 1, 2]


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (request(1, []), "prompt"),
        (request(1, [1] * 128), "prompt"),
        (request(1, [1], 0), "max_tokens"),
        (request(1, [1], 2, [5, 6]), "max_tokens"),
    ],
)
def test_what_can_never_run_is_refused_by_name(bad: Request, param: str) -> None:
    engine = Engine(ROOMY)
    with pytest.raises(AdmissionError) as caught:
        engine.scheduler.admit(bad)
    assert caught.value.param == param
    assert engine.scheduler.idle


def test_a_full_queue_and_a_live_id_are_refused() -> None:
    engine = Engine(replace(ROOMY, max_num_queued=1))
    engine.admit(request(1, [1]))
    with pytest.raises(AdmissionError, match="live already"):
        engine.scheduler.admit(request(1, [1]))
    with pytest.raises(AdmissionError, match="queue is full"):
        engine.scheduler.admit(request(2, [1]))


def test_an_id_that_comes_again_has_its_new_place_in_the_queue() -> None:
    engine = Engine(replace(ROOMY, depth=0, max_num_seqs=1))
    engine.admit(replace(request(1, [1], 1), priority=-1))
    engine.admit(request(2, [2], 1))
    assert engine.scheduler.cancel(1)
    engine.admit(replace(request(1, [1], 1), priority=1))
    assert engine.scheduler.num_waiting == 2
    first = engine.scheduler.plan()
    assert first is not None and np.frombuffer(first.chunk_ids, "<i4").tolist() == [2]


def test_thousands_of_stop_ids_stop_their_request_and_cost_no_other(expected: dict[int, Answer]) -> None:
    for one in mixed_requests():
        engine = Engine(ROOMY)
        width = engine.scheduler.slots.stop_ids.shape
        many = msgspec.structs.replace(one.sampling, stop_ids=one.sampling.stop_ids * 1000)
        engine.serve([replace(one, sampling=many)], False)
        assert engine.answers[one.id] == expected[one.id]
        assert engine.scheduler.slots.stop_ids.shape == width and not engine.scheduler.slots.more_stop_ids


def test_the_longest_prompt_gets_its_one_token() -> None:
    engine = Engine(ROOMY)
    engine.admit(request(1, [3] * 127, 50))
    engine.run()
    assert len(engine.answers[1].ids) == 1 and engine.answers[1].finish == Finish.LENGTH


def test_limits_that_contradict_are_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        Limits(100, max_num_seqs=64, max_num_batched_tokens=32, max_model_len=64)
    with pytest.raises(ValueError, match="max_model_len"):
        Limits(10, 4, max_model_len=64)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_arrival_waits_for_no_more_than_the_steps_already_sent(depth: int) -> None:
    engine = Engine(replace(ROOMY, depth=depth))
    engine.admit(request(1, [1, 2], 50))
    sent = 0
    while (plan := engine.scheduler.plan()) is not None:
        engine.device.launch(plan, engine.results.append)
        sent += 1
    assert sent == depth + 1
    engine.admit(request(2, [3, 4], 50))
    engine._commit(engine.results.popleft())
    plan = engine.scheduler.plan()
    assert plan is not None and plan.step == sent and np.frombuffer(plan.chunk_ids, "<i4").tolist() == [3, 4]
