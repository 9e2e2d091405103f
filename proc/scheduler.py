"""The scheduler process: the engine's loop between its inboxes and its outboxes. Knows no text and no device."""

from __future__ import annotations

import numpy as np

from ipc.messages import Admit, Cancel, Rejected, SamplingParams, TokenBatch, ToScheduler, ToTokenizer
from ipc.sockets import Receiver, Sender
from ipc.token_table import TokenTable
from runtime.request import AdmissionError, Request
from runtime.sampling import Sampling
from runtime.scheduler import Outputs, Scheduler
from runtime.step import StepPlan, StepResult

IDLE_WAIT = 1.0  # seconds blocked without work; a lost wake-up is a delay, not an end


def check(params: SamplingParams, vocab_size: int) -> None:
    """Raises `AdmissionError` naming the first field that cannot be honoured (not-a-number included)."""
    for param, fine, words in (
        ("temperature", 0 <= params.temperature < float("inf"), "a finite number, at least 0"),
        ("top_k", params.top_k >= -1, "-1 or 0 (off), or positive"),
        ("top_p", 0 < params.top_p <= 1, "above 0, at most 1"),
        ("min_p", 0 <= params.min_p <= 1, "between 0 and 1"),
        ("max_tokens", params.max_tokens >= 1, "at least 1"),
        ("min_tokens", 0 <= params.min_tokens <= params.max_tokens, "between 0 and max_tokens"),
        ("stop_token_ids", all(0 <= i < vocab_size for i in params.stop_token_ids), f"ids below {vocab_size}"),
    ):
        if not fine:
            raise AdmissionError(param, f"{param} must be {words}")


class SchedulerLoop:
    """One replica's loop. `turn` never waits for a step that could be planned past."""

    def __init__(
        self,
        engine: Scheduler,
        table: TokenTable,
        requests: Receiver[ToScheduler],
        plans: Sender[StepPlan],
        results: Receiver[StepResult],
        tokenizers: list[Sender[ToTokenizer]],
        eos_ids: tuple[int, ...],
        vocab_size: int,
    ) -> None:
        self.engine, self.table, self.eos_ids, self.vocab_size = engine, table, eos_ids, vocab_size
        self.requests, self.plans, self.results, self.tokenizers = requests, plans, results, tokenizers

    def turn(self, idle_wait: float = IDLE_WAIT) -> None:
        """Receive, plan, send the plan, receive a result, commit, send tokens."""
        self.take_requests(wait=idle_wait if self.engine.idle else 0.0)
        while (plan := self.engine.plan()) is not None:
            self.plans.send(plan)
        if self.engine.records and (result := self.results.receive(idle_wait)) is not None:
            ids, _ = self.table.read(result.step, self.engine.records[0].rows)
            self.deliver(self.engine.commit(result.step, ids[:, 0]))

    def take_requests(self, wait: float) -> None:
        """Everything that has arrived; blocks up to `wait` seconds for the first."""
        while (message := self.requests.receive(wait)) is not None:
            wait = 0.0
            if isinstance(message, Cancel):
                self.engine.cancel(message.request)
            else:
                self.admit(message)

    def admit(self, message: Admit) -> None:
        try:
            self.engine.admit(self.resolve(message))
        except AdmissionError as error:
            self.tokenizers[message.tokenizer].send(Rejected(message.request, error.param, str(error)))

    def resolve(self, message: Admit) -> Request:
        """The caller's wishes turned into what the engine does. Raises `AdmissionError` naming an impossible one."""
        params = message.params
        check(params, self.vocab_size)
        stop_ids = tuple(params.stop_token_ids) + (() if params.ignore_eos else self.eos_ids)
        sampling = Sampling(
            params.temperature,
            min(max(params.top_k, 0), self.vocab_size),
            params.top_p,
            params.min_p,
            message.seed,
            min(params.min_tokens, self.engine.limits.max_model_len),
            stop_ids,
        )
        prompt, output = (np.frombuffer(ids, "<i4") for ids in (message.prompt_ids, message.output_ids))
        for param, ids in (("prompt", prompt), ("output_ids", output)):
            if ((ids < 0) | (ids >= self.vocab_size)).any():
                raise AdmissionError(param, f"token ids must be between 0 and {self.vocab_size - 1}")
        return Request(
            message.request, prompt, sampling, params.max_tokens, output, message.priority, message.tokenizer
        )

    def deliver(self, outputs: Outputs) -> None:
        """One message to each tokenizer that has tokens in this step."""
        for index in np.unique(outputs.sources).tolist():
            mine = outputs.sources == index
            self.tokenizers[index].send(
                TokenBatch(
                    outputs.requests[mine].astype("<u8").tobytes(),
                    outputs.offsets[mine].astype("<i4").tobytes(),
                    outputs.ids[mine].astype("<i4").tobytes(),
                    outputs.finishes[mine].tobytes(),
                )
            )
