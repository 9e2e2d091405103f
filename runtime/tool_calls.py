"""Tool calls in a model's output: found as the text comes, and forced by a grammar. Knows no token and no request.

What is given out after k characters is a function of those k characters, however they were cut into pieces. A call is
told as soon as its name is known, its arguments as they come; what turns out to be no call is content, to the letter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.text import begun

Reading = Generator[None, str, str]  # is sent the characters one by one
ARGUMENTS = ("arguments", "parameters")
BLANK = " \t\r\n"


@dataclass(frozen=True)
class CallDelta:
    """News of a call: `name` once, with its first delta; then some more of the arguments' JSON text."""

    index: int  # of the call in the answer
    name: str | None
    arguments: str


class ToolCallParser(Protocol):
    """Both return (content that is part of no call, news of calls)."""

    def feed(self, text: str) -> tuple[str, list[CallDelta]]: ...

    def finish(self) -> tuple[str, list[CallDelta]]:
        """The end of the text: what was held back."""


class _Call:
    """Reads one call: an object with a name and arguments, or the arguments alone where the `name` is known.

    `over` once it has ended, `broken` where it is no JSON.
    """

    def __init__(self, index: int, name: str | None = None) -> None:
        self.index, self.name = index, name
        self.raw: list[str] = []
        self.over = self.broken = self.told = self._given = False
        self._arguments: list[str] = []
        self._reader = self._object() if name is None else self._bare()
        next(self._reader)

    def feed(self, text: str) -> int:
        """How many characters belong to the call; those after its end do not."""
        for at, char in enumerate(text):
            try:
                self._reader.send(char)
            except StopIteration as end:
                self.over, self.broken = True, end.value == "broken"
                used = at if self.broken else at + 1
                self.raw.append(text[:used])
                return used
        self.raw.append(text)
        return len(text)

    def news(self) -> list[CallDelta]:
        if self.name is None or not (self._arguments or not self.told):
            return []
        name, self.told = (None if self.told else self.name), True
        told, self._arguments = "".join(self._arguments), []
        return [CallDelta(self.index, name, told)]

    def _give(self, text: str) -> None:
        self._given = True
        self._arguments.append(text)

    def _bare(self) -> Reading:
        char = yield from self._solid()
        if char != "{":
            return "broken"
        yield from self._value(char, self._give)
        return "whole"

    def _object(self) -> Reading:
        if (yield from self._solid()) != "{":
            return "broken"
        char = ","
        while char == ",":
            if (yield from self._solid()) != '"':
                return "broken"
            key = yield from self._string()
            if (yield from self._solid()) != ":":
                return "broken"
            char = yield from self._member(key)
            char = (yield from self._solid()) if not char or char in BLANK else char
        if char != "}" or not self.name:
            return "broken"
        if not self._given:
            self._give("{}")  # a call without arguments
        return "whole"

    def _member(self, key: str) -> Reading:
        """A value, from its first character on; returns the character after it where that was needed to see its end."""
        char = yield from self._solid()
        value: list[str] = []
        streamed = key in ARGUMENTS and char in "{["
        after = yield from self._value(char, self._give if streamed else value.append)
        text = "".join(value)
        if key == "name":
            name = _decoded(text)
            self.name = name if isinstance(name, str) and name else None
        elif key in ARGUMENTS and not streamed:
            inner = _decoded(text)
            self._give(inner if isinstance(inner, str) else "{}" if inner is None else text)
        return after

    def _value(self, char: str, give: Callable[[str], None]) -> Reading:
        give(char)
        if char == '"':
            yield from self._quoted(give)
            return ""
        if char not in "{[":
            while (char := (yield)) not in ",}]" + BLANK:
                give(char)
            return char
        depth = 1
        while depth:
            char = yield
            give(char)
            if char == '"':
                yield from self._quoted(give)
            depth += (char in "{[") - (char in "}]")
        return ""

    def _quoted(self, give: Callable[[str], None]) -> Reading:
        escaped = False
        while True:
            char = yield
            give(char)
            if char == '"' and not escaped:
                return ""
            escaped = char == "\\" and not escaped

    def _string(self) -> Reading:
        parts = ['"']
        yield from self._quoted(parts.append)
        return str(_decoded("".join(parts)))

    def _solid(self) -> Reading:
        while (char := (yield)) in BLANK:
            pass
        return char


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class _Parser:
    """What the formats share. `_step` looks at `_rest`, and says whether it got on."""

    def __init__(self) -> None:
        self._rest = ""
        self._index = 0  # of the next call
        self._call: _Call | None = None
        self._opening = ""  # what stood before the call, given back as content where there is none
        self._content: list[str] = []
        self._news: list[CallDelta] = []
        self._gap: list[str] | None = None  # white space after a call, which is content only where content follows
        self._step: Callable[[bool], bool] = self._begin
        self._otherwise: Callable[[bool], bool] = self._begin  # after what was no call

    def feed(self, text: str) -> tuple[str, list[CallDelta]]:
        self._rest += text
        return self._run(False)

    def finish(self) -> tuple[str, list[CallDelta]]:
        content, news = self._run(True)
        if self._call is not None and self._call.name is None:
            self._say(self._opening + "".join(self._call.raw))
        return content + "".join(self._content), news

    def _run(self, final: bool) -> tuple[str, list[CallDelta]]:
        while self._step(final):
            pass
        if self._call is not None:
            self._news += self._call.news()
        content, news = "".join(self._content), self._news
        self._content, self._news = [], []
        return content, news

    def _say(self, text: str) -> None:
        if self._gap is not None:
            self._gap.append(text)
            if not text.strip():
                return
            text, self._gap = "".join(self._gap), None
        self._content.append(text)

    def _plain(self, final: bool) -> bool:
        self._say(self._rest)
        self._rest = ""
        return False

    def _search(self, mark: str, found: Callable[[bool], bool], final: bool) -> bool:
        """Content up to `mark`, after which `found` goes on; the beginning of a mark is held back."""
        at = self._rest.find(mark)
        if at < 0:
            shown = len(self._rest) - (0 if final else begun(self._rest, mark))
            self._say(self._rest[:shown])
            self._rest = self._rest[shown:]
            return False
        self._say(self._rest[:at])
        self._rest, self._opening, self._step = self._rest[at + len(mark) :], mark, found
        return True

    def _begin(self, final: bool) -> bool:
        raise NotImplementedError

    def _read(self, after: Callable[[bool], bool], name: str | None = None) -> bool:
        """The call at hand, begun here where there is none; `after` goes on behind it."""
        if self._call is None:
            self._call = _Call(self._index, name)
        self._rest = self._rest[self._call.feed(self._rest) :]
        call = self._call
        if not call.over:
            return False
        self._call, self._step = None, after
        if call.name is None:
            self._say(self._opening + "".join(call.raw))
            self._step = self._otherwise
        else:
            self._news += call.news()
            self._index += 1
            self._gap = []
        return True


