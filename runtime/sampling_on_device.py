"""A step's tokens drawn on the device that computed its logits, in the order of its stream, without waiting for it: the
next step is launched before the host knows what was drawn.

The reference is `runtime.sampler` on torch; here nothing is asked of the device and no shape depends on a value in it.
What the host knows decides what is done: a step of greedy rows without wishes is three operations and no transfer, and
nothing is sorted for top_k and top_p that no row asks for. Processors of a user's own need the ids before: see
`Asked.needs_host`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.device.base import MaskSet
from runtime.device.changes import Changes, changes, mask
from runtime.device.filters import Filters, TorchFilters
from runtime.device.histories import Counts, Tails, Words, words
from runtime.device.put import Put
from runtime.device.told import Told, told
from runtime.logits import Processor, process
from runtime.sampling import Sampling
from runtime.sampling_on_torch import best_ids, inverse_cdf
from runtime.slot_sampling import SampleBatch

I32 = NDArray[np.int32]


@dataclass(frozen=True)
class Asked:
    """What a step's sampling rows ask for, on its way to the device; S rows."""

    how: SampleBatch
    changes: Changes
    numbers: Tensor | None  # float64[7, S], as `_numbers` has them; None: the host's facts below say it all
    end: int  # ids from this one on are padding for all rows; 0: it depends on the row
    samples: bool  # some row has a temperature
    min_p: bool  # some row has one; as below
    top_k: bool
    top_p: bool
    most: int  # so many best ids hold all cut-offs

    @property
    def needs_host(self) -> bool:
        """Processors run on the host, which has to wait: before `draw`, `how.drawn(ids)` must have been called for each
        earlier step of theirs, and `draw` itself waits for their rows' logits. Other steps need neither."""
        return any(edits.sampling.processors for _, edits in self.how.edits)


