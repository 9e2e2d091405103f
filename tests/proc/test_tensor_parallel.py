"""A tiny float32 model over several ranks: the tokens of one rank, whatever is asked for; and how ranks end.

The smallest gap between the two best logits along the greedy answer is asserted, so that a difference is a fault and
never rounding.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ipc import errors
from ipc.client import Client
from ipc.endpoints import address
from ipc.sampling_params import SamplingParams, StructuredOutputs
from ipc.sockets import Sender
from proc.llm import LLM, RequestOutput
from proc.settings import Settings, UsageError
from proc.supervisor import Supervisor
from runtime.step import StepPlan
from tests.proc.test_tiny_model import uppercase

ROOT = Path(__file__).parent.parent.parent
Oracle = tuple[Path, transformers.LlamaForCausalLM]
PERSON = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON, WORDS = StructuredOutputs(json=PERSON), StructuredOutputs(regex="[a-f]{3,9}-[0-9]{2}")
WISHES = [
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=2),
    SamplingParams(temperature=0.9, seed=1, max_tokens=20, prompt_logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=20, presence_penalty=1.5, repetition_penalty=1.3),
    SamplingParams(seed=2, max_tokens=20, frequency_penalty=0.7, top_k=20, top_p=0.9),
    SamplingParams(seed=3, max_tokens=30, structured_outputs=JSON),
    SamplingParams(seed=4, max_tokens=20, structured_outputs=WORDS, logprobs=1),
    SamplingParams(seed=5, max_tokens=20, logits_processors=["upper"], min_p=0.01),
    SamplingParams(seed=6, max_tokens=20, logit_bias={65: 4.0, 66: -100.0}, min_tokens=5),
    SamplingParams(temperature=0.0, max_tokens=20, logits_processors=["leaning"], logprobs=1),
]
PROMPTS = [f"{'shared beginning ' * (n % 3)}prompt number {n}" for n in range(9)]
ROOMY: dict[str, Any] = {"block_size": 4, "max_model_len": 96, "num_blocks": 400}
TIGHT: dict[str, Any] = ROOMY | {"num_blocks": 28, "max_num_seqs": 8, "max_num_batched_tokens": 16}
NAMED = "upper=tests.proc.test_tensor_parallel:uppercase,leaning=tests.proc.test_tensor_parallel:leaning"
__all__ = ["uppercase"]


def leaning(prompt: Any, output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A processor that would want other ids in other ranks, and fails once."""
    if len(output) == 3:
        raise RuntimeError("out of luck")
    logits[65 + (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)] += 9.0
    return logits


def answers(oracle: Oracle, **settings: Any) -> tuple[list[RequestOutput], dict[str, Any]]:
    with LLM(str(oracle[0]), logits_processors=NAMED, **settings) as llm:
        outputs = llm.generate(PROMPTS, WISHES, use_tqdm=False)
        return outputs, llm.client.status()


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> list[RequestOutput]:
    """Of one worker, in no hurry; the greedy answer is transformers'."""
    outputs, _ = answers(oracle, **ROOMY, overlap_depth=0)
    prompt, ids = outputs[0].prompt_token_ids, outputs[0].outputs[0].token_ids
    with torch.inference_mode():
        logits = oracle[1](torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == ids
    best = logits.topk(2).values
    smallest = float((best[:, 0] - best[:, 1]).min())
    print(f"smallest top-2 gap {smallest:.2e}")
    assert smallest > 1e-3
    return outputs


def told(output: RequestOutput) -> list[tuple[int, float, int | None]]:
    """All log probabilities: id, value, rank."""
    tables = [*(output.outputs[0].logprobs or []), *(table for table in output.prompt_logprobs or [] if table)]
    return [(token, entry.logprob, entry.rank) for table in tables for token, entry in sorted(table.items())]


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        (TIGHT | {"tensor_parallel_size": 2, "overlap_depth": 0}, 2),
        (TIGHT | {"procs": "scheduler=2,worker=2", "overlap_depth": 2}, 2),
        (TIGHT | {"procs": "worker=4", "disable_radix_cache": True}, 4),
    ],
    ids=str,
)
def test_ranks_draw_what_one_worker_draws(
    oracle: Oracle, expected: list[RequestOutput], settings: dict[str, Any], ranks: int
) -> None:
    """Chunked, preempted, constrained and penalised; with four ranks each of the two KV heads is held twice."""
    outputs, status = answers(oracle, **settings)
    assert status["preemptions"] > 0
    assert f"plain torch, rank 0 of {ranks}" in status["device"]
    for output, one in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == one.outputs[0].token_ids
        mine, theirs = told(output), told(one)
        assert [(token, rank) for token, _, rank in mine] == [(token, rank) for token, _, rank in theirs]
        assert all(abs(a - b) < 1e-3 for (_, a, _), (_, b, _) in zip(mine, theirs, strict=True))
    assert len(told(outputs[0])) >= 40 and json.loads(outputs[4].outputs[0].text)["a"] < 100


