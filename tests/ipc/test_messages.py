"""The public protocol: golden bytes, refusals that name the field, and a page that names every field."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.errors import BY_CODE, InternalError, InvalidRequest, SidestepError, from_wire
from ipc.histogram import Histogram
from ipc.messages import (
    Abort,
    Accepted,
    Attach,
    Chunk,
    Chunks,
    Detach,
    Detokenize,
    Detokenized,
    Done,
    Error,
    FromClient,
    Generate,
    Hello,
    Metrics,
    MetricsReply,
    ModelList,
    Models,
    Ping,
    Pong,
    SamplingParams,
    Status,
    StatusReply,
    ToClient,
    Tokenize,
    Tokenized,
    Trace,
    TraceReply,
    Track,
    Usage,
    Welcome,
    decode_from_client,
    decode_to_client,
    encode,
    label_of,
)

PAGE = (Path(__file__).parent.parent.parent / "docs" / "PROTOCOL.md").read_text()
GOLDEN: dict[str, Any] = {
    "82a474797065a568656c6c6fa776657273696f6e01": Hello(1),
    "84a474797065a867656e6572617465a26964a131a670726f6d7074a26869a873616d706c696e6782ab74656d706572617475726500"
    "aa6d61785f746f6b656e7304": Generate("1", "hi", sampling=SamplingParams(temperature=0, max_tokens=4)),
    "82a474797065a561626f7274a26964a131": Abort("1"),
    "83a474797065a8746f6b656e697a65a26964a131a474657874a178": Tokenize("1", "x"),
    "83a474797065aa6465746f6b656e697a65a26964a131a36964739105": Detokenize("1", [5]),
    "82a474797065a66d6f64656c73a26964a131": Models("1"),
    "82a474797065a6737461747573a26964a131": Status("1"),
    "82a474797065a6646574616368a26964a131": Detach("1"),
    "84a474797065a6617474616368a26964a131a36b6579a3302d31a66f666673657405": Attach("1", "0-1", 5),
    "82a474797065a57472616365a26964a131": Trace("1"),
    "82a474797065a76d657472696373a26964a131": Metrics("1"),
    "82a474797065a470696e67a26964a131": Ping("1"),
    "82a474797065a470 6f6e67a26964a131".replace(" ", ""): Pong("1"),
    "82a474797065a66368756e6b73a56974656d739184a26964a131a66f666673657402a474657874a178a36964739107": Chunks(
        [Chunk("1", 2, "x", [7])]
    ),
}
REPLIES: list[ToClient] = [
    Welcome(1, "m", 8, ["ipc://x"]),
    Chunks([]),
    Accepted("1", "0-1"),
    Done(id="1", finish_reason="stop", usage=Usage(1, 2, 0), seed=2**64 - 1, times={"total": 0.5}),
    Error("aborted", "words", "1", "id"),
    Tokenized("1", [1]),
    Detokenized("1", "x"),
    ModelList("1", ["m"]),
    StatusReply("1", {"running": 0}),
    MetricsReply("1", {"running": 0}, {"e2e_request_latency_seconds": Histogram([0.1], [1, 0], 0.05)}),
    TraceReply("1", [Track("scheduler0", ["step"], [[3]])]),
]


@pytest.mark.parametrize("golden", GOLDEN)
def test_golden_bytes(golden: str) -> None:
    """Any msgpack that says the same is understood; the types and names of fields never change within a version."""
    message = GOLDEN[golden]
    raw = bytes.fromhex(golden)
    decode = decode_to_client if isinstance(message, get_args(ToClient)) else decode_from_client
    assert decode(raw) == message
    assert decode(encode(message)) == message
    written, meant = msgpack.unpackb(encode(message)), msgpack.unpackb(raw)
    assert written == {name: value for name, value in meant.items() if (name, value) != ("version", 1)}


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: type(reply).__name__)
def test_replies_are_maps_with_a_type(reply: ToClient) -> None:
    raw = msgpack.unpackb(encode(reply))
    assert raw["type"] == type(reply).__struct_config__.tag
    assert decode_to_client(msgpack.packb(raw)) == reply


def test_the_page_names_every_type_and_field() -> None:
    for kind in (*get_args(FromClient), *get_args(ToClient), SamplingParams, Chunk, Usage, Track, Histogram):
        if kind.__struct_config__.tag:
            assert f"`{kind.__struct_config__.tag}`" in PAGE
        for one in msgspec.structs.fields(kind):
            assert f"`{one.name}`" in PAGE, f"{kind.__name__}.{one.name}"
    for code in BY_CODE:
        assert f"`{code}`" in PAGE or code in ("cannot_connect", "timed_out"), code  # those two arise in a client


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"type": "generate", "id": "1", "colour": 1}, "colour"),
        ({"type": "generate", "id": 1}, "id"),
        ({"type": "generate", "id": "1", "sampling": {"temperature": "hot"}}, "sampling.temperature"),
        ({"type": "generate", "id": "1", "sampling": {"beam": 2}}, "beam"),
        ({"type": "generate", "id": "1", "sampling": {"seed": -1}}, "sampling.seed"),
        ({"type": "generate", "id": "1", "sampling": {"logit_bias": {5: "much"}}}, "sampling.logit_bias"),
        ({"type": "generate", "id": "1", "sampling": {"logit_bias": {"x": 1.0}}}, "sampling.logit_bias"),
        ({"type": "generate", "id": "1", "sampling": {"stop": ["a", 1]}}, "sampling.stop[1]"),
        ({"type": "abort"}, "id"),
        ({"type": "dance", "id": "1"}, "type"),
    ],
)
def test_refusals_name_the_field(message: dict[str, Any], param: str | None) -> None:
    frame = msgpack.packb(message)
    with pytest.raises(InvalidRequest) as caught:
        decode_from_client(frame)
    assert caught.value.param == param
    assert label_of(frame) == ("1" if message.get("id") == "1" else None)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_and_nothing_else(frame: bytes) -> None:
    try:
        decode_from_client(frame)
    except InvalidRequest:
        label_of(frame)


def test_mutated_messages_are_read_or_refused() -> None:
    draw = random.Random(1)
    seeds = [encode(message) for message in GOLDEN.values() if not isinstance(message, get_args(ToClient))]
    for _ in range(20_000):
        frame = bytearray(draw.choice(seeds))
        for _ in range(draw.randint(1, 4)):
            frame[draw.randrange(len(frame))] = draw.choice((draw.randrange(256), 0x81, 0xC7, 0xD7, 0xC1, 0xDF))
        try:
            decode_from_client(bytes(frame))
        except InvalidRequest:
            label_of(bytes(frame))


@pytest.mark.parametrize("frame", [b"\x91" * 5000, b"\x81\xa1x" * 5000, b"\xa2\xed\xa0", b"\xdf\xff\xff\xff\xff"])
def test_nasty_bytes_are_refused(frame: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_from_client(frame)
    assert label_of(frame) is None


def test_what_cannot_be_encoded_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        encode(Tokenize("1", "a\ud800"))
    large = {"prompt_ids": Generate("1", prompt_ids=[1, 2**70]), "ids": Detokenize("1", [-(2**64)])}
    large["max_tokens"] = Generate("1", "x", sampling=SamplingParams(max_tokens=2**70))
    for param, message in large.items():
        with pytest.raises(InvalidRequest, match=f"a number in {param} does not fit 64 bits") as caught:
            encode(message)
        assert caught.value.param == param


def test_each_code_is_one_class() -> None:
    for code, kind in BY_CODE.items():
        error = from_wire(code, "words", "field")
        assert type(error) is kind and error.code == code and error.param == "field" and str(error) == "words"
    assert isinstance(from_wire("new_code", "words"), InternalError)


def test_the_tree_in_the_docstring_is_the_real_one() -> None:
    import ipc.errors

    def names(kind: type[SidestepError]) -> list[str]:
        below = [child for child in kind.__subclasses__() if child.__module__ == "ipc.errors"]  # HTTP has its own
        return [kind.__name__, *(name for child in below for name in names(child))]

    words = (ipc.errors.__doc__ or "").replace("├──", "").replace("└──", "").replace("│", "").split()
    drawn = [word for word in words if word in names(SidestepError)]
    assert drawn == names(SidestepError)
    assert json.dumps(sorted(BY_CODE)) == json.dumps(sorted(word for word in words if word in BY_CODE))
