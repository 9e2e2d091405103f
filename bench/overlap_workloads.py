"""What `sidestep bench overlap` asks: the published run's lengths, small steps, shared prefixes, and Poisson arrivals.

Prompts are token ids, the same for a seed. Every other request samples, with a seed of its own, so that equal tokens
across modes say something about random numbers too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proc.settings import UsageError

SHAREGPT = (
    3000,
    673_672,
    581_627,
)  # requests, input and output tokens of the published run (SGLang's overlap pull request)
STREAMS = 256  # of small-steps
SHORTEST, LONGEST = 4, 1024  # tokens; the field's filter of ShareGPT


@dataclass(frozen=True)
class Ask:
    """One request; `due` is in seconds from the start, `after` is an earlier one whose end it waits for."""

    prompt_ids: list[int]
    output_len: int
    due: float = 0.0
    after: int | None = None
    schema: dict[str, Any] | None = None  # of JSON that the output must be


@dataclass(frozen=True)
class Variant:
    """A way to run the same requests. `load`: arrivals as a share of the saturation rate, 0 for all at once.

    `structured`: of the streams, so many draw under a grammar.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    load: float = 0.0
    structured: int = 0
    modes: tuple[str, ...] = ()  # only these; () for all


@dataclass(frozen=True)
class Workload:
    asks: list[Ask]
    device: str
    settings: dict[str, Any]
    variants: list[Variant] = field(default_factory=lambda: [Variant("")])


def workload(name: str, num_prompts: int | None, vocab_size: int, seed: int) -> Workload:
    """Raises `UsageError` for a name or a number that cannot be."""
    if num_prompts is not None and num_prompts < 1:
        raise UsageError("--num-prompts must be at least 1")
    return WORKLOADS[name](num_prompts, vocab_size, np.random.default_rng(seed))


def sharegpt_lengths() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(input, output) lengths of the 3000: log-normal as ShareGPT's are, with exactly the published sums."""
    draw = np.random.default_rng(0)
    count, inputs, outputs = SHAREGPT
    return _lengths(draw, count, inputs, 1.35), _lengths(draw, count, outputs, 1.1)


def _lengths(draw: np.random.Generator, count: int, total: int, sigma: float) -> NDArray[np.int64]:
    """`count` lengths within the bounds that sum to `total`."""
    shape = draw.lognormal(0.0, sigma, count)
    low, high = 0.0, float(LONGEST)
    for _ in range(60):  # the scale whose clipped sum is just below the total
        middle = (low + high) / 2
        fits = np.clip(shape * middle, SHORTEST, LONGEST).astype(np.int64).sum() <= total
        low, high = (middle, high) if fits else (low, middle)
    lengths = np.clip(shape * low, SHORTEST, LONGEST).astype(np.int64)
    missing = total - int(lengths.sum())
    room = np.flatnonzero(lengths < LONGEST)[:missing]
    lengths[room] += 1
    return lengths


def _ids(draw: np.random.Generator, length: int, vocab_size: int) -> list[int]:
    found: list[int] = draw.integers(0, vocab_size, length).tolist()
    return found


def _sharegpt(num_prompts: int | None, vocab_size: int, draw: np.random.Generator) -> Workload:
    count = num_prompts or SHAREGPT[0]
    if count > SHAREGPT[0]:
        raise UsageError(f"--num-prompts: sharegpt-3000 has {SHAREGPT[0]} requests")
    inputs, outputs = sharegpt_lengths()
    asks = [Ask(_ids(draw, int(inputs[n]), vocab_size), int(outputs[n])) for n in range(count)]
    return Workload(asks, "sim:h100-llama-3.1-8b", {"max_num_seqs": 512, "max_num_batched_tokens": 8192})


def _small_steps(num_prompts: int | None, vocab_size: int, draw: np.random.Generator) -> Workload:
    """256 streams, each of one request after another; steps take about 3 ms. All streams are equally long."""
    count = num_prompts or 4096
    if count % STREAMS:
        raise UsageError(f"--num-prompts: small-steps has {STREAMS} streams and needs a multiple of that")
    outputs = draw.integers(128, 385, (count // STREAMS, STREAMS))
    even = outputs.sum(0).max()
    outputs = outputs * even // outputs.sum(0)
    outputs[-1] += even - outputs.sum(0)
    asks = [
        Ask(_ids(draw, 128, vocab_size), int(length), after=number - STREAMS if number >= STREAMS else None)
        for number, length in enumerate(outputs.ravel())
    ]
    return Workload(asks, "sim:h200-qwen3-0.6b", {"max_num_seqs": STREAMS, "max_num_batched_tokens": 8192})


def _shared_prefix(num_prompts: int | None, vocab_size: int, draw: np.random.Generator) -> Workload:
    """Eight long beginnings, each followed by many short questions."""
    beginnings = [_ids(draw, 1024, vocab_size) for _ in range(8)]
    asks = [Ask(beginnings[n % 8] + _ids(draw, 64, vocab_size), 96) for n in range(num_prompts or 512)]
    variants = [Variant("radix"), Variant("no-radix", {"disable_radix_cache": True})]
    settings = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    return Workload(asks, "sim:h100-llama-3.1-8b", settings, variants)


def _poisson(num_prompts: int | None, vocab_size: int, draw: np.random.Generator) -> Workload:
    """Arrivals at half and at nine tenths of the saturation rate, and so few that requests hardly meet."""
    asks = [Ask(_ids(draw, 128, vocab_size), 64) for _ in range(num_prompts or 400)]
    variants = [Variant("all at once"), *(Variant(f"{load:g} of saturation", load=load) for load in (0.9, 0.5, 0.005))]
    return Workload(asks, "sim:h100-llama-3.1-8b", {"max_num_seqs": 256, "max_num_batched_tokens": 8192}, variants)


ORDERS: dict[str, Any] = {  # longer than any output; no maxLength, as in OpenAI's strict schemas
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
            "title": {"type": "string"},
            "status": {"enum": ["open", "paid", "shipped", "returned"]},
            "price": {"type": "number", "minimum": 0, "maximum": 9999},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        },
        "required": ["sku", "title", "status", "price"],
        "additionalProperties": False,
    },
}


def with_grammars(work: Workload, rows: int) -> Workload:
    """Each variant, and each once more with `rows` of the streams under a grammar."""
    if not rows:
        return work
    if not 1 <= rows <= STREAMS:
        raise UsageError(f"--grammar-rows must be between 1 and {STREAMS}")
    name = f"{rows} grammar rows"
    more = [replace(one, name=f"{one.name} {name}".strip(), structured=rows) for one in work.variants]
    return replace(work, variants=[*work.variants, *more])


def structured(asks: list[Ask], rows: int) -> list[Ask]:
    """`rows` of each `STREAMS` requests, spread evenly, with `ORDERS` as their schema."""
    chosen = {stream * STREAMS // rows for stream in range(rows)}
    return [replace(ask, schema=ORDERS) if n % STREAMS in chosen else ask for n, ask in enumerate(asks)]


WORKLOADS = {
    "sharegpt-3000": _sharegpt,
    "small-steps": _small_steps,
    "shared-prefix": _shared_prefix,
    "poisson": _poisson,
}
