"""A tiny float32 model through real processes: the same tokens under every layout, equal to transformers' greedy ones.

The smallest gap between the two best logits along the answers is printed and asserted, so that a difference is a fault
and never rounding.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ipc.client import Client
from ipc.errors import InvalidRequest
from ipc.sampling_params import SamplingParams, StructuredOutputs
from proc.cores import PLACED, computes
from proc.llm import LLM
from proc.settings import Settings, UsageError
from proc.supervisor import Supervisor
from runtime.kernels.library import kernels
from runtime.model.quantized import quantize
from tests.coded import as_coded
from tests.proc.test_cores import cores_of

PROMPTS = [f"{'shared beginning ' * (n % 3)}prompt number {n}" for n in range(12)]
LAYOUTS: list[dict[str, Any]] = [
    {"procs": "1", "overlap_depth": 0},
    {"procs": "1"},
    {"procs": "2", "overlap_depth": 2},
    {"procs": "3", "overlap_depth": 0, "disable_radix_cache": True},
    {"procs": "3"},
    {"procs": "3", "overlap_depth": 2, "max_num_batched_tokens": 16, "num_blocks": 25},
    {"procs": "tokenizer=2", "num_blocks": 25},
    {"procs": "scheduler=2"},
]


def smallest_gap(
    oracle: tuple[Path, transformers.LlamaForCausalLM],
    layout: dict[str, Any],
    started: Callable[[Supervisor], None] = lambda server: None,
) -> float:
    """Between the two best logits, once all answers have turned out to be transformers' greedy ones."""
    folder, model = oracle
    settings = Settings(
        **({"model": str(folder), "num_blocks": 200, "block_size": 4, "max_num_seqs": 8, "max_model_len": 96} | layout)
    )
    smallest = float("inf")
    with Supervisor(settings) as server, Client(server.addresses[0]) as client:
        started(server)
        streams = [client.stream(prompt, temperature=0.0, max_tokens=24, return_prompt_ids=True) for prompt in PROMPTS]
        for stream in streams:
            assert len(list(stream)) >= 1
            done = stream.result
            assert done is not None and done.prompt_token_ids is not None
            start = len(done.prompt_token_ids)
            with torch.inference_mode():
                logits = model(torch.tensor([done.prompt_token_ids + done.token_ids])).logits[0, start - 1 : -1]
            assert logits.argmax(-1).tolist() == done.token_ids
            assert (done.finish_reason == "stop") == (done.token_ids[-1] == 7)
            best = logits.topk(2).values
            smallest = min(smallest, float((best[:, 0] - best[:, 1]).min()))
    print(f"smallest top-2 gap {smallest:.2e}")
    return smallest


def cores_are_shared_again(server: Supervisor) -> None:
    """What the worker had for itself while it loaded is everybody's now; only the threads that compute stay apart."""
    present = os.sched_getaffinity(0)
    workers = [computes(process.roles) for process in server.processes]
    placed = kernels() is not None and len(present) > 1 and not any(os.environ.get(name) for name in PLACED)
    kept = []
    for process, works in zip(server.processes, workers, strict=True):
        cores = cores_of(process.popen.pid)
        apart = [core for one in cores if one != present for core in one]
        assert works or not apart
        assert present in cores
        kept += apart
    assert sorted(kept) == (sorted(present) if placed and len(present) % sum(workers) == 0 else [])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_gives_the_greedy_tokens(
    oracle: tuple[Path, transformers.LlamaForCausalLM], layout: dict[str, Any]
) -> None:
    assert smallest_gap(oracle, layout, cores_are_shared_again) > 1e-3


def test_logprobs_are_transformers_whatever_shapes_the_draw(
    oracle: tuple[Path, transformers.LlamaForCausalLM],
) -> None:
    """Within 1e-3, though the prefix is cached and penalties and a grammar are at work."""
    folder, model = oracle
    wishes = [
        SamplingParams(temperature=0.9, seed=1, max_tokens=12, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=5, presence_penalty=1.5, repetition_penalty=1.3),
        SamplingParams(
            temperature=0.8, seed=2, max_tokens=12, logprobs=0, structured_outputs=StructuredOutputs(regex="[ab]+")
        ),
    ]
    with LLM(
        str(folder), num_blocks=200, block_size=4, max_num_seqs=8, max_model_len=96, max_num_batched_tokens=16
    ) as llm:
        outputs = llm.generate(["shared beginning of all"] * 3, wishes, use_tqdm=False)
        again = llm.generate(["shared beginning of all"] * 3, wishes, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in again]
    for output, wish in zip(outputs, wishes, strict=True):
        prompt, ids = output.prompt_token_ids, output.outputs[0].token_ids
        with torch.inference_mode():
            expected = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
        told = output.outputs[0].logprobs
        assert told is not None and len(told) == len(ids) and wish.logprobs is not None
        for n, (token, entries) in enumerate(zip(ids, told, strict=True)):
            row = expected[len(prompt) - 1 + n]
            assert {*row.topk(wish.logprobs).indices.tolist(), token} == set(entries)
            assert all(abs(entry.logprob - row[entry.token]) < 1e-3 for entry in entries.values())
            assert entries[token].rank == int((row > row[token]).sum()) + 1
    assert set(outputs[2].outputs[0].text) <= set("ab")


