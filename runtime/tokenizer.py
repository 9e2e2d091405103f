"""A model's tokenizer, from the files of its folder: text to ids, the bytes of each id, and the chat template.

The `tokenizers` library encodes. The way back is ours: every id has its bytes (`bytes_of`), and `runtime.text` turns
bytes into characters as they come. Templates run in jinja2's sandbox. Knows no torch and no transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Encoder

from runtime.text import Utf8Stream

OPEN, CLOSE = "\uf8f0", "\uf8f1"  # private marks around what must stay text while a template is rendered
LONG = 4096  # characters; the last such text is not encoded again, since answers to one prompt are asked for one by one
END = "\uf8f2"  # the same, behind a text that is to be continued
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>")
SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class TokenizerError(ValueError):
    """Files that cannot be used; one clear line."""


class TextError(ValueError):
    """A caller's text or conversation that cannot be encoded; `param` names the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class Tokenizer:
    """Reads `tokenizer.json` and, where present, tokenizer_config, generation_config, config and the chat template."""

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        try:
            self._encoder = Encoder.from_file(str(folder / "tokenizer.json"))
            spec = json.loads((folder / "tokenizer.json").read_text("utf-8"))
            settings, generation, config = (
                _optional_json(folder / f"{name}.json") for name in ("tokenizer_config", "generation_config", "config")
            )
        except Exception as error:  # the library raises bare Exception for a broken file
            raise TokenizerError(f"{folder}: the tokenizer cannot be read: {error}") from None
        self.vocab_size = max(self._encoder.get_vocab(with_added_tokens=True).values()) + 1
        self.eos_ids = _eos_ids(generation, config)
        self.sampling_defaults: Mapping[str, float] = {
            name: generation[name] for name in SAMPLING_DEFAULTS if generation.get(name) is not None
        }
        self.special_ids = {entry["id"] for entry in spec.get("added_tokens", ()) if entry["special"]}
        self._added = {entry["id"]: entry["content"] for entry in spec.get("added_tokens", ())}
        self._to_bytes = _decoder_of(spec)
        self._names = {
            name: _content(settings[name]) for name in ("bos_token", "eos_token", "pad_token") if settings.get(name)
        }
        template = folder / "chat_template.jinja"
        stored = template.read_text("utf-8") if template.exists() else settings.get("chat_template")
        self.template_text: str | None = chat_template or (stored if isinstance(stored, str) else None)
        self.bytes_of = lru_cache(maxsize=None)(self._bytes_of)
        self.shown_bytes_of = lru_cache(maxsize=None)(self._shown_bytes_of)
        self.marked_bytes_of = lru_cache(maxsize=None)(self._marked_bytes_of)
        self._encode_once = lru_cache(maxsize=1)(self._encode_anew)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Raises `TextError` for text that is not Unicode (a lone surrogate)."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TextError("prompt", f"the text has a lone surrogate at position {error.start}") from None
        return (self._encode_anew if len(text) < LONG else self._encode_once)(text, add_special).copy()

    def _encode_anew(self, text: str, add_special: bool) -> list[int]:
        ids: list[int] = self._encoder.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """The text of whole ids, the same as a stream of them shows."""
        of = self.shown_bytes_of if skip_special else self.bytes_of
        return Utf8Stream().feed(b"".join(of(token) for token in ids), final=True)

    def chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        continued: bool = False,
        **variables: Any,
    ) -> list[int]:
        """A conversation through the model's template; `continued` ends it where the last message's text ends.

        Control tokens in a message's text stay text. Raises `TextError`, in the template's words if it refuses.
        """
        try:
            masked: list[dict[str, Any]] = self._masked(messages)
            variables = self._masked(variables)
        except RecursionError:
            raise TextError("messages", "the messages are nested too deeply") from None
        if continued:
            masked[-1]["content"] = str(masked[-1].get("content") or "").rstrip() + END
        text = self.render(masked, add_generation_prompt, **variables).partition(END)[0]
        ids: list[int] = []
        for plain, hidden in _split(text):
            ids += self.encode(plain, add_special=False) if plain else []
            ids += self._as_text(hidden) if hidden else []
        return ids

    def _masked(self, value: Any) -> Any:
        """Every text in it masked."""
        if isinstance(value, str):
            return self._mask(value)
        if isinstance(value, list):
            return [self._masked(one) for one in value]
        return {name: self._masked(one) for name, one in value.items()} if isinstance(value, dict) else value

    def _mask(self, text: str) -> str:
        """`text` with the control tokens in it put between marks, so that rendering does not make them tokens."""
        return self._control.sub(lambda found: f"{OPEN}{found[0].encode().hex()}{CLOSE}", text)

    def _as_text(self, hidden: str) -> list[int]:
        """The ids of a control token's letters."""
        self._encoder.encode_special_tokens = True
        try:
            ids: list[int] = self._encoder.encode(hidden, add_special_tokens=False).ids
            return ids
        finally:
            self._encoder.encode_special_tokens = False

    @cached_property
    def _control(self) -> re.Pattern[str]:
        """Finds the vocabulary's control tokens (the longest first) and the marks themselves in a text."""
        words = sorted((str(self._added[token]) for token in self.special_ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, (*words, OPEN, CLOSE, END))))

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        if self._template is None:
            raise TextError("messages", "the model has no chat template; send a prompt, or start with --chat-template")
        try:
            return str(
                self._template.render(
                    messages=messages, add_generation_prompt=add_generation_prompt, **(self._names | variables)
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise TextError("messages", f"the chat template refuses: {error}") from None

    @cached_property
    def _template(self) -> Any:
        if self.template_text is None:
            return None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(self.template_text)
        except TemplateError as error:
            raise TokenizerError(f"the chat template cannot be read: {error}") from None

    def _bytes_of(self, token: int) -> bytes:
        """A token's bytes; b"" for an id the vocabulary does not have (a padded head)."""
        if token in self._added:
            return str(self._added[token]).encode("utf-8")
        text: str | None = self._encoder.id_to_token(token)
        return b"" if text is None else self._to_bytes(text)

    def _shown_bytes_of(self, token: int) -> bytes:
        return b"" if token in self.special_ids else self._bytes_of(token)

    def _marked_bytes_of(self, token: int) -> bytes:
        """As `shown_bytes_of`, with the special tokens that mark tool calls and reasoning."""
        marks = self._added.get(token) in MARKS
        return self._bytes_of(token) if marks else self._shown_bytes_of(token)


def _split(text: str) -> Iterator[tuple[str, str]]:
    """Parts of a rendered text: (what is encoded as it stands, the letters of a control token behind it)."""
    *marked, rest = text.split(CLOSE)
    for part in marked:
        plain, _, hidden = part.partition(OPEN)
        try:
            yield plain, bytes.fromhex(hidden).decode()
        except ValueError:
            raise TextError(
                "messages", f"the conversation must not use the characters {OPEN!r} and {CLOSE!r}"
            ) from None
    yield rest, ""


def _optional_json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text("utf-8"))) if file.exists() else {}


