"""Real processes on the simulated device: every layout answers alike, and every request has one last word."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from ipc import errors
from ipc.async_client import AsyncClient
from ipc.client import Client
from ipc.endpoints import discover
from ipc.internal import Admit
from ipc.messages import decode_to_client
from ipc.sampling_params import SamplingParams, StructuredOutputs
from ipc.sockets import Sender
from proc.settings import Settings, UsageError
from proc.supervisor import Supervisor


def start(**changes: Any) -> Supervisor:
    settings = Settings(**({"device": "sim", "startup_timeout": 30.0, "max_num_seqs": 8, "block_size": 4} | changes))
    server = Supervisor(settings)
    server.start()
    return server


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    draw = random.Random(4)
    common = "the same beginning " * 5
    return [
        {
            "prompt": common[: draw.choice([0, 40, 90])] + str(n),
            "max_tokens": draw.choice([1, 5, 30]),
            "temperature": draw.choice([0.0, 1.0]),
            "seed": n,
            "stop": ["Z"] if n % 3 == 0 else [],
        }
        for n in range(24)
    ]


def answers(client: Client, prompts: list[dict[str, Any]]) -> list[tuple[str, list[int], str]]:
    streams = [client.stream(**prompt) for prompt in prompts]
    found = []
    for stream in streams:
        for _ in stream:
            pass
        assert stream.result is not None
        found.append((stream.result.text, stream.result.token_ids, stream.result.finish_reason))
    return found


LAYOUTS: list[dict[str, Any]] = [
    {"procs": "1"},
    {"procs": "1", "overlap_depth": 0},
    {"procs": "2"},
    {"procs": "3", "overlap_depth": 2},
    {"procs": "3", "disable_overlap": True, "disable_radix_cache": True},
    {"procs": "3", "num_blocks": 40, "max_model_len": 150},
    {"procs": "5", "max_num_batched_tokens": 8},
    {"procs": "tokenizer=2,scheduler=2"},
]


@pytest.fixture(scope="module")
def expected(
    prompts: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[str, list[int], str]]:
    os.environ["SIDESTEP_RUN_DIR"] = str(tmp_path_factory.mktemp("first"))
    with start() as server, Client(server.addresses[0]) as client:
        return answers(client, prompts)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_answers_alike(
    layout: dict[str, Any], prompts: list[dict[str, Any]], expected: list[tuple[str, list[int], str]]
) -> None:
    with start(**layout) as server, Client(server.addresses[0]) as client:
        assert answers(client, prompts) == expected
        status = client.status()
        assert status["free_slots"] == status["num_slots"]
        assert status["available_blocks"] == status["num_blocks"]


@pytest.fixture
def server() -> Iterator[Supervisor]:
    with start() as server:
        yield server


@pytest.fixture
def client(server: Supervisor) -> Iterator[Client]:
    with Client(server.addresses[0]) as client:
        yield client


def test_the_next_plan_leaves_before_the_result_arrives(client: Client) -> None:
    client.generate("x", max_tokens=400, ignore_eos=True)
    status = client.status()
    assert status["steps"] >= 400
    assert status["steps_planned_ahead"] >= 0.95 * status["steps"]


def test_depth_0_never_plans_ahead() -> None:
    with start(overlap_depth=0) as server, Client(server.addresses[0]) as client:
        client.generate("x", max_tokens=50, ignore_eos=True)
        assert client.status()["steps_planned_ahead"] == 0


def test_resuming_from_half_an_answer(client: Client) -> None:
    whole = client.generate("resume me", max_tokens=40, seed=5, ignore_eos=True)
    for cut in (1, 7, 39):
        rest = client.generate("resume me", max_tokens=40, seed=5, ignore_eos=True, output_ids=whole.token_ids[:cut])
        assert rest.token_ids == whole.token_ids[cut:]
        assert whole.text.endswith(rest.text)
    over = client.generate("resume me", max_tokens=40, seed=5, ignore_eos=True, output_ids=whole.token_ids)
    assert (over.token_ids, over.finish_reason) == ([], "length")


def test_stop_strings_cut_text_and_ids(client: Client) -> None:
    whole = client.generate("stop", max_tokens=60, seed=1, ignore_eos=True)
    letter = next(c for c in whole.text[5:] if c.isascii())
    cut = client.generate("stop", max_tokens=60, seed=1, ignore_eos=True, stop=letter)
    assert cut.finish_reason == "stop" and cut.stop_reason == letter
    assert cut.text == whole.text[: whole.text.index(letter)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    token = whole.token_ids[9]
    ended = client.generate("stop", max_tokens=60, seed=1, ignore_eos=True, stop_token_ids=[token])
    assert ended.stop_reason == token and ended.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]


def test_one_request_and_streams_and_wholes_agree(client: Client) -> None:
    whole = client.generate("same", max_tokens=30, seed=2, return_prompt_ids=True)
    with client.stream("same", max_tokens=30, seed=2) as stream:
        text = "".join(chunk.text for chunk in stream)
    assert stream.result is not None
    assert (text, stream.result.token_ids) == (whole.text, whole.token_ids)
    assert whole.prompt_token_ids == list(b"same")
    assert client.detokenize(client.tokenize("héllo")) == "héllo"
    assert client.models() == ["sim"]


def test_the_async_twin(server: Supervisor, client: Client) -> None:
    async def run() -> None:
        async with AsyncClient(server.addresses[0]) as other:
            whole = await other.generate("twin", max_tokens=20, seed=3)
            stream = await other.stream("twin", max_tokens=20, seed=3)
            async with stream:
                text = "".join([chunk.text async for chunk in stream])
            assert text == whole.text == client.generate("twin", max_tokens=20, seed=3).text
            assert await other.detokenize(await other.tokenize("hi")) == "hi"
            with pytest.raises(errors.InvalidRequest):
                await other.generate("x", temperature=-1.0)
            many = await asyncio.gather(*(other.generate(str(n), max_tokens=5, seed=n) for n in range(50)))
            assert len(many) == 50

    asyncio.run(run())


def test_thousands_that_leave_at_once_leave_nothing(server: Supervisor) -> None:
    """Cancelled while the socket would not take more, and again while they abort, as a gather does it."""

    async def run() -> None:
        async with AsyncClient(server.addresses[0]) as other:
            wishes: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}
            asked = [asyncio.ensure_future(other.generate("x" * 1000, **wishes)) for _ in range(4000)]
            for _ in range(2):
                await asyncio.sleep(0)
                for one in asked:
                    one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            for _ in range(200):
                status = await other.status()
                if status["running"] == status["waiting"] == 0:
                    break
                await asyncio.sleep(0.05)
            assert status["running"] == status["waiting"] == 0
            assert not other._lines[0].exchange.pending

    asyncio.run(run())


BAD: list[tuple[dict[str, Any], type[errors.SidestepError], str | None]] = [
    ({"prompt": ""}, errors.InvalidRequest, "prompt"),
    ({"prompt": "x" * 5000}, errors.PromptTooLong, "prompt"),
    ({"prompt": [1, 9999]}, errors.InvalidRequest, "prompt_ids"),
    ({"prompt": [-1]}, errors.InvalidRequest, "prompt_ids"),
    ({"prompt": "x", "temperature": float("nan")}, errors.InvalidRequest, "temperature"),
    ({"prompt": "x", "max_tokens": 0}, errors.InvalidRequest, "max_tokens"),
    ({"prompt": "x", "top_p": 2.0}, errors.InvalidRequest, "top_p"),
    ({"prompt": "x", "stop": [""]}, errors.InvalidRequest, "stop"),
    ({"prompt": "x", "stop_token_ids": [9999]}, errors.InvalidRequest, "stop_token_ids"),
    ({"prompt": "x", "bad_words": ["x" * 257]}, errors.InvalidRequest, "bad_words"),
    ({"prompt": "x", "stop": ["x" * 1025]}, errors.InvalidRequest, "stop"),
    ({"prompt": "x", "bad_words": ["a", " \n"]}, errors.InvalidRequest, "bad_words"),
    ({"prompt": "x", "allowed_token_ids": []}, errors.InvalidRequest, "allowed_token_ids"),
    ({"prompt": "x", "n": 2}, errors.InvalidRequest, "n"),
    ({"prompt": "x", "seed": -1}, errors.InvalidRequest, "seed"),
    ({"prompt": "x", "seed": 2**70}, errors.InvalidRequest, "seed"),
    ({"prompt": "x\ud800"}, errors.InvalidRequest, None),
    ({"prompt": "x", "model": "other"}, errors.ModelNotFound, "model"),
    ({}, errors.InvalidRequest, "prompt"),
    ({"messages": []}, errors.InvalidRequest, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, errors.InvalidRequest, "messages"),
]


def test_what_cannot_be_is_refused_by_name_and_the_next_is_served(client: Client) -> None:
    for wishes, kind, param in BAD:
        with pytest.raises(kind) as caught:
            for _ in client.stream(**wishes):
                pass
        assert type(caught.value) is kind
        assert caught.value.param == param, wishes
    assert client.generate("x", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3


def test_foreign_frames_are_answered_or_dropped(server: Supervisor, client: Client) -> None:
    with zmq.Context.instance().socket(zmq.DEALER) as stranger:
        stranger.connect(server.addresses[0])
        stranger.send_multipart([b"two", b"frames"])
        draw = random.Random(1)
        frames = [
            b"",
            b"\xc1",
            b"\x80",
            b"\x91" * 5000,
            b"\x81\xa4type\xa8generate",
            b"\x82\xa4type\xa5abort\xa2id\x01",
        ]
        frames += [draw.randbytes(draw.randrange(1, 300)) for _ in range(50)]
        for frame in frames:
            stranger.send(frame)
        for _ in frames:
            assert stranger.poll(5000)
            reply = decode_to_client(stranger.recv())
            assert type(reply).__name__ == "Error" and reply.code == "invalid_request"  # type: ignore[union-attr]
    assert client.generate("x", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2


def test_a_full_queue_is_told() -> None:
    with start(max_num_seqs=1, max_num_queued_reqs=1) as server, Client(server.addresses[0]) as client:
        streams = [client.stream("x", max_tokens=200, ignore_eos=True) for _ in range(8)]
        kinds = []
        for stream in streams:
            try:
                kinds.append(len(list(stream)))
            except errors.QueueFull:
                kinds.append(0)
        assert kinds.count(0) >= 5 and kinds.count(200) >= 1


def test_aborts_and_disconnects_leave_nothing(server: Supervisor, client: Client) -> None:
    draw = random.Random(2)
    for n in range(200):
        stream = client.stream(f"{n} " * draw.randrange(1, 30), max_tokens=draw.randrange(1, 60), ignore_eos=True)
        if n % 10 == 0:
            with Client(server.addresses[0]) as leaver:
                leaver.stream("gone", max_tokens=4000, ignore_eos=True)
        for _, _ in zip(range(draw.randrange(4)), stream, strict=False):
            pass
        stream.close()
    for _ in range(600):
        status = client.status()
        if status["free_slots"] == status["num_slots"] and not status["waiting"]:
            break
        threading.Event().wait(0.02)
    assert status["free_slots"] == status["num_slots"] and status["running"] == 0
    assert status["available_blocks"] == status["num_blocks"]


@pytest.mark.parametrize("role", ["tokenizer", "scheduler", "worker"])
def test_a_dead_process_ends_every_request_with_a_word(role: str) -> None:
    server = start()
    with Client(server.addresses[0]) as client:
        stream = client.stream("x", max_tokens=4000, ignore_eos=True)
        next(iter(stream))
        process = next(p for p in server.processes if p.roles[0].name == role)
        os.kill(process.popen.pid, signal.SIGKILL)
        reason = None
        while reason is None:
            reason = server.watch(5.0)
        assert reason == f"{role}-0 died (signal 9)"
        server.fail(reason)
        if role != "tokenizer":  # a dead tokenizer is noticed by its silence
            with pytest.raises(errors.ProcessDied, match="signal 9"):
                for _ in stream:
                    pass


READER = """
import os, signal, sys
from ipc.client import Client
with Client(sys.argv[1]) as client:
    stream = client.stream("x", max_tokens=700, ignore_eos=True, logprobs=20)
    next(iter(stream))
    os.kill(os.getpid(), signal.SIGSTOP)
    print(sum(1 for _ in stream), stream.result.finish_reason)
