"""`sidestep bench kernels`: the C kernels of the CPU path against torch and against what the machine can do at most.

A floor is the larger of the bytes that must be read over the measured bandwidth and the arithmetic over the measured
peak (`bench.machine`). Floor, kernel and reference take turns; figures are the best turns, fewer where one takes long:
on a shared machine medians say more about its neighbours. The reference runs in the faster of float32 and the kernel's
type. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import kernel_cases as cases
from bench.kernel_cases import Case, Subject
from bench.machine import Machine, Work, seconds
from proc.settings import UsageError
from runtime.kernels.library import Kernels, kernels
from runtime.kernels.pack import Unsupported
from runtime.model.coded import as_numbers
from runtime.model.config import ConfigError, ModelConfig, read_config
from runtime.model.linears import Weight
from runtime.model.weights import dummy_weights, load_weights

SMOLLM2 = ModelConfig("LlamaForCausalLM", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, 1e5, tied=True)
TINY = ModelConfig("LlamaForCausalLM", 96, 64, 96, 2, 4, 2, 16, 8192, 1e-5, 1e4, tied=True)
TURN_SECONDS = 0.4  # a case's turns end after so long, of the kernel and of the reference each ...
LEAST_TURNS = 3  # ... but not before the kernel has had these
FLOOR_SHARE = 0.1  # of the kernel's time is spent on its floor, and one look in each turn at least
COLUMNS = {
    **{"ms": "ms", "torch_ms": "torch ms", "torch_over_kernel": "ratio"},
    **{"floor_ms": "floor ms", "over_floor": "over floor", "torch_dtype": "torch in"},
}


@dataclass(frozen=True)
class Size:
    """How much is measured. `attention`: rows and keys of decode rows; `context`: keys of a decode step's rows."""

    config: ModelConfig
    read: int  # bytes
    product: int  # rows and columns
    linear: tuple[int, ...]  # rows
    attention: tuple[tuple[int, int], ...]
    context: int
    decode: tuple[int, ...]  # rows
    prefill: tuple[int, ...]  # tokens
    norm: int  # rows

    @property
    def tokens(self) -> int:
        """Whose keys and values there is room for."""
        steps = (*self.attention, *((rows, self.context) for rows in self.decode), *((1, n) for n in self.prefill))
        return max(rows * (keys + cases.BLOCK) for rows, keys in steps)


WHOLE = Size(
    *(SMOLLM2, 2**29, 960, (1, 8, 16, 64, 256), ((64, 256), (16, 1024), (1, 4096))),
    *(200, (1, 8, 16, 64), (512, 2048), 32768),
)
QUICK = Size(TINY, 2**24, 128, (1, 3), ((2, 20), (1, 600)), 20, (1, 2), (16, 40), 64)


def main(given: argparse.Namespace) -> int:
    found = _kernels()
    if given.threads:
        torch.set_num_threads(given.threads)
    size = QUICK if given.quick else WHOLE
    with torch.inference_mode():
        machine = Machine(found, size.read, size.product)
        machine.look(5)
        subject, other = _subjects(given, size, found)
        measured = [_turns(machine, case, given.repeats) for case in _cases(size, subject, other)]
        machine.look(5)
    lines = {one.name: _line(one, machine.floor(one.work)) for one in measured}
    report = _report(machine, subject, size, lines)
    if not given.json:
        _print(report)
    print(json.dumps(report))
    return 0


def _kernels() -> Kernels:
    try:
        found = kernels()
    except ValueError as error:
        raise UsageError(str(error)) from None
    if found is None:
        raise UsageError("bench kernels: no C kernels here; the library was not built, or SIDESTEP_KERNELS is torch")
    return found


