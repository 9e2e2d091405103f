"""What a structured output may say next, as one bit an id, through llguidance. Knows no socket and no step's rows.

A grammar is compiled once and copied for each request that uses it; llguidance bounds the time and the memory of both
(its fuel and state limits), and holds no interpreter lock meanwhile.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, cast

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

from runtime.tokenizer import ByteTokenizer, Tokenizer

KINDS = ("json", "json_object", "regex", "choice", "grammar", "lark")
WHITE_SPACE = r"(\n {0,16}| )?"  # of JSON: a blank or a new line with an indent; no model goes on with it for ever
CACHED = 256  # compiled grammars, which take up to 2 MiB each where their texts are short
CACHED_CHARACTERS = 2_000_000  # of their texts; one takes 35 to 160 bytes once it is compiled
TOO_COMPLEX = "the grammar becomes too complex"
LONGEST_WORDS = 400  # characters of an error


class GrammarError(ValueError):
    """A grammar that cannot be used, or output that does not follow it; says where."""


class Grammars:
    """Compiles for one vocabulary of `vocab_size` ids, `num_threads` masks at once. Safe for several threads."""

    def __init__(self, tokenizer: Tokenizer | ByteTokenizer, vocab_size: int, num_threads: int = 1) -> None:
        if not tokenizer.eos_ids:
            raise GrammarError("the model has no end-of-sequence token, without which no structured output can end")
        words = _Words(tokenizer, vocab_size)
        self.words = LLTokenizer(TokenizerWrapper(words), n_vocab=vocab_size, eos_token=list(tokenizer.eos_ids))
        self.executor = LLExecutor(num_threads=num_threads)
        self._limits = LLParserLimits(verbose_errors=False)
        self._compiled = _Compiled()

    def compile(self, kind: str, text: str, output_ids: Sequence[int] = ()) -> LLMatcher:
        """A matcher of its own, after `output_ids`. `kind` is one of KINDS; `text` is JSON for json and choice.

        Raises `GrammarError`, also for what only fails when its first mask is computed.
        """
        matcher = self._cached(kind, text).deep_copy()
        if output_ids and not matcher.consume_tokens(list(output_ids)):
            raise GrammarError("output_ids do not follow the grammar")
        return matcher

    def _cached(self, kind: str, text: str) -> LLMatcher:
        matcher = self._compiled.get(kind, text)
        if matcher is not None:
            return matcher
        matcher = LLMatcher(self.words, source(kind, text), log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(_words(matcher))
        self._compiled.keep(kind, text, matcher)
        return matcher


class _Compiled:
    """The grammars used last, by kind and text. llguidance tells no sizes, so texts stand for them."""

    def __init__(self) -> None:
        self._matchers: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._characters = 0
        self._lock = Lock()

    def get(self, kind: str, text: str) -> LLMatcher | None:
        with self._lock:
            if (kind, text) in self._matchers:
                self._matchers.move_to_end((kind, text))
            return self._matchers.get((kind, text))

    def keep(self, kind: str, text: str, matcher: LLMatcher) -> None:
        with self._lock:
            if (kind, text) not in self._matchers:
                self._characters += len(text)
            self._matchers[kind, text] = matcher
            while len(self._matchers) > CACHED or self._characters > CACHED_CHARACTERS:
                (_, oldest), _ = self._matchers.popitem(last=False)
                self._characters -= len(oldest)


def source(kind: str, text: str) -> str:
    """llguidance's own form of a grammar. Raises `GrammarError`."""
    try:
        if kind == "json_object":
            return _schema({"type": "object"})
        if kind == "json":
            return _schema(_object(text))
        if kind == "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(text))))
        if kind == "regex":
            return LLMatcher.grammar_from_regex(text)
        is_ebnf = kind == "grammar" and "::=" in text
        return LLMatcher.grammar_from_lark(gbnf_to_lark(text) if is_ebnf else text)
    except (ValueError, RecursionError, GbnfToLarkError) as error:
        raise GrammarError(str(error)[:LONGEST_WORDS]) from None


def _object(text: str) -> dict[str, Any]:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema must be an object")
    return schema


def _schema(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITE_SPACE})


class _Words:
    """Our vocabulary as llguidance wants it: the bytes of each id."""

    def __init__(self, tokenizer: Tokenizer | ByteTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.bytes_of(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids | set(tokenizer.eos_ids))

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"), False)


@dataclass
class _Place:
    """Where a request stands."""

    matcher: LLMatcher
    taken: int  # output ids


class Matchers:
    """The live requests' places in their grammars. For one thread."""

    def __init__(self, executor: LLExecutor) -> None:
        self.executor = executor
        self._live: dict[int, _Place] = {}

    def __len__(self) -> int:
        return len(self._live)

    def follow(self, request: int, matcher: LLMatcher, num_output: int) -> None:
        """From its `num_output`-th output id on."""
        self._live[request] = _Place(matcher, num_output)

    def forget(self, request: int) -> None:
        self._live.pop(request, None)

    def masks(
        self, requests: list[int], offsets: list[int], ids: list[int], bits: NDArray[np.uint32]
    ) -> tuple[list[int], dict[int, str]]:
        """Take each request's newest id (`offsets` its index in the output, -1 for none) and write its mask.

        Returns the entries that have a mask, in the order of the rows of `bits`, uint32[rows, words], and what has gone
        wrong by request. Those, and requests that are not live any more, draw freely and are dropped afterwards.
        """
        wrong = self._take(requests, offsets, ids)
        entries = [n for n, request in enumerate(requests) if request in self._live and request not in wrong]
        matchers = [(self._live[requests[n]].matcher, row) for row, n in enumerate(entries)]
        if matchers:
            fill_next_token_bitmask_par(self.executor, matchers, cast("NDArray[np.int32]", bits.view(np.int32)))
        for row, n in enumerate(entries):
            if self._live[requests[n]].matcher.is_error():
                wrong[requests[n]] = _words(self._live[requests[n]].matcher)
                bits[row] = ~np.uint32(0)
        return entries, wrong

    def _take(self, requests: list[int], offsets: list[int], ids: list[int]) -> dict[int, str]:
        """What has gone wrong, by request. An id that was taken already is not taken twice."""
        wrong, due = {}, []
        for request, offset, token in zip(requests, offsets, ids, strict=True):
            place = self._live.get(request)
            if place is not None and offset > place.taken:
                wrong[request] = f"output token {place.taken} was skipped"
            elif place is not None and offset == place.taken:
                place.taken += 1
                due.append((request, place.matcher, token))
        good = self.executor.consume_token_par([(matcher, token) for _, matcher, token in due]) if due else []
        return wrong | {request: _words(m) for (request, m, _), fine in zip(due, good, strict=True) if not fine}


def _words(matcher: LLMatcher) -> str:
    """What a matcher complains of, without its state; "" for nothing."""
    words = matcher.get_error().split("\n<")[0].strip()
    if words.lower().startswith(("parser error", "lexer error")) and "doesn't satisfy" not in words:
        words = f"{TOO_COMPLEX}: {words}"
    return "it allows no output at all" if words.startswith("NoExtension") else words[:LONGEST_WORDS]
