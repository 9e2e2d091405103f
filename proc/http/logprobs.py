"""Log probabilities in OpenAI's two shapes, and vLLM's for a prompt's. Knows no answer and no stream."""

from __future__ import annotations

from typing import Any

from ipc.messages import Logprob

Entries = list[Logprob]  # a token itself, then the most likely ones


def of_chat(tokens: list[Entries]) -> dict[str, Any]:
    return {"content": [_token(one[0]) | {"top_logprobs": [_token(top) for top in one[1:]]} for one in tokens]}


def of_text(tokens: list[Entries], offset: int, first: str = "") -> dict[str, Any]:
    """`offset`: characters before these tokens; `first`: text of a prompt's first token, which has no entries."""
    texts = [_text(one[0]) if one else first for one in tokens]
    offsets = [offset + sum(map(len, texts[:n])) for n in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": [one[0].logprob if one else None for one in tokens],
        "top_logprobs": [{_text(entry): entry.logprob for entry in reversed(one)} if one else None for one in tokens],
        "text_offset": offsets,
    }


def length(tokens: list[Entries]) -> int:
    """Characters of the tokens' own texts."""
    return sum(len(_text(one[0])) for one in tokens if one)


def of_prompt(tokens: list[Entries] | None) -> list[dict[str, Any] | None] | None:
    if tokens is None:
        return None
    return [
        {
            str(entry.token): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": _text(entry)}
            for entry in reversed(one)
        }
        or None
        for one in tokens
    ]


def _token(entry: Logprob) -> dict[str, Any]:
    return {"token": _text(entry), "logprob": entry.logprob, "bytes": list(entry.raw)}


def _text(entry: Logprob) -> str:
    return entry.raw.decode("utf-8", "replace")
