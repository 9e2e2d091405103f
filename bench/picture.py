"""Pictures of what `sidestep bench overlap` measured. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proc.settings import UsageError


def idle_by_mode(lines: list[dict[str, Any]], file: Path) -> None:
    """Bars of the idle share, a group for each variant and a bar for each mode. Raises `UsageError`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--picture needs matplotlib: pip install 'sidestep[bench]'") from None
    modes = list(dict.fromkeys(line["mode"] for line in lines))
    groups = list(dict.fromkeys(_group(line) for line in lines))
    figure = Figure(figsize=(1.5 + 1.8 * max(len(groups), 2), 3.6), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(modes)
    for number, mode in enumerate(modes):
        shares = [100 * line["idle_with_work_fraction"] for line in lines if line["mode"] == mode]
        places = [group + (number - (len(modes) - 1) / 2) * width for group in range(len(groups))]
        bars = axes.bar(places, shares, width * 0.9, label=mode)
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.set_ylabel("device idle while there was work, %")
    axes.set_title("simulated devices, real processes on two cores", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def _group(line: dict[str, Any]) -> str:
    return "\n".join(filter(None, (line["workload"], line["variant"], line["device"].removeprefix("sim:"))))