def start(oracle: Oracle, **settings: Any) -> Supervisor:
    server = Supervisor(Settings(**({"model": str(oracle[0]), "tensor_parallel_size": 2} | ROOMY | settings)))
    server.start()
    return server


def pid_of(server: Supervisor, role: str) -> int:
    return next(p.popen.pid for p in server.processes if str(p.roles[0]) == role)


def ended(server: Supervisor, pids: list[int]) -> bool:
    return not server.processes and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_dead_rank_ends_its_replica_with_the_cause(oracle: Oracle) -> None:
    server = start(oracle)
    pids = [process.popen.pid for process in server.processes]
    with Client(server.addresses[0]) as client:
        streams = [client.stream("x", max_tokens=90, ignore_eos=True) for _ in range(4)]
        next(iter(streams[0]))
        os.kill(pid_of(server, "worker-1"), signal.SIGKILL)
        reason = None
        while reason is None:
            reason = server.watch(5.0)
        assert reason == "worker-1 died (signal 9)"
        began = time.monotonic()
        server.fail(reason)
        assert time.monotonic() - began < 4 and ended(server, pids)
        for stream in streams:
            with pytest.raises(errors.ProcessDied, match="signal 9"):
                for _ in stream:
                    pass


def test_a_rank_that_fails_is_the_cause_and_not_those_that_wait_for_it(oracle: Oracle) -> None:
    with (
        LLM(str(oracle[0]), tensor_parallel_size=2, **ROOMY) as llm,
        closing(Sender[StepPlan](address(str(llm._server._run_dir), "worker", 1, "plans"))) as wrong,
    ):
        next(iter(llm.client.stream("x", max_tokens=90, ignore_eos=True)))
        wrong.send(StepPlan(9, 0, b""))
        with pytest.raises(errors.ProcessDied, match="worker-1 failed: plan of epoch 9"):
            while True:  # the plan takes its time, and a request may end before it arrives
                for _ in llm.client.stream("x", max_tokens=90, ignore_eos=True):
                    pass


def test_a_rank_that_hangs_does_not_hang_the_end(oracle: Oracle) -> None:
    server = start(oracle)
    pids = [process.popen.pid for process in server.processes]
    with Client(server.addresses[0]) as client:
        stream = client.stream("x", max_tokens=90, ignore_eos=True)
        next(iter(stream))
        os.kill(pid_of(server, "worker-1"), signal.SIGSTOP)
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 15 and ended(server, pids)
        with pytest.raises(errors.ShuttingDown):
            for _ in stream:
                pass


def test_a_model_that_cannot_be_split_is_refused(oracle: Oracle) -> None:
    words = "--tensor-parallel-size 3: the model's 4 attention heads cannot be split so (but into 1, 2, 4)"
    with pytest.raises(UsageError, match=re.escape(words)):
        start(oracle, tensor_parallel_size=3)


def test_serve_names_its_ranks_and_ends_on_a_signal_amid_a_step(oracle: Oracle) -> None:
    command = [sys.executable, "-m", "proc", "serve", str(oracle[0]), "--tp", "2", "--port", "0"]
    with subprocess.Popen(
        [*command, "--shutdown-timeout", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as server:
        assert server.stdout is not None
        public = server.stdout.readline().split()[-1]
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        assert len(children) == 6
        with Client(public) as client:
            streams = [client.stream("x", max_tokens=90, ignore_eos=True) for _ in range(8)]
            next(iter(streams[0]))
            server.terminate()
            _, words = server.communicate(timeout=20)
        assert server.returncode == 0 and not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert "plain torch, rank 0 of 2" in words and "plain torch, rank 1 of 2" in words
    assert "Traceback" not in words and "Error" not in words and "Warning" not in words
