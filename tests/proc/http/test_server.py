"""The web server's own manners: keys, CORS, limits, health, metrics, disconnects and its end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from ipc.client import Client
from ipc.errors import ProcessDied
from ipc.sampling_params import StructuredOutputs
from proc.settings import UsageError, settings_from
from proc.supervisor import Supervisor
from tests.proc.http.conftest import Start, ask, connection

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3000, "ignore_eos": True, "stream": True}
SLOW = {"device": "sim:h100-llama-3.1-8b", "sim_launch_ms": 0.0, "max_model_len": 4096}


def settled(server: Supervisor) -> bool:
    """Within ten seconds all slots and pages are free."""
    with Client(server.addresses[0]) as client:
        for _ in range(200):
            status = client.status()
            if status["free_slots"] == status["num_slots"] and status["available_blocks"] == status["num_blocks"]:
                return True
            time.sleep(0.05)
    return False


def test_keys_guard_all_but_the_probes(start: Start, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first\nsecond\n")
    server = start(api_key=f"@{tmp_path}/keys", cors_origins="https://a.example")
    assert ask(server, "/health").status == ask(server, "/ready").status == 200
    for headers in ({}, {"Authorization": "Bearer third"}, {"Authorization": "Basic first"}):
        reply = ask(server, "/v1/models", **headers)
        assert reply.status == 401 and reply.json["error"]["code"] == "invalid_api_key"
    for key in ("first", "second"):
        assert ask(server, "/v1/models", Authorization=f"Bearer {key}").status == 200
    asked = {"Origin": "https://a.example", "Access_Control_Request_Method": "POST"}
    preflight = ask(server, CHAT, method="OPTIONS", **asked)
    assert preflight.status == 200 and preflight.headers["access-control-allow-origin"] == "https://a.example"
    other = ask(server, CHAT, method="OPTIONS", **(asked | {"Origin": "https://b.example"}))
    assert "access-control-allow-origin" not in other.headers


def test_without_origins_there_is_no_cors(start: Start) -> None:
    reply = ask(start(), "/v1/models", Origin="https://a.example")
    assert reply.status == 200 and not [name for name in reply.headers if name.startswith("access-control")]


def test_request_ids_come_back(start: Start) -> None:
    server = start()
    assert ask(server, "/version", X_Request_Id="mine-1").headers["x-request-id"] == "mine-1"
    for strange in ("x" * 500, "caf\xe9", ""):
        assert len(ask(server, "/version", X_Request_Id=strange).headers["x-request-id"]) == 32
    assert ask(server, "/nowhere").json["error"]["code"] == "not_found"
    refused = ask(server, CHAT, method="GET")
    assert refused.json["error"]["code"] == "method_not_allowed" and refused.headers["allow"] == "POST"


def test_a_body_that_is_too_large_is_refused(start: Start) -> None:
    server = start()
    line = connection(server)
    line.putrequest("POST", CHAT)
    line.putheader("Content-Length", str(40 << 20))
    line.endheaders()
    sent = 0
    try:
        while sent < 40 << 20:
            line.send(b" " * (1 << 20))
            sent += 1 << 20
    except (BrokenPipeError, ConnectionResetError):
        pass
    reply = line.getresponse()
    assert reply.status == 413 and json.loads(reply.read())["error"]["code"] == "body_too_large"
    line.close()
    assert ask(server, CHAT, LONG | {"max_tokens": 2}).status == 200


def test_metrics_count_what_was_done(start: Start) -> None:
    server = start(procs="tokenizer=2,scheduler=2,http=2")
    for _ in range(4):
        assert ask(server, CHAT, LONG | {"max_tokens": 5, "stream": False}).status == 200
    lines = ask(server, "/metrics").body.decode().splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    label = '{model_name="sim"}'
    assert values[f"sidestep:generation_tokens_total{label}"] == 20
    assert values['sidestep:request_success_total{finished_reason="length",model_name="sim"}'] == 4
    assert values[f"sidestep:time_to_first_token_seconds_count{label}"] == 4
    assert values[f"sidestep:inter_token_latency_seconds_count{label}"] == 16
    assert values[f"sidestep:e2e_request_latency_seconds_count{label}"] == 4
    assert values[f"sidestep:request_queue_time_seconds_count{label}"] == 4
    assert values[f"sidestep:num_requests_running{label}"] == 0
    assert values[f"sidestep:device_busy_seconds_total{label}"] > 0
    dashboard = (Path(__file__).parents[3] / "docs" / "grafana.json").read_text()
    present = {name.partition("{")[0] for name in values}
    assert set(re.findall(r"sidestep:\w+", dashboard)) <= present
    for name in ("num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_hits_total", "num_preemptions_total"):
        assert f"sidestep:{name}{label}" in values


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_client_that_goes_away_stops_its_request(start: Start, stream: bool, tokens: int) -> None:
    server = start(**SLOW)
    line = connection(server)
    line.request("POST", CHAT, json.dumps(LONG | {"stream": stream}))
    if stream:
        reply = line.getresponse()
        for _ in range(tokens):
            while not reply.readline().startswith(b"data: "):
                pass
    else:
        with Client(server.addresses[0]) as client:
            while not client.status()["running"]:
                time.sleep(0.01)
    assert line.sock is not None or stream
    if line.sock is not None:
        line.sock.shutdown(socket.SHUT_RDWR)
    line.close()
    if stream:
        reply.close()
    assert settled(server)


def test_an_error_in_a_stream_is_an_event_and_no_end(start: Start) -> None:
    server = start(**SLOW)
    line = connection(server)
    line.request("POST", CHAT, json.dumps(LONG))
    reply = line.getresponse()
    assert reply.readline().startswith(b"data: ")
    server.fail("the test says so")
    rest = reply.read().decode()
    line.close()
    last = json.loads(rest.strip().split("data: ")[-1])
    assert last["error"]["code"] == "process_died" and "[DONE]" not in rest


def test_a_drain_lets_streams_end_and_refuses_new_requests(start: Start) -> None:
    import threading

    server = start(**SLOW)
    line = connection(server)
    line.request("POST", CHAT, json.dumps(LONG | {"max_tokens": 120}))
    reply = line.getresponse()
    reply.readline()
    late: list[tuple[int, int]] = []

    def ask_meanwhile() -> None:
        while not late and thread_alive[0]:
            probe = ask(server, "/ready").status
            if probe != 200:
                refused = ask(server, CHAT, LONG)
                late.append((probe, refused.status))
                assert refused.headers["retry-after"] == "5"

    thread_alive = [True]
    thread = threading.Thread(target=ask_meanwhile)
    thread.start()
    url = server.url
    server.stop(20.0)
    thread_alive[0] = False
    thread.join()
    assert reply.read().endswith(b"data: [DONE]\n\n") and late == [(503, 503)] and url
    line.close()


def test_a_full_queue_is_429_with_a_time_to_come_back(start: Start) -> None:
    server = start(**SLOW, max_num_seqs=1, max_num_queued_reqs=1)
    lines = []
    with Client(server.addresses[0]) as client:
        for figure in ("running", "waiting"):
            lines.append(connection(server))
            lines[-1].request("POST", CHAT, json.dumps(LONG))
            deadline = time.monotonic() + 30
            while client.status()[figure] != 1:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    reply = ask(server, CHAT, LONG)
    assert reply.status == 429 and reply.headers["retry-after"] == "1" and reply.json["error"]["code"] == "queue_full"
    for line in lines:
        line.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"port": 70000}, "--port must be"),
        ({"ssl_keyfile": "x"}, "--ssl-certfile"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        settings_from(**changes)


def test_a_taken_port_and_missing_keys_are_told(start: Start, tmp_path: Path) -> None:
    port = int(start().url.rpartition(":")[2])
    with pytest.raises(UsageError, match=f"--port {port}: Address already in use"):
        start(port=port)
    with pytest.raises(UsageError, match="--api-key"):
        start(api_key=f"@{tmp_path}/nowhere")


def test_tls(start: Start, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(words, check=True, capture_output=True)
    server = start(ssl_keyfile=str(key), ssl_certfile=str(certificate))
    assert server.url.startswith("https://")
    trust = ssl.create_default_context(cafile=str(certificate))
    with urllib.request.urlopen(f"{server.url}/v1/models", context=trust, timeout=20) as reply:
        assert json.load(reply)["data"][0]["id"] == "sim"
    with pytest.raises(UsageError, match="--ssl-certfile"):
        start(ssl_keyfile=str(key), ssl_certfile=str(tmp_path / "nowhere.pem"))


def test_requests_are_logged_when_asked_for_without_their_text(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    server = start(enable_log_requests=True)
    body = LONG | {"max_tokens": 3, "messages": [{"role": "user", "content": "secret words"}]}
    for stream in (True, False):
        assert ask(server, CHAT, body | {"stream": stream}, X_Request_Id=f"mine{stream}").status == 200
    ask(server, "/health")
    server.stop()
    log = capfd.readouterr().err
    lines = [line for line in log.splitlines() if "/v1/chat/completions 200" in line]
    assert len(lines) == 2 and "secret" not in log and "/health" not in log
    for line in lines:
        assert "http-0" in line and "mine" in line and "prefill" in line and "queued" in line


def test_many_streams_at_once(start: Start) -> None:
    server = start(max_num_seqs=256)
    lines = [connection(server) for _ in range(500)]
    for line in lines:
        line.request("POST", CHAT, json.dumps(LONG | {"max_tokens": 20}))
    replies = [line.getresponse().read() for line in lines]
    assert {reply.endswith(b"data: [DONE]\n\n") for reply in replies} == {True}
    for line in lines:
        line.close()
    assert settled(server)


def test_a_stream_can_be_rejoined_while_it_runs_and_after_its_end(start: Start) -> None:
    server = start(**SLOW, procs="tokenizer=2,http=2")
    body = LONG | {"max_tokens": 60, "temperature": 0}
    whole = [event for event in ask(server, CHAT, body).events if event != "[DONE]"]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in whole)

    def first_ten(line: Any) -> tuple[str, str]:
        line.request("POST", CHAT, json.dumps(body), {"X-Sidestep-Detach": "30"})
        reply, shown, last = line.getresponse(), "", ""
        while not last.endswith(":10"):
            words = reply.readline().decode()
            if words.startswith("id: "):
                last = words[4:].strip()
            elif words.startswith("data: "):
                shown += json.loads(words[6:])["choices"][0]["delta"].get("content", "")
        while words != "\n":  # the text of that event
            words = reply.readline().decode()
            if words.startswith("data: "):
                shown += json.loads(words[6:])["choices"][0]["delta"].get("content", "")
        reply.close()
        return shown, last

    for wait_for_the_end in (False, True):
        line = connection(server)
        shown, last = first_ten(line)
        line.close()
        if wait_for_the_end:
            assert settled(server)
        for _ in range(2):  # it can be rejoined again
            rest = ask(server, CHAT, body, Last_Event_ID=last)
            assert rest.status == 200
            events = [event for event in rest.events if event != "[DONE]"]
            more = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
            assert shown + more == text and rest.body.endswith(b"[DONE]\n\n")
            assert not any("role" in event["choices"][0]["delta"] for event in events)
    for wrong in ("0-0-00:5", "rubbish", "0-0-00:x", f"{last[:-5]}00000:1", last.replace(":10", ":9999")):
        assert ask(server, CHAT, body, Last_Event_ID=wrong).status == 400
    assert ask(server, CHAT, body, X_Sidestep_Detach="soon").status == 400
    assert ask(server, CHAT, body | {"n": 2}, X_Sidestep_Detach="5").status == 400


def test_a_stream_that_nobody_comes_back_for_ends(start: Start) -> None:
    server = start(**SLOW)
    line = connection(server)
    line.request("POST", CHAT, json.dumps(LONG), {"X-Sidestep-Detach": "0.3"})
    line.getresponse().close()
    line.close()
    assert settled(server)


def test_a_reader_of_a_byte_a_second_holds_up_nobody_and_is_closed_in_the_end(start: Start) -> None:
    server = start(write_timeout=1.0)
    line = connection(server)
    line.connect()
    assert line.sock is not None
    line.request("POST", CHAT, json.dumps(LONG | {"max_tokens": 3900, "n": 24}))
    assert line.sock.recv(1)
    for _ in range(5):
        assert ask(server, CHAT, LONG | {"max_tokens": 20}).body.endswith(b"[DONE]\n\n")
    assert settled(server)
    time.sleep(2.0)  # the write timeout and the look at it
    rest = b""
    try:
        while part := line.sock.recv(1 << 20):
            rest = (rest + part)[-100:]
    except ConnectionResetError:
        pass
    assert b"[DONE]" not in rest
    line.close()


def until(client: Client, **figures: float) -> None:
    """Waits until the status says so, for thirty seconds at most."""
    deadline = time.monotonic() + 30
    while any(client.status()[name] != value for name, value in figures.items()):
        assert time.monotonic() < deadline, figures
        time.sleep(0.01)


def test_the_openai_client_comes_back_after_a_full_queue(start: Start) -> None:
    server = start(**SLOW, max_num_seqs=1, max_num_queued_reqs=1)
    lines = []
    with Client(server.addresses[0]) as client:
        for figures in ({"running": 1.0}, {"waiting": 1.0}):
            lines.append(connection(server))
            lines[-1].request("POST", CHAT, json.dumps(LONG | {"max_tokens": 120}))
            until(client, **figures)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as impatient:
        with pytest.raises(openai.RateLimitError):
            impatient.completions.create(model="sim", prompt="x", max_tokens=2)
        patient = impatient.with_options(max_retries=5)
        assert patient.completions.create(model="sim", prompt="x", max_tokens=2).choices
    for line in lines:
        line.close()


def test_a_client_that_goes_away_while_it_waits_leaves_the_queue(start: Start) -> None:
    server = start(**SLOW, max_num_seqs=1)
    lines = []
    with Client(server.addresses[0]) as client:
        for figures in ({"running": 1.0}, {"waiting": 1.0}):
            lines.append(connection(server))
            lines[-1].request("POST", CHAT, json.dumps(LONG))
            until(client, **figures)
        for line in reversed(lines):
            assert line.sock is not None
            line.sock.shutdown(socket.SHUT_RDWR)
            line.close()
            until(client, waiting=0.0)
    assert settled(server)


def test_a_client_that_leaves_a_whole_answer_is_no_fault(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    server = start(**SLOW, enable_log_requests=True)
    with Client(server.addresses[0]) as client:
        line = connection(server)
        line.request("POST", CHAT, json.dumps(LONG | {"stream": False}))
        until(client, running=1.0)
        line.close()
        until(client, running=0.0)
    assert settled(server)
    server.stop()
    log = capfd.readouterr().err
    assert "/v1/chat/completions 499" in log and "Traceback" not in log and "ERROR" not in log


def test_an_idle_worker_that_has_stopped_is_noticed(start: Start) -> None:
    server = start()
    assert ask(server, "/health").status == 200
    worker = next(int(pid) for role, pid, *_ in server.table() if role == "worker-0")
    os.kill(worker, signal.SIGSTOP)
    try:
        assert becomes(server, 503)
        assert "a worker has said nothing" in ask(server, "/health").json["error"]["message"]
    finally:
        os.kill(worker, signal.SIGCONT)
    assert becomes(server, 200)


def test_a_grammar_process_that_has_stopped_is_noticed_and_not_waited_for(start: Start) -> None:
    server = start()
    grammar = next(int(pid) for role, pid, *_ in server.table() if role == "grammar-0")
    wish = {"prompt": "x", "max_tokens": 9, "structured_outputs": {"choice": ["yes", "no"]}}
    client = Client(server.addresses[0])
    bound = client.stream("x", max_tokens=3000, structured_outputs=StructuredOutputs(regex="[ab]{3000}"))
    free = client.stream("x", max_tokens=3000, ignore_eos=True)
    next(iter(bound)), next(iter(free))
    os.kill(grammar, signal.SIGSTOP)
    try:
        with pytest.raises(ProcessDied, match="grammar-0, does not answer"):
            list(bound)
        assert sum(len(chunk.ids) for chunk in free) > 1000  # it shared a step with one that waited for masks
        given_up = ask(server, "/v1/completions", wish)
        assert given_up.status == 503 and "grammar-0, does not answer" in given_up.json["error"]["message"]
        assert "a grammar process has said nothing" in ask(server, "/health").json["error"]["message"]
        assert ask(server, "/v1/completions", wish | {"structured_outputs": None}).status == 200
    finally:
        os.kill(grammar, signal.SIGCONT)
    assert becomes(server, 200)
    assert ask(server, "/v1/completions", wish).json["choices"][0]["text"] in ("yes", "no")
    client.close()


def becomes(server: Supervisor, status: int) -> bool:
    """/health says so within fifteen seconds."""
    for _ in range(150):
        if ask(server, "/health").status == status:
            return True
        time.sleep(0.1)
    return False
