"""The public messages, between clients and tokenizers: msgpack maps with a `type`. Knows no socket and no engine.

docs/PROTOCOL.md describes them field by field. Those inside the server are in `ipc.internal`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from ipc.errors import InvalidRequest
from ipc.histogram import Histogram
from ipc.sampling_params import U64, SamplingParams

PROTOCOL = 1
MAX_FRAME = 64 << 20  # bytes; a larger one is refused by the socket

Priority = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


# -- public: from the client


class Public(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type"):
    pass


class Hello(Public, frozen=True, tag="hello"):
    """The first message of a client; answered with `Welcome`."""

    version: int = PROTOCOL


class Generate(Public, frozen=True, tag="generate"):
    """Exactly one of `prompt`, `messages`, `prompt_ids`."""

    id: str  # a label, unique among the client's live requests
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_ids: list[int] | None = None
    output_ids: list[int] = []  # tokens already received, to resume: the answer goes on after them
    sampling: SamplingParams = SamplingParams()
    stream: bool = True
    model: str | None = None
    priority: Priority = 0  # lower runs first
    timeout_ms: Annotated[int, msgspec.Meta(ge=1)] | None = None  # in the queue and while running
    detach: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0  # seconds that it goes on without its client
    return_prompt_ids: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer goes on where the last message, the assistant's, ends
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []  # OpenAI's function tools; with `messages`
    tool_choice: str | dict[str, Any] = "auto"  # auto, none, required, or OpenAI's object that names a function
    parallel_tool_calls: bool = True
    separate_reasoning: bool = False  # what the model thinks before it answers comes apart from the text


class Abort(Public, frozen=True, tag="abort"):
    """Ends the client's live request of exactly this id; an unknown id is ignored."""

    id: str


class Detach(Public, frozen=True, tag="detach"):
    """The client leaves its live request of this id, which goes on for the seconds it was given; else it ends."""

    id: str


class Attach(Public, frozen=True, tag="attach"):
    """Go on with a request from its output token `offset`; answered as `Generate` is, under the new `id`."""

    id: str
    key: str  # as `Accepted` told it
    offset: U64 = 0


class Tokenize(Public, frozen=True, tag="tokenize"):
    id: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True


class Detokenize(Public, frozen=True, tag="detokenize"):
    id: str
    ids: list[int]
    skip_special_tokens: bool = False


class Models(Public, frozen=True, tag="models"):
    id: str


class Status(Public, frozen=True, tag="status"):
    id: str


class Trace(Public, frozen=True, tag="trace"):
    """The times of the last steps."""

    id: str
    last: U64 = 4096  # steps


class Metrics(Public, frozen=True, tag="metrics"):
    """Figures and histograms, for /metrics."""

    id: str


class Ping(Public, frozen=True, tag="ping"):
    id: str


# -- public: to the client


class Welcome(Public, frozen=True, tag="welcome"):
    version: int
    model: str
    max_model_len: int
    addresses: list[str]  # of every tokenizer; a client may spread over them
    index: int = 0  # of the tokenizer that answers


class Accepted(Public, frozen=True, tag="accepted"):
    """The first answer to a `Generate` with `detach`."""

    id: str
    key: str


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One id's natural log probability by the model alone (before temperature, penalties and masks)."""

    token: int
    logprob: float  # finite
    rank: int  # 1 is the most likely
    raw: bytes  # of the token; may be part of a character


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call of a tool, or some more of one: `id` and `name` come once, with its first piece."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""  # JSON text


