"""The bodies of the OpenAI endpoints as they may come: every field named, unknown ones refused, null means absent."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ipc.errors import InvalidRequest
from ipc.messages import SamplingParams, field_of

T = TypeVar("T")
NOT_YET = {  # fields whose only honoured values are those that change nothing
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "best_of": (1,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),  # there are no tool calls
}
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop_token_ids", "ignore_eos"),
    *("skip_special_tokens", "include_stop_str_in_output"),
)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None


class Sampled(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints share."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    timeout_ms: int | None = None
    user: str | None = None  # for OpenAI's sake; nothing depends on it
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def longest(self) -> int | None:
        """max_tokens, or what stands for it."""
        return self.max_tokens

    def check(self) -> None:
        """Raises `InvalidRequest` that names a field which this version cannot honour."""
        for name, neutral in NOT_YET.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                raise InvalidRequest(f"{name} is not supported by this version", name)
        if not 1 <= self.choices <= 128:
            raise InvalidRequest("n must be between 1 and 128", "n")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream", "stream_options")
        if not -(2**31) <= (self.priority or 0) < 2**31:
            raise InvalidRequest("priority must fit 32 bits", "priority")
        if not 1 <= (self.timeout_ms or 1) < 2**63:
            raise InvalidRequest("timeout_ms must be at least 1", "timeout_ms")

    def sampling(self, choice: int) -> SamplingParams:
        """Of one of the `n` choices; a seed counts on from choice to choice. Raises `InvalidRequest`."""
        given = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
        if "seed" in given:
            given["seed"] += choice
        if self.stop is not None:
            given["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        params = SamplingParams(max_tokens=self.longest, **given)
        params.check()
        return params


class CompletionBody(Sampled, forbid_unknown_fields=True, kw_only=True):
    prompt: Any
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None

    @property
    def longest(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default

    def prompts(self) -> list[str | list[int]]:
        """A text, token ids, or a list of either. Raises `InvalidRequest`."""
        prompt = self.prompt
        if isinstance(prompt, str) or (_is_list(prompt, int) and prompt):
            return [prompt]
        if isinstance(prompt, list) and prompt and (_is_list(prompt, str) or all(_is_list(one, int) for one in prompt)):
            return list(prompt)
        raise InvalidRequest("prompt must be a text, a list of token ids, or a list of either", "prompt")


class ChatBody(Sampled, forbid_unknown_fields=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @property
    def longest(self) -> int | None:
        """max_completion_tokens before max_tokens, which OpenAI calls deprecated."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def conversation(self) -> list[dict[str, Any]]:
        return [
            message | {"role": "system"} if message.get("role") == "developer" else message for message in self.messages
        ]

    def wishes(self) -> dict[str, Any]:
        """How the template is to be used."""
        names = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


def read(body: bytes, kind: type[T]) -> T:
    """Raises `InvalidRequest` that names the field, or says why the body is no JSON."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), field_of(error)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(one) is kind for one in value)
