"""Structured outputs and tools through real processes: what comes out is what was asked for, at every depth."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from ipc.errors import Aborted, InvalidRequest
from ipc.sampling_params import SamplingParams, StructuredOutputs
from proc.llm import LLM
from tests.schemas import schemas

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WISHES: list[dict[str, Any]] = [
    {"json": PERSON},
    {"json": json.dumps(PERSON)},
    {"regex": "[a-f]{3,9}-[0-9]{2}"},
    {"choice": ["yes", "no", 'per"haps\n']},
    {"grammar": 'start: "x" /[0-9]{1,5}/ "y"'},
    {"grammar": 'root ::= "x" [0-9] [0-9] "y"'},
]


def fits(wish: dict[str, Any], text: str) -> bool:
    if "json" in wish:
        jsonschema.validate(json.loads(text), PERSON)
        return True
    if "choice" in wish:
        return text in wish["choice"]
    return re.fullmatch(wish.get("regex", "x[0-9]{1,5}y"), text) is not None


@pytest.fixture(scope="module", params=[0, 1, 2])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(device="sim", overlap_depth=request.param, max_model_len=2048, num_blocks=4096) as one:
        yield one


TEXTS: dict[int, list[str]] = {}  # by depth


def test_each_kind_gives_what_it_says(llm: LLM) -> None:
    params = [
        SamplingParams(seed=seed, max_tokens=200, structured_outputs=StructuredOutputs(**wish))
        for wish in WISHES
        for seed in range(8)
    ]
    plain = [SamplingParams(seed=seed, max_tokens=30) for seed in range(16)]
    outputs = llm.generate(["x"] * (len(params) + 16), [*params, *plain], use_tqdm=False)
    for n, output in enumerate(outputs[: len(params)]):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop" and fits(WISHES[n // 8], answer.text), answer
    depth = llm._server.settings.depth
    TEXTS[depth] = [output.outputs[0].text for output in outputs]
    assert all(texts == TEXTS[depth] for texts in TEXTS.values())


def test_three_hundred_schemas_of_real_shape(llm: LLM) -> None:
    if llm._server.settings.depth != 1:
        pytest.skip("one depth is enough")
    asked = schemas()
    params = [
        SamplingParams(seed=n, max_tokens=1500, structured_outputs=StructuredOutputs(json=json.dumps(schema)))
        for n, schema in enumerate(asked)
    ]
    outputs = llm.generate(["x"] * len(asked), params, use_tqdm=False)
    for schema, output in zip(asked, outputs, strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop", (schema, answer.text)
        jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))


def test_stop_strings_and_limits_end_a_structured_answer_too(llm: LLM) -> None:
    wish = StructuredOutputs(regex="[ab]{40}")
    for changes, reason in (({"stop": ["a"]}, "stop"), ({"max_tokens": 7}, "length")):
        answer = llm.client.generate("x", seed=3, structured_outputs=wish, **changes)
        assert answer.finish_reason == reason and len(answer.text) < 40
    ended = llm.client.generate("x", structured_outputs=StructuredOutputs(regex="ab"), min_tokens=9, max_tokens=20)
    assert ended.text == "ab"  # the grammar's end comes before min_tokens


def test_an_answer_can_be_resumed_in_its_grammar(llm: LLM) -> None:
    wish = StructuredOutputs(json=PERSON)
    whole = llm.client.generate("x", seed=5, structured_outputs=wish)
    half = whole.token_ids[: len(whole.token_ids) // 2]
    rest = llm.client.generate("x", seed=5, structured_outputs=wish, output_ids=half)
    assert half + rest.token_ids == whole.token_ids
    with pytest.raises(InvalidRequest, match="do not follow the grammar"):
        llm.client.generate("x", structured_outputs=wish, output_ids=[65, 66])


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"json": {"$ref": "#"}}, "allows no output"),
        ({"json": "[1]"}, "must be an object"),
        ({"json": "{"}, "structured_outputs"),
        ({"json": {"type": "thing"}}, "Invalid type"),
        ({"json": {"not": {}}}, "Unimplemented"),
        ({"regex": "(?=a)"}, "look-around"),
        ({"regex": "("}, "regex"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"choice": ["x" * 131_072]}, "more than 131072 characters"),
        ({"choice": []}, "choice"),
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["a"]}, "exactly one"),
    ],
)
def test_what_cannot_be_is_refused_with_the_place(llm: LLM, wish: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        llm.client.generate("x", structured_outputs=StructuredOutputs(**wish))
    assert caught.value.param == "structured_outputs"


def test_aborted_and_finished_requests_leave_no_matcher(llm: LLM) -> None:
    """Aborted while compiling, while running, and at the end; then all slots are free and answers still come."""
    slow = {"enum": [f"value number {n} of many" for n in range(4_000)]}
    with pytest.raises(Aborted):
        stream = llm.client.stream("x", structured_outputs=StructuredOutputs(json=slow))
        threading.Timer(0.01, stream.close).start()
        for _ in stream:
            pass
        raise Aborted("by ourselves")
    with llm.client.stream("x", structured_outputs=StructuredOutputs(regex="a{100,}"), max_tokens=1000) as running:
        next(iter(running))
    assert llm.client.generate("x", structured_outputs=StructuredOutputs(choice=["a"])).text == "a"
    for _ in range(200):
        status = llm.client.status()
        if status["free_slots"] == status["num_slots"]:
            return
        time.sleep(0.05)
    raise AssertionError("slots are missing")


def test_a_grammar_that_becomes_too_complex_ends_its_request_alone(llm: LLM) -> None:
    """Its first mask can be computed, a later one is beyond llguidance's limits."""
    wide = {"type": "object", "properties": {f"p{n}": {"type": ["string", "null"]} for n in range(1500)}}
    neighbour = llm.client.stream("x", seed=1, max_tokens=300, ignore_eos=True)
    long = {"type": "string", "pattern": "(a|b)*" * 2000 + "c{99}"}
    for wish in (StructuredOutputs(json=wide), StructuredOutputs(json=long)):  # the parser says so, and the lexer
        with pytest.raises(InvalidRequest, match="too complex"):
            llm.client.generate("x", seed=1, structured_outputs=wish)
    assert sum(len(chunk.ids) for chunk in neighbour) == 300


def test_where_the_grammar_ends_so_does_the_answer(llm: LLM) -> None:
    wish = StructuredOutputs(regex="ab")
    answer = llm.client.generate("x", structured_outputs=wish, min_tokens=9, max_tokens=9)
    assert answer.text == "ab" and answer.finish_reason == "stop" and answer.usage.completion_tokens == 3


def test_a_grammar_leaves_no_room_for_thoughts() -> None:
    with LLM(device="sim", reasoning_parser="think") as one:
        wish = StructuredOutputs(choice=["yes", "no"])
        answer = one.client.generate("well<think>", structured_outputs=wish, separate_reasoning=True, max_tokens=20)
        assert answer.text in ("yes", "no") and not answer.reasoning


def test_what_nobody_waits_for_is_not_compiled(llm: LLM) -> None:
    """A large grammar takes above half a second here; six that were given up hold up nobody."""
    client = llm.client
    for number in range(6):
        choice = [f"{number} and {n}" for n in range(8_000)]
        client.stream("x", structured_outputs=StructuredOutputs(choice=choice), max_tokens=2).close()
    began = time.monotonic()
    client.generate("x", structured_outputs=StructuredOutputs(choice=["c"]), max_tokens=4)
    assert time.monotonic() - began < 4
