"""`sidestep bench start`: seconds from the command `sidestep serve` to its line "sidestep is ready", files cached.

A start that is not counted goes first, since it may fetch, convert or compile. Prints the median and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from proc.settings import UsageError

READY = "sidestep is ready"


def start(options: list[str]) -> float:
    """Seconds until a server with these options of `serve` is ready; it is stopped then. Raises `UsageError`."""
    command = [sys.executable, "-m", "proc", "serve", "--port", "0", *options]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as words:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, text=True) as server:
            assert server.stdout is not None
            ready = any(line.startswith(READY) for line in server.stdout)
            seconds = time.perf_counter() - began
            server.send_signal(signal.SIGTERM)
        words.seek(0)
        if not ready:
            raise UsageError(f"no start: {words.read().strip()}")
    return seconds


def main(given: argparse.Namespace) -> int:
    start(given.options)
    seconds = [round(start(given.options), 2) for _ in range(given.repeats)]
    median = statistics.median(seconds)
    if not given.json:
        print(f"ready after {median:.2f} s, the median of {given.repeats}")
    print(json.dumps({"options": given.options, "seconds": seconds, "median_s": median}))
    return 0
