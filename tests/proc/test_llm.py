"""`LLM`: answers in the order of the prompts, in vLLM's shape."""

from __future__ import annotations

import os
import signal
import time

import pytest

from ipc.errors import InvalidRequest, ProcessDied
from ipc.sampling_params import SamplingParams
from proc.llm import LLM
from proc.settings import UsageError


def test_answers_in_order_with_params_each() -> None:
    with LLM(device="sim", overlap_depth=2, seed=1) as llm:
        prompts: list[str | list[int]] = [f"prompt {n}" for n in range(300)]
        params = [SamplingParams(max_tokens=1 + n % 7, seed=n, ignore_eos=True) for n in range(300)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.prompt for output in outputs] == prompts
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + n % 7 for n in range(300)]
        one = llm.generate("prompt 5", params[5], use_tqdm=False)[0]
        assert one == outputs[5] and one.prompt_token_ids == list(b"prompt 5")
        assert llm.generate([list(b"prompt 5")], params[5], use_tqdm=False)[0].outputs == one.outputs
        talk = [{"role": "user", "content": "hi"}]
        first = llm.chat(talk, SamplingParams(max_tokens=3, seed=1), use_tqdm=False)
        assert first == llm.chat([talk], SamplingParams(max_tokens=3, seed=1), use_tqdm=False)
        with pytest.raises(ValueError, match="2 sampling params for 1 prompts"):
            llm.generate(["x"], params[:2])
        with pytest.raises(InvalidRequest, match="empty"):
            llm.generate(["x", ""], use_tqdm=False)
        assert llm.generate([], use_tqdm=False) == []


def test_unknown_settings_are_named() -> None:
    with pytest.raises(UsageError, match="did you mean max_model_len"):
        LLM(device="sim", max_model_length=3)


@pytest.mark.parametrize("role", ["tokenizer", "worker"])
def test_after_a_process_has_died_every_request_says_so(role: str) -> None:
    """Also one that is sent when all have ended, where nobody is left to answer."""
    with LLM(device="sim") as llm:
        process = next(p for p in llm._server.processes if p.roles[0].name == role)
        os.kill(process.popen.pid, signal.SIGKILL)
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(ProcessDied, match=f"{role}-0 died .signal 9"):
                while True:  # it takes a moment to be seen
                    llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)
        assert time.monotonic() - began < 8
