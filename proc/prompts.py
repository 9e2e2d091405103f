"""From what a client sent to token ids: texts, conversations and ids, each checked and refused by the field's name."""

from __future__ import annotations

from typing import Any

from ipc.errors import InvalidRequest, PromptTooLong
from ipc.messages import Generate, Tokenize
from runtime.tokenizer import ByteTokenizer, Tokenizer

LONGEST_TOKEN = 256  # characters; a text longer than this many a token cannot fit and is not even encoded


class Prompts:
    """For one vocabulary and one context length. Methods raise a `RequestError` or a `TextError`."""

    def __init__(self, tokenizer: Tokenizer | ByteTokenizer, max_model_len: int, vocab_size: int) -> None:
        self.tokenizer, self.max_model_len, self.vocab_size = tokenizer, max_model_len, vocab_size

    def ids(self, message: Generate) -> list[int]:
        """Of the one prompt the message brings."""
        given = [name for name in ("prompt", "messages", "prompt_ids") if getattr(message, name) is not None]
        if len(given) != 1:
            raise InvalidRequest(f"exactly one of prompt, messages and prompt_ids is needed, got {given}", "prompt")
        for name in ("prompt_ids", "output_ids"):
            self.check_ids(getattr(message, name) or [], name)
        if message.prompt_ids is not None:
            return message.prompt_ids
        if message.prompt is not None:
            return self._text(message.prompt, True)
        if message.continue_final_message:
            return self._continued(message)
        return self._chat(message.messages or [], message.add_generation_prompt, message.chat_template_kwargs)

    def tokenize(self, message: Tokenize) -> list[int]:
        if (message.text is None) == (message.messages is None):
            raise InvalidRequest("exactly one of text and messages is needed", "text")
        if message.text is not None:
            return self._text(message.text, message.add_special_tokens)
        return self._chat(message.messages or [], True, {})

    def check_ids(self, ids: list[int], name: str) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            raise InvalidRequest(f"token ids must be between 0 and {self.vocab_size - 1}", name)

    def _text(self, text: str, add_special: bool) -> list[int]:
        self._check_length(text)
        return self.tokenizer.encode(text, add_special)

    def _check_length(self, text: str) -> None:
        if len(text) > self.max_model_len * LONGEST_TOKEN:
            raise PromptTooLong(f"{len(text)} characters cannot fit {self.max_model_len} tokens", "prompt")

    def _continued(self, message: Generate) -> list[int]:
        """The conversation up to the end of its last message, with nothing of the template behind it."""
        conversation = text_messages(message.messages or [])
        if "add_generation_prompt" in message.chat_template_kwargs or conversation[-1]["role"] != "assistant":
            raise InvalidRequest("the last message to be continued must be the assistant's", "continue_final_message")
        self._check_length("".join(part["content"] for part in conversation))
        return self.tokenizer.chat(conversation, False, continued=True, **message.chat_template_kwargs)

    def _chat(self, messages: list[dict[str, Any]], prompt_follows: bool, variables: dict[str, Any]) -> list[int]:
        conversation = text_messages(messages)
        self._check_length("".join(message["content"] for message in conversation))
        reserved = {"messages", "add_generation_prompt", "continued"} & set(variables)
        if reserved:
            raise InvalidRequest(f"chat_template_kwargs must not name {min(reserved)}", "chat_template_kwargs")
        return self.tokenizer.chat(conversation, prompt_follows, **variables)


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
    if not isinstance(content, list):
        raise InvalidRequest(f"messages[{n}].content must be a text or a list of parts", "messages")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"messages[{n}].content has a part that is not of type text", "messages")
    return "".join(part["text"] for part in content)
