"""What the scheduler tells the worker, and what the worker answers: the step protocol's two structs.

A plan names slots, never tokens: a decode row reads its input id from `TokenTable.next[slot]` on the device, so the
plan of step N+1 can be sent before the result of step N exists. Only differences travel: page tables, positions and
sampling live on the worker (`runtime.batch`) and are changed by what a plan adds. Arrays travel as little-endian bytes
so that encoding a step costs the same for 1 row and for 1000. This module knows no sockets and no devices.
"""

from __future__ import annotations

import msgspec

from runtime.sampling import Sampling

SLOT_DTYPE = "<u2"
ID_DTYPE = "<i4"


class SlotAdmission(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A slot given to a request (new, resumed or preempted: one path); it resets all that the worker knows of it."""

    slot: int
    start: int  # tokens whose KV the prefix cache already holds; the first chunk begins at this position
    num_prompt: int  # the prompt/output boundary among the ids (min_tokens counts from here)
    pages: bytes  # ID_DTYPE[start / block_size]: the shared prefix pages; new ones come as `page_slots`/`pages`
    sampling: Sampling
    history: bytes = b""  # ID_DTYPE: all known ids, where `sampling.needs_history`


class StepPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step. Rows are the decode rows, in order, followed by the chunk rows, in order."""

    epoch: int  # one life of the worker; a plan of another epoch is refused
    step: int  # gapless within an epoch
    decode_slots: bytes  # SLOT_DTYPE[D]: one token each, input from TokenTable.next[slot]; all of them sample
    chunk_slots: bytes = b""  # SLOT_DTYPE[C]: rows whose ids travel with the plan
    chunk_lens: bytes = b""  # ID_DTYPE[C]: tokens of each chunk, at least 1
    chunk_samples: bytes = b""  # uint8[C]: 1 where the chunk reaches the last known token, so the row samples
    chunk_ids: bytes = b""  # ID_DTYPE[sum(chunk_lens)]
    page_slots: bytes = b""  # SLOT_DTYPE[P]: which slot's table each of `pages` is appended to, in order
    pages: bytes = b""  # ID_DTYPE[P]
    admitted: list[SlotAdmission] = []  # applied before `pages`
    masked: bool = False  # rows draw under masks: the step's `SampleHalf` follows, and sampling waits for it


class MaskOrder(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """To those who make masks: all ids before this step are known. Arrays have an entry for each constrained row."""

    epoch: int
    step: int
    rows: bytes  # ID_DTYPE: which of the step's sampling rows
    requests: bytes  # <u8
    offsets: bytes  # ID_DTYPE: index of `ids` among the request's output; -1 where there is none yet
    ids: bytes  # ID_DTYPE: the last token of each
    ordered: int  # CLOCK_MONOTONIC nanoseconds


class SampleHalf(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A plan's second half: the masks of its constrained rows stand in the ring. Due for each plan that is `masked`.

    A second one comes where its rows ended while their masks were made. The first counts.
    """

    epoch: int
    step: int
    rows: bytes  # ID_DTYPE: sampling rows that have a mask, in the ring's order; others of the step draw freely
    ordered: int  # CLOCK_MONOTONIC nanoseconds: when the ids before the step were known
    written: int  # when the masks were there


class Logprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural log probabilities of consecutive tokens of one slot, by the model alone (no temperature, no penalty)."""

    slot: int
    first: int  # position of the first token
    width: int  # entries for each token: itself, then the most likely ids, the best first
    ids: bytes  # ID_DTYPE[tokens, width]
    values: bytes  # <f4[tokens, width]; finite
    ranks: bytes  # ID_DTYPE[tokens]: 1 where the token itself is the most likely one


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A step is done: its ids stand in `TokenTable.ids[step % R]`. Times are CLOCK_MONOTONIC nanoseconds."""

    epoch: int
    step: int
    received: int  # the worker took the plan up
    launched: int  # the host's work for it was done
    started: int  # the device began to compute it
    ended: int  # the device had finished
    reported: int  # the ids were visible and the worker said so
    logprobs: list[Logprobs] = []  # in the order of the step's rows, prompts first
    masking: int = 0  # nanoseconds from the order of this step's masks until they were written
    exposed: int = 0  # nanoseconds of `started` to `ended` in which the device waited for them
