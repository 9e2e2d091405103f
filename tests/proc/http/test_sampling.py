"""The openai client's structured outputs, tools and log probabilities, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from proc.settings import settings_from
from proc.supervisor import Supervisor
from tests.proc.http.conftest import ask

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get current temperature for a given location.",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "maxLength": 9}, "unit": {"enum": ["C", "F"]}},
            "required": ["location", "unit"],
            "additionalProperties": False,
        },
    },
}
NOTHING = {"type": "object", "additionalProperties": False}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "parameters": NOTHING}}


class Event(pydantic.BaseModel):
    kind: Literal["talk", "walk"]
    hours: Literal[1, 2, 3]
    open_to_all: bool


@pytest.fixture(scope="module", params=["auto", "llama3", "mistral"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIDESTEP_RUN_DIR", str(tmp_path_factory.mktemp("module")))
        settings = settings_from(device="sim", port=0, tool_call_parser=request.param, reasoning_parser="think")
        with Supervisor(settings, http=1) as running:
            yield running


@pytest.fixture(scope="module")
def client(server: Supervisor) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_the_clients_parse_helper(client: openai.OpenAI) -> None:
    done = client.chat.completions.parse(model="sim", messages=HELLO, response_format=Event, max_tokens=400)
    assert isinstance(done.choices[0].message.parsed, Event) and done.choices[0].finish_reason == "stop"


def test_json_mode_and_our_own_structures(server: Supervisor) -> None:
    for path, start in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"})):
        for field, value in (
            ("response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["ab", 5]}}}),
            ("structured_outputs", {"choice": ["ab", "cd"]}),
        ):
            reply = ask(server, path, start | {field: value, "max_tokens": 50})
            choice = reply.json["choices"][0]
            assert choice["finish_reason"] == "stop"
            assert (choice["message"]["content"] if path == CHAT else choice["text"]) in ("ab", "cd", '"ab"', "5")


def test_a_named_function_is_called(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    wishes: dict[str, Any] = {
        "model": "sim",
        "messages": HELLO,
        "tools": [NOW, WEATHER],
        "tool_choice": named,
        "seed": 3,
    }
    done = client.chat.completions.create(**wishes, max_tokens=300)
    message = done.choices[0].message
    assert done.choices[0].finish_reason == "tool_calls" and message.content is None and message.tool_calls
    [call] = message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather" and call.id.startswith("call_")
    assert set(json.loads(call.function.arguments)) == {"location", "unit"}
    names, arguments, ids, ends = [], "", [], []
    for chunk in client.chat.completions.create(**wishes, max_tokens=300, stream=True):
        ends.append(chunk.choices[0].finish_reason)
        for delta in chunk.choices[0].delta.tool_calls or []:
            assert delta.index == 0 and delta.function is not None
            names += [delta.function.name] if delta.function.name else []
            ids += [delta.id] if delta.id else []
            arguments += delta.function.arguments or ""
    assert names == ["get_weather"] and len(ids) == 1 and ends[-1] == "tool_calls"
    assert arguments == call.function.arguments


def test_required_calls_one_or_more(server: Supervisor) -> None:
    body = {"messages": HELLO, "tools": [NOW, WEATHER], "tool_choice": "required", "max_tokens": 2000}
    most = set()
    for seed in range(12):
        for parallel in (True, False):
            reply = ask(server, CHAT, body | {"seed": seed, "parallel_tool_calls": parallel}).json["choices"][0]
            calls = reply["message"]["tool_calls"]
            assert reply["finish_reason"] == "tool_calls" and (parallel or len(calls) == 1)
            for call in calls:
                arguments = json.loads(call["function"]["arguments"])
                assert set(arguments) == ({"location", "unit"} if call["function"]["name"] == "get_weather" else set())
            most.add(len(calls))
    assert max(most) > 1  # several at once happen


def test_a_conversation_with_calls_goes_on(server: Supervisor) -> None:
    """Arguments as text, content null, results: as the openai client sends them back."""
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    talk = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    talk.append({"role": "tool", "tool_call_id": "call_1", "content": "noon"})
    for tools in ({}, {"tools": [NOW]}):
        assert ask(server, CHAT, {"messages": talk, "max_tokens": 3} | tools).status == 200
    call = call | {"function": {"name": "now", "arguments": "{"}}
    broken = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    assert ask(server, CHAT, {"messages": broken}).json["error"]["param"] == "messages"


def test_tools_reach_the_prompt_unless_none_are_wanted(server: Supervisor) -> None:
    def prompt_tokens(**fields: Any) -> int:
        reply = ask(server, CHAT, {"messages": HELLO, "max_tokens": 1} | fields)
        return int(reply.json["usage"]["prompt_tokens"])

    plain = prompt_tokens()
    assert prompt_tokens(tools=[WEATHER]) > plain + 100
    assert prompt_tokens(tools=[WEATHER], tool_choice="none") == plain == prompt_tokens(tools=[])


def test_chat_logprobs(client: openai.OpenAI) -> None:
    wishes: dict[str, Any] = {
        "model": "sim",
        "messages": HELLO,
        "max_tokens": 6,
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**wishes).choices[0].logprobs
    streamed = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**wishes, stream=True)]
    tokens = [token for one in streamed if one for token in one.content or []]
    assert whole is not None and whole.content is not None and tokens == whole.content
    assert 1 <= len(tokens) <= 6 and all(len(token.top_logprobs) == 2 and -10 < token.logprob < 0 for token in tokens)
    assert all(
        token.bytes is not None and bytes(token.bytes).decode("utf-8", "replace") == token.token for token in tokens
    )


def test_text_logprobs_and_those_of_the_prompt(server: Supervisor) -> None:
    body = {"prompt": "abc", "max_tokens": 5, "logprobs": 1, "seed": 4, "temperature": 1, "ignore_eos": True}
    [choice] = ask(server, TEXT, body | {"echo": True}).json["choices"]
    told = choice["logprobs"]
    assert told["tokens"][:3] == ["a", "b", "c"] and told["token_logprobs"][0] is None is told["top_logprobs"][0]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["text_offset"]) == 8
    assert told["text_offset"][:4] == [0, 1, 2, 3] and choice["prompt_logprobs"][0] is None
    events = ask(server, TEXT, body | {"stream": True}).events[:-1]
    tokens = [token for event in events for token in (event["choices"][0]["logprobs"] or {"tokens": []})["tokens"]]
    offsets = [at for event in events for at in (event["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]]
    assert tokens == told["tokens"][3:] and offsets == [at - 3 for at in told["text_offset"][3:]]
    raw = ask(server, CHAT, {"messages": HELLO, "max_tokens": 1, "prompt_logprobs": 0}).json["choices"][0]
    assert raw["prompt_logprobs"][0] is None and all(raw["prompt_logprobs"][1:])


def test_errors_name_the_fields_that_were_sent(server: Supervisor) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "thing"}}}
    parameters = {"type": "object", "properties": {"a": {"type": "thing"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for fields, param in (
        ({"response_format": schema}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"tools": [tool], "tool_choice": "required"}, "tools"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
    ):
        error = ask(server, CHAT, asked | fields).json.get("error", {"param": None, "message": str(fields)})
        assert error["param"] == param and param in error["message"], error
