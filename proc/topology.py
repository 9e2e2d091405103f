"""How the roles are spread over processes: `--procs` read into data. Knows no process.

The same role code runs under every layout; a layout is a list of processes, each a list of (role, index). `worker=N`
and `--tensor-parallel-size N` are one number, that of each replica: `scheduler=2,worker=4` has eight workers.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from proc.settings import Settings, UsageError
from runtime.model.config import ConfigError, read_config
from runtime.model.sharding import Rank, config_of

ROLES = ("tokenizer", "scheduler", "worker", "http")


@dataclass(frozen=True, order=True)
class Role:
    name: str
    index: int

    def __str__(self) -> str:
        return f"{self.name}-{self.index}"


@dataclass(frozen=True)
class Topology:
    """`processes` in the order in which they are shown. Every scheduler has the grammar of its index.

    It has `num_ranks` workers, those of scheduler n from index n * num_ranks on.
    """

    processes: tuple[tuple[Role, ...], ...]

    def count(self, name: str) -> int:
        return sum(role.name == name for process in self.processes for role in process)

    @property
    def num_ranks(self) -> int:
        return self.count("worker") // self.count("scheduler")


def resolve(settings: Settings, http: int = 0) -> Topology:
    """The layout of a server. Raises `UsageError` where its device or its weights cannot have that layout."""
    topology = parse(settings.procs, http, settings.tensor_parallel_size)
    if topology.num_ranks > 1:
        asked = f"--tensor-parallel-size {topology.num_ranks}"
        if settings.simulated:
            raise UsageError(f"{asked}: a simulated device has one worker")
        if settings.quantization != "none":
            raise UsageError(
                f"{asked}: --quantization {settings.quantization} needs the C kernels, which run one worker"
            )
    return topology


def check_split(topology: Topology, folder: str) -> None:
    """Raises `UsageError` where the model in `folder` cannot be divided among the ranks, before any is started."""
    if topology.num_ranks > 1:
        try:
            config_of(read_config(Path(folder)), Rank(0, topology.num_ranks))
        except ConfigError as error:
            raise UsageError(str(error)) from None


def parse(procs: str, http: int = 0, ranks: int | None = None) -> Topology:
    """Read `--procs` with `http` processes where it names none; `ranks` is `--tensor-parallel-size`.

    Raises `UsageError` with the reason for a layout that cannot be met.
    """
    try:
        number = int(procs)
    except ValueError:
        counts = _counts(procs)
        if ranks is not None and counts.setdefault("worker", ranks) != ranks:
            raise UsageError(f"--tensor-parallel-size {ranks} and --procs worker={counts['worker']} differ") from None
        return _by_role({"http": http} | counts)
    return _by_number(number, http, ranks or 1)


def _by_number(number: int, http: int, ranks: int) -> Topology:
    """Further ranks are processes beside those that the number counts."""
    if not 1 <= number <= 64:
        raise UsageError(f"--procs {number}: between 1 and 64 processes")
    if number == 1 and ranks > 1:
        raise UsageError(f"--procs 1 is one process, --tensor-parallel-size {ranks} needs one for each worker")
    tokenizer, scheduler, worker, grammar = (Role(name, 0) for name in ("tokenizer", "scheduler", "worker", "grammar"))
    web = tuple(Role("http", index) for index in range(http))
    if number == 1:
        return Topology(((tokenizer, scheduler, worker, grammar, *web),))
    if number == 2:
        alone = (*(Role("worker", index) for index in range(ranks)), grammar, *web)
        return Topology(((tokenizer, scheduler), *((role,) for role in alone)))
    return _by_role({"tokenizer": number - 2, "worker": ranks, "http": http})


def _by_role(counts: dict[str, int]) -> Topology:
    replicas = counts.get("scheduler", 1)
    workers = replicas * counts.get("worker", 1)
    if workers > 64:
        raise UsageError(f"--procs: {replicas} times {workers // replicas} workers, at most 64 are possible")
    names = ("tokenizer",) * counts.get("tokenizer", 1) + ("scheduler",) * replicas + ("worker",) * workers
    names += ("grammar",) * replicas + ("http",) * counts.get("http", 0)
    seen: dict[str, int] = {}
    processes = []
    for name in names:
        seen[name] = seen.get(name, -1) + 1
        processes.append((Role(name, seen[name]),))
    return Topology(tuple(processes))


def _counts(procs: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for part in procs.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if name not in ROLES:
            close = difflib.get_close_matches(name, ROLES, 1)
            hint = f" (did you mean {close[0]}?)" if close else f"; roles are {', '.join(ROLES)}"
            raise UsageError(f"--procs: unknown role {name!r}{hint}")
        if name in counts:
            raise UsageError(f"--procs: {name} is named twice")
        if not equals or not number.isdecimal():
            raise UsageError(f"--procs: {name} needs a number, as in {name}=1")
        counts[name] = int(number)
    _refuse(counts)
    return counts


def _refuse(counts: dict[str, int]) -> None:
    for name in ("tokenizer", "scheduler", "worker"):
        if not 1 <= counts.get(name, 1) <= 64:
            raise UsageError(f"--procs: {name}={counts[name]}, between 1 and 64 are needed")
    if counts.get("http", 0) > 64:
        raise UsageError(f"--procs: http={counts['http']}, at most 64 are possible")
