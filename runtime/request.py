"""A request as the engine sees it: token ids and resolved sampling. Knows no text, no client, no clock.

There is one admission. A new request, a preempted one, one recovered from a dead process and one resubmitted by a
client differ only in `output_ids`, the tokens that were already generated.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from runtime.sampling import Sampling


class Finish(IntEnum):
    """How a token left its request; travels as one byte."""

    NONE = 0
    STOP = 1
    LENGTH = 2


class AdmissionError(ValueError):
    """A request that is not taken; `param` names the field at fault and `code` the kind, in the wire's words."""

    def __init__(self, param: str, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param, self.code = param, code


@dataclass(frozen=True)
class Request:
    """What `Scheduler.admit` takes."""

    id: int  # unique among the live ones
    prompt_ids: NDArray[np.int32]
    sampling: Sampling
    max_tokens: int  # output tokens, those in `output_ids` included
    output_ids: NDArray[np.int32]  # already generated; empty for a new request
    priority: int = 0  # lower runs first
    source: int = 0  # which tokenizer gets its tokens
    arrival: int | None = None  # place in the queue; None: the scheduler numbers it, kept through preemption


NO_IDS: NDArray[np.int32] = np.zeros(0, np.int32)