"""


def test_what_was_sent_arrives_though_the_server_ends() -> None:
    """A reader that was held up still gets its answer out of a server that is going: more than a socket's buffer."""
    server = start(max_model_len=1024)
    with subprocess.Popen([sys.executable, "-c", READER, server.addresses[0]], stdout=-1, text=True) as reader:
        os.waitid(os.P_PID, reader.pid, os.WSTOPPED)
        with Client(server.addresses[0]) as client:
            deadline = time.monotonic() + 30
            while client.status()["running"]:
                assert time.monotonic() < deadline
        ending = threading.Thread(target=server.stop)
        ending.start()
        time.sleep(0.7)  # the tokenizer has nothing more to do, and its process would be gone
        reader.send_signal(signal.SIGCONT)
        ending.join(20)
        assert reader.communicate(timeout=30)[0].split()[-1:] == ["length"]


def test_a_drain_lets_requests_end_and_refuses_new_ones() -> None:
    server = start()
    with Client(server.addresses[0]) as client:
        stream = client.stream("x", max_tokens=600, ignore_eos=True)
        next(iter(stream))
        ending = threading.Thread(target=server.stop, args=(20.0,))
        ending.start()
        assert sum(1 for _ in stream) == 599
        ending.join(20)
        assert not ending.is_alive()


