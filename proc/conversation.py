"""One request as its tokenizer sees it: the wish, the text shown so far, and what its last word will say."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np

from ipc.errors import SidestepError
from ipc.internal import Started, Told
from ipc.messages import Chunk, Done, Generate, Logprob, Usage
from ipc.sampling_params import SamplingParams
from proc.output import OutputParser, Shown, joined
from runtime.request import Finish
from runtime.text import TextStream
from runtime.tokenizer import ByteTokenizer, Tokenizer

NOBODY = b""  # as a client
CONTEXT = 4  # tokens at the end of the prompt that may hold the beginning of a character


class Live:
    """`ids` are the output tokens known, those the client brought to resume included."""

    __slots__ = (
        "admitted",
        "arrived",
        "cached",
        "client",
        "first",
        "ids",
        "keeps",
        "key",
        "label",
        "last",
        "latest",
        "leaves",
        "logprobs",
        "message",
        "parser",
        "prompt",
        "prompt_logprobs",
        "queued",
        "replica",
        "seed",
        "shown",
        "stop",
        "streams",
        "structured",
        "text",
        "tokenizer",
    )

    def __init__(
        self,
        client: bytes,
        message: Generate,
        prompt: list[int],
        tokenizer: Tokenizer | ByteTokenizer,
        seed: int,
        arrived: int,
        parser: OutputParser | None = None,
    ) -> None:
        wishes = message.sampling
        self.tokenizer, self.parser = tokenizer, parser
        bytes_of = tokenizer.shown_bytes_of if wishes.skip_special_tokens else tokenizer.bytes_of
        if parser is not None and wishes.skip_special_tokens:
            bytes_of = tokenizer.marked_bytes_of
        before = b"".join(bytes_of(token) for token in prompt[-CONTEXT:])
        self.client, self.message, self.prompt, self.seed = client, message, prompt, seed
        self.label, self.streams = message.id, message.stream
        self.keeps = not message.stream or message.detach > 0  # the text of each token
        self.key = ""  # by which others may attach
        self.leaves = 0.0  # seconds, when it ends for lack of a client
        self.last: Done | SidestepError | None = None  # its last word
        self.text = TextStream(bytes_of, wishes.stop, wishes.include_stop_str_in_output, before, wishes.min_tokens)
        self.ids = list(message.output_ids)
        for token in self.ids:  # replayed: the client has this text
            self._parsed(self.text.push(token), False)
        self.stop = self.text.stop
        self.structured = False  # a grammar of its replica follows it
        self.shown: list[Shown] = []  # what each output token brought, where it is kept
        self.logprobs: list[list[Logprob]] = []  # of each output token, where it is kept
        self.prompt_logprobs: list[list[Logprob]] = [[]]
        self.replica = self.cached = 0
        self.arrived, self.admitted = arrived, time.monotonic_ns()  # in nanoseconds, as the next three
        self.queued = self.first = self.latest = 0

    def already_over(self, params: SamplingParams) -> tuple[str, int | str | None] | None:
        """(finish reason, stop reason) where the tokens to resume from are a whole answer."""
        if self.stop is not None:
            return "stop", self.stop
        if self.ids and len(self.ids) > params.min_tokens and self.ids[-1] in params.stop_token_ids:
            return "stop", self.ids[-1] if self.ids[-1] in self.message.sampling.stop_token_ids else None
        if params.max_tokens is not None and len(self.ids) >= params.max_tokens:
            return "length", None
        return None

    def started(self, started: Started) -> None:
        self.cached = started.cached_tokens
        self.queued = self.queued or started.queued

    def push(self, token: int, finish: int, now: int, told: list[Logprob] | None = None) -> Chunk | None:
        """Take the next token; the chunk to send, or None for an answer that is not streamed. May set `stop`."""
        self.first = self.first or now
        text = self._end(token, finish) if finish else self.text.push(token)
        self.stop = self.text.stop
        offset = len(self.ids)
        self.ids.append(token)
        wanted = self.streams and self.client
        if self.parser is None and not (self.keeps or told):
            return Chunk(self.label, offset, text, [token]) if wanted else None
        shown = self._parsed(text, bool(finish) or self.stop is not None)
        if self.keeps:
            self.shown.append(shown)
            self.logprobs += [told] if told else []
        return self._chunk(offset, shown, [token], [told] if told else []) if wanted else None

    def tell_prompt(self, told: Told) -> None:
        """Log probabilities of prompt tokens; what is known already, from before a preemption, is dropped."""
        for index, entry in enumerate(entries(told, self.tokenizer), told.offset + len(self.prompt)):
            if index == len(self.prompt_logprobs):
                self.prompt_logprobs.append(entry)

    def since(self, offset: int) -> Chunk:
        """What has been generated from that output token on."""
        known = len(self.message.output_ids)
        logprobs = self.logprobs[offset - known :]
        return self._chunk(offset, joined(self.shown[offset - known :]), self.ids[offset:], logprobs)

    def _chunk(self, offset: int, shown: Shown, ids: list[int], logprobs: list[list[Logprob]]) -> Chunk:
        return Chunk(self.label, offset, shown.text, ids, shown.reasoning, list(shown.calls), logprobs)

    def _parsed(self, text: str, final: bool) -> Shown:
        return Shown(text) if self.parser is None else self.parser.feed(text, final)

    def _end(self, token: int, finish: int) -> str:
        """The text that the last token brings; one that stops the request is not shown unless that was asked for."""
        hidden = finish == Finish.STOP and not self.message.sampling.include_stop_str_in_output
        shown = "" if hidden else self.text.push(token)
        return shown if self.text.stop is not None else shown + self.text.finish()

    def _times(self, now: int) -> dict[str, float]:
        """Seconds by hop, and since arrival."""
        first, latest = self.first or now, self.latest or now
        hops = {
            "tokenized": self.admitted - self.arrived,
            "queued": self.queued,
            "prefill": max(0, first - self.admitted - self.queued),
            "decode": latest - first,
            "detokenized": now - latest,
            "first_token": first - self.arrived,
            "total": now - self.arrived,
        }
        return {name: nanoseconds / 1e9 for name, nanoseconds in hops.items()}

    def done(self, reason: str, stop: int | str | None) -> Done:
        message, now = self.message, time.monotonic_ns()
        whole = Shown() if message.stream else joined(self.shown)
        called = self.parser is not None and self.parser.called
        return Done(
            id=self.label,
            finish_reason="tool_calls" if called and reason == "stop" else reason,
            stop_reason=stop,
            usage=Usage(len(self.prompt), len(self.ids), self.cached),
            seed=self.seed,
            times=self._times(now),
            text=whole.text,
            ids=[] if message.stream else self.ids[len(message.output_ids) :],
            prompt_ids=self.prompt if message.return_prompt_ids else None,
            reasoning=whole.reasoning,
            tool_calls=list(whole.calls),
            logprobs=[] if message.stream else self.logprobs,
            prompt_logprobs=None if message.sampling.prompt_logprobs is None else self.prompt_logprobs,
        )


def entries(told: Told, tokenizer: Tokenizer | ByteTokenizer) -> list[list[Logprob]]:
    """For each token told about: itself, then the most likely ids."""
    ids, ranks = np.frombuffer(told.ids, "<i4").tolist(), np.frombuffer(told.ranks, "<i4").tolist()
    values, width = np.frombuffer(told.values, "<f4").tolist(), told.width
    found = []
    for n, rank in enumerate(ranks):
        at = range(n * width, (n + 1) * width)
        places = [rank, *range(1, width)]
        found.append(
            [Logprob(ids[i], values[i], r, tokenizer.bytes_of(ids[i])) for i, r in zip(at, places, strict=True)]
        )
    return found


def resolved(wishes: SamplingParams, tokenizer: Tokenizer | ByteTokenizer) -> SamplingParams:
    """The wishes with the model's defaults filled in, and EOS among the stop ids unless ignored."""
    defaults = {name: value for name, value in tokenizer.sampling_defaults.items() if getattr(wishes, name) is None}
    eos = [] if wishes.ignore_eos else [token for token in tokenizer.eos_ids if token not in wishes.stop_token_ids]
    stops = [*wishes.stop_token_ids, *eos]
    told_apart: dict[str, Any] = {"stop": [], "bad_words": [], "structured_outputs": None}  # the tokenizer's business
    return msgspec.structs.replace(wishes, stop_token_ids=stops, **told_apart, **defaults)
