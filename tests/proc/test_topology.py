"""Every form of --procs, and what is refused with its reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proc.routing import BLOCK, Routing
from proc.settings import UsageError
from proc.topology import Topology, parse


def names(topology: Topology) -> list[str]:
    return ["+".join(map(str, process)) for process in topology.processes]


@pytest.mark.parametrize(
    ("procs", "expected"),
    [
        ("1", ["tokenizer-0+scheduler-0+worker-0+grammar-0"]),
        ("2", ["tokenizer-0+scheduler-0", "worker-0", "grammar-0"]),
        ("3", ["tokenizer-0", "scheduler-0", "worker-0", "grammar-0"]),
        ("5", ["tokenizer-0", "tokenizer-1", "tokenizer-2", "scheduler-0", "worker-0", "grammar-0"]),
        ("tokenizer=2,worker=1", ["tokenizer-0", "tokenizer-1", "scheduler-0", "worker-0", "grammar-0"]),
        (
            "scheduler=2",
            ["tokenizer-0", "scheduler-0", "scheduler-1", "worker-0", "worker-1", "grammar-0", "grammar-1"],
        ),
        (" worker = 1 , http=0 ", ["tokenizer-0", "scheduler-0", "worker-0", "grammar-0"]),
    ],
)
def test_every_form(procs: str, expected: list[str]) -> None:
    assert names(parse(procs)) == expected


def test_http_is_one_process_unless_the_layout_says_otherwise() -> None:
    assert names(parse("1", http=1)) == ["tokenizer-0+scheduler-0+worker-0+grammar-0+http-0"]
    assert names(parse("2", http=1)) == ["tokenizer-0+scheduler-0", "worker-0", "grammar-0", "http-0"]
    assert names(parse("3", http=1))[4:] == names(parse("worker=1", http=1))[4:] == ["http-0"]
    assert names(parse("http=2", http=1))[4:] == ["http-0", "http-1"]
    assert names(parse("http=0", http=1))[4:] == []


@pytest.mark.parametrize(
    ("procs", "words"),
    [
        ("0", "between 1 and 64"),
        ("-3", "between 1 and 64"),
        ("1000", "between 1 and 64"),
        ("worker=2", "tensor parallelism"),
        ("http=65", "at most 64"),
        ("tokeniser=1", "did you mean tokenizer"),
        ("gpu=1", "roles are tokenizer, scheduler, worker, http"),
        ("tokenizer", "needs a number"),
        ("tokenizer=x", "needs a number"),
        ("tokenizer=0", "between 1 and 64"),
        ("tokenizer=1,tokenizer=2", "named twice"),
        ("", "unknown role"),
    ],
)
def test_what_cannot_be_met_is_refused_with_the_reason(procs: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(procs)


@given(st.text(max_size=30))
def test_anything_else_is_read_or_refused(procs: str) -> None:
    try:
        topology = parse(procs)
    except UsageError:
        return
    assert topology.count("scheduler") == topology.count("worker") == topology.count("grammar") >= 1


def test_a_known_prefix_goes_where_it_is_known_unless_that_is_far_busier() -> None:
    routing = Routing(2)
    prefix = list(range(2 * BLOCK))
    home = routing.choose([*prefix, 1])
    assert [routing.choose([*prefix, n]) for n in range(5)] == [home] * 5
    assert routing.choose([7] * BLOCK) != home  # an unknown one goes to the least loaded
    while routing.live[home] < 40:
        routing.choose([*prefix, 1])
        if routing.live[1 - home] > 1:
            break
    assert routing.live[1 - home] > 1  # the queue of the knowing one grew too long


def test_loads_even_out() -> None:
    routing = Routing(3)
    chosen = [routing.choose([n]) for n in range(9)]
    assert routing.live == [3, 3, 3]
    for replica in chosen:
        routing.ended(replica)
    assert routing.live == [0, 0, 0]