def _eos_ids(*sources: dict[str, Any]) -> tuple[int, ...]:
    for source in sources:
        found = source.get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    return ()


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _decoder_of(spec: dict[str, Any]) -> Callable[[str], bytes]:
    """Token text → bytes, by the kind of decoder that tokenizer.json names."""
    decoder = spec.get("decoder") or {}
    kinds = {decoder.get("type"), *(part["type"] for part in decoder.get("decoders", ()))}
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"ByteFallback", "Metaspace"}:
        return _sentence_piece
    raise TokenizerError(
        f"a tokenizer with decoder {decoder.get('type')} is not supported (ByteLevel, ByteFallback are)"
    )


def _byte_level(text: str) -> bytes:
    table = _byte_table()
    try:
        return bytes(map(table.__getitem__, text))
    except KeyError:  # letters of an added token
        return b"".join(bytes((table[letter],)) if letter in table else letter.encode("utf-8") for letter in text)


def _sentence_piece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes((int(text[3:5], 16),))
    return text.replace("▁", " ").encode("utf-8")


@lru_cache(maxsize=1)
def _byte_table() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: the printable ones stand for themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class ByteTokenizer:
    """The 256 bytes and one EOS, for the simulated device without a model. The interface of `Tokenizer`."""

    vocab_size = 257
    eos_ids = (256,)
    special_ids = frozenset(eos_ids)
    sampling_defaults: Mapping[str, float] = MappingProxyType({})
    template_text: str | None = None

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        try:
            return list(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise TextError("prompt", f"the text has a lone surrogate at position {error.start}") from None

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return Utf8Stream().feed(b"".join(map(self.bytes_of, ids)), final=True)

    def chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        continued: bool = False,
        **variables: Any,
    ) -> list[int]:
        """`role: content` lines. Raises `TextError` for messages that have no text content."""
        if not all(isinstance(m.get("content"), str) and isinstance(m.get("role"), str) for m in messages):
            raise TextError("messages", "each message needs a role and a content, both text")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join([*lines, "assistant:"] if add_generation_prompt else lines))

    def bytes_of(self, token: int) -> bytes:
        return bytes((token,)) if token < 256 else b""

    shown_bytes_of = marked_bytes_of = bytes_of
