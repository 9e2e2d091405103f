"""Tool calls in a model's output by format, and the grammar that forces them. Knows no token and no request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime.call_parser import BLANK, CallParser, NoCall, Reading, ToolCallParser

NAMED = re.compile(r"([^\s\[\]{]+)(?:\[CALL_ID\][^\s\[\]{]*)?(?:\[ARGS\])?\{")  # Mistral's newer form
WHITE_SPACE = r"(\n {0,16}| )?"  # of forced arguments; bounded, or a model may go on with blanks for ever


class Hermes(CallParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them among content."""

    def _read(self) -> Reading[None]:
        while True:
            yield from self._mark("<tool_call>")
            if (yield from self._call(self._object())) and (yield from self._stands("</tool_call>")):
                self._held.clear()


class Llama3(CallParser):
    """The whole answer is `{"name": …, "parameters": {…}}`, perhaps behind `<|python_tag|>`; others may follow."""

    def _read(self) -> Reading[None]:
        bare = not (yield from self._stands("<|python_tag|>"))
        while (yield from self._call(self._object(bare))):
            following = yield from self._solid(BLANK | {";"})
            self._unread()
            if following != "{":
                break
        while True:
            self._say()
            yield from self._next()


class Mistral(CallParser):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` for each call."""

    def _read(self) -> Reading[None]:
        while True:
            yield from self._mark("[TOOL_CALLS]")
            more = (yield from self._solid()) == "["
            if not more:
                self._unread()
                yield from self._call(self._named())
            while more:
                more = (yield from self._call(self._object())) and (yield from self._another())

    def _another(self) -> Reading[bool]:
        """Behind an item of the list: whether a comma follows. It stays held; the list's end is dropped."""
        char = yield from self._solid()
        if char == "]":
            self._held.clear()
        elif char != ",":
            self._unread()
            self._say()
        return char == ","

    def _named(self) -> Reading[None]:
        """`name[ARGS]{…}`. White space ends a name, so that words behind the mark are not held for long."""
        text = yield from self._solid()
        while not text.endswith("{"):
            char = yield from (self._solid() if text.endswith("]") else self._next())
            if char in BLANK:
                raise NoCall
            text += char
        found = NAMED.fullmatch(text)
        if not found:
            raise NoCall
        self._tell(found[1])
        yield from self._nested("{", self._give)


@dataclass(frozen=True)
class Format:
    """One way to write calls."""

    parser: Callable[[], ToolCallParser]
    mark: str  # by which a chat template is known
    arguments: str  # their key
    opens: str
    closes: str
    between: str
    listed: bool = False  # `opens` and `closes` stand around all calls, not around each


FORMATS = {
    "hermes": Format(Hermes, "<tool_call>", "arguments", "<tool_call>\n", "\n</tool_call>", "\n"),
    "llama3": Format(Llama3, "<|python_tag|>", "parameters", "", "", "; "),
    "mistral": Format(Mistral, "[TOOL_CALLS]", "arguments", "[TOOL_CALLS][", "]", ", ", listed=True),
}


def detect(chat_template: str) -> str | None:
    """The format whose mark the template names, or None. Llama 3's say `"parameters": ` where they say no mark."""
    found = [name for name, form in FORMATS.items() if form.mark in chat_template]
    if not found and ("python_tag" in chat_template or '"parameters": ' in chat_template):
        return "llama3"
    return found[0] if found else None


def grammar(format: str, functions: list[dict[str, Any]], parallel: bool) -> str:
    """Lark, as llguidance reads it, for one call of these (or, `parallel`, one or more) and nothing else.

    Raises `KeyError` for a format that is not in FORMATS, `ValueError` without functions.
    """
    form = FORMATS[format]
    if not functions:
        raise ValueError("functions: a call needs one")
    around = (form.opens, form.closes) if form.listed else ("", "")
    more = f"({_literal(form.between)} call)*" if parallel else ""
    lines = [f"start: {_literal(around[0])} call {more} {_literal(around[1])}"]
    lines.append("call: " + " | ".join(f"call_{n}" for n in range(len(functions))))
    for n, function in enumerate(functions):
        lines += _rules(form, n, function)
    return "\n".join(lines)


def _rules(form: Format, n: int, function: dict[str, Any]) -> list[str]:
    opens, closes = ("", "") if form.listed else (form.opens, form.closes)
    name = json.dumps(function["name"], ensure_ascii=False)
    head = f'{opens}{{"name": {name}, "{form.arguments}": '
    schema = (function.get("parameters") or {}) | {"type": "object", "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    return [
        f"call_{n}: {_literal(head)} arguments_{n} {_literal('}' + closes)}",
        f"arguments_{n}: %json {json.dumps(schema)}",
    ]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""
