"""The supervisor: makes the endpoints and the shared memory, starts the processes, watches them, ends them.

It carries no traffic. Used by `sidestep serve` and by `LLM`; installs no signal handlers.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ipc.endpoints import announce, create_run_dir
from ipc.shared_memory import create_masks, create_table
from proc import topology
from proc.child import Word
from proc.cores import computes, leave_first, parse_cores, use
from proc.models import prepare, served_name
from proc.role import Command, ProcessSpec
from proc.settings import Settings, UsageError
from proc.shapes import ring_shape, table_shape
from proc.topology import Role, Topology

SPIN = {"GOMP_SPINCOUNT": "5000"}  # compute threads that spin on take the cores the other roles need (bench/LOG.md)
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # of numpy, where no worker is: starting more is most of its import
GRACE = 5.0  # seconds from a stop to a kill


class StartError(RuntimeError):
    """The server did not come up; `trace` is the first traceback, empty for a user's mistake."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


@dataclass
class Process:
    """A child, and what its roles have said."""

    roles: tuple[Role, ...]
    popen: subprocess.Popen[bytes]
    control: socket.socket
    cores: list[int]
    ready: dict[str, dict[str, Any]] = field(default_factory=dict)
    informed: set[str] = field(default_factory=set)  # roles that know the tokenizers' addresses
    ended: set[str] = field(default_factory=set)
    failed: Word | None = None
    gone: bool = False
    _rest: bytes = b""

    def send(self, command: Command) -> None:
        with contextlib.suppress(OSError):  # a process that died meanwhile is noticed by `listen`
            self.control.sendall(msgspec.json.encode(command) + b"\n")

    def listen(self) -> None:
        """Take what has come from the process; nothing but the end of the stream means that it is gone."""
        try:
            data = self.control.recv(1 << 16)
        except OSError:
            data = b""
        self.gone = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            word = msgspec.json.decode(line, type=Word)
            if word.kind == "ready":
                self.ready[word.role] = word.info
            elif word.kind == "obeyed":
                self.informed |= {word.role} if word.message == "addresses" else set()
            elif word.kind == "ended":
                self.ended.add(word.role)
            elif self.failed is None:
                self.failed = word

    def ends(self, name: str) -> bool:
        """Nothing more to wait for of this role here."""
        mine = {str(role) for role in self.roles if role.name == name}
        return self.gone or mine <= self.ended

    @property
    def all_ready(self) -> bool:
        return len(self.ready) == len(self.roles)

    @property
    def all_informed(self) -> bool:
        return len(self.informed) == len(self.roles)