def _subjects(given: argparse.Namespace, size: Size, found: Kernels) -> tuple[Subject, Subject]:
    """The model in --dtype, and in the other type."""
    try:
        config = read_config(Path(given.model)) if given.model else size.config
        weights: dict[str, Weight] = {}
        weights |= (
            load_weights(Path(given.model), config, None) if given.model else dummy_weights(config, torch.bfloat16)
        )
        as_numbers(weights, torch.float32)
        float32, bfloat16 = (
            {name: one.to(to) for name, one in weights.items() if isinstance(one, torch.Tensor)}
            for to in (torch.float32, torch.bfloat16)
        )
        wide = Subject(config, float32, found, size.tokens)
        narrow = Subject(config, bfloat16, found, size.tokens, wide)
    except (ConfigError, Unsupported) as error:
        raise UsageError(f"--model: {error}") from None
    return (wide, narrow) if given.dtype == "float32" else (narrow, wide)


def _cases(size: Size, subject: Subject, other: Subject) -> Iterator[Case]:
    """Each is made when it is its turn."""
    for one in (subject, other):
        yield from (cases.linear_case(one, rows) for rows in size.linear)
    yield from (cases.decode_step_case(subject, rows, size.context) for rows in size.decode)
    yield from (cases.prefill_case(subject, tokens) for tokens in size.prefill)
    yield from (cases.decode_attention_case(subject, rows, keys) for rows, keys in size.attention)
    yield from (cases.chunk_attention_case(subject, tokens) for tokens in size.prefill)
    yield cases.rms_norm_case(subject, size.norm)


@dataclass(frozen=True)
class Measured:
    """A case without what it ran on; the least seconds of each side."""

    name: str
    torch_dtype: str
    work: Work
    kernel: float
    torch: float


def _turns(machine: Machine, case: Case, repeats: int) -> Measured:
    times: dict[str, list[float]] = {"kernel": [], "torch": [], "floor": []}
    for _ in range(repeats + 1):
        for name, run, least in (("kernel", case.kernel, LEAST_TURNS), ("torch", case.torch, 1)):
            if len(times[name]) < least or sum(times[name]) < TURN_SECONDS:
                times[name].append(seconds(run))
        times["floor"].append(machine.look_again(case.work))
        while sum(times["floor"]) < FLOOR_SHARE * sum(times["kernel"]):
            times["floor"].append(machine.look_again(case.work))
    return Measured(case.name, case.torch_dtype, case.work, min(times["kernel"]), min(times["torch"]))


def _report(machine: Machine, subject: Subject, size: Size, lines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "decode_step_over_floor": lines["decode step, rows=1"]["over_floor"],
        "prefill_over_floor": lines[f"prefill, tokens={size.prefill[-1]}"]["over_floor"],
        "kernels": lines,
        "isa": subject.kernels.name,
        "threads": subject.threads,
        "dtype": subject.name,
        "read_gb_per_s": _rounded(machine.rates(machine.reads, machine.size)),
        "peak_gflop_per_s": _rounded(machine.rates(machine.products, machine.flops)),
    }


def _line(one: Measured, floor: float) -> dict[str, Any]:
    figures = (one.kernel * 1e3, one.torch * 1e3, one.torch / one.kernel, floor * 1e3, one.kernel / floor)
    return dict(zip(COLUMNS, (*(float(f"{figure:.4g}") for figure in figures), one.torch_dtype), strict=True))


def _rounded(rates: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{rate / 1e9:.4g}") for name, rate in rates.items()}


def _print(report: dict[str, Any]) -> None:
    print(f"{report['isa']} kernels, {report['threads']} threads, {report['dtype']}")
    for name, unit in (("read_gb_per_s", "GB/s read"), ("peak_gflop_per_s", "GFLOP/s")):
        print(f"{unit}: " + ", ".join(f"{way} {rate:.4g}" for way, rate in report[name].items()))
    print(f"{'':<40}" + "".join(f"{title:>11}" for title in COLUMNS.values()))
    for name, line in report["kernels"].items():
        print(f"{name:<40}" + "".join(f"{line[column]:>11}" for column in COLUMNS))
