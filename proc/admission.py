"""A `Generate` on its way to a scheduler: checked, resolved, and by way of a grammar where its output is structured.

Knows no socket of a client. A request whose grammar is being compiled is live but not admitted; it may be aborted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ipc.errors import InvalidRequest
from ipc.internal import Admit, Compile, Forget, ToScheduler
from ipc.messages import Generate
from ipc.sampling_params import SamplingParams, StructuredOutputs
from ipc.sockets import Sender
from proc.conversation import Live, resolved
from proc.output import OutputParser
from proc.prompts import Prompts
from proc.settings import Settings
from proc.tools import Toolbox, Tools, as_json
from runtime.reasoning import ReasoningSplit
from runtime.tokenizer import ByteTokenizer, Tokenizer

ToGrammar = Compile | Forget
THINK = "<think>"
LONGEST_GRAMMAR = 131_072  # characters: what compiles in a second or so, and does not hold up the masks of others
TAIL = 8  # ids at the end of a prompt in which an open <think> stands


@dataclass(frozen=True)
class Request:
    """A `Generate` understood."""

    ids: list[int]
    params: SamplingParams  # resolved
    grammar: tuple[str, str, str] | None  # (kind, text, param) as `Compile` has them
    parser: OutputParser | None


class Admissions:
    """Of tokenizer `index`."""

    def __init__(
        self,
        index: int,
        settings: Settings,
        tokenizer: Tokenizer | ByteTokenizer,
        prompts: Prompts,
        schedulers: list[Sender[ToScheduler]],
        grammars: list[Sender[ToGrammar]],
    ) -> None:
        self.index, self.tokenizer, self.prompts = index, tokenizer, prompts
        self.schedulers, self.grammars = schedulers, grammars
        self.processors = settings.processors
        self.tools = Tools(tokenizer.template_text, settings.tool_call_parser)
        chosen, template = settings.reasoning_parser, tokenizer.template_text or ""
        self.thinks = chosen == "think" or (chosen == "auto" and THINK in template)
        padded = tokenizer.vocab_size < prompts.vocab_size
        self.vocab = tokenizer.vocab_size if padded else 0
        self._waiting: dict[int, Admit] = {}  # for their grammars

    def understand(self, message: Generate) -> Request:
        """Raises a `RequestError` or `TextError` that names what is wrong."""
        wishes = message.sampling
        wishes.check()
        if wishes.n != 1:
            raise InvalidRequest("n must be 1 on the socket: send a request for each answer", "n")
        for name in wishes.logits_processors:
            if name not in self.processors:
                raise InvalidRequest(f"the server has no logits processor {name!r}", "logits_processors")
        box = self.tools.box(message)
        ids = self.prompts.ids(message, lambda messages: self.tools.told(messages, box))
        grammar = ("lark", box.lark, "tools") if box and box.lark else _grammar(wishes.structured_outputs)
        if grammar and len(grammar[1]) > LONGEST_GRAMMAR:
            raise InvalidRequest(f"{grammar[2]} has more than {LONGEST_GRAMMAR} characters", grammar[2])
        parser = self._parser(message, box, ids, grammar is not None)
        return Request(ids, resolved(wishes, self.tokenizer), grammar, parser)

    def _parser(self, message: Generate, box: Toolbox | None, ids: list[int], constrained: bool) -> OutputParser | None:
        thinks = message.separate_reasoning and self.thinks and not constrained  # a grammar leaves no room for thoughts
        if box is None and not thinks:
            return None
        opened = self.tokenizer.decode(ids[-TAIL:], skip_special=False).rstrip().endswith(THINK)
        reasoning = ReasoningSplit(opened) if thinks else None
        return OutputParser(reasoning, box.parser() if box else None, box.most if box else None)

    def send(self, number: int, live: Live, request: Request) -> None:
        """To the scheduler, or first to the grammar of its replica."""
        message = live.message
        prompt, output = (np.array(part, "<i4").tobytes() for part in (request.ids, message.output_ids))
        admit = Admit(
            number,
            self.index,
            prompt,
            output,
            request.params,
            live.seed,
            message.priority,
            self.vocab,
            self.prompts.bad_words(message.sampling.bad_words),
            request.grammar is not None,
        )
        if request.grammar is None:
            self.schedulers[live.replica].send(admit)
            return
        live.structured = True
        self._waiting[number] = admit
        self.grammars[live.replica].send(Compile(number, self.index, *request.grammar, output))

    def compiled(self, number: int, live: Live) -> None:
        """The grammar of a live request is there."""
        self.schedulers[live.replica].send(self._waiting.pop(number))

    def forget(self, number: int, replica: int) -> None:
        """A structured request is over."""
        self._waiting.pop(number, None)
        self.grammars[replica].send(Forget(number))


def _grammar(wanted: StructuredOutputs | None) -> tuple[str, str, str] | None:
    return None if wanted is None else (*_kind_and_text(wanted), "structured_outputs")


def _kind_and_text(wanted: StructuredOutputs) -> tuple[str, str]:
    if wanted.json_object:
        return "json_object", ""
    if wanted.json is not None:
        return "json", wanted.json if isinstance(wanted.json, str) else as_json(wanted.json, "structured_outputs")
    if wanted.choice is not None:
        return "choice", as_json(wanted.choice, "structured_outputs")
    if wanted.regex is not None:
        return "regex", wanted.regex
    return "grammar", wanted.grammar or ""
