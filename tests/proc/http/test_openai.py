"""The OpenAI endpoints: the real client, the shapes it expects, and every refusal by the field's name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from proc.settings import settings_from
from proc.supervisor import Supervisor
from tests.proc.http.conftest import ask

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIDESTEP_RUN_DIR", str(tmp_path_factory.mktemp("module")))
        with Supervisor(settings_from(device="sim", port=0, max_model_len=200, procs="tokenizer=2"), http=2) as running:
            yield running


@pytest.fixture(scope="module")
def client(server: Supervisor) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def greedy(**changes: Any) -> dict[str, Any]:
    return {"model": "sim", "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}} | changes


def test_chat_streamed_and_whole_agree(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=HELLO, **greedy())
    stream = client.chat.completions.create(
        messages=HELLO, stream=True, stream_options={"include_usage": True}, **greedy()
    )
    *chunks, last = list(stream)
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens == 12
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens > 0
    assert len({chunk.id for chunk in [*chunks, last]}) == 1 and whole.object == "chat.completion"


def test_the_stream_helper_of_the_client(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=HELLO, **greedy()).choices[0].message.content
    assert whole is not None
    with client.chat.completions.stream(messages=HELLO, stop=whole[4], **greedy()) as stream:  # it raises for "length"
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content == whole[: whole.index(whole[4])]
    assert final.choices[0].finish_reason == "stop"


def test_the_async_client(server: Supervisor, client: openai.OpenAI) -> None:
    import asyncio

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as made:
            answers = [made.completions.create(prompt=f"p{n % 4}", **greedy()) for n in range(16)]
            return [answer.choices[0].text for answer in await asyncio.gather(*answers)]

    texts = asyncio.run(run())
    assert texts[:4] * 4 == texts
    assert texts[1] == client.completions.create(prompt="p1", **greedy()).choices[0].text


def test_several_prompts_choices_and_echo(client: openai.OpenAI, server: Supervisor) -> None:
    alone = [client.completions.create(prompt=prompt, **greedy()).choices[0].text for prompt in ("ab", "cd")]
    both = client.completions.create(prompt=["ab", "cd"], n=2, echo=True, **greedy())
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    expected = ["ab" + alone[0]] * 2 + ["cd" + alone[1]] * 2
    assert [choice.text for choice in both.choices] == expected
    assert both.usage is not None and (both.usage.prompt_tokens, both.usage.completion_tokens) == (4, 48)
    ids = client.completions.create(prompt=[[97, 98], [99, 100]], **greedy())
    assert [choice.text for choice in ids.choices] == alone
    texts = [""] * 4
    for chunk in client.completions.create(prompt=["ab", "cd"], n=2, echo=True, stream=True, **greedy()):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_a_seed_counts_on_over_the_choices(client: openai.OpenAI) -> None:
    def texts(**changes: Any) -> list[str]:
        answer = client.completions.create(prompt="x", **greedy(temperature=1, **changes))
        return [choice.text for choice in answer.choices]

    assert texts(seed=5, n=3) == [*texts(seed=5), *texts(seed=6), *texts(seed=7)]
    assert len(set(texts(seed=5, n=3))) == 3


def test_null_means_absent(server: Supervisor) -> None:
    fields = ("n", "stop", "seed", "stream", "stream_options", "top_p", "logprobs", "tools", "response_format", "user")
    body = {"messages": HELLO, "max_tokens": 2} | dict.fromkeys(fields)
    assert ask(server, CHAT, body).status == 200


def test_max_completion_tokens_comes_before_max_tokens(server: Supervisor) -> None:
    body = {"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 3, "ignore_eos": True}
    assert ask(server, CHAT, body).json["usage"]["completion_tokens"] == 3


def test_developer_is_system_and_parts_are_their_text(server: Supervisor) -> None:
    def text(content: Any, role: str) -> Any:
        body = {"messages": [{"role": role, "content": content}, *HELLO], "max_tokens": 5, "temperature": 0}
        return ask(server, CHAT, body).json["choices"]

    assert text("be kind", "system") == text([{"type": "text", "text": "be kind"}], "developer")


TOOL = {"type": "function", "function": {"name": "now"}}
BAD: list[tuple[str, dict[str, Any], int, str | None]] = [
    (CHAT, {"messages": HELLO, "beam": 1}, 400, "beam"),
    (CHAT, {"messages": HELLO, "temperature": "hot"}, 400, "temperature"),
    (CHAT, {"messages": HELLO, "temperature": -1}, 400, "temperature"),
    (CHAT, {"messages": HELLO, "max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"messages": HELLO, "max_tokens": 10**21}, 400, "max_tokens"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 10**21}, 400, "max_completion_tokens"),
    (CHAT, {"messages": HELLO, "seed": 2**70}, 400, "seed"),
    (CHAT, {"messages": HELLO, "seed": -1}, 400, "seed"),
    (CHAT, {"messages": HELLO, "n": 0}, 400, "n"),
    (CHAT, {"messages": HELLO, "n": 10**9}, 400, "n"),
    (CHAT, {"messages": HELLO, "stop": [""]}, 400, "stop"),
    (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (CHAT, {"messages": HELLO, "presence_penalty": 3}, 400, "presence_penalty"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, 400, "response_format"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, 400, "response_format.type"),
    (CHAT, {"messages": HELLO, "structured_outputs": {"regex": "(?=a)"}}, 400, "structured_outputs"),
    (CHAT, {"messages": HELLO, "structured_outputs": {"regex": "a"}, "ignore_eos": True}, 400, "ignore_eos"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    (CHAT, {"messages": HELLO, "top_logprobs": 1}, 400, "top_logprobs"),
    (CHAT, {"messages": HELLO, "logit_bias": {"x": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": HELLO, "logit_bias": {"999999": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": HELLO, "logit_bias": {" 1_0": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": HELLO, "logit_bias": {"1": "much"}}, 400, "logit_bias"),
    (CHAT, {"messages": HELLO, "logits_processors": ["none"]}, 400, "logits_processors"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": "maybe"}, 400, "tool_choice"),
    (CHAT, {"messages": HELLO, "tools": [TOOL, TOOL]}, 400, "tools"),
    (CHAT, {"messages": HELLO, "model": "other"}, 404, "model"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    (CHAT, {"messages": HELLO, "continue_final_message": True}, 400, "continue_final_message"),
    (CHAT, {}, 400, "messages"),
    (TEXT, {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    (TEXT, {"prompt": "x", "best_of": 3}, 400, "best_of"),
    (TEXT, {"prompt": "x", "logprobs": 21}, 400, "logprobs"),
    (TEXT, {"prompt": "x", "logprobs": 1, "echo": True, "stream": True}, 400, "echo"),
    (TEXT, {"prompt": ""}, 400, "prompt"),
    (TEXT, {"prompt": ["a", [1]]}, 400, "prompt"),
    (TEXT, {"prompt": [9999]}, 400, "prompt"),
    (TEXT, {"prompt": [10**21]}, 400, "prompt"),
    (TEXT, {"prompt": "x" * 300}, 400, "prompt"),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/detokenize", {"tokens": [10**21]}, 400, "tokens"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
def test_refusals_name_the_field(
    server: Supervisor, path: str, body: dict[str, Any], status: int, param: str | None, stream: bool
) -> None:
    if stream and path.startswith("/v1"):
        body = body | {"stream": True}
    elif stream:
        pytest.skip("not a stream")
    if "stream_options" in body:
        body = body | {"stream": False}
    reply = ask(server, path, body)
    assert reply.status == status, reply.body
    error = reply.json["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param and error["message"]
    assert reply.headers["content-type"] == "application/json"


def test_the_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="the model here is sim"):
        client.chat.completions.create(messages=HELLO, **greedy(model="other"))
    with pytest.raises(openai.BadRequestError, match="temperature must be"):
        client.chat.completions.create(messages=HELLO, **greedy(temperature=-1))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"a":' * 5000, b'{"messages": [], "messages": []'])
def test_bodies_that_are_no_json_are_refused(server: Supervisor, body: bytes) -> None:
    reply = ask(server, CHAT, body, method="POST")
    assert reply.status == 400 and reply.json["error"]["type"] == "invalid_request_error"


def test_a_refusal_is_in_words(server: Supervisor) -> None:
    reply = ask(server, TEXT, {"prompt": "x", "timeout_ms": 0})
    assert reply.json["error"]["message"] == "timeout_ms must be at least 1, and below 2**63"


def test_a_number_out_of_range_is_refused_by_its_field(server: Supervisor) -> None:
    """One that no float holds; Python would not write it."""
    reply = ask(server, TEXT, b'{"prompt": "x", "logit_bias": {"5": 1e400}}')
    assert reply.status == 400 and reply.json["error"]["param"] == "logit_bias"


def test_models_version_and_words(server: Supervisor, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["sim"]
    assert "version" in ask(server, "/version").json
    tokens = ask(server, "/tokenize", {"prompt": "héllo"}).json
    assert tokens["count"] == 6 and tokens["max_model_len"] == 200
    assert ask(server, "/detokenize", {"tokens": tokens["tokens"]}).json == {"prompt": "héllo"}
    assert ask(server, "/tokenize", {"messages": HELLO}).json["count"] > 5


def test_the_page_of_fields_is_whole() -> None:
    """docs/HTTP.md lists each field that a body may have."""
    from proc.http.schema import ChatBody, CompletionBody

    page = (Path(__file__).parents[3] / "docs" / "HTTP.md").read_text()
    for kind in (ChatBody, CompletionBody):
        for name in kind.__struct_fields__:
            assert f"`{name}`" in page, name
    json.dumps(page)


def test_what_the_benchmarks_of_vllm_and_sglang_send_and_how_they_read(server: Supervisor) -> None:
    """Bodies as `vllm bench serve` and `sglang.bench_serving` send them; each line of a stream is what they expect."""
    usage = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    vllm_text = {"model": "sim", "prompt": "hi", "repetition_penalty": 1.0, "max_tokens": 9, "logprobs": None, **usage}
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    vllm_chat = {"model": "sim", "messages": parts, "max_completion_tokens": 9, **usage}
    for path, body in ((TEXT, vllm_text), (CHAT, vllm_chat)):
        reply = ask(server, path, body, x_request_id="bench-1")
        messages = [part.strip().removeprefix("data: ") for part in reply.body.decode().split("\n\n") if part.strip()]
        assert messages.pop() == "[DONE]"
        *tokens, last = [json.loads(message) for message in messages]
        assert not last["choices"] and last["usage"]["completion_tokens"] == 9
        for token in tokens:
            assert token["usage"] is None
            choice = token["choices"][0]
            assert isinstance(choice["text"] if path == TEXT else choice["delta"].get("content", ""), str)
    common = {"model": "sim", "temperature": 0.0, "max_tokens": 9, "stream": True, "ignore_eos": True}
    for path, body in ((TEXT, common | {"prompt": "hi", "best_of": 1}), (CHAT, common | {"messages": parts})):
        for line in ask(server, path, body).body.splitlines():
            if line.strip() and line != b"data: [DONE]":
                choice = json.loads(line.decode().removeprefix("data: "))["choices"][0]
                assert "text" in choice if path == TEXT else "delta" in choice
