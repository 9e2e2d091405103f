"""The scheduler's loop between real sockets, with a worker process on the other side."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ipc.messages import Admit, Cancel, Rejected, SamplingParams, ToScheduler, ToTokenizer
from ipc.sockets import Receiver, Sender
from ipc.token_table import Shape, TokenTable
from proc.scheduler import SchedulerLoop, check
from proc.worker import WorkerSpec
from runtime.request import AdmissionError, Finish
from runtime.scheduler import Limits, Scheduler
from runtime.step import StepResult
from tests.fakes import Engine, request

ROOT = Path(__file__).parent.parent.parent
LIMITS = Limits(num_blocks=33, block_size=4, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=32)
EOS = 3


class Rig:
    """A scheduler loop, a worker process, and the ends that two tokenizers would hold."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        shape = Shape(limits.slots, limits.depth + 2, limits.max_num_seqs)
        fd = TokenTable.create_fd(shape)
        spec = WorkerSpec(limits, shape, fd, f"ipc://{folder}/p", f"ipc://{folder}/r")
        self.inboxes = [Receiver(f"ipc://{folder}/t{n}", ToTokenizer) for n in range(2)]
        requests = Receiver(f"ipc://{folder}/s", ToScheduler)
        self.outbox: Sender[ToScheduler] = Sender(f"ipc://{folder}/s")
        senders: list[Sender[ToTokenizer]] = [Sender(f"ipc://{folder}/t{n}") for n in range(2)]
        self.loop = SchedulerLoop(
            Scheduler(limits),
            TokenTable(shape, fd),
            requests,
            Sender(spec.plans),
            Receiver(spec.results, StepResult),
            senders,
            (EOS,),
            512,
        )
        command = [sys.executable, "-m", "proc.worker", msgspec.json.encode(spec).decode()]
        self.process = subprocess.Popen(command, cwd=ROOT, pass_fds=[fd])

        self.rejected: list[Rejected] = []

    def serve(self, count: int) -> dict[int, tuple[int, list[int], int]]:
        """Turns until `count` requests have had their last word: id → (tokenizer, ids, finish)."""
        found: dict[int, tuple[int, list[int], int]] = {}
        ended = 0
        for _ in range(5000):
            self.loop.turn(idle_wait=5.0 if self.loop.engine.records else 0.05)
            for index, inbox in enumerate(self.inboxes):
                while (message := inbox.receive(0.02 if self.loop.engine.idle else 0.0)) is not None:
                    if isinstance(message, Rejected):
                        self.rejected.append(message)
                        continue
                    columns = zip(
                        np.frombuffer(message.requests, "<u8").tolist(),
                        np.frombuffer(message.offsets, "<i4").tolist(),
                        np.frombuffer(message.ids, "<i4").tolist(),
                        message.finishes,
                        strict=True,
                    )
                    for number, offset, token, finish in columns:
                        _, ids, _ = found.get(number, (index, [], 0))
                        assert offset == len(ids)
                        found[number] = (index, [*ids, token], finish)
                        ended += finish != Finish.NONE
            if ended == count:
                return found
        raise AssertionError(f"{ended} of {count} ended")

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        loop = self.loop
        for socket in (*self.inboxes, self.outbox, loop.requests, loop.plans, loop.results, *loop.tokenizers):
            socket.close()


@pytest.fixture(params=[0, 1, 2])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, replace(LIMITS, depth=request.param))
    yield rig
    rig.close()


def admission(number: int, prompt: list[int], **params: object) -> Admit:
    wishes = SamplingParams(**params)  # type: ignore[arg-type]
    return Admit(number, number % 2, np.array(prompt, "<i4").tobytes(), b"", wishes, seed=number)


NAN = float("nan")


@pytest.mark.parametrize(
    "wish",
    [
        {"temperature": -1.0},
        {"temperature": NAN},
        {"top_k": -2},
        {"top_p": 0.0},
        {"top_p": NAN},
        {"min_p": 1.5},
        {"max_tokens": 0},
        {"max_tokens": 4, "min_tokens": 5},
        {"stop_token_ids": [2**40]},
    ],
)
def test_an_impossible_wish_is_refused_by_name(wish: dict[str, object]) -> None:
    with pytest.raises(AdmissionError) as caught:
        check(SamplingParams(**wish), 512)  # type: ignore[arg-type]
    assert caught.value.param == list(wish)[-1]
    check(SamplingParams(), 512)


def test_tokens_reach_their_own_tokenizer_and_equal_the_engine_alone(rig: Rig) -> None:
    engine = Engine(rig.loop.engine.limits)
    for number in range(12):
        prompt = [number] * (3 + 5 * number)
        rig.outbox.send(admission(number, prompt, max_tokens=40))
        engine.admit(request(number, prompt, 40, temperature=1.0, seed=number, stop_ids=(EOS,)))
    engine.run()
    expected = {n: (n % 2, answer.ids, answer.finish) for n, answer in engine.answers.items()}
    assert rig.serve(12) == expected


def test_a_refused_request_gets_a_last_word_and_the_next_is_served(rig: Rig) -> None:
    rig.outbox.send(Cancel(99))
    rig.outbox.send(admission(0, []))
    rig.loop.turn(idle_wait=5.0)
    for _ in range(100):
        if (word := rig.inboxes[0].receive(0.05)) is not None:
            break
        rig.loop.turn(idle_wait=0.05)
    assert word == Rejected(0, "prompt", "the prompt is empty")
    rig.outbox.send(admission(2, [7, 512]))
    rig.outbox.send(admission(1, [5, 6], max_tokens=4, ignore_eos=True))
    assert len(rig.serve(1)[1][1]) == 4
    assert [word.param for word in rig.rejected] == ["prompt"]
