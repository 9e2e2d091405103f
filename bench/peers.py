"""`sidestep bench peers`: the same requests to several running OpenAI-compatible servers, and their speeds as ratios.

A round goes through all workloads, and each workload through all servers before the next, so that what the machine
does meanwhile touches all alike; ratios are taken within a round. Each round has prompts of its own, the same for every
server, so that no prefix cache knows them. A server whose answers are not as long as asked for is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import uvloop

from bench.openai_backend import OpenAIBackend
from bench.options import add_serving_flags
from bench.serving import Outcome, measure
from bench.workloads import Job, random_jobs
from proc.settings import UsageError


@dataclass(frozen=True)
class Workload:
    num_prompts: int
    concurrency: int
    input_len: tuple[int, int]  # tokens, uniform from the first to the second
    output_len: int
    prefix_len: int = 0  # tokens before these that all requests have in common


WORKLOADS = {
    "A": Workload(64, 16, (16, 256), 64),
    "B": Workload(8, 1, (16, 256), 64),
    "C": Workload(64, 16, (32, 32), 32, prefix_len=512),
}
WARM_UP = Workload(16, 16, (64, 64), 8)
SHOWN = {"tokens/s": "output_throughput", "TTFT ms": "median_ttft_ms", "TPOT ms": "median_tpot_ms"}
REST = 0.5  # seconds before each run: OpenMP's threads spin for a while after their last work
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not")


@dataclass(frozen=True)
class Server:
    name: str
    backend: OpenAIBackend
    takes_ids: bool  # as a prompt; else it is sent a word for each id


@dataclass(frozen=True)
class Run:
    """One workload once on one server."""

    workload: str
    server: str
    figures: dict[str, Any]


def main(given: argparse.Namespace) -> int:
    names = [name for name, _ in given.url]
    if len(set(names)) < len(names):
        raise UsageError(f"--url: two servers have the same name: {', '.join(names)}")
    base = given.base or names[0]
    if base not in names:
        raise UsageError(f"--base {base}: the servers are {', '.join(names)}")
    if given.seed is None:
        given.seed = secrets.randbelow(2**31)
    runs = uvloop.run(_runs(given))
    lines = [_line(runs, workload, name, base) for workload in given.workload for name in names]
    if not given.json:
        _print_table(lines, base, given.repeats)
    print(json.dumps({"base": base, "seed": given.seed, "repeats": given.repeats, "results": lines}))
    return 0


async def _runs(given: argparse.Namespace) -> list[Run]:
    runs = []
    async with AsyncExitStack() as stack:
        servers = [await _open(stack, name, url, given.vocab_size) for name, url in given.url]
        for server in servers:
            if not server.takes_ids:
                _say(given, f"{server.name} takes no token ids: its prompts are words")
            await _measure(server, WARM_UP, np.random.default_rng([given.seed, 0]), given.vocab_size)
        for repeat in range(1, given.repeats + 1):  # 0 is the warm-up's
            for workload in given.workload:
                for server in servers:
                    await asyncio.sleep(REST)
                    draw = np.random.default_rng([given.seed, repeat, ord(workload)])
                    figures = await _measure(server, WORKLOADS[workload], draw, given.vocab_size)
                    runs.append(Run(workload, server.name, figures))
                    _say(given, f"{repeat}/{given.repeats} {workload} {server.name}: {_row(figures)}")
    return runs


async def _open(stack: AsyncExitStack, name: str, url: str, vocab_size: int) -> Server:
    backend = OpenAIBackend(url, None, None)
    await stack.enter_async_context(backend)
    return Server(name, backend, await _takes_ids(backend, vocab_size))


async def _takes_ids(backend: OpenAIBackend, vocab_size: int) -> bool:
    """Whether a list of ids, the highest among them, counts as so many tokens; a server may put one before them."""
    outcome = Outcome(Job([vocab_size - 1] * 16, 1))
    try:
        await backend.request(outcome, ignore_eos=True)
    except RuntimeError:
        return False
    return outcome.prompt_tokens in (16, 17)


async def _measure(server: Server, work: Workload, draw: np.random.Generator, vocab_size: int) -> dict[str, Any]:
    jobs = _jobs(work, draw, vocab_size)
    if not server.takes_ids:
        jobs = [replace(job, prompt=_words(job)) for job in jobs]
    figures, outcomes = await measure(server.backend, jobs, _load(work))
    _refuse_others(server.name, outcomes)
    return figures


def _words(job: Job) -> str:
    """One for each id: common words that are one token in all common vocabularies."""
    return " ".join(WORDS[int(token) % len(WORDS)] for token in job.prompt)


def _jobs(work: Workload, draw: np.random.Generator, vocab_size: int) -> list[Job]:
    low, high = work.input_len
    inputs = draw.integers(low, high + 1, work.num_prompts).tolist()
    return random_jobs(draw, inputs, [work.output_len] * work.num_prompts, vocab_size, work.prefix_len)


def _load(work: Workload) -> argparse.Namespace:
    """All at once, so many under way: the options of `bench serving` that say so."""
    parser = argparse.ArgumentParser()
    add_serving_flags(parser)
    counts = ["--num-prompts", str(work.num_prompts), "--max-concurrency", str(work.concurrency)]
    return parser.parse_args([*counts, "--disable-tqdm"])


def _refuse_others(name: str, outcomes: list[Outcome]) -> None:
    """Raises `UsageError` for a request that failed or whose answer has another length: no speed is comparable then."""
    for outcome in outcomes:
        if outcome.error:
            raise UsageError(f"{name} failed a request: {outcome.error}")
        if outcome.output_tokens != outcome.job.output_len:
            raise UsageError(
                f"{name} answered {outcome.output_tokens} tokens where {outcome.job.output_len} were asked for: "
                "it must honour max_tokens and ignore_eos"
            )


def _line(runs: list[Run], workload: str, name: str, base: str) -> dict[str, Any]:
    """Medians over the rounds, each figure's ratio to the base server's, and the throughput of each round."""
    of = {one: [run.figures for run in runs if (run.workload, run.server) == (workload, one)] for one in (name, base)}
    line: dict[str, Any] = {"workload": workload, "server": name, "input_tokens": of[name][0]["total_input_tokens"]}
    for figure in SHOWN.values():
        pairs = [(mine[figure], other[figure]) for mine, other in zip(of[name], of[base], strict=True)]
        line[figure] = _median(lambda mine, _: mine, pairs)
        line[f"{figure}_over_base"] = _median(lambda mine, other: mine / other, pairs)
    return line | {"output_throughputs": [figures["output_throughput"] for figures in of[name]]}


def _median(value: Callable[[float, float], float], pairs: list[tuple[Any, Any]]) -> float | None:
    """None where a round has no figure: the TPOT of answers that came in one piece."""
    return None if any(None in pair for pair in pairs) else statistics.median(value(*pair) for pair in pairs)


def _row(figures: dict[str, Any]) -> str:
    return "  ".join(f"{column} {_shown(figures[figure], 1)}" for column, figure in SHOWN.items())


def _print_table(lines: list[dict[str, Any]], base: str, repeats: int) -> None:
    width = max(len("server"), *(len(line["server"]) for line in lines))
    print(f"medians of {repeats}, x is over {base}")
    print(f"{'workload':<10}{'server':<{width}}" + "".join(f"{column:>11}{'x':>8}" for column in SHOWN))
    for line in lines:
        cells = (
            f"{_shown(line[figure], 1):>11}{_shown(line[f'{figure}_over_base'], 3):>8}" for figure in SHOWN.values()
        )
        print(f"{line['workload']:<10}{line['server']:<{width}}" + "".join(cells))


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _say(given: argparse.Namespace, line: str) -> None:
    if not given.json:
        print(line, flush=True)
