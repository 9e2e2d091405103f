"""`sidestep bench http`: what a streamed token costs the http process, with a load client on raw sockets.

Many streams at once on a simulated device with steps of a set length; CPU time of each role from /proc. A first run
asks the same of the public socket, so that the device's idle share can be compared. A last one streams made events
from a bare application on the same web server: what is beyond that is ours, on whatever machine.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from bench.cpu_time import by_role, of
from bench.front_end import ask_all
from bench.overlap_workloads import Ask
from ipc.client import Client
from proc.settings import settings_from
from proc.supervisor import Supervisor

DEVICE = """
[accelerator]
memory = 80e9
bandwidth = 3e12
rate = 1e15
[model]
dense_bytes = 0
flops_per_token = 0
kv_bytes_per_token = 1000
overhead_us = {step_us}
launch_ms = 0.5
max_model_len = 4096
"""


def main(given: argparse.Namespace) -> int:
    figures = {way: _run(given, way) for way in ("zmq", "http")}
    if not given.json:
        print(f"{'':<6}{'tokens/s':>10}{'idle %':>8}{'TTFT ms':>9}{'http µs/token':>15}{'tokenizer µs/token':>20}")
        for way, one in figures.items():
            print(
                f"{way:<6}{one['output_throughput']:>10.0f}{100 * one['idle_with_work_fraction']:>8.2f}"
                f"{one['mean_ttft_ms']:>9.1f}{one['http_us_per_token']:>15.1f}{one['tokenizer_us_per_token']:>20.1f}"
            )
    bare = _bare(given)
    ratio = figures["http"]["http_us_per_token"] / bare if bare else None  # too short a run for the clock
    if ratio is not None and not given.json:
        print(f"a bare application on the same web server: {bare:.1f} µs/token, ours over it {ratio:.2f}")
    print(json.dumps(figures | {"bare_us_per_token": bare, "http_over_bare": ratio}))
    return 0


def _bare(given: argparse.Namespace) -> float:
    """µs of a process that only sends, for each event."""
    command = [sys.executable, "-m", "bench.bare_asgi", str(given.tokens), str(given.step_ms)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        port = int(process.stdout.readline())
        before = of(process.pid)
        _load("127.0.0.1", port, given)
        seconds = of(process.pid) - before
        process.stdin.close()
    tokens: int = given.streams * given.tokens
    return 1e6 * seconds / tokens


def _run(given: argparse.Namespace, way: str) -> dict[str, float]:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as device:
        device.write(DEVICE.format(step_us=given.step_ms * 1000))
        device.flush()
        settings = settings_from(
            device=f"sim:{device.name}", port=0, max_num_seqs=given.streams, max_num_batched_tokens=8192
        )
        with Supervisor(settings, http=1) as server, Client(server.addresses[0]) as client:
            client.generate("x", max_tokens=2)
            before, cpu = client.status(), by_role(server)
            began = time.perf_counter()
            ttft = (_over_http if way == "http" else _over_zmq)(server, given)
            seconds = time.perf_counter() - began
            cpu = {role: now - cpu[role] for role, now in by_role(server).items()}
            after = client.status()
    tokens = given.streams * given.tokens
    busy, idle = (after[name] - before[name] for name in ("device_busy_s", "device_idle_with_work_s"))
    return {
        "output_throughput": tokens / seconds,
        "idle_with_work_fraction": idle / (busy + idle),
        "mean_ttft_ms": 1e3 * sum(ttft) / len(ttft),
        "http_us_per_token": 1e6 * cpu["http-0"] / tokens,
        "tokenizer_us_per_token": 1e6 * cpu["tokenizer-0"] / tokens,
    }


def _over_zmq(server: Supervisor, given: argparse.Namespace) -> list[float]:
    answers = ask_all(server.addresses, [Ask([number % 256, 7], given.tokens) for number in range(given.streams)])
    return [answer.times[0] - answer.sent for answer in answers]


def _over_http(server: Supervisor, given: argparse.Namespace) -> list[float]:
    host, port = server.url.partition("//")[2].split(":")
    return _load(host, int(port), given)


def _load(host: str, port: int, given: argparse.Namespace) -> list[float]:
    """All streams, read to their ends; the seconds until the first event of each."""
    selector = selectors.DefaultSelector()
    lines = [_ask(host, port, number, given.tokens) for number in range(given.streams)]
    for line in lines:
        selector.register(line["socket"], selectors.EVENT_READ, line)
    while selector.get_map():
        for key, _ in selector.select(60):
            data = key.data["socket"].recv(1 << 16)
            if not key.data["first"] and b"data: " in data:
                key.data["first"] = time.perf_counter()
            key.data["end"] = (key.data["end"] + data)[-64:]
            if not data or b"[DONE]" in key.data["end"]:
                selector.unregister(key.data["socket"])
                key.data["socket"].close()
    if not all(b"[DONE]" in line["end"] for line in lines):
        raise RuntimeError(
            f"a stream ended badly: {next(line['end'] for line in lines if b'[DONE]' not in line['end'])!r}"
        )
    return [line["first"] - line["sent"] for line in lines]


def _ask(host: str, port: int, number: int, tokens: int) -> dict[str, Any]:
    body = {
        "prompt": [number % 256, 7],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "temperature": number % 2,
    }
    data = json.dumps(body | {"seed": number}).encode()
    made = socket.create_connection((host, port))
    made.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    )
    return {"socket": made, "sent": time.perf_counter(), "first": 0.0, "end": b""}
