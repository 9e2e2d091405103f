"""Reads tool calls in a model's output as it comes: what the formats of `runtime.tool_calls` share. Knows no format.

A format is a coroutine that is sent the text character by character, so how it was cut cannot matter and the cost is
linear. Every character is first held; then it is content, or belongs to a mark or a call. A call is told where its
arguments begin, since until then it may turn out to be none, and what is none is content to the letter.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from runtime.text import begun

T = TypeVar("T")
Reading = Generator[None, str, T]
ARGUMENTS = ("arguments", "parameters")
BLANK = frozenset(" \t\r\n")
CLOSED_BY = {"{": "}", "[": "]"}
HEX = frozenset("0123456789abcdefABCDEF")
ESCAPE = re.compile(r"\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|\\u\w{4}|\\.", re.DOTALL)
HIGH = re.compile(r"\\u[dD][89abAB]..")  # the first half of a pair of surrogates


@dataclass(frozen=True)
class CallDelta:
    """News of a call: `name` once, with its first delta; then some more of the arguments' JSON text."""

    index: int  # of the call in the answer, from 0
    name: str | None
    arguments: str


class ToolCallParser(Protocol):
    """Both return (content that is part of no call, news of calls), and raise nothing. `finish` comes last."""

    def feed(self, text: str) -> tuple[str, list[CallDelta]]: ...

    def finish(self) -> tuple[str, list[CallDelta]]:
        """The end of the text: what was held back."""


class _End(Exception):
    """The text is over."""


class NoCall(Exception):
    """The character just read, or all that is held, is part of no call."""


