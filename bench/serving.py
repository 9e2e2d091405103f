"""`sidestep bench serving`: requests at a rate against a running server, and the field's usual report.

Token times are taken per token, also where a message carries several. Random prompts are token ids, so that their
lengths are exact. Every request is answered or counted as failed, and why is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import uvloop
from tqdm import tqdm

from bench.report import Sample, print_report, summary
from bench.workloads import Job, jobs
from ipc.async_client import AsyncClient


@dataclass
class Outcome:
    """One request as it went."""

    job: Job
    sent: float = 0.0
    token_times: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


class Backend(Protocol):
    """A way to a server. `request` fills the outcome and raises what goes wrong."""

    name: str

    async def __aenter__(self) -> Backend: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def request(self, outcome: Outcome, ignore_eos: bool) -> None: ...

    async def vocabulary(self) -> int: ...

    async def retokenize(self, text: str) -> int | None:
        """Tokens of a text, None where the server does not tell."""

    async def device(self) -> tuple[float, float]:
        """Seconds so far that the device was busy, and idle while it had work; not-a-number where nobody tells."""


class SidestepBackend:
    name = "sidestep"

    def __init__(self, address: str | None) -> None:
        self.client = AsyncClient(address)

    async def __aenter__(self) -> Backend:
        await self.client.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    async def request(self, outcome: Outcome, ignore_eos: bool) -> None:
        job = outcome.job
        outcome.sent = time.perf_counter()
        stream = await self.client.stream(job.prompt, max_tokens=job.output_len, ignore_eos=ignore_eos, temperature=0.0)
        async with stream:
            async for chunk in stream:
                now = time.perf_counter()
                outcome.token_times += [now] * len(chunk.ids)
                outcome.text.append(chunk.text)
            assert stream.result is not None
            usage = stream.result.usage
        outcome.prompt_tokens, outcome.output_tokens = usage.prompt_tokens, usage.completion_tokens

    async def vocabulary(self) -> int:
        return int((await self.client.status())["vocab_size"])

    async def retokenize(self, text: str) -> int | None:
        return len(await self.client.tokenize(text, add_special_tokens=False))

    async def device(self) -> tuple[float, float]:
        status = await self.client.status()
        return status["device_busy_s"], status["device_idle_with_work_s"]


def main(given: argparse.Namespace) -> int:
    return int(uvloop.run(_main(given)))


async def _main(given: argparse.Namespace) -> int:
    if given.output_file:
        open(given.output_file, "a").close()  # a place that cannot be written to is known before the measurement
    async with _backend(given) as backend:
        work = [await _counted(backend, job) for job in jobs(given, await backend.vocabulary())]
        for job in work[: given.warmup_requests]:
            await backend.request(Outcome(job), not given.disable_ignore_eos)
        figures, outcomes = await measure(backend, work, given)
    print_report(figures)
    for error, count in Counter(outcome.error for outcome in outcomes if outcome.error).items():
        print(f"{count} failed: {error}")
    line = json.dumps(figures)
    print(line)
    if given.output_file:
        with open(given.output_file, "a") as file:
            file.write(line + "\n")
    return 0 if figures["completed"] == len(work) else 1


async def measure(backend: Backend, work: list[Job], given: argparse.Namespace) -> tuple[dict[str, Any], list[Outcome]]:
    """Send all requests at their times: the report's figures, and each request as it went."""
    before = await backend.device()
    outcomes, seconds = await _run(backend, work, given)
    busy, idle = (now - then for now, then in zip(await backend.device(), before, strict=True))
    return summary(await _sample(backend, outcomes, seconds, busy, idle), given), outcomes


async def _counted(backend: Backend, job: Job) -> Job:
    """The job with its output as long as the answer it was made from."""
    count = await backend.retokenize(job.answer) if job.answer else None
    return replace(job, output_len=max(1, count)) if count is not None else job


def _backend(given: argparse.Namespace) -> Backend:
    if given.backend == "openai":
        from bench.openai_backend import OpenAIBackend

        return OpenAIBackend(given.base_url, given.model, given.api_key)
    return SidestepBackend(given.address)


async def _run(backend: Backend, work: list[Job], given: argparse.Namespace) -> tuple[list[Outcome], float]:
    """All requests, each at its time; seconds from the first to the end of the last."""
    outcomes: list[Outcome] = []
    room = asyncio.Semaphore(given.max_concurrency or len(work))
    progress = tqdm(total=len(work), disable=given.disable_tqdm, desc="requests")

    async def one(outcome: Outcome) -> None:
        async with room:
            try:
                await backend.request(outcome, not given.disable_ignore_eos)
            except Exception as error:  # counted, and told at the end
                outcome.error = f"{type(error).__name__}: {error}"
        progress.update()

    began = time.perf_counter()
    tasks = []
    async for job in _arrivals(work, given):
        outcomes.append(Outcome(job))
        tasks.append(asyncio.create_task(one(outcomes[-1])))
    await asyncio.gather(*tasks)
    seconds = time.perf_counter() - began
    progress.close()
    return outcomes, seconds


async def _arrivals(work: list[Job], given: argparse.Namespace) -> AsyncIterator[Job]:
    """The jobs, each when it is due: gaps are gamma distributed with the mean 1 / rate (exponential for Poisson)."""
    draw = np.random.default_rng(given.seed)
    due = time.perf_counter()
    for job in work:
        wait = due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        yield job
        if given.request_rate != float("inf"):
            due += draw.gamma(given.burstiness, 1 / (given.request_rate * given.burstiness))


async def _sample(backend: Backend, outcomes: list[Outcome], seconds: float, busy: float, idle: float) -> Sample:
    done = [outcome for outcome in outcomes if not outcome.error]
    again = [await backend.retokenize("".join(outcome.text)) for outcome in done]
    return Sample(
        backend.name,
        seconds,
        len(done),
        sum(outcome.prompt_tokens for outcome in done),
        sum(outcome.output_tokens for outcome in done),
        None if None in again else sum(count or 0 for count in again),
        busy,
        idle,
        [outcome.token_times[-1] - outcome.sent for outcome in done if outcome.token_times],
        [outcome.token_times[0] - outcome.sent for outcome in done if outcome.token_times],
        [  # by the counted tokens: an event of another server may carry several, or none
            (outcome.token_times[-1] - outcome.token_times[0]) / (outcome.output_tokens - 1)
            for outcome in done
            if len(outcome.token_times) > 1 and outcome.output_tokens > 1
        ],
        [gap for outcome in done for gap in np.diff(outcome.token_times).tolist()],
    )
