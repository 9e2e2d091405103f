"""What every role is: a loop of turns, woken by its sockets or by a command. Knows no role in particular."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import zmq

from proc.settings import Settings
from proc.topology import Role

IDLE_WAIT = 1.0  # seconds; a lost wake-up is a delay, not an end


class Command(msgspec.Struct, frozen=True):
    """From the supervisor: `stop` now, `drain` what runs within `timeout` seconds, or `fail` it with `message`."""

    kind: str
    timeout: float = 0.0
    message: str = ""


class ProcessSpec(msgspec.Struct, frozen=True):
    """What a process is started with, as a line of JSON."""

    roles: list[Role]
    settings: Settings
    run_dir: str
    folder: str  # of the model; "" for the simulated device without one
    tables: list[int]  # the TokenTable's descriptor of each replica
    rings: list[int]  # the mask ring's
    num_tokenizers: int
    http_socket: int  # the listening socket's descriptor; -1 without HTTP
    cores: dict[str, list[int]] = {}
    parent: int = 0  # pid that must be alive
    num_ranks: int = 1  # workers of each replica

    @property
    def num_schedulers(self) -> int:
        return len(self.tables)

    @property
    def num_workers(self) -> int:
        """On this machine, of all replicas."""
        return self.num_schedulers * self.num_ranks

    def workers(self, replica: int) -> range:
        """The indices of a replica's workers, by rank."""
        return range(replica * self.num_ranks, (replica + 1) * self.num_ranks)


class Control:
    """Commands for one role, from another thread; `fd` is readable when there is one."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.stopped = threading.Event()  # a stop has come
        self._commands: deque[Command] = deque()

    def send(self, command: Command) -> None:
        self._commands.append(command)
        if command.kind == "stop":
            self.stopped.set()
        os.eventfd_write(self.fd, 1)

    def take(self) -> list[Command]:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return []
        return [self._commands.popleft() for _ in range(len(self._commands))]


class RoleLoop(Protocol):
    finished: bool  # nothing more to do, the process may end

    def start(self) -> dict[str, Any]:
        """Open sockets, load, wait for those it needs; returns what the supervisor should know."""

    def turn(self, poller: Poller) -> None:
        """Wait for something to do, and do it."""

    def command(self, command: Command) -> None:
        """`drain` or `fail`."""

    def close(self) -> None: ...


class Poller:
    """Waits for any of a role's sockets or for a command."""

    def __init__(self, control: Control, *sockets: zmq.Socket[bytes]) -> None:
        self.control = control
        self._poller = zmq.Poller()
        for readable in (control.fd, *sockets):
            self._poller.register(readable, zmq.POLLIN)

    def wait(self, seconds: float = IDLE_WAIT) -> None:
        self._poller.poll(max(int(seconds * 1000), 0))


def run(loop: RoleLoop, control: Control, sockets: list[zmq.Socket[bytes]], obeyed: Callable[[Command], None]) -> None:
    """Turns until a stop, or until the role has finished; tells of each command that has been carried out."""
    poller = Poller(control, *sockets)
    while not loop.finished:
        for command in control.take():
            if command.kind == "stop":
                return
            loop.command(command)
            obeyed(command)
        if not loop.finished:
            loop.turn(poller)
