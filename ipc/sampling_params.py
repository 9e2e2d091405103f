"""What a caller may ask of sampling; names follow vLLM. Knows no tokenizer: texts and ids are checked elsewhere."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec

from ipc.errors import InvalidRequest

U64 = Annotated[int, msgspec.Meta(ge=0)]  # msgpack itself ends at 2**64 - 1
MOST_LOGPROBS = 20
LONGEST_WORD = 256  # characters of a bad word: all of them are encoded while others wait
LONGEST_STOP = 1024  # characters of a stop string: looking for its beginning costs the square of what is held back


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the output must be; exactly one of them."""

    json: dict[str, Any] | str | None = None  # a JSON schema, as such or as text
    json_object: bool | None = None  # any JSON object
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # Lark, or EBNF with ::=

    def check(self) -> None:
        """Raises `InvalidRequest`."""
        given = [name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            words = f"exactly one of {', '.join(self.__struct_fields__)} is needed, got {given}"
            raise InvalidRequest(f"structured_outputs: {words}", "structured_outputs")
        if self.choice is not None and (not self.choice or "" in self.choice):
            raise InvalidRequest("structured_outputs.choice needs texts, none of them empty", "structured_outputs")


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """None: the model's own default (generation_config), else vLLM's."""

    n: int = 1  # answers to one prompt; `LLM` and HTTP only: the socket takes a request for each
    temperature: float | None = None  # 1.0; 0 is greedy
    top_k: int | None = None  # 0 and -1 are off
    top_p: float | None = None  # 1.0
    min_p: float | None = None  # 0.0
    seed: U64 | None = None  # None: drawn by the server and told with the last word
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None  # 1.0
    logit_bias: dict[int, float] = {}  # token id → what is added to its logit
    allowed_token_ids: list[int] | None = None  # None: all
    bad_words: list[str] = []  # texts whose tokens the output does not contain
    max_tokens: int | None = None  # None: until the context is full
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # of each token, and so many of the most likely ones
    prompt_logprobs: int | None = None  # the same of the prompt's tokens
    structured_outputs: StructuredOutputs | None = None
    logits_processors: list[str] = []  # by the names under which the server was started with them

    def check(self) -> None:
        """Raises `InvalidRequest` naming the first field that cannot be honoured (not-a-number included)."""
        for param, fine, words in self._rules():
            if not fine:
                raise InvalidRequest(f"{param} must be {words}", param)
        if self.structured_outputs is not None:
            self.structured_outputs.check()
            for param in ("ignore_eos", "allowed_token_ids"):
                if getattr(self, param):
                    raise InvalidRequest(f"{param} cannot be had with structured_outputs", param)

    def _rules(self) -> tuple[tuple[str, bool, str], ...]:
        infinity = math.inf
        repetition = 1.0 if self.repetition_penalty is None else self.repetition_penalty
        return (
            ("n", 1 <= self.n <= 128, "between 1 and 128"),
            ("temperature", self.temperature is None or 0 <= self.temperature <= 100, "between 0 and 100"),
            ("top_k", self.top_k is None or self.top_k >= -1, "-1 or 0 (off), or positive"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "above 0, at most 1"),
            ("min_p", self.min_p is None or 0 <= self.min_p <= 1, "between 0 and 1"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("repetition_penalty", 0.001 <= repetition <= 1000, "between 0.001 and 1000"),
            ("logit_bias", all(-100 <= b <= 100 for b in self.logit_bias.values()), "biases between -100 and 100"),
            ("logit_bias", all(0 <= i < 2**31 for i in self.logit_bias), "by token ids"),
            ("allowed_token_ids", self.allowed_token_ids != [], "at least one token id, or absent"),
            ("allowed_token_ids", all(0 <= i < 2**31 for i in self.allowed_token_ids or []), "token ids"),
            ("bad_words", len(self.bad_words) <= 1024, "at most 1024 texts"),
            ("bad_words", all(word.strip() for word in self.bad_words), "texts, none of them blank"),
            ("bad_words", _longest(self.bad_words) <= LONGEST_WORD, f"at most {LONGEST_WORD} characters each"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("seed", 0 <= (self.seed or 0) < 2**64, "between 0 and 2**64 - 1"),
            ("min_tokens", 0 <= self.min_tokens <= (self.max_tokens or infinity), "between 0 and max_tokens"),
            ("stop", "" not in self.stop and len(self.stop) <= 64, "at most 64 strings, none of them empty"),
            ("stop", _longest(self.stop) <= LONGEST_STOP, f"at most {LONGEST_STOP} characters each"),
            ("stop_token_ids", all(0 <= i < 2**31 for i in self.stop_token_ids), "token ids"),
            ("logprobs", 0 <= (self.logprobs or 0) <= MOST_LOGPROBS, f"between 0 and {MOST_LOGPROBS}"),
            ("prompt_logprobs", 0 <= (self.prompt_logprobs or 0) <= MOST_LOGPROBS, f"between 0 and {MOST_LOGPROBS}"),
        )


def _longest(texts: list[str]) -> int:
    return max(map(len, texts), default=0)
