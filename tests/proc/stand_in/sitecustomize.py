"""Python reads this at the start of each process whose PYTHONPATH names its folder: a GPU is then the CPU.

Everything else of the GPU worker is as it is: the processes, the wire, the table and its handles, the device's threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


@cache
def runtime() -> Any:
    """One for each process."""
    from tests.fake_cuda import PromptCuda

    return PromptCuda()


def stand_in(module: Any) -> None:
    """For `proc.gpu`."""
    from tests.fake_accelerator import FakeAccelerator

    module.machine = lambda index: (FakeAccelerator(), runtime())
    module.COLLECTIVE = "gloo"


def read_by(module: Any) -> None:
    """For `proc.scheduler`."""
    module.Cudart = runtime


CHANGED: dict[str, Callable[[Any], None]] = {"proc.gpu": stand_in, "proc.scheduler": read_by}


class Changing(MetaPathFinder):
    """Loads modules as ever, then changes some."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in CHANGED else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def changing(module: ModuleType) -> None:
            execute(module)
            CHANGED[name](module)

        spec.loader.exec_module = changing  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Changing())