class Chunk(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Some more of one answer."""

    id: str
    offset: int  # output tokens before these
    text: str
    ids: list[int]
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    logprobs: list[list[Logprob]] = []  # for each id: itself, then the most likely ones


class Chunks(Public, frozen=True, tag="chunks"):
    """Of any number of the client's requests; none when the server only asks whether the client is there."""

    items: list[Chunk]


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Done(Public, frozen=True, tag="done", kw_only=True):
    """A request's last word. `text` and `ids` are the whole answer where it was not streamed, else empty."""

    id: str
    finish_reason: str  # stop | length | tool_calls
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it; None for EOS
    usage: Usage
    seed: int
    times: dict[str, float]  # seconds by hop, see docs/PROTOCOL.md
    text: str = ""
    ids: list[int] = []
    prompt_ids: list[int] | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    logprobs: list[list[Logprob]] = []
    prompt_logprobs: list[list[Logprob]] | None = None  # for each token of the prompt; empty for the first


class Error(Public, frozen=True, tag="error"):
    """A request's last word when it failed; `id` is None for a message that could not be read."""

    code: str
    message: str
    id: str | None = None
    param: str | None = None


class Tokenized(Public, frozen=True, tag="tokenized"):
    id: str
    ids: list[int]


class Detokenized(Public, frozen=True, tag="detokenized"):
    id: str
    text: str


class ModelList(Public, frozen=True, tag="model_list"):
    id: str
    models: list[str]


class StatusReply(Public, frozen=True, tag="status_reply"):
    id: str
    status: dict[str, Any]


class Track(msgspec.Struct, frozen=True):
    """What one role remembers of its last steps; times are nanoseconds of the machine's CLOCK_MONOTONIC."""

    role: str  # such as scheduler0
    columns: list[str]
    rows: list[list[int]]


class TraceReply(Public, frozen=True, tag="trace_reply"):
    id: str
    tracks: list[Track]  # of all schedulers and of the tokenizer that answers


class MetricsReply(Public, frozen=True, tag="metrics_reply"):
    """Of all schedulers, and of the requests of the tokenizer that answers."""

    id: str
    figures: dict[str, float]
    histograms: dict[str, Histogram]


class Pong(Public, frozen=True, tag="pong"):
    id: str


FromClient = (
    Hello | Generate | Abort | Detach | Attach | Tokenize | Detokenize | Models | Status | Trace | Metrics | Ping
)
ToClient = (
    Welcome
    | Accepted
    | Chunks
    | Done
    | Error
    | Tokenized
    | Detokenized
    | ModelList
    | StatusReply
    | TraceReply
    | MetricsReply
    | Pong
)
_decoder = msgspec.msgpack.Decoder(FromClient)
_client_decoder = msgspec.msgpack.Decoder(ToClient)
_encoder = msgspec.msgpack.Encoder()
_any_decoder = msgspec.msgpack.Decoder()


def decode_from_client(frame: bytes) -> FromClient:
    """Raises `InvalidRequest`, naming the field where one is at fault, for whatever a client may send."""
    try:
        return _decoder.decode(frame)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), field_of(error)) from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise InvalidRequest(f"the message cannot be read: {error}") from None


def field_of(error: msgspec.ValidationError) -> str | None:
    """The field that msgspec's words are about."""
    words = str(error)
    for before in ("unknown field `", "missing required field `"):
        if before in words:
            return words.split(before)[1].split("`")[0]
    place = re.search(r" - at (?:`key` in )?`\$\.(.+?)(?:\[\.\.\.\].*)?`$", words)  # [...]: whatever is in the map
    return place and place[1]


def label_of(frame: bytes) -> str | None:
    """The id in a message that was refused, so that the refusal can name it; None where there is none."""
    try:
        raw = _any_decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError):
        return None
    label = raw.get("id") if isinstance(raw, dict) else None
    return label if isinstance(label, str) else None


def decode_to_client(frame: bytes) -> ToClient:
    """Raises `msgspec.MsgspecError` for a reply of another version."""
    return _client_decoder.decode(frame)


def encode(message: FromClient | ToClient) -> bytes:
    """Raises `InvalidRequest` for text that is not Unicode (a lone surrogate), and for numbers beyond 64 bits."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text has a lone surrogate at position {error.start}") from None
    except OverflowError:
        param = _overflowing(message)
        raise InvalidRequest(f"a number in {param} does not fit 64 bits", param) from None


def _overflowing(message: msgspec.Struct) -> str:
    """The field whose number, or one of whose numbers, does not fit."""
    for name in message.__struct_fields__:
        value = getattr(message, name)
        try:
            _encoder.encode(value)
        except OverflowError:
            return _overflowing(value) if isinstance(value, msgspec.Struct) else name
    return ""