def test_a_drain_without_time_has_a_last_word() -> None:
    server = start()
    with Client(server.addresses[0]) as client:
        stream = client.stream("x", max_tokens=4000, ignore_eos=True)
        next(iter(stream))
        server.stop(0.0)
        with pytest.raises(errors.ShuttingDown):
            for _ in stream:
                pass


def test_tcp_and_discovery(run_dir: Path) -> None:
    with start(zmq_address="tcp://127.0.0.1:0", procs="4") as server:
        assert len(server.addresses) == 2 and all(a.startswith("tcp://127.0.0.1:") for a in server.addresses)
        assert discover()[0]["addresses"] == server.addresses
        with Client() as client:  # finds the one running server
            assert client.generate("x", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
    with pytest.raises(errors.CannotConnect, match="none"):
        Client()


def test_a_chosen_path_is_not_stolen(tmp_path: Path) -> None:
    wanted = f"ipc://{tmp_path}/front"
    with start(zmq_address=wanted, procs="4") as server:
        assert server.addresses == [wanted, f"{wanted}.1"]
        with pytest.raises(UsageError, match="exists already"):
            start(zmq_address=wanted)
        with Client(server.addresses[1]) as client:
            assert client.models() == ["sim"]


def test_what_cannot_be_read_inside_is_dropped(server: Supervisor, client: Client) -> None:
    folder = Path(server.addresses[0].removeprefix("ipc://")).parent
    scheduler: Sender[Any] = Sender(f"ipc://{folder}/scheduler0.0.in")
    huge = SamplingParams(stop_token_ids=[2**64 - 1])
    for message in (
        Admit(1, 0, b"abc", b"", SamplingParams(), 0),
        Admit(2, 0, b"\0\0\0\0", b"", huge, 0),
        Admit(3, 99, b"\0\0\0\0", b"", SamplingParams(), 0),
        {"not": "a message"},
    ):
        scheduler.send(message)
    assert client.generate("x", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
    scheduler.close()


def test_a_deadline_ends_a_request_in_the_queue_and_while_it_runs() -> None:
    with (
        start(device="sim:h100-llama-3.1-8b", sim_launch_ms=0.0, max_num_seqs=1) as server,
        Client(server.addresses[0]) as client,
    ):
        first = client.stream("x", max_tokens=3000, ignore_eos=True, timeout_ms=600)
        queued = client.stream("x", max_tokens=3000, timeout_ms=100)
        with pytest.raises(errors.DeadlineExceeded, match="100 ms"):
            list(queued)
        shown = 0
        with pytest.raises(errors.DeadlineExceeded, match="600 ms"):
            for chunk in first:
                shown += len(chunk.ids)
        assert shown > 10
        with pytest.raises(errors.InvalidRequest, match="timeout_ms"):
            client.generate("x", timeout_ms=0)
        done = client.generate("x", max_tokens=5, ignore_eos=True, timeout_ms=20_000)
        assert done.usage.completion_tokens == 5
        hops = [done.times[name] for name in ("tokenized", "queued", "prefill", "decode", "detokenized")]
        assert min(hops) >= 0 and sum(hops) == pytest.approx(done.times["total"], abs=1e-3)
        assert done.times["decode"] > 3 * 0.006 and client.status()["running"] == 0


def test_a_stream_that_was_left_goes_on_elsewhere() -> None:
    server = start(device="sim:h100-llama-3.1-8b", sim_launch_ms=0.0, procs="4")
    with server, Client(server.addresses[0]) as one, Client(server.addresses[1]) as other:
        whole = one.generate("x", max_tokens=40, ignore_eos=True, temperature=0)
        for leave in (True, False):
            stream = one.stream("x", max_tokens=40, ignore_eos=True, temperature=0, detach=30)
            chunks = iter(stream)
            ids = [token for _ in range(5) for token in next(chunks).ids]
            if leave:
                stream.detach()
            rest = other.attach(stream.key, len(ids))
            more = [token for chunk in rest for token in chunk.ids]
            assert ids + more == whole.token_ids
            assert rest.result is not None and rest.result.usage == whole.usage
            if not leave:
                with pytest.raises(errors.Aborted, match="goes on elsewhere"):
                    list(chunks)
        with pytest.raises(errors.InvalidRequest, match="offset"):
            list(one.attach(stream.key, 41))
        with pytest.raises(errors.InvalidRequest, match="detach"):
            one.generate("x", detach=5)


def test_cached_tokens_are_told_when_the_prompt_comes_in_chunks() -> None:
    with start(max_num_batched_tokens=64, max_num_seqs=8) as server, Client(server.addresses[0]) as client:
        prompt = list(range(160))
        assert client.generate(prompt, max_tokens=1).usage.cached_tokens == 0
        again = client.generate(prompt + list(range(100)), max_tokens=1)
        assert again.usage.cached_tokens == 160


def test_starts_that_must_fail() -> None:
    with pytest.raises(UsageError, match="does not fit the KV cache"):
        start(num_blocks=3, max_model_len=100)
    with pytest.raises(UsageError, match="no such folder"):
        start(model="./missing")
    with pytest.raises(UsageError, match="not on the loopback"):
        start(zmq_address="tcp://0.0.0.0:5555")
    with start(zmq_address="tcp://127.0.0.1:0") as server, pytest.raises(UsageError, match="in use"):
        start(zmq_address=server.addresses[0])


DEEP: dict[str, Any] = {}
for _ in range(900):
    DEEP = {"a": DEEP}
USER = {"role": "user", "content": "x"}


HOSTILE: list[dict[str, Any]] = [
    {"messages": [{"role": "assistant", "content": "", "tool_calls": 5}]},
    {"messages": [{"role": "assistant", "content": "", "tool_calls": {"a": 1}}]},
    {"messages": [USER | {"y": DEEP}]},
    {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": b"b"}}}]},
    {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "description": b"b"}}]},
    {"messages": [USER], "structured_outputs": StructuredOutputs(json={"a": b"b"})},
    {"messages": [USER], "chat_template_kwargs": {"a": DEEP}},
]


def test_what_a_message_holds_costs_its_request_alone() -> None:
    with start() as server, Client(server.addresses[0]) as client:
        for fields in HOSTILE:
            with contextlib.suppress(errors.InvalidRequest):
                client.chat(**fields, max_tokens=2, timeout=20.0)
            after = client.generate("x", max_tokens=2, ignore_eos=True, timeout=20.0)
            assert after.usage.completion_tokens == 2
