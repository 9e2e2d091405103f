"""What the processes of a replica agree on, as it follows from the settings. Imports nothing heavy."""

from __future__ import annotations

from ipc.shared_memory import Shape
from proc.settings import Settings


def num_slots(settings: Settings) -> int:
    """One is padding's; the others budget for requests whose successor is admitted before their last result is in."""
    return 1 + (1 + settings.depth) * settings.max_num_seqs


def table_shape(settings: Settings) -> Shape:
    """Of a replica's TokenTable."""
    return Shape(num_slots(settings), settings.depth + 2, settings.max_num_seqs)


def ring_shape(settings: Settings) -> tuple[int, int]:
    """(steps, rows) of a replica's mask ring."""
    return settings.depth + 2, settings.max_num_seqs
