"""`LLM`: a server and its client in one object, for scripts. Installs no signal handlers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ipc.client import Client, Stream
from ipc.errors import ProcessDied
from ipc.exchange import Completion
from ipc.messages import Logprob
from ipc.sampling_params import SamplingParams
from proc.settings import settings_from
from proc.supervisor import Supervisor

WATCH = 0.2  # seconds between looks whether the server is being closed
WINDOW = 256  # requests under way at once


@dataclass(frozen=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[dict[int, Logprob]] | None = None  # for each token: itself and the most likely ids


@dataclass(frozen=True)
class RequestOutput:
    """vLLM's shape: the prompt and its answers."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # None for the first token


class LLM:
    """`LLM(model, **settings)`; the settings are the flags of `sidestep serve`. A context manager.

    Raises `UsageError` for a setting that cannot be met, `StartError` when a process fails.
    """

    def __init__(self, model: str = "smollm2", **settings: Any) -> None:
        self._server = Supervisor(settings_from(model=model, **settings))
        self._server.start()
        try:
            self.client = Client(self._server.addresses[0])
        except BaseException:
            self._server.stop()
            raise
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="sidestep-watch", daemon=True)
        self._watcher.start()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closing.set()
        self._watcher.join()
        self.client.close()
        self._server.stop()

    def _watch(self) -> None:
        """Where a process dies, each request gets an error that says so: those under way, and all later ones."""
        while not self._closing.is_set():
            reason = self._server.watch(WATCH)
            if reason is not None:
                self._server.fail(reason)
                self.client.give_up(ProcessDied(reason))
                return

    def generate(
        self,
        prompts: str | Sequence[str | list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts (texts, or lists of token ids). Raises the first request's error."""
        wanted = [prompts] if isinstance(prompts, str) else list(prompts)
        return self._run([{"prompt": prompt} for prompt in wanted], sampling_params, use_tqdm)

    def chat(
        self,
        conversations: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or several."""
        one = bool(conversations) and isinstance(conversations[0], dict)
        wanted: list[Any] = [conversations] if one else list(conversations)
        return self._run([{"messages": list(messages)} for messages in wanted], sampling_params, use_tqdm)

    def _run(
        self,
        requests: list[dict[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(requests)
        if len(sampling_params) != len(requests):
            raise ValueError(f"{len(sampling_params)} sampling params for {len(requests)} prompts")
        pairs = list(zip(requests, sampling_params, strict=True))
        asks = [_ask(request, one, choice) for request, one in pairs for choice in range(one.n)]
        answers = iter(self._answers(asks, use_tqdm))
        return [_output(request.get("prompt"), [next(answers) for _ in range(one.n)], one) for request, one in pairs]

    def _answers(self, asks: list[dict[str, Any]], use_tqdm: bool) -> list[Completion]:
        """All answers in order, at most WINDOW under way."""
        streams: list[Stream] = []
        answers = []
        with _progress(len(asks), use_tqdm) as progress:
            try:
                for n in range(len(asks)):
                    while len(streams) < min(len(asks), n + WINDOW):
                        streams.append(self.client.stream(**asks[len(streams)]))
                    for _ in streams[n]:
                        pass
                    done = streams[n].result
                    assert done is not None
                    answers.append(done)
                    progress.update()
            finally:
                for stream in streams:
                    stream.close()
        return answers


def _ask(request: dict[str, Any], params: SamplingParams, choice: int) -> dict[str, Any]:
    """One of `n` answers to a prompt; a seed counts on from one to the next."""
    params.check()
    seed = None if params.seed is None else (params.seed + choice) % 2**64
    one = msgspec.structs.replace(params, n=1, seed=seed)
    return request | {"sampling_params": one, "return_prompt_ids": True}


def _output(prompt: Any, answers: list[Completion], params: SamplingParams) -> RequestOutput:
    outputs = [
        CompletionOutput(
            index,
            answer.text,
            answer.token_ids,
            answer.finish_reason,
            answer.stop_reason,
            None if params.logprobs is None else [_by_token(one) for one in answer.logprobs],
        )
        for index, answer in enumerate(answers)
    ]
    told = answers[0].prompt_logprobs
    prompt_logprobs = None if told is None else [_by_token(one) or None for one in told]
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput(text, answers[0].prompt_token_ids or [], outputs, prompt_logprobs=prompt_logprobs)


def _by_token(entries: list[Logprob]) -> dict[int, Logprob]:
    return {entry.token: entry for entry in reversed(entries)}


def _progress(total: int, wanted: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="Processed prompts", disable=not wanted)
