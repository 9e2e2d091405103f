"""Every form of --procs, and what is refused with its reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proc.routing import BLOCK, Routing
from proc.settings import Settings, UsageError
from proc.topology import Topology, parse, resolve


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
        ("worker=2", ["tokenizer-0", "scheduler-0", "worker-0", "worker-1", "grammar-0"]),
    ],
)
def test_every_form(procs: str, expected: list[str]) -> None:
    assert names(parse(procs)) == expected


@pytest.mark.parametrize("procs", ["2", "3", "5", "tokenizer=2", "scheduler=2", "worker=2"])
def test_the_tensor_parallel_size_is_the_workers_of_each_scheduler(procs: str) -> None:
    topology = parse(procs, 0, 2)
    assert topology.num_ranks == 2 and topology.count("worker") == 2 * topology.count("scheduler")
    others = [name for name in names(topology) if "worker" not in name]
    assert others == [name for name in names(parse(procs, 0)) if "worker" not in name]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"procs": "worker=2", "tensor_parallel_size": 4}, "--tensor-parallel-size 4 and --procs worker=2 differ"),
        ({"procs": "worker=2", "tensor_parallel_size": 1}, "--tensor-parallel-size 1 and --procs worker=2 differ"),
        ({"procs": "1", "tensor_parallel_size": 2}, "--procs 1 is one process, --tensor-parallel-size 2"),
        ({"procs": "worker=2", "device": "sim"}, "--tensor-parallel-size 2: a simulated device"),
        ({"tensor_parallel_size": 2, "quantization": "int8"}, "--tensor-parallel-size 2: --quantization int8"),
    ],
)
def test_ranks_that_cannot_be_are_refused_with_the_reason(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve(Settings(**settings))


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
        ("worker=0", "between 1 and 64"),
        ("scheduler=2,worker=33", "2 times 33 workers"),
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
    assert topology.count("worker") == topology.count("scheduler") * topology.num_ranks >= 1
    assert topology.count("scheduler") == topology.count("grammar")


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
