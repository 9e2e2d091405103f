"""The messages inside the server: positional, their arrays little-endian bytes. Knows no socket."""

from __future__ import annotations

import msgspec

from ipc.histogram import Histogram
from ipc.messages import Priority
from ipc.sampling_params import U64, SamplingParams
from ipc.shared_memory import Shape


class Admit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request for the engine, new or resumed."""

    request: U64  # unique among the live ones
    tokenizer: U64  # index of the tokenizer that gets its tokens
    prompt_ids: bytes  # <i4
    output_ids: bytes  # <i4: already generated and delivered
    params: SamplingParams
    seed: U64  # the tokenizer draws one where the caller gave none
    priority: Priority = 0
    vocab: U64 = 0  # ids from this one on are no tokens; 0: the model's vocabulary is the tokenizer's
    bad_words: list[tuple[int, ...]] = []  # the ids of `params.bad_words`
    constrained: bool = False  # the grammar of this number is compiled, and each draw waits for its mask


class Cancel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nobody wants the rest: aborted, or ended by a stop string. Unknown ids are ignored."""

    request: U64


class Compile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A grammar for a request that has not been admitted yet; answered by `Compiled` or `Rejected`."""

    request: U64
    tokenizer: U64
    kind: str  # a field of StructuredOutputs, or lark
    text: str  # JSON for json and choice
    param: str  # the caller's field that asks for it
    output_ids: bytes  # <i4: already generated


class Forget(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The request of that grammar is over."""

    request: U64


class Compiled(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The grammar is there, and its first mask could be computed."""

    request: U64
    replica: U64


class Ask(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A tokenizer wants the replica's figures for a status, or its last steps for a trace."""

    tokenizer: U64
    ask: U64
    steps: U64 = 0  # how many of the last ones; 0: the figures


class Started(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request got its slot."""

    request: int
    cached_tokens: int
    queued: int  # nanoseconds until then


class Told(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log probabilities of consecutive tokens of a request, as the worker told them."""

    request: int
    offset: int  # index of the first among the output; below 0: in the prompt
    width: int  # entries a token
    ids: bytes  # <i4
    values: bytes  # <f4
    ranks: bytes  # <i4, one a token


class TokenBatch(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The tokens of one step for one tokenizer, a row each."""

    scheduler: int
    step: int
    requests: bytes  # <u8
    offsets: bytes  # <i4: index of the token among its request's output; receivers drop what they have
    ids: bytes  # <i4
    finishes: bytes  # u1: 0 goes on, 1 stop, 2 length
    started: list[Started] = []  # those whose first token this is
    logprobs: list[Told] = []


class Rejected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request's last word when it cannot be admitted."""

    request: U64
    code: str  # of ipc.errors
    message: str
    param: str | None = None


class ReplicaReady(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A scheduler and its worker are up."""

    scheduler: int
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    device: str


class Load(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What a replica answers to `Ask`: its figures, or a row for each of its last steps."""

    scheduler: int
    ask: int
    figures: dict[str, float]
    histograms: dict[str, Histogram] = {}
    columns: list[str] = []
    rows: list[list[int]] = []


class Alive(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To schedulers: a worker with nothing to do is still there. To tokenizers: a grammar process, whatever it does."""

    index: U64 = 0  # a worker's rank in its replica, or a grammar process's replica


class TableExport(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Where a worker's TokenTable is on its GPU. Void once the worker has ended; another one has another epoch."""

    epoch: U64
    device: str  # PCI bus id: ordinals are each process's own
    memory: bytes  # cudaIpcMemHandle_t
    offset: U64  # of the table in that memory
    dtype: str  # of ids
    shape: Shape  # all other offsets follow from it
    events: list[bytes]  # cudaIpcEventHandle_t, one for each entry of the ring
    process: U64  # its own handles are no use to it: there the table and its events are
    address: U64
    local_events: list[U64]


ToScheduler = Admit | Cancel | Ask
ToTokenizer = TokenBatch | Compiled | Rejected | ReplicaReady | Load | Alive
