"""The bodies of the OpenAI endpoints as they may come: every field named, unknown ones refused, null means absent."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from ipc.errors import InvalidRequest
from ipc.messages import field_of
from ipc.sampling_params import SamplingParams, StructuredOutputs

T = TypeVar("T")
NEUTRAL = {"best_of": (1,), "suffix": ("",)}  # fields that are honoured only where they change nothing
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop_token_ids", "ignore_eos"),
    *("skip_special_tokens", "include_stop_str_in_output", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "allowed_token_ids", "bad_words", "prompt_logprobs", "logits_processors"),
)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str | None = None  # for the caller; nothing depends on it, nor on the next
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None  # the schema always holds


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def structure(self) -> StructuredOutputs | None:
        """Raises `InvalidRequest`."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest("response_format needs json_schema with type json_schema alone", "response_format")
        if self.json_schema is not None:
            return StructuredOutputs(json=self.json_schema.schema or {})
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


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
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    logits_processors: list[str] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def longest(self) -> int | None:
        """max_tokens, or what stands for it."""
        return self.max_tokens

    @property
    def told(self) -> int | None:
        """The most likely ids told with each token; None: no log probabilities."""
        return None

    @property
    def names(self) -> dict[str, str]:
        """The socket's fields that this body asks for by other names."""
        return {} if self.response_format is None else {"structured_outputs": "response_format"}

    def _structure(self) -> StructuredOutputs | None:
        """Raises `InvalidRequest`."""
        wanted = None if self.response_format is None else self.response_format.structure()
        if wanted is not None and self.structured_outputs is not None:
            raise InvalidRequest("response_format and structured_outputs cannot both be given", "response_format")
        return self.structured_outputs if wanted is None else wanted

    def check(self) -> None:
        """Raises `InvalidRequest` that names a field which cannot be honoured."""
        for name, neutral in NEUTRAL.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                raise InvalidRequest(f"{name} is not supported", name)
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs cannot be streamed", "prompt_logprobs")
        if not 1 <= self.choices <= 128:
            raise InvalidRequest("n must be between 1 and 128", "n")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream", "stream_options")
        if not -(2**31) <= (self.priority or 0) < 2**31:
            raise InvalidRequest("priority must fit 32 bits", "priority")
        if self.timeout_ms is not None and not 1 <= self.timeout_ms < 2**63:
            raise InvalidRequest("timeout_ms must be at least 1, and below 2**63", "timeout_ms")

    def sampling(self, choice: int) -> SamplingParams:
        """Of one of the `n` choices; a seed counts on from choice to choice. Raises `InvalidRequest`."""
        given = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
        if "seed" in given:
            given["seed"] = (given["seed"] + choice) % 2**64 if 0 <= given["seed"] < 2**64 else given["seed"]
        if self.stop is not None:
            given["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        if self.logit_bias:
            given["logit_bias"] = _biases(self.logit_bias)
        params = SamplingParams(
            max_tokens=self.longest, logprobs=self.told, structured_outputs=self._structure(), **given
        )
        params.check()
        return params


class CompletionBody(Sampled, forbid_unknown_fields=True, kw_only=True):
    prompt: Any
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None

    @property
    def told(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is not None:
            if self.stream:
                raise InvalidRequest("echo with logprobs cannot be streamed", "echo")
            if self.prompt_logprobs is None:
                self.prompt_logprobs = self.logprobs

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
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def longest(self) -> int | None:
        """max_completion_tokens before max_tokens, which OpenAI calls deprecated."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def told(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs", "top_logprobs")

    @property
    def names(self) -> dict[str, str]:
        names = super().names | {"logprobs": "top_logprobs"}
        return names if self.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}

    def conversation(self) -> list[dict[str, Any]]:
        return [
            message | {"role": "system"} if message.get("role") == "developer" else message for message in self.messages
        ]

    def wishes(self) -> dict[str, Any]:
        """How the template is to be used, and the tools."""
        template = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        names = (*template, "tools", "tool_choice", "parallel_tool_calls")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return given | {"separate_reasoning": True}


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


def _biases(given: dict[str, float]) -> dict[int, float]:
    """By token id, which JSON writes as text. Raises `InvalidRequest`."""
    if not all(token.isascii() and token.isdecimal() and len(token) < 20 for token in given):
        raise InvalidRequest("logit_bias must be by token ids", "logit_bias")
    return {int(token): bias for token, bias in given.items()}


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(one) is kind for one in value)
