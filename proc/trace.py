"""`sidestep trace`: what each role remembers of its last steps as one file that Perfetto and Chrome open.

Every role stamps its steps with the machine's one monotonic clock, so the processes share a time axis without more ado.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ipc.client import Client
from ipc.messages import Track

Event = dict[str, Any]
# (process, thread, name, begin, end) of the slices of a step, by the kind of role that remembers them
SLICES = {
    "scheduler": (
        ("scheduler", "plan and send", "plan", "planned", "sent"),
        ("worker", "launch", "launch", "received", "launched"),
        ("worker", "device", "step", "started", "ended"),
        ("scheduler", "commit and deliver", "commit", "taken", "committed"),
        ("scheduler", "commit and deliver", "deliver", "committed", "delivered"),
    ),
    "tokenizer": (
        ("tokenizer", "tokens to text", "detokenize", "taken", "detokenized"),
        ("tokenizer", "tokens to text", "send", "detokenized", "delivered"),
    ),
}
COUNTERS = ("running", "waiting", "used_blocks")
FLOW = ("plan", "launch", "step", "commit", "deliver", "detokenize")  # the arrows that join a step's slices


def write(tracks: list[Track], file: Path) -> int:
    """Write the tracks; returns the number of steps on them."""
    events = list(_all(tracks))
    zero = min((event["ts"] for event in events if "ts" in event), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - zero, 3)
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return sum(len(track.rows) for track in tracks if track.role.startswith("scheduler"))


def _all(tracks: list[Track]) -> Iterator[Event]:
    numbers: dict[str, int] = {}  # of processes and of threads, given as they appear
    for track in tracks:
        for row in track.rows:
            yield from _step(track.role, dict(zip(track.columns, row, strict=True)), numbers)
    for name, number in numbers.items():
        process, _, thread = name.partition("/")
        kind = "thread_name" if thread else "process_name"
        yield {"ph": "M", "name": kind, "pid": numbers[process], "tid": number, "args": {"name": thread or process}}


def _step(role: str, step: dict[str, int], numbers: dict[str, int]) -> Iterator[Event]:
    kind = role.rstrip("0123456789")
    index = role.removeprefix(kind)
    replica = step.get("scheduler", int(index))
    for process, thread, name, begin, end in SLICES[kind]:
        pid = numbers.setdefault(f"{process}{index}", len(numbers) + 1)
        tid = numbers.setdefault(f"{process}{index}/{thread}", len(numbers) + 1)
        where = {"pid": pid, "tid": tid, "ts": step[begin] / 1e3}
        title = f"step {step['step']}" if name == "step" else name
        yield {"ph": "X", "name": title, "dur": (step[end] - step[begin]) / 1e3, "args": step, **where}
        if name in FLOW:
            phase = "s" if name == FLOW[0] else "f" if name == FLOW[-1] else "t"
            flow = {"cat": "step", "id": replica << 48 | step["step"], "bp": "e"}
            yield {"ph": phase, "name": "step", **flow, **where}
    for counter in COUNTERS if kind == "scheduler" else ():
        pid = numbers[role]
        yield {"ph": "C", "name": counter, "pid": pid, "ts": step["committed"] / 1e3, "args": {counter: step[counter]}}


def main(given: argparse.Namespace) -> int:
    with Client(given.address) as client:
        count = write(client.trace(), Path(given.output))
    print(f"{given.output}: the last {count} steps; open it in ui.perfetto.dev or chrome://tracing")
    return 0
