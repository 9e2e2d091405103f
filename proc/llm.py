"""`LLM`: a server and its client in one object, for scripts. Installs no signal handlers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipc.client import Client, Stream
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


@dataclass(frozen=True)
class RequestOutput:
    """vLLM's shape: the prompt and its answers."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


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
        """Where a process dies, each request under way gets an error that says so."""
        while not self._closing.is_set():
            reason = self._server.watch(WATCH)
            if reason is not None:
                self._server.fail(reason)
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
        streams: list[Stream] = []
        results = []
        with _progress(len(requests), use_tqdm) as progress:
            try:
                for n in range(len(requests)):
                    while len(streams) < min(len(requests), n + WINDOW):
                        m = len(streams)
                        streams.append(
                            self.client.stream(
                                **requests[m], sampling_params=sampling_params[m], return_prompt_ids=True
                            )
                        )
                    results.append(_output(requests[n].get("prompt"), streams[n]))
                    progress.update()
            finally:
                for stream in streams:
                    stream.close()
        return results


def _output(prompt: Any, stream: Stream) -> RequestOutput:
    for _ in stream:
        pass
    done = stream.result
    assert done is not None
    answer = CompletionOutput(0, done.text, done.token_ids, done.finish_reason, done.stop_reason)
    return RequestOutput(prompt if isinstance(prompt, str) else None, done.prompt_token_ids or [], [answer])


def _progress(total: int, wanted: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="Processed prompts", disable=not wanted)
