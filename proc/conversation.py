"""One request as its tokenizer sees it: the wish, the text shown so far, and what its last word will say."""

from __future__ import annotations

import time

import msgspec

from ipc.errors import SidestepError
from ipc.internal import Started
from ipc.messages import Chunk, Done, Generate, SamplingParams, Usage
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
        "message",
        "prompt",
        "queued",
        "replica",
        "seed",
        "shown",
        "stop",
        "streams",
        "text",
    )

    def __init__(
        self,
        client: bytes,
        message: Generate,
        prompt: list[int],
        tokenizer: Tokenizer | ByteTokenizer,
        seed: int,
        arrived: int,
    ) -> None:
        wishes = message.sampling
        bytes_of = tokenizer.shown_bytes_of if wishes.skip_special_tokens else tokenizer.bytes_of
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
            self.text.push(token)
        self.stop = self.text.stop
        self.shown: list[str] = []  # the text of each output token, where it is kept
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

    def push(self, token: int, finish: int, now: int) -> Chunk | None:
        """Take the next token; the chunk to send, or None for an answer that is not streamed. May set `stop`."""
        self.first = self.first or now
        shown = self._end(token, finish) if finish else self.text.push(token)
        self.stop = self.text.stop
        ids = self.ids
        offset = len(ids)
        ids.append(token)
        if self.keeps:
            self.shown.append(shown)
        return Chunk(self.label, offset, shown, [token]) if self.streams and self.client else None

    def since(self, offset: int) -> Chunk:
        """What has been generated from that output token on."""
        known = len(self.message.output_ids)
        return Chunk(self.label, offset, "".join(self.shown[offset - known :]), self.ids[offset:])

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
        return Done(
            id=self.label,
            finish_reason=reason,
            stop_reason=stop,
            usage=Usage(len(self.prompt), len(self.ids), self.cached),
            seed=self.seed,
            times=self._times(now),
            text="" if message.stream else "".join(self.shown),
            ids=[] if message.stream else self.ids[len(message.output_ids) :],
            prompt_ids=self.prompt if message.return_prompt_ids else None,
        )


def resolved(wishes: SamplingParams, tokenizer: Tokenizer | ByteTokenizer) -> SamplingParams:
    """The wishes with the model's defaults filled in, and EOS among the stop ids unless ignored."""
    defaults = {name: value for name, value in tokenizer.sampling_defaults.items() if getattr(wishes, name) is None}
    eos = [] if wishes.ignore_eos else [token for token in tokenizer.eos_ids if token not in wishes.stop_token_ids]
    return msgspec.structs.replace(wishes, stop_token_ids=[*wishes.stop_token_ids, *eos], stop=[], **defaults)