class _Written(msgspec.Struct):
    """A call as the model wrote it."""

    name: str = ""
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class CallParser(ABC):
    """What the formats share: holding, telling, and the reading of a call's object. They bring `_read`."""

    def __init__(self) -> None:
        self._held: list[str] = []  # undecided; of a call that was told, what was read of it
        self._back: list[str] = []  # to be read again, the last one first
        self._gap: list[str] | None = None  # white space after a call, which is content only where content follows
        self._content: list[str] = []
        self._news: list[tuple[int, str | None, list[str]]] = []
        self._index = -1  # of the newest call
        self._told = False  # the call at hand
        self._inside = False  # an object that may be a call
        self._bare = False  # no mark announced it, so it is no call without arguments
        self._start = self._comma = 0  # in `_held`: where that object begins, and its latest member's end
        self._reading = self._answer()
        next(self._reading)

    def feed(self, text: str) -> tuple[str, list[CallDelta]]:
        for char in text:
            self._reading.send(char)
        return self._given()

    def finish(self) -> tuple[str, list[CallDelta]]:
        with suppress(StopIteration):
            self._reading.send("")
        return self._given()

    def _given(self) -> tuple[str, list[CallDelta]]:
        content, news = "".join(self._content), [CallDelta(n, name, "".join(parts)) for n, name, parts in self._news]
        self._content, self._news = [], []
        return content, news

    def _answer(self) -> Reading[None]:
        with suppress(_End):
            yield from self._read()
        if self._inside and not self._told:
            self._cut()
        if not self._told:
            self._say()

    @abstractmethod
    def _read(self) -> Reading[None]:
        """The whole text of an answer, to its end."""

    def _next(self) -> Reading[str]:
        char = self._back.pop() if self._back else (yield)
        if not char:
            raise _End
        self._held.append(char)
        return char

    def _solid(self, blank: Collection[str] = BLANK) -> Reading[str]:
        while (char := (yield from self._next())) in blank:
            pass
        return char

    def _unread(self, count: int = 1) -> None:
        for _ in range(count):
            self._back.append(self._held.pop())

    def _say(self, but: int = 0) -> None:
        """What is held is content, without the last `but` characters."""
        said = len(self._held) - but
        text, self._held = "".join(self._held[:said]), self._held[said:]
        if self._gap is not None:
            self._gap.append(text)
            if not text.strip():
                return
            text, self._gap = "".join(self._gap), None
        self._content.append(text)

    def _tell(self, name: str, arguments: str = "") -> None:
        if not name:
            raise NoCall
        self._told, self._gap, self._index = True, [], self._index + 1
        self._news.append((self._index, name, [arguments]))

    def _give(self, text: str) -> None:
        if not self._news:
            self._news.append((self._index, None, []))
        self._news[-1][2].append(text)

    def _mark(self, mark: str) -> Reading[None]:
        """Content up to the mark, which stays held."""
        text = ""
        while text != mark:
            text += yield from self._next()
            if text != mark:
                kept = begun(text, mark)
                self._say(but=kept)
                text = text[len(text) - kept :]

    def _stands(self, mark: str) -> Reading[bool]:
        """Whether the mark comes next, behind white space: then both are held, otherwise they are read again."""
        before = len(self._held)
        text = yield from self._solid()
        while text != mark and mark.startswith(text):
            text += yield from self._next()
        if text != mark:
            self._unread(len(self._held) - before)
        return text == mark

    def _call(self, reading: Reading[None]) -> Reading[bool]:
        """Whether `reading` found a call. If not, what is held is content."""
        self._told, self._inside, self._start, self._comma = False, True, len(self._held), 0
        try:
            yield from reading
        except NoCall:
            self._unread()
        told, self._told, self._inside = self._told, False, False
        if told:
            self._held.clear()
        else:
            self._say()
        return told

    def _object(self, bare: bool = False) -> Reading[None]:
        """`{"name": …, "arguments": …}`; other members are not looked at."""
        self._bare = bare
        if (yield from self._solid()) != "{":
            raise NoCall
        keys: set[str] = set()
        char = ","
        while char == ",":
            key, char = yield from self._member(keys)
            keys.add(key)
            if char not in (",", "}"):
                raise NoCall
            self._comma = len(self._held) - 1
            if not self._told and (char == "}" or {"name"} < keys & {"name", *ARGUMENTS}):
                self._whole(self._comma, "{}")

    def _member(self, keys: set[str]) -> Reading[tuple[str, str]]:
        """(key, the solid character after the value)."""
        if (yield from self._solid()) != '"':
            raise NoCall
        parts: list[str] = []
        yield from self._quoted(parts.append)
        key = "".join(parts[:-1])
        if (yield from self._solid()) != ":":
            raise NoCall
        char = yield from self._solid()
        if key not in ARGUMENTS or "name" not in keys or self._told or char not in ("{", '"'):
            return key, (yield from self._value(char, lambda text: None))
        name = self._written(len(self._held) - 1, "{}}").name
        if char == "{":
            self._tell(name)
            return key, (yield from self._value(char, self._give))
        yield from self._unquoted(name)
        return key, (yield from self._solid())

    def _written(self, end: int, closing: str = "}") -> _Written:
        """The object up to `end`, closed. Raises `NoCall` where it is not JSON."""
        try:
            return msgspec.json.decode("".join(self._held[self._start : end]) + closing, type=_Written)
        except (ValueError, RecursionError):
            raise NoCall from None

    def _whole(self, end: int, absent: str) -> None:
        """Tells a call whose arguments have been read, or that has none: `absent`. Raises `NoCall`."""
        written = self._written(end)
        raw = bytes(written.arguments or written.parameters).decode()
        text = _plain(raw[1:-1]) if raw.startswith('"') else raw
        if text.strip() in ("", "null") and not (self._bare and not raw):
            text = "{}" if raw else absent
        elif not text.lstrip().startswith("{"):
            raise NoCall
        self._tell(written.name, text)

    def _cut(self) -> None:
        """The text ended in the object: a call where its name is known."""
        for end in (len(self._held), self._comma):
            with suppress(NoCall):
                return self._whole(end, "")

    def _value(self, char: str, give: Callable[[str], None]) -> Reading[str]:
        """A value that begins with `char`; returns the solid character after it."""
        if char == '"':
            give(char)
            yield from self._quoted(give)
        elif char in CLOSED_BY:
            yield from self._nested(char, give)
        else:
            while char not in BLANK and char not in ",}]":
                char = yield from self._next()
            return (yield from self._solid()) if char in BLANK else char
        return (yield from self._solid())

    def _nested(self, char: str, give: Callable[[str], None]) -> Reading[None]:
        due = [CLOSED_BY[char]]
        give(char)
        while due:
            char = yield from self._next()
            if char in CLOSED_BY:
                due.append(CLOSED_BY[char])
            elif char in "]}" and char != due.pop():
                raise NoCall
            give(char)
            if char == '"':
                yield from self._quoted(give)

    def _quoted(self, give: Callable[[str], None]) -> Reading[None]:
        """A string behind its opening quote, as it is written."""
        char = ""
        while char != '"':
            char = yield from self._next()
            give(char)
            if char == "\\":
                give((yield from self._next()))

    def _unquoted(self, name: str) -> Reading[None]:
        """Arguments in a string that holds their JSON, behind its opening quote; told once an object begins."""
        text = ""
        while (unit := (yield from self._unit())) != '"':
            if self._told:
                self._give(_plain(unit))
                continue
            text += _plain(unit)
            if text.strip():
                if not text.endswith("{"):
                    raise NoCall
                self._tell(name, text)
        if not self._told:
            self._tell(name, "{}")

    def _unit(self) -> Reading[str]:
        """A character of a string or a whole escape; of surrogates, both."""
        text = yield from self._escape()
        if HIGH.fullmatch(text):
            if (yield from self._next()) == "\\":
                self._unread()
                return text + (yield from self._escape())
            self._unread()
        return text

    def _escape(self) -> Reading[str]:
        text = yield from self._next()
        if text == "\\":
            text += yield from self._next()
        while text.startswith("\\u") and len(text) < 6:
            text += yield from self._next()
            if text[-1] not in HEX:
                self._unread()
                return text[:-1]
        return text


def _plain(text: str) -> str:
    """The characters of a string as it is written; an escape that stands for none (half a pair) stays one."""
    return ESCAPE.sub(lambda found: _decoded(found[0]), text)


def _decoded(escape: str) -> str:
    try:
        return msgspec.json.decode(f'"{escape}"', type=str)
    except ValueError:
        return escape
