"""The command `sidestep`: serve, chat, generate, bench. Imports nothing heavy before it must."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from proc.settings import Parser, Settings, UsageError, add_flags, from_arguments, non_defaults, positive

if TYPE_CHECKING:
    from ipc.client import Client, Stream
    from proc.supervisor import Supervisor

HTTP_FLAGS = (
    *("host", "port", "api_key", "cors_origins", "ssl_keyfile", "ssl_certfile", "write_timeout", "enable_log_requests"),
)
SAMPLING = (
    ("--temperature", float, "0 is greedy (default: the model's, else 1)"),
    ("--top-k", int, "candidates by rank; 0 is off (default: the model's)"),
    ("--top-p", float, "candidates by cumulated probability (default: the model's)"),
    ("--min-p", float, "candidates by share of the best one's probability (default: the model's)"),
    ("--max-tokens", int, "tokens of the answer (default: until the context is full)"),
    ("--request-seed", int, "of this request's random numbers"),
)


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse(arguments)
    try:
        return int(given.run(given) or 0)
    except UsageError as error:
        print(f"sidestep: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads; nothing more to say
        return 0
    except Exception as error:
        return _failed(error)


def parser() -> Parser:
    top = Parser(prog="sidestep", description="Serves large language models from separate processes.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    served = commands.add_parser("serve", help="start a server and keep it running")
    add_flags(served)
    served.set_defaults(run=serve)
    for name, words, run in (
        ("generate", "answer one prompt, with a server of its own or that of --address", generate),
        (
            "chat",
            "talk with the running server's model, or one of its own where there is none or an option is given",
            chat,
        ),
    ):
        command = commands.add_parser(name, help=words, description=words)
        add_flags(command, without=HTTP_FLAGS)
        command.add_argument("--address", help="of a running server to use, such as ipc://PATH or tcp://HOST:PORT")
        for option, kind, help_text in SAMPLING:
            command.add_argument(option, type=kind, help=help_text)
        command.set_defaults(run=run)
        if name == "generate":
            command.add_argument("--prompt", required=True, help="the text to continue")
    traced = commands.add_parser(
        "trace", help="write the last steps of a running server, all processes on one time axis"
    )
    traced.add_argument("--address", help="of the server (default: the one running)")
    traced.add_argument(
        "--output", default="trace.json", help="Chrome's trace format, which Perfetto opens (default: trace.json)"
    )
    traced.set_defaults(run=_main_of("proc.trace"))
    _add_bench(commands)
    return top


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure: bench serving, bench peers, bench overlap, bench device, bench http, bench sampler, "
        "bench kernels, bench perplexity, bench step, bench start",
    )
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="KIND", parser_class=Parser)
    serving = kinds.add_parser("serving", help="requests against a running server")
    from bench.options import (
        PEERS,
        add_device_flags,
        add_kernels_flags,
        add_overlap_flags,
        add_peers_flags,
        add_perplexity_flags,
        add_sampler_flags,
        add_serving_flags,
    )

    add_serving_flags(serving)
    serving.set_defaults(run=_main_of("bench.serving"))
    peers = kinds.add_parser("peers", help="running OpenAI-compatible servers, side by side", description=PEERS)
    add_peers_flags(peers)
    peers.set_defaults(run=_main_of("bench.peers"))
    overlap = kinds.add_parser("overlap", help="what overlap wins, by mode, on a simulated device")
    add_overlap_flags(overlap)
    overlap.set_defaults(run=_main_of("bench.overlap"))
    device = kinds.add_parser("device", help="decode and prefill of a model's shape on the device, with its floors")
    device.set_defaults(run=_main_of("bench.device"))
    add_device_flags(device)
    http = kinds.add_parser("http", help="what a streamed token costs the http process, on a simulated device")
    http.add_argument("--streams", type=positive, default=256, help="at once (default: 256)")
    http.add_argument("--tokens", type=positive, default=256, help="of each stream (default: 256)")
    http.add_argument("--step-ms", type=float, default=12.0, help="the device's time for a step (default: 12)")
    http.add_argument("--json", action="store_true", help="only the JSON line")
    http.set_defaults(run=_main_of("bench.http_load"))
    sampler = kinds.add_parser("sampler", help="what drawing tokens costs on the CPU, by what is asked for")
    sampler.set_defaults(run=_main_of("bench.sampler"))
    add_sampler_flags(sampler)
    kernels = kinds.add_parser("kernels", help="the C kernels against torch and against what this machine can do")
    kernels.set_defaults(run=_main_of("bench.kernels"))
    add_kernels_flags(kernels)
    perplexity = kinds.add_parser("perplexity", help="what quantization costs in quality, on a fixed text")
    perplexity.set_defaults(run=_main_of("bench.perplexity"))
    add_perplexity_flags(perplexity)
    step = kinds.add_parser("step", help="what one step costs the scheduler alone")
    rows = [1, 64, 256, 1024, 4096]
    step.add_argument("--rows", type=positive, nargs="+", default=rows, help="of a step (default: 1 64 256 1024 4096)")
    step.add_argument("--steps", type=positive, default=200, help="over which means are taken (default: 200)")
    step.add_argument("--json", action="store_true", help="only the JSON lines")
    step.set_defaults(run=_main_of("bench.step"))
    start = kinds.add_parser("start", help="how long `serve` takes until it is ready")
    start.add_argument("options", nargs="*", help="of `serve`, after --")
    start.add_argument("--repeats", type=positive, default=5, help="starts (default: 5)")
    start.add_argument("--json", action="store_true", help="only the JSON line")
    start.set_defaults(run=_main_of("bench.start"))


def _main_of(module: str) -> Callable[[argparse.Namespace], int]:
    """That of a module which is imported when it is wanted."""
    return lambda given: int(import_module(module).main(given))


def serve(given: argparse.Namespace) -> int:
    """Start, and leave nothing behind whatever ends it, such as nobody reading what it says."""
    from proc.supervisor import Supervisor

    settings = from_arguments(given)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # gives up the start, which cleans up
    server = Supervisor(settings, say, http=1)
    say(f"settings: {non_defaults(settings)}")
    began = time.monotonic()
    with server:
        _describe(server, settings, time.monotonic() - began)
        return _keep(server, settings)


def _keep(server: Supervisor, settings: Settings) -> int:
    """Say that it is ready, and keep it running until a signal or a death."""
    where = f"{server.url}  zmq" if server.url else "zmq"
    print(f"sidestep is ready: {where} {' '.join(server.addresses)}", flush=True)
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stop.append(received))
    reason = None
    while not stop and reason is None:
        reason = server.watch(0.5)
    if reason is not None:
        trace = next((p.failed.trace for p in server.processes if p.failed), "")
        server.fail(reason)
        print(f"{trace}sidestep: {reason}", file=sys.stderr)
        return 1
    say(f"shutting down; requests under way get up to {settings.shutdown_timeout:g} s, a second signal ends them now")
    server.stop(settings.shutdown_timeout, lambda: len(stop) > 1)
    return 0


def _describe(server: Supervisor, settings: Settings, seconds: float) -> None:
    info = server.worker_info()
    mib = {name: f"{info[name] / 2**20:.0f} MiB" for name in ("weight_bytes", "kv_bytes")}
    ranks = server.topology.num_ranks
    each = f" in each of {ranks} tensor-parallel workers" if ranks > 1 else ""
    say(f"started in {seconds:.1f} s; weights {mib['weight_bytes']}, KV {mib['kv_bytes']}{each}")
    tokens, longest = info["kv_tokens"], info["max_model_len"]
    say(f"KV cache: {tokens} tokens; maximum concurrency for {longest} tokens: {tokens / longest:.1f}x")
    say(f"{'role':<14}{'pid':<9}{'cores':<9}device or address")
    for role, pid, cores, where in server.table():
        say(f"{role:<14}{pid:<9}{cores:<9}{where}")


def generate(given: argparse.Namespace) -> int:
    """Print the answer as it comes, and its figures to stderr."""
    return _with_client(given, lambda client: _show(client.stream(given.prompt, **_wishes(given))))


def chat(given: argparse.Namespace) -> int:
    """A conversation: a line is a message, an empty one or Ctrl-D the end; Ctrl-C stops an answer."""
    if sys.stdin.isatty():
        say("a line is a message; an empty line ends, Ctrl-C stops an answer")
    return _with_client(given, lambda client: _converse(client, _wishes(given)))


def _converse(client: Client, wishes: dict[str, Any]) -> None:
    messages: list[dict[str, Any]] = []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if not line:
            return
        messages.append({"role": "user", "content": line})
        try:
            answer = _show(client.stream(messages=messages, **wishes))
        except KeyboardInterrupt:
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


def _show(stream: Stream) -> str:
    """Print a stream; its figures go to stderr."""
    began = time.monotonic()
    first = 0.0
    with stream:
        try:
            for chunk in stream:
                first = first or time.monotonic() - began
                print(chunk.text, end="", flush=True)
        finally:
            print(flush=True)
        done = stream.result
        assert done is not None
    count, seconds = done.usage.completion_tokens, time.monotonic() - began
    rate = (count - 1) / max(seconds - first, 1e-9)
    say(f"[{count} tokens, {done.finish_reason}; TTFT {first * 1000:.0f} ms, then {rate:.1f} tokens/s]")
    return done.text


def _with_client(given: argparse.Namespace, use: Callable[[Client], object]) -> int:
    """The server that was named or, for lack of one, a server of our own for this one use."""
    from ipc.client import Client
    from ipc.endpoints import discover

    settings = from_arguments(given)
    named = "model" in vars(given) or given.model_positional or settings != Settings()
    if given.address and named:
        raise UsageError("--address is that of a running server, whose model and settings are its own")
    if given.address or (given.command == "chat" and not named and discover()):
        with Client(given.address) as client:
            use(client)
        return 0
    from proc.supervisor import Supervisor

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with Supervisor(settings, say) as server, Client(server.addresses[0]) as client:
        use(client)
        status = client.status()
        busy, idle = status["device_busy_s"], status["device_idle_with_work_s"]
        say(f"[device idle while there was work: {100 * idle / max(busy + idle, 1e-9):.2f} %]")
    return 0


def _wishes(given: argparse.Namespace) -> dict[str, Any]:
    names = {option.removeprefix("--").replace("-", "_") for option, _, _ in SAMPLING}
    found = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    if "request_seed" in found:
        found["seed"] = found.pop("request_seed")
    return found


def say(line: str) -> None:
    """One line for people, beside what the command answers."""
    print(line, file=sys.stderr, flush=True)


def _failed(error: Exception) -> int:
    """The first root cause, last: its traceback where it is ours, one line where it is the caller's."""
    from ipc.errors import SidestepError
    from proc.supervisor import StartError

    if isinstance(error, StartError):
        print(f"{error.trace}sidestep: {error}", file=sys.stderr)
        return 2
    if isinstance(error, (SidestepError, OSError)):
        print(f"sidestep: {error}", file=sys.stderr)
        return 1
    raise error


if __name__ == "__main__":
    sys.exit(main())
