"""What travels between a tokenizer and a scheduler. Arrays are little-endian bytes. Knows no socket and no engine."""

from __future__ import annotations

from typing import Annotated

import msgspec

U64 = Annotated[int, msgspec.Meta(ge=0)]  # msgpack itself ends at 2**64 - 1
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a caller may ask; names and defaults follow vLLM. `None` means the model's or the server's default."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 and -1 are off
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False


class Admit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request for the engine, new or resumed."""

    request: U64  # uint64, unique among the live ones
    tokenizer: U64  # index of the tokenizer that gets its tokens
    prompt_ids: bytes  # <i4
    output_ids: bytes  # <i4: already generated and delivered
    params: SamplingParams
    seed: U64  # uint64; the tokenizer draws one where the caller gave none
    priority: Priority = 0  # lower runs first


class Cancel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nobody wants the rest: aborted, or ended by a stop string. Unknown ids are ignored."""

    request: U64


class TokenBatch(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The tokens of one step for one tokenizer, a row each."""

    requests: bytes  # <u8
    offsets: bytes  # <i4: index of the token among its request's output; receivers drop what they have
    ids: bytes  # <i4
    finishes: bytes  # u1: 0 goes on, 1 stop, 2 length


class Rejected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request's last word when it cannot be admitted."""

    request: U64
    param: str  # the field at fault
    message: str


ToScheduler = Admit | Cancel
ToTokenizer = TokenBatch | Rejected
