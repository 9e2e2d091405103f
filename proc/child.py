"""A process of the server: `python -m proc.child FD` runs the roles that it is told of there, each in a thread.

The first line on that socket is its `ProcessSpec`, which is no argument, since every user could read that. The main
thread listens to the supervisor: commands go to every role; when the supervisor is gone, so is this process at once.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from typing import Any, BinaryIO

import msgspec
import zmq

from proc.role import Command, Control, ProcessSpec, run
from proc.settings import UsageError
from proc.topology import Role

LINGER = 3.0  # seconds; a little more than the public socket's
PATIENCE = 30.0  # seconds in which one that has lost its peer is to be stopped; longer than an end takes
PR_SET_PDEATHSIG = 1
COLLECT = 20_000  # more objects than before, after which the youngest are collected; Python's own choice is 700


class Word(msgspec.Struct, frozen=True):
    """From a role to the supervisor: `ready` with what it knows, `obeyed` a command, `ended`, `failed` and why."""

    kind: str
    role: str
    info: dict[str, Any] = {}
    message: str = ""  # the last line of what went wrong
    trace: str = ""  # the traceback; empty where the message says it all (a user's mistake)


class Child:
    def __init__(self, spec: ProcessSpec, supervisor: socket.socket, lines: BinaryIO) -> None:
        self.spec, self.supervisor, self.lines = spec, supervisor, lines
        self.loading = len(spec.roles)
        self.controls = [Control() for _ in spec.roles]
        self._lock = threading.Lock()

    def main(self) -> None:
        threads = [
            threading.Thread(target=self.serve, args=(role, control), name=str(role))
            for role, control in zip(self.spec.roles, self.controls, strict=True)
        ]
        for thread in threads:
            thread.daemon = True
            thread.start()
        for line in self.lines:
            command = msgspec.json.decode(line, type=Command)
            for control in self.controls:
                control.send(command)
            if command.kind == "stop":
                for thread in threads:
                    thread.join()
                _deliver()
                return
        os._exit(1)  # the supervisor is gone

    def serve(self, role: Role, control: Control) -> None:
        """One role from its start to its end; what goes wrong is told and ends this process."""
        try:
            loop = _loop(role, self.spec)
            self.tell(Word("ready", str(role), loop.start() | {"thread": threading.get_native_id()}))
            self.loaded()
            run(loop, control, loop.sockets, lambda command: self.tell(Word("obeyed", str(role), message=command.kind)))
            loop.close()
            self.tell(Word("ended", str(role)))
        except Exception as error:
            if "PeerLost" in _kinds(error) and control.stopped.wait(PATIENCE):
                loop.close()  # the rank that ended is the cause, and the supervisor knows of it
                return
            mistake = isinstance(error, (UsageError, ValueError, OSError)) and _is_clear(error)
            trace = "" if mistake else traceback.format_exc()
            self.tell(Word("failed", str(role), message=str(error) or repr(error), trace=trace))
            os._exit(1)

    def loaded(self) -> None:
        """One more role is ready. After the last: what was loaded stays, no collection needs to look at it again.

        What comes and goes with each token holds no circles: a few collections will do.
        """
        with self._lock:
            self.loading -= 1
            if self.loading:
                return
        gc.freeze()
        gc.set_threshold(COLLECT)
        gc.enable()

    def tell(self, word: Word) -> None:
        with self._lock:
            self.supervisor.sendall(msgspec.json.encode(word) + b"\n")


def _deliver() -> None:
    """Wait until ZMQ has written what was sent, for as long as its sockets linger; it does not at a process's end."""
    ended = threading.Thread(target=zmq.Context.instance().term, daemon=True)
    ended.start()
    ended.join(LINGER)


def _is_clear(error: Exception) -> bool:
    """An error made for a user's eyes: its text says what to change."""
    return bool(_kinds(error) & {"UsageError", "ConfigError", "TokenizerError"})


def _kinds(error: Exception) -> set[str]:
    """By name: a process without the role does not load the module."""
    return {kind.__name__ for kind in type(error).__mro__}


def _loop(role: Role, spec: ProcessSpec) -> Any:
    """The role's loop; each imports only what it needs."""
    if role.name == "tokenizer":
        from proc.tokenizer import TokenizerLoop

        return TokenizerLoop(spec, role.index)
    if role.name == "scheduler":
        from proc.scheduler import SchedulerLoop

        return SchedulerLoop(spec, role.index)
    if role.name == "grammar":
        from proc.grammar import GrammarLoop

        return GrammarLoop(spec, role.index)
    if role.name == "http":
        from proc.http.role import HttpLoop

        return HttpLoop(spec, role.index)
    from proc.worker import Worker

    return Worker(spec, role.index)


def main() -> None:
    gc.disable()  # until all is loaded: the collections would take a seventh of the time that torch needs
    supervisor = socket.socket(fileno=int(sys.argv[1]))
    lines = supervisor.makefile("rb")
    spec = msgspec.json.decode(lines.readline(), type=ProcessSpec)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's business
    if spec.parent:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != spec.parent:
            os._exit(1)
    if all(role.name == "tokenizer" for role in spec.roles):
        # text must not take the core from those that feed the device (bench/LOG.md)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    cores = [core for role in spec.roles for core in spec.cores.get(role.name, [])]
    if cores:
        os.sched_setaffinity(0, cores)
    logging.basicConfig(
        level=spec.settings.log_level.upper(),
        format="%(asctime)s %(threadName)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    Child(spec, supervisor, lines).main()


if __name__ == "__main__":
    main()
