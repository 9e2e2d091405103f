"""`sidestep bench overlap`: one workload through the real processes in several modes, on a simulated device.

The modes run one after the other and interleaved over the repeats, so that what the machine does meanwhile touches all
alike; ratios are taken within a repeat. All runs must give the same tokens. Every figure is *simulated*: the device's
time is a roofline's, only the host's work is real.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.cpu_time import by_process, by_role
from bench.front_end import Answer, ask_all, digests
from bench.overlap_workloads import Ask, Variant, Workload, structured, with_grammars, workload
from ipc.client import Client
from proc.models import prepare
from proc.settings import Settings, UsageError, settings_from
from proc.supervisor import Supervisor
from proc.trace import write

MODES = {  # (--procs, --overlap-depth)
    "threads": ("1", 1),
    "threads0": ("1", 0),
    "threads2": ("1", 2),
    "depth0": ("3", 0),
    "depth1": ("3", 1),
    "depth2": ("3", 2),
}
BYTES = "bytes"  # as --model: no vocabulary but the 256 bytes
SHOWN = {  # column → figure
    "req/s": "request_throughput",
    "tok/s": "output_throughput",
    "makespan s": "makespan_s",
    "busy s": "device_busy_s",
    "span/busy": "makespan_over_busy",
    "idle %": "idle_with_work_fraction",
    "TTFT ms": "mean_ttft_ms",
    "ITL p50": "median_itl_ms",
    "ITL p99": "p99_itl_ms",
    "mask us": "masking_us",
    "hidden %": "masks_hidden_fraction",
}


@dataclass(frozen=True)
class Run:
    """One workload once through one server."""

    variant: str
    mode: str
    figures: dict[str, Any]
    tokens: list[bytes]  # a digest for each request
    structured: int = 0  # streams under a grammar: others have other tokens


def main(given: argparse.Namespace) -> int:
    runs: list[Run] = []
    modes = _modes(given.modes)
    folder = "" if given.model == BYTES else prepare(Settings(model=given.model), print)
    vocab_size = json.loads((Path(folder) / "config.json").read_text())["vocab_size"] if folder else 256
    given.model = folder or Settings.model  # the default model's name means bytes on a simulated device
    work = _launches(workload(given.workload, given.num_prompts, vocab_size, given.seed), given)
    work = with_grammars(work, given.grammar_rows)
    if given.device:
        work = replace(work, device=given.device)
    saturation = 0.0
    gc.disable()
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # the load must not preempt what it measures
    for repeat in range(given.repeats):
        for variant in work.variants:
            rate = variant.load * saturation
            for mode in modes:
                run = _run(given, work, variant, mode, rate, repeat)
                runs.append(run)
                _say(given, f"{repeat + 1}/{given.repeats} {variant.name} {mode}: {_row(run.figures)}")
                gc.collect()
            saturation = saturation or runs[-1].figures["request_throughput"]
    lines = _summary(runs, modes, work, given)
    if not given.json:
        _print_table(lines)
    for line in lines:
        print(json.dumps(line))
    if given.picture:
        from bench.picture import idle_by_mode

        idle_by_mode(lines, Path(given.picture))
    return 0 if _equal(runs) else 1


def _equal(runs: list[Run]) -> bool:
    """Every run of the same requests gave the same tokens (a slow one may have asked only the first)."""
    longest = {run.structured: run.tokens for run in sorted(runs, key=lambda run: len(run.tokens))}
    return all(run.tokens == longest[run.structured][: len(run.tokens)] for run in runs)


def _launches(work: Workload, given: argparse.Namespace) -> Workload:
    """Each variant with each of the launch costs that were asked for."""
    costs = [
        (f"{kind} {cost:g} ms", {"sim_launch_ms": cost, "sim_launch_work": kind})
        for kind in given.sim_launch_work
        for cost in given.sim_launch_ms
    ]
    if not costs:
        return work
    variants = [
        replace(variant, name=f"{variant.name} {name}".strip(), settings=variant.settings | settings)
        for variant in work.variants
        for name, settings in costs
    ]
    return replace(work, variants=variants)


def _modes(text: str) -> list[str]:
    modes = text.split(",")
    for mode in modes:
        if mode not in MODES:
            raise UsageError(f"--modes: {mode!r} is none of {', '.join(MODES)}")
    return modes


def _run(given: argparse.Namespace, work: Workload, variant: Variant, mode: str, rate: float, repeat: int) -> Run:
    asks = structured(work.asks, variant.structured) if variant.structured else work.asks
    if rate:
        gaps = np.random.default_rng(given.seed).exponential(1 / rate, len(asks))
        asks = [replace(ask, due=float(due)) for ask, due in zip(asks, np.cumsum(gaps) - gaps[0], strict=True)]
        asks = [ask for ask in asks if ask.due <= given.longest]
    with Supervisor(_settings(given, work, variant, mode)) as server, Client(server.addresses[0]) as client:
        client.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
        before, cpu, processes = client.status(), by_role(server), by_process(server)
        own = time.process_time()
        answers = ask_all(server.addresses, asks, not given.no_stream)
        own = time.process_time() - own
        cpu = {role: seconds - cpu[role] for role, seconds in by_role(server).items()}
        busiest = max(now - then for now, then in zip(by_process(server), processes, strict=True))
        after = client.status()
        if given.trace:
            write(client.trace(), Path(given.trace) / f"{given.workload}-{variant.name or 'run'}-{mode}-{repeat}.json")
    spent = {name: after[name] - before[name] for name, value in after.items() if isinstance(value, float)}
    roles = {name: round(seconds, 2) for name, seconds in sorted(cpu.items())} | {"client": round(own, 2)}
    figures = _figures(asks, answers, spent)
    figures |= {"cpu_s_by_role": roles, "busiest_process_cpu_share": busiest / figures["makespan_s"]}
    return Run(variant.name, mode, figures, digests(answers), variant.structured)


def _settings(given: argparse.Namespace, work: Workload, variant: Variant, mode: str) -> Settings:
    procs, depth = MODES[mode]
    changes: dict[str, Any] = {
        "model": given.model,
        "device": work.device,
        "procs": procs,
        "overlap_depth": depth,
        **work.settings,
        **variant.settings,
    }
    return settings_from(**changes)


def _figures(asks: list[Ask], answers: list[Answer], spent: dict[str, float]) -> dict[str, Any]:
    span = max(answer.ended for answer in answers)
    busy, idle = spent["device_busy_s"], spent["device_idle_with_work_s"]
    steps = max(spent["steps_committed"], 1)
    tokens = sum(len(answer.ids) for answer in answers)
    streamed = [answer for answer in answers if answer.times]
    gaps = np.concatenate([np.diff(answer.times) for answer in streamed]) if streamed else np.full(1, np.nan)
    return {
        "num_prompts": len(asks),
        "input_tokens": sum(len(ask.prompt_ids) for ask in asks),
        "output_tokens": tokens,
        "request_throughput": len(asks) / span,
        "output_throughput": tokens / span,
        "makespan_s": span,
        "device_busy_s": busy,
        "makespan_over_busy": span / busy,
        "idle_with_work_fraction": idle / (busy + idle),
        "mean_ttft_ms": statistics.fmean([a.times[0] - a.sent for a in streamed]) * 1e3 if streamed else None,
        "median_itl_ms": float(np.median(gaps)) * 1e3 if streamed else None,
        "p99_itl_ms": float(np.percentile(gaps, 99)) * 1e3 if streamed else None,
        "steps": int(steps),
        "mean_step_ms": busy / steps * 1e3,
        "report_delay_us": spent["report_delay_s"] / steps * 1e6,
        "planned_ahead_fraction": spent["steps_planned_ahead"] / steps,
        "masking_us": spent["masking_s"] / steps * 1e6,
        "masks_hidden_fraction": 1 - spent["masking_exposed_s"] / spent["masking_s"] if spent["masking_s"] else None,
    }


def _summary(runs: list[Run], modes: list[str], work: Workload, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians over the repeats, a line for each variant and mode."""
    base = "depth0" if "depth0" in modes else modes[0]
    lines = []
    for variant in work.variants:
        of = {mode: [run.figures for run in runs if (run.variant, run.mode) == (variant.name, mode)] for mode in modes}
        for mode in modes:
            line: dict[str, Any] = {"workload": given.workload, "variant": variant.name, "mode": mode}
            line |= {name: _middle([figures[name] for figures in of[mode]]) for name in of[mode][0]}
            pairs = zip(of[mode], of[base], strict=True)
            line[f"throughput_over_{base}"] = statistics.median(
                mine["output_throughput"] / other["output_throughput"] for mine, other in pairs
            )
            if variant.structured:
                line |= _against_plain(runs, variant.name, mode)
            line["equal_tokens"] = _equal(runs)
            line |= {"repeats": given.repeats, "device": work.device, "simulated": True}
            lines.append(line)
    return lines