@pytest.mark.skipif(kernels() is None, reason="the C library is not built here")
@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 4)])
def test_quantized_weights_are_what_their_codes_say(
    oracle: tuple[Path, transformers.LlamaForCausalLM], kind: str, bits: int
) -> None:
    """Against transformers on the dequantized weights, its inputs rounded as ours; the head has eight bits."""
    folder, model = oracle
    coded = copy.deepcopy(model)
    for name, part in coded.named_modules():
        if isinstance(part, torch.nn.Linear):
            part.weight.data = quantize(part.weight.data, 8 if name == "lm_head" else bits).dequantized()
            part.register_forward_pre_hook(lambda _, inputs: (as_coded(inputs[0]),))
    with LLM(str(folder), quantization=kind, num_blocks=200, block_size=4, max_model_len=96) as llm:
        output = llm.generate(
            ["some words"], SamplingParams(temperature=0.0, max_tokens=20, logprobs=0), use_tqdm=False
        )[0]
    prompt, ids, told = output.prompt_token_ids, output.outputs[0].token_ids, output.outputs[0].logprobs
    assert told is not None
    with torch.inference_mode():
        expected = coded(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert expected.argmax(-1).tolist() == ids
    assert all(
        abs(entry[token].logprob - expected[n, token]) < 5e-3  # an input in the middle of two codes may take either
        for n, (token, entry) in enumerate(zip(ids, told, strict=True))
    )


def test_quantization_without_kernels_is_refused(
    oracle: tuple[Path, transformers.LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDESTEP_KERNELS", "torch")
    for kind, words in (("int8", "--quantization int8 needs the C kernels"), ("gguf", "--quantization gguf")):
        with pytest.raises(UsageError, match=words):
            LLM(str(oracle[0]), quantization=kind, num_blocks=200, block_size=4, max_model_len=96)


def test_prompt_logprobs_are_transformers_chunked_and_preempted(
    oracle: tuple[Path, transformers.LlamaForCausalLM],
) -> None:
    folder, model = oracle
    wishes = [SamplingParams(seed=n, max_tokens=20, prompt_logprobs=3) for n in range(12)]
    prompts = [f"shared beginning of it all, number {n}" for n in range(12)]
    few = {"num_blocks": 26, "block_size": 4, "max_num_seqs": 8, "max_model_len": 96, "max_num_batched_tokens": 16}
    with LLM(str(folder), **few) as llm:
        outputs = llm.generate(prompts, wishes, use_tqdm=False)
        assert llm.client.status()["preemptions"] > 0
    for output in outputs:
        ids, told = output.prompt_token_ids, output.prompt_logprobs
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert told is not None and told[0] is None and len(told) == len(ids)
        for n, token in enumerate(ids[1:], 1):
            row, entries = expected[n - 1], told[n]
            assert entries is not None and {*row.topk(3).indices.tolist(), token} == set(entries)
            assert all(abs(entry.logprob - row[entry.token]) < 1e-3 for entry in entries.values())
            assert entries[token].rank == int((row > row[token]).sum()) + 1


def uppercase(prompt: Any, output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A processor as a user would write one: letters only, which in this vocabulary are the ids from 32 to 57."""
    logits[:32] = logits[58:] = -torch.inf
    return logits


def test_a_processor_of_ones_own_shapes_its_requests_alone(
    oracle: tuple[Path, transformers.LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = oracle
    named = "upper=tests.proc.test_tiny_model:uppercase"
    with LLM(str(folder), num_blocks=200, block_size=4, max_model_len=96, logits_processors=named) as llm:
        wish = SamplingParams(seed=1, max_tokens=20, logits_processors=["upper"])
        shaped, free = llm.generate(["x", "x"], [wish, SamplingParams(seed=1, max_tokens=20)], use_tqdm=False)
        assert all(32 <= token < 58 for token in shaped.outputs[0].token_ids)
        assert not all(32 <= token < 58 for token in free.outputs[0].token_ids)
        with pytest.raises(InvalidRequest, match="no logits processor 'lower'"):
            llm.generate("x", SamplingParams(logits_processors=["lower"]), use_tqdm=False)
    for wrong, words in (
        ("upper", "NAME=module:callable"),
        ("a=no.such:thing", "no.such"),
        ("a=os:nothing", "nothing"),
    ):
        with pytest.raises(UsageError, match=words):
            LLM(str(folder), num_blocks=200, block_size=4, max_model_len=96, logits_processors=wrong)


def test_a_seed_gives_the_same_after_a_restart_and_n_its_own_streams(
    oracle: tuple[Path, transformers.LlamaForCausalLM],
) -> None:
    folder, _ = oracle
    answers = []
    for depth in (0, 2):
        with LLM(str(folder), num_blocks=200, block_size=4, max_model_len=96, overlap_depth=depth) as llm:
            one = llm.generate("some prompt", SamplingParams(n=3, seed=7, max_tokens=16), use_tqdm=False)[0]
            answers.append([output.token_ids for output in one.outputs])
            single = llm.generate("some prompt", SamplingParams(seed=8, max_tokens=16), use_tqdm=False)[0]
            assert single.outputs[0].token_ids == answers[-1][1]
    assert answers[0] == answers[1] and len(set(map(tuple, answers[0]))) == 3