class Hermes(_Parser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them among content."""

    def _begin(self, final: bool) -> bool:
        return self._search("<tool_call>", self._inside, final)

    def _inside(self, final: bool) -> bool:
        return self._read(self._close)

    def _close(self, final: bool) -> bool:
        """Past the closing mark, where there is one."""
        mark, text = "</tool_call>", self._rest.lstrip()
        if not final and len(text) < len(mark) and mark.startswith(text):
            return False
        self._rest = text.removeprefix(mark) if text.startswith(mark) else self._rest
        self._step = self._begin
        return True


class Llama3(_Parser):
    """The whole answer is `{"name": …, "parameters": {…}}`, perhaps after `<|python_tag|>`; several follow on `;`."""

    MARK = "<|python_tag|>"

    def __init__(self) -> None:
        super().__init__()
        self._otherwise = self._plain

    def _begin(self, final: bool) -> bool:
        text = self._rest.lstrip()
        if not final and len(text) < len(self.MARK) and self.MARK.startswith(text):
            return False
        marked = text.startswith(self.MARK)
        if not marked and not text.startswith("{"):
            self._step = self._plain
            return True
        self._opening = self._rest[: len(self._rest) - len(text)] + (self.MARK if marked else "")
        self._rest = text.removeprefix(self.MARK)
        self._step = self._inside
        return True

    def _inside(self, final: bool) -> bool:
        return self._read(self._more)

    def _more(self, final: bool) -> bool:
        """Another call, or the end of them."""
        text = self._rest.lstrip(BLANK + ";")
        if not text and not final:
            return False
        if text.startswith("{"):
            self._opening, self._rest, self._step = self._rest[: len(self._rest) - len(text)], text, self._inside
        else:
            self._rest, self._step = self._rest if text else "", self._plain
        return True


class Mistral(_Parser):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` for each call."""

    MARK, ARGS = "[TOOL_CALLS]", "[ARGS]"

    def _begin(self, final: bool) -> bool:
        return self._search(self.MARK, self._kind, final)

    def _kind(self, final: bool) -> bool:
        text = self._rest.lstrip()
        if not text:
            return self._lost() if final else False
        if text.startswith("["):
            blanks = len(self._rest) - len(text)
            self._opening, self._rest, self._step = self._opening + self._rest[: blanks + 1], text[1:], self._item
        else:
            self._step = self._named
        return True

    def _lost(self) -> bool:
        """It was no call after all."""
        self._say(self._opening)
        self._step = self._begin
        return True

    def _named(self, final: bool) -> bool:
        at = self._rest.find("{")
        if at < 0:
            return self._lost() if final else False
        name = self._rest[:at].strip().removesuffix(self.ARGS).strip()
        if not name or self.MARK in name:
            return self._lost()
        self._opening, self._rest = self._opening + self._rest[:at], self._rest[at:]
        self._step = lambda final: self._read(self._begin, name)
        return True

    def _item(self, final: bool) -> bool:
        return self._read(self._next)

    def _next(self, final: bool) -> bool:
        """After an item of the list: another one, or its end."""
        text = self._rest.lstrip()
        if not text and not final:
            return False
        self._opening = "," if text.startswith(",") else ""
        self._step = self._item if text.startswith(",") else self._begin
        self._rest = text[1:] if text[:1] in ("]", ",") else self._rest
        return True


@dataclass(frozen=True)
class Format:
    """One way to write calls."""

    parser: Callable[[], ToolCallParser]
    mark: str  # by which a chat template is known
    arguments: str  # their key
    opens: str
    closes: str
    between: str


FORMATS = {
    "hermes": Format(Hermes, "<tool_call>", "arguments", "<tool_call>\n", "\n</tool_call>", "\n"),
    "llama3": Format(Llama3, "python_tag", "parameters", "", "", "; "),
    "mistral": Format(Mistral, "[TOOL_CALLS]", "arguments", "[TOOL_CALLS][", "]", ", "),
}


def detect(chat_template: str) -> str | None:
    """The format whose mark the template names."""
    found = [name for name, form in FORMATS.items() if form.mark in chat_template]
    if not found and '"parameters": ' in chat_template:
        return "llama3"
    return found[0] if found else None


def grammar(form: str, functions: list[dict[str, Any]], parallel: bool) -> str:
    """Lark, as llguidance reads it, for one call of these (or, `parallel`, one or more) and nothing else."""
    chosen = FORMATS[form]
    whole = (chosen.opens, chosen.closes) if form == "mistral" else ("", "")
    each = ("", "") if form == "mistral" else (chosen.opens, chosen.closes)
    lines = [f"start: {_literal(whole[0])} call{_more(chosen.between) if parallel else ''} {_literal(whole[1])}"]
    lines.append("call: " + " | ".join(f"call_{n}" for n in range(len(functions))))
    for n, function in enumerate(functions):
        head = each[0] + json.dumps({"name": function["name"]}, ensure_ascii=False)[:-1] + f', "{chosen.arguments}": '
        lines.append(f"call_{n}: {_literal(head)} arguments_{n} {_literal('}' + each[1])}")
        lines.append(f"arguments_{n}: %json {json.dumps(_schema(function))}")
    return "\n".join(lines)


def _more(between: str) -> str:
    return f" ({_literal(between)} call)*"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _schema(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object"}