def _against_plain(runs: list[Run], name: str, mode: str) -> dict[str, float]:
    """What the grammars cost: throughput against the same requests without, within each repeat."""
    mine = [run.figures["output_throughput"] for run in runs if (run.variant, run.mode) == (name, mode)]
    plain = [run.figures["output_throughput"] for run in runs if run.mode == mode and not run.structured]
    return {"throughput_over_plain": statistics.median(one / other for one, other in zip(mine, plain, strict=False))}


def _middle(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: _middle([value.get(name, 0.0) for value in values]) for name in values[0]}
    return None if None in values else statistics.median(values)


def _row(figures: dict[str, Any]) -> str:
    return "  ".join(f"{column} {_shown(name, figures[name])}" for column, name in SHOWN.items())


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.2f}" if name.endswith("_fraction") else f"{value:.4g}" if value < 1e4 else f"{value:.0f}"


def _print_table(lines: list[dict[str, Any]]) -> None:
    ratio = next(name for name in lines[0] if name.startswith("throughput_over_"))
    print(f"simulated: {lines[0]['device']}, {lines[0]['workload']}, medians of {lines[0]['repeats']}")
    print(f"{'variant':<20}{'mode':<10}" + "".join(f"{column:>11}" for column in (*SHOWN, f"x {ratio[16:]}")))
    for line in lines:
        cells = [*(_shown(name, line[name]) for name in SHOWN.values()), f"{line[ratio]:.3f}"]
        print(f"{line['variant']:<20}{line['mode']:<10}" + "".join(f"{cell:>11}" for cell in cells))
    for line in lines:
        if "throughput_over_plain" in line:
            print(f"{line['variant']}, {line['mode']}: {line['throughput_over_plain']:.3f} of the throughput without")
    print("tokens are equal in all runs" if lines[0]["equal_tokens"] else "TOKENS DIFFER BETWEEN RUNS")


def _say(given: argparse.Namespace, line: str) -> None:
    if not given.json:
        print(line, flush=True)