class DeviceSampler:
    """For `num_slots` slots and logits of `vocab` ids on `device`, whatever torch calls it."""

    def __init__(
        self,
        num_slots: int,
        vocab: int,
        device: str,
        filters: Filters | None = None,
        processors: Mapping[str, Processor] | None = None,
    ) -> None:
        self.vocab = vocab
        self.filters = filters or TorchFilters()
        self.processors = processors or {}
        self.counts, self.tails = Counts(num_slots, vocab, device), Tails(num_slots, device)
        self.words: list[Words | None] = [None] * num_slots
        self._packed: tuple[SampleBatch, Changes] | None = None

    @torch.inference_mode()
    def admit(self, slot: int, sampling: Sampling, num_prompt: int, ids: I32, put: Put) -> None:
        """A slot begins anew; `ids` int32 as in `SlotSampling.admit`. Raises `ValueError` for ids there are not."""
        self._check(sampling, ids)
        self.counts.give_back(slot)
        self.tails.give_back(slot)
        self.words[slot] = own = words(sampling.bad_words, self.vocab) if sampling.bad_words else None
        if sampling.penalised:
            self.counts.admit(slot, num_prompt, ids, put)
        if own is not None and own.before.shape[1]:
            self.tails.admit(slot, own.before.shape[1], ids[num_prompt:], put)

    @torch.inference_mode()
    def prepare(self, how: SampleBatch, put: Put) -> Asked:
        """No transfer for greedy rows without new wishes, one if a row has a temperature, two more for new changes."""
        sampled = how.temperature > 0
        top_k = np.where(sampled & (how.top_k > 0), np.minimum(how.top_k, self.vocab), self.vocab)
        top_p = np.where(sampled, how.top_p, 1.0)
        limited = top_k < self.vocab
        most = top_k[limited].max(initial=1) if limited[top_p < 1].all() else self.vocab
        ends = np.where((how.vocab > 0) & (how.vocab < self.vocab), how.vocab, self.vocab)
        end = int(ends[0]) if (ends == ends[:1]).all() and len(ends) else 0
        min_p = np.where(sampled, how.min_p, 0.0)
        facts = bool(min_p.any()), bool(limited.any()), bool((top_p < 1).any()), int(most)
        numbers = None
        if sampled.any() or not end:
            temperature = np.where(sampled, how.temperature, 1.0)
            numbers = put(np.stack((temperature, min_p, top_k, top_p, how.uniform, ~sampled, ends)))
        return Asked(how, self._changes(how, put), numbers, end, bool(sampled.any()), *facts)

    @torch.inference_mode()
    def raw(self, logits: Tensor, asked: Asked) -> Tensor | None:
        """The rows that want log probabilities, kept from before `draw` changes them."""
        return logits.index_select(0, asked.changes.told[0]) if asked.changes.told else None

    @torch.inference_mode()
    def draw(self, logits: Tensor, asked: Asked, masks: MaskSet | None, put: Put) -> Tensor:
        """Contiguous float32[S, vocab], which are overwritten, to int32[S]; the histories are told."""
        self._edit(logits, asked, masks, put)
        ids = best_ids(logits)
        if asked.samples:
            assert asked.numbers is not None
            temperature, min_p, top_k, top_p, uniform, greedy, _ = asked.numbers.unbind()
            best = logits.amax(-1)
            weights = (logits - best[:, None]).div_(temperature.float()[:, None]).exp_()
            if asked.min_p:
                weights.masked_fill_(weights < min_p.float()[:, None], 0.0)
            if asked.top_k or asked.top_p:
                filters = top_k.long() if asked.top_k else None, top_p if asked.top_p else None
                weights = self.filters.cut(logits, weights, *filters, asked.most)
            plain = greedy.bool() | ~best.isfinite()  # a row that overflowed has no distribution
            ids = torch.where(plain, ids, inverse_cdf(weights, uniform, torch.float64))
        asked.changes.drawn(ids, self.counts, self.tails)
        return ids.int()

    @torch.inference_mode()
    def told(self, raw: Tensor, asked: Asked, ids: Tensor) -> Told:
        """Of what was drawn, int32[S], for the rows that `raw` has kept."""
        return told(raw, ids.index_select(0, asked.changes.told[0]), asked.how)

    def _check(self, sampling: Sampling, ids: I32) -> None:
        named = [ids, np.array(sampling.allowed_ids), np.array([token for token, _ in sampling.logit_bias])]
        if any(((one < 0) | (one >= self.vocab)).any() for one in named):
            raise ValueError(f"an id that is not among the {self.vocab} of the model")

    def _changes(self, how: SampleBatch, put: Put) -> Changes:
        """Packed anew only if other requests stand in the rows, or ask for something else by now."""
        if self._packed is None or not _alike(self._packed[0], how):
            self._packed = how, changes(how, self.vocab, self.counts, self.tails, self.words, put)
        return self._packed[1]

    def _edit(self, logits: Tensor, asked: Asked, masks: MaskSet | None, put: Put) -> None:
        todo = asked.changes
        if masks is not None and len(masks.rows):
            mask(logits, masks, put)
        _cut(logits, asked)
        if todo.allowed:
            todo.allow(logits)
        if todo.banned:
            todo.ban(logits, self.tails)
        if todo.biased:
            todo.bias(logits)
        if asked.needs_host:
            self._process(logits, asked.how)
        if todo.penalised:
            todo.penalise(logits, self.counts)

    def _process(self, logits: Tensor, how: SampleBatch) -> None:
        for row, edits in how.edits:
            if edits.sampling.processors:
                here = logits[row : row + 1].to("cpu", copy=True)
                for name in edits.sampling.processors:
                    process(here, 0, edits, name, self.processors[name])
                logits[row : row + 1].copy_(here)


def _alike(last: SampleBatch, how: SampleBatch) -> bool:
    """Whether all but numbers is the same; a request's `Edits` are made once, at its admission."""
    same = len(last.edits) == len(how.edits) and all(
        row == old_row and edits is old for (row, edits), (old_row, old) in zip(how.edits, last.edits, strict=True)
    )
    return same and last.banned == how.banned and last.logprobs == how.logprobs


def _cut(logits: Tensor, asked: Asked) -> None:
    """Nothing is drawn from a head's padding."""
    if asked.end:
        if asked.end < logits.shape[1]:
            logits[:, asked.end :].fill_(-torch.inf)
    elif asked.numbers is not None:
        ids = torch.arange(logits.shape[1], device=logits.device)
        logits.masked_fill_(ids >= asked.numbers[6][:, None], -torch.inf)