class Supervisor:
    """A server as a context: `start` returns when every process is ready, `stop` leaves nothing behind.

    Raises `UsageError` for settings that cannot be met and `StartError` when a process fails.
    """

    def __init__(self, settings: Settings, tell: Callable[[str], None] = lambda line: None, http: int = 0) -> None:
        self.settings, self.tell = settings, tell
        self.topology: Topology = topology.resolve(settings, http)
        self.cores = parse_cores(settings.cores)
        self.processes: list[Process] = []
        self.addresses: list[str] = []
        self._tables: list[int] = []
        self._rings: list[int] = []
        self._http: socket.socket | None = None
        self._run_dir: Path | None = None
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Supervisor:
        if not self.processes:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        try:
            self._http = listen(self.settings) if self.topology.count("http") else None
            for name in ("ssl_keyfile", "ssl_certfile"):
                file = getattr(self.settings, name)
                if file is not None and not Path(file).is_file():
                    raise UsageError(f"--{name.replace('_', '-')} {file}: no such file")
            folder = prepare(self.settings, self.tell)
            topology.check_split(self.topology, folder)
            self._spawn_all(folder)
            self._wait_until(lambda: all(p.all_ready for p in self.processes), self.settings.startup_timeout)
            self._give_back_first_core()
            self.addresses = [self._info("tokenizer", n)["public"] for n in range(self.topology.count("tokenizer"))]
            for process in self.processes:
                process.send(Command("addresses", message=" ".join(self.addresses)))
            self._wait_until(lambda: all(p.all_informed for p in self.processes), self.settings.startup_timeout)
        except BaseException:
            self._kill_all()
            self._clean()
            raise
        assert self._run_dir is not None
        announce(self._run_dir, served_name(self.settings, folder), self.addresses)

    def watch(self, timeout: float) -> str | None:
        """Wait up to `timeout` seconds for news; the reason where a process has died, and None as long as all live."""
        self._listen(timeout)
        dead = next((process for process in self.processes if process.gone or process.failed), None)
        return None if dead is None else self._death(dead)

    def stop(self, timeout: float = 0.0, hurry: Callable[[], bool] = lambda: False) -> None:
        """End: requests get `timeout` seconds, or until `hurry`, then each its last word; then the processes."""
        self._tell_all(Command("drain", timeout=timeout))
        self._wait_for_tokenizers(timeout, hurry)
        self._end(Command("drain"), GRACE)

    def fail(self, reason: str) -> None:
        """A process is dead: every request gets `reason` as its last word, then all end."""
        self._end(Command("fail", message=reason), GRACE)

    def _end(self, command: Command, timeout: float) -> None:
        """The tokenizers first, since theirs is the last word; then all; what has not ended by then is killed."""
        self._tell_all(command)
        self._wait_for_tokenizers(timeout)
        self._tell_all(Command("stop"))
        deadline = time.monotonic() + GRACE
        while any(p.popen.poll() is None for p in self.processes) and time.monotonic() < deadline:
            self._listen(0.02)
        self._kill_all()
        self._clean()

    def table(self) -> list[tuple[str, str, str, str]]:
        """(role, pid, cores, device or address) of every role, for people."""
        rows = []
        for process in self.processes:
            cores = ",".join(map(str, process.cores)) or "any"
            for role in process.roles:
                info = process.ready.get(str(role), {})
                rows.append((str(role), str(process.popen.pid), cores, info.get("device") or info.get("public") or ""))
        return rows

    @property
    def url(self) -> str:
        """Of the HTTP server; "" without one."""
        if self._http is None:
            return ""
        host, port = self._http.getsockname()[:2]
        scheme = "https" if self.settings.ssl_certfile else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def worker_info(self) -> dict[str, Any]:
        return self._info("worker", 0)

    # -- starting

    def _spawn_all(self, folder: str) -> None:
        self._run_dir = create_run_dir()
        shape = table_shape(self.settings)
        replicas = range(self.topology.count("scheduler"))
        self._tables = [create_table(shape) for _ in replicas]
        self._rings = [create_masks(*ring_shape(self.settings)) for _ in replicas]
        for roles in sorted(self.topology.processes, key=computes, reverse=True):  # a worker takes longest to load
            self._spawn(roles, folder)
            if self._worker_loads_alone and not computes(roles):
                leave_first(self.processes[-1].popen.pid)

    @property
    def _worker_loads_alone(self) -> bool:
        """Whether the others leave it the first core: a start is as long as its import of torch, one thread's work."""
        return not (self.settings.simulated or self.cores)

    def _give_back_first_core(self) -> None:
        for process in self.processes if self._worker_loads_alone else ():
            if not computes(process.roles):
                use(process.popen.pid, os.sched_getaffinity(0))

    def _spawn(self, roles: tuple[Role, ...], folder: str) -> None:
        ours, theirs = socket.socketpair()
        in_main = threading.current_thread() is threading.main_thread()  # the death signal goes with the thread
        spec = ProcessSpec(
            list(roles),
            self.settings,
            str(self._run_dir),
            folder,
            self._tables,
            self._rings,
            self.topology.count("tokenizer"),
            -1 if self._http is None else self._http.fileno(),
            self.cores,
            os.getpid() if in_main else 0,
            self.topology.num_ranks,
        )
        root = str(Path(__file__).parent.parent)
        popen = subprocess.Popen(
            [sys.executable, "-m", "proc.child", str(theirs.fileno())],
            pass_fds=[theirs.fileno(), *self._tables, *self._rings, *([self._http.fileno()] if self._http else [])],
            env=({} if computes(roles) else ONE_THREAD)
            | SPIN
            | os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        ours.sendall(msgspec.json.encode(spec) + b"\n")
        cores = [core for role in roles for core in self.cores.get(role.name, [])]
        process = Process(roles, popen, ours, cores)
        self.processes.append(process)
        self._selector.register(ours, selectors.EVENT_READ, process)

    def _wait_until(self, done: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                slow = [str(r) for p in self.processes for r in p.roles if str(r) not in p.ready]
                raise StartError(f"{', '.join(slow)} not ready within {timeout:.0f} s (--startup-timeout)")
            reason = self.watch(min(left, 1.0))
            if reason is not None:
                failed = next((p.failed for p in self.processes if p.failed), None)
                if failed is not None and not failed.trace:
                    raise UsageError(failed.message)
                raise StartError(reason, failed.trace if failed else "")

    def _info(self, name: str, index: int) -> dict[str, Any]:
        role = str(Role(name, index))
        return next(process.ready[role] for process in self.processes if role in process.ready)

    # -- watching and ending

    def _listen(self, timeout: float) -> None:
        if not self._selector.get_map():
            return
        for key, _ in self._selector.select(timeout):
            process: Process = key.data
            process.listen()
            if process.gone:
                self._selector.unregister(process.control)

    def _death(self, process: Process) -> str:
        names = "+".join(str(role) for role in process.roles)
        if process.failed is not None:
            return f"{process.failed.role} failed: {process.failed.message}"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.popen.wait(1.0)
            return f"{names} died ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
        return f"{names} died"

    def _tell_all(self, command: Command) -> None:
        for process in self.processes:
            process.send(command)

    def _wait_for_tokenizers(self, timeout: float, hurry: Callable[[], bool] = lambda: False) -> None:
        deadline = time.monotonic() + timeout
        while not all(p.ends("tokenizer") for p in self.processes) and time.monotonic() < deadline and not hurry():
            self._listen(0.05)

    def _kill_all(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.popen.kill()
        for process in self.processes:
            process.popen.wait()
            process.control.close()

    def _clean(self) -> None:
        self._selector.close()
        self._selector = selectors.DefaultSelector()
        for fd in (*self._tables, *self._rings):
            os.close(fd)
        self._tables, self._rings, self.processes = [], [], []
        if self._http is not None:
            self._http.close()
            self._http = None
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)


def listen(settings: Settings) -> socket.socket:
    """The socket that all http processes accept from. Raises `UsageError` for an address that cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        words = (error.strerror or str(error)).partition(" (while")[0]
        raise UsageError(f"--host {settings.host} --port {settings.port}: {words}") from None
