"""What a client is shown of an answer: its text, or reasoning, text and tool calls apart. Knows no token."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from ipc.exchange import joined_calls
from ipc.messages import ToolCall
from runtime.call_parser import CallDelta, ToolCallParser
from runtime.reasoning import ReasoningSplit


@dataclass(frozen=True)
class Shown:
    """Some more of an answer, or all of it."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class OutputParser:
    """Takes the text as it comes. Without `reasoning` or `tools` that part is not looked for."""

    def __init__(self, reasoning: ReasoningSplit | None, tools: ToolCallParser | None, most: int | None = None) -> None:
        """`most`: how many calls are passed on; None: all."""
        self.reasoning, self.tools, self.most = reasoning, tools, most
        self.called = False  # there was a tool call

    def feed(self, text: str, final: bool = False) -> Shown:
        thought, content = self.reasoning.feed(text) if self.reasoning else ("", text)
        if final and self.reasoning:
            more, rest = self.reasoning.finish()
            thought, content = thought + more, content + rest
        if self.tools is None:
            return Shown(content, thought)
        content, calls = self.tools.feed(content)
        if final:
            rest, more_calls = self.tools.finish()
            content, calls = content + rest, calls + more_calls
        calls = [call for call in calls if self.most is None or call.index < self.most]
        self.called = self.called or bool(calls)
        return Shown(content, thought, tuple(map(_call, calls)))


def _call(delta: CallDelta) -> ToolCall:
    """With an id of ours where the call begins."""
    if delta.name is None:
        return ToolCall(delta.index, arguments=delta.arguments)
    return ToolCall(delta.index, f"call_{secrets.token_hex(12)}", delta.name, delta.arguments)


def joined(parts: Sequence[Shown]) -> Shown:
    """All of them as one; each call whole."""
    calls = joined_calls(call for part in parts for call in part.calls)
    return Shown("".join(part.text for part in parts), "".join(part.reasoning for part in parts), tuple(calls))
