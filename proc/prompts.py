"""From what a client sent to token ids: texts, conversations and ids, each checked and refused by the field's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ipc.errors import InvalidRequest, PromptTooLong
from ipc.messages import Generate, Tokenize
from runtime.tokenizer import ByteTokenizer, Tokenizer

RESERVED = {"messages", "add_generation_prompt", "continued", "tools"}
Message = dict[str, Any]
Told = Callable[[list[Message]], tuple[list[Message], dict[str, Any]]]
LONGEST_TOKEN = 256  # characters; a text longer than this many a token cannot fit and is not even encoded


class Prompts:
    """For one vocabulary and one context length. Methods raise a `RequestError` or a `TextError`."""

    def __init__(self, tokenizer: Tokenizer | ByteTokenizer, max_model_len: int, vocab_size: int) -> None:
        self.tokenizer, self.max_model_len, self.vocab_size = tokenizer, max_model_len, vocab_size

    def ids(self, message: Generate, told: Told) -> list[int]:
        """Of the one prompt the message brings; `told` makes a conversation what the template wants."""
        given = [name for name in ("prompt", "messages", "prompt_ids") if getattr(message, name) is not None]
        if len(given) != 1:
            raise InvalidRequest(f"exactly one of prompt, messages and prompt_ids is needed, got {given}", "prompt")
        for name in ("prompt_ids", "output_ids"):
            self.check_ids(getattr(message, name) or [], name)
        if message.prompt_ids is not None:
            return message.prompt_ids
        if message.prompt is not None:
            return self._text(message.prompt, True)
        conversation, variables = told(text_messages(message.messages or []))
        variables = variables | self._variables(message.chat_template_kwargs)
        if message.continue_final_message:
            return self._continued(conversation, variables)
        return self._chat(conversation, message.add_generation_prompt, variables)

    def tokenize(self, message: Tokenize) -> list[int]:
        if (message.text is None) == (message.messages is None):
            raise InvalidRequest("exactly one of text and messages is needed", "text")
        if message.text is not None:
            return self._text(message.text, message.add_special_tokens)
        return self._chat(text_messages(message.messages or []), True, {})

    def check_ids(self, ids: list[int], name: str) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            raise InvalidRequest(f"token ids must be between 0 and {self.vocab_size - 1}", name)

    def _text(self, text: str, add_special: bool) -> list[int]:
        self._check_length(text)
        return self.tokenizer.encode(text, add_special)

    def _check_length(self, text: str) -> None:
        if len(text) > self.max_model_len * LONGEST_TOKEN:
            raise PromptTooLong(f"{len(text)} characters cannot fit {self.max_model_len} tokens", "prompt")

    def _continued(self, conversation: list[Message], variables: dict[str, Any]) -> list[int]:
        """The conversation up to the end of its last message, with nothing of the template behind it."""
        if conversation[-1]["role"] != "assistant":
            raise InvalidRequest("the last message to be continued must be the assistant's", "continue_final_message")
        self._check_length("".join(part["content"] for part in conversation))
        return self.tokenizer.chat(conversation, False, continued=True, **variables)

    def _chat(self, conversation: list[Message], prompt_follows: bool, variables: dict[str, Any]) -> list[int]:
        self._check_length("".join(message["content"] for message in conversation))
        return self.tokenizer.chat(conversation, prompt_follows, **variables)

    def _variables(self, given: dict[str, Any]) -> dict[str, Any]:
        reserved = RESERVED & set(given)
        if reserved:
            raise InvalidRequest(f"chat_template_kwargs must not name {min(reserved)}", "chat_template_kwargs")
        return given

    def bad_words(self, words: list[str]) -> list[tuple[int, ...]]:
        """The ids of each word at the beginning of a text and, where that is another token, after a blank."""
        found = []
        for word in words:
            first = tuple(self.tokenizer.encode(word.lstrip(), False))
            after = tuple(self.tokenizer.encode(f" {word.lstrip()}", False))
            found.append(first)
            if len(after) == len(first) and after[0] != first[0]:
                found.append(after)
        return found


def text_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose content is text: parts of type `text` are joined. Raises `InvalidRequest` that names the place."""
    if not messages:
        raise InvalidRequest("messages must not be empty", "messages")
    return [message | {"content": _text(message, n)} for n, message in enumerate(messages)]


def _text(message: dict[str, Any], n: int) -> str:
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"messages[{n}].role must be a text", "messages")
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return ""
    if not isinstance(content, list):
        raise InvalidRequest(f"messages[{n}].content must be a text or a list of parts", "messages")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"messages[{n}].content has a part that is not of type text", "messages")
    return "".join(part["text"] for part in content)
