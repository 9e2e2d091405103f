"""The command as a user runs it: a fixed ready line, clear last lines, exit codes, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ALONE = ("--device", "sim")
SIM = (*ALONE, "--port", "0")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "proc", *arguments]


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, input=text, timeout=60, cwd=ROOT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_says_that_it_is_ready_and_ends_on_a_signal(number: signal.Signals) -> None:
    with subprocess.Popen(command("serve", *SIM), stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("sidestep is ready: http://127.0.0.1:") and "  zmq ipc://" in line
        answer = run("chat", text="hello\n")  # finds the running server
        assert answer.returncode == 0 and "tokens/s" in answer.stderr
        server.send_signal(number)
        assert server.wait(20) == 0


def test_generate_with_a_server_of_its_own() -> None:
    first, second = (
        run("generate", *ALONE, "--prompt", "x", "--max-tokens", "5", "--request-seed", "1") for _ in range(2)
    )
    assert first.returncode == 0 and first.stdout == second.stdout
    assert "[5 tokens, length;" in first.stderr and "device idle" in first.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "./nowhere"), "no such folder or file"),
        (("serve", "./nowhere.gguf"), "no such file"),
        (("serve", *SIM, "--procs", "worker=2"), "a simulated device has one worker"),
        (("serve", *SIM, "--num-blocks", "3", "--max-model-len", "4000"), "does not fit the KV cache"),
        (("serve", *SIM, "--overlap-deth", "1"), "did you mean --overlap-depth"),
        (("generate", *ALONE, "--prompt", "x", "--port", "1"), "unknown argument --port"),
        (("generate", *ALONE, "--prompt", "x", "--address", "ipc:///nowhere"), "model and settings are its own"),
        (("serve", *SIM, "--disable-overlap", "--overlap-depth", "2"), "--disable-overlap"),
        (("serve", *SIM, "--chat-template", "/nowhere"), "--chat-template /nowhere"),
        (("serve", *SIM, "--zmq-address", "tcp://0.0.0.0:1"), "not on the loopback"),
    ],
)
def test_what_cannot_be_ends_with_one_clear_line_and_2(arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_broken_checkpoint_ends_with_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    done = run("serve", str(tmp_path))
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert "supported are LlamaForCausalLM" in last or "tokenizer cannot be read" in last


def test_an_error_of_a_request_is_one_line() -> None:
    done = run("generate", *ALONE, "--prompt", "")
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1] == "sidestep: the prompt is empty"


def test_bench_step_prints_json() -> None:
    done = run("bench", "step", "--rows", "4", "--steps", "20", "--json")
    figures = json.loads(done.stdout)
    for line in (figures, figures["mixed"]):
        parts = [line[name] for name in ("plan_us", "commit_us", "encode_us")]
        assert line["rows"] == 4 and min(parts) > 0 and line["total_us"] == pytest.approx(sum(parts), abs=0.05)


def test_bench_serving_reports_every_request(tmp_path: Path) -> None:
    with subprocess.Popen(
        command("serve", *SIM, "--procs", "4"), stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        out = tmp_path / "out.jsonl"
        done = run(
            *("bench", "serving", "--num-prompts", "20", "--request-rate", "200", "--random-output-len", "8"),
            *("--random-range-ratio", "0.5", "--output-file", str(out), "--disable-tqdm"),
        )
        assert done.returncode == 0, done.stderr
        figures = json.loads(out.read_text())
        assert figures["completed"] == 20 and figures["failed"] == 0
        assert json.loads(done.stdout.splitlines()[-1]) == figures
        assert "Successful requests:                     20" in done.stdout
        assert figures["mean_ttft_ms"] > 0 and figures["median_itl_ms"] is not None
        server.terminate()
        assert server.wait(20) == 0


def test_serve_without_a_reader_leaves_nothing(run_dir: Path) -> None:
    """As in `serve | true`."""
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(command("serve", *SIM), stdout=writer, cwd=ROOT) as server:
        os.close(writer)
        assert server.wait(30) == 0
    assert not list(run_dir.iterdir())


def test_serve_whose_reader_has_gone_leaves_nothing(run_dir: Path) -> None:
    """As in `serve 2>&1 | head`: its last lines are read by nobody."""
    with subprocess.Popen(command("serve", *SIM), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT) as server:
        assert server.stdout is not None
        while b"is ready" not in server.stdout.readline():
            pass
        server.stdout.close()
        server.terminate()
        server.wait(30)
    assert not list(run_dir.iterdir())


def test_children_die_with_a_killed_supervisor_and_the_next_one_sweeps_up(run_dir: Path) -> None:
    with subprocess.Popen(command("serve", *SIM), stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        server.stdout.readline()
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        assert len(children) == 5
        server.kill()
        server.wait(10)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(int(child))
            assert select.select([fd], [], [], 10.0)[0], "a child outlived its supervisor"
            os.close(fd)
    assert len(list(run_dir.iterdir())) == 1
    assert run("generate", *ALONE, "--prompt", "x", "--max-tokens", "2").returncode == 0
    assert not list(run_dir.iterdir())


def test_two_servers_started_at_the_same_instant() -> None:
    servers = [subprocess.Popen(command("serve", *SIM), stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
    lines = [server.stdout.readline() for server in servers if server.stdout]
    assert lines[0] != lines[1]
    for line in lines:
        done = run("generate", "--address", line.split()[-1], "--prompt", "x", "--max-tokens", "2")
        assert done.returncode == 0
    for server in servers:
        with server:
            server.terminate()
            assert server.wait(20) == 0
