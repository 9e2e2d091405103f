"""What a serving benchmark asks: prompts and output lengths from a data set or drawn at random, the same for a seed."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from proc.settings import UsageError


@dataclass(frozen=True)
class Job:
    prompt: str | list[int]
    output_len: int
    answer: str | None = None  # whose tokens, where the server can count them, are the output's length


def jobs(given: argparse.Namespace, vocab_size: int) -> list[Job]:
    """`num_prompts` jobs. Raises `UsageError` for options or files that do not fit."""
    if given.num_prompts < 1:
        raise UsageError("--num-prompts must be at least 1")
    if given.request_rate <= 0 or given.burstiness <= 0:
        raise UsageError("--request-rate and --burstiness must be above 0")
    if given.dataset_name == "random":
        return _random(given, vocab_size)
    if not given.dataset_path:
        raise UsageError(f"--dataset-name {given.dataset_name} needs --dataset-path")
    found = _read(given)
    if not found:
        raise UsageError(f"{given.dataset_path} holds no prompt")
    order = np.random.default_rng(given.seed).permutation(len(found))
    return [found[order[n % len(found)]] for n in range(given.num_prompts)]


def _random(given: argparse.Namespace, vocab_size: int) -> list[Job]:
    ratio = given.random_range_ratio
    if not 0 <= ratio < 1:
        raise UsageError("--random-range-ratio must be at least 0 and below 1")
    draw = np.random.default_rng(given.seed)

    def lengths(mean: int) -> list[int]:
        low, high = max(1, int(mean * (1 - ratio))), int(mean * (1 + ratio))
        return [int(n) for n in draw.integers(low, max(low, high) + 1, given.num_prompts)]

    inputs, outputs = lengths(given.random_input_len), lengths(given.random_output_len)
    return random_jobs(draw, inputs, outputs, vocab_size)


def random_jobs(
    draw: np.random.Generator, inputs: list[int], outputs: list[int], vocab_size: int, prefix_len: int = 0
) -> list[Job]:
    """Prompts of random ids, `inputs` long, after `prefix_len` ids more that all have in common."""
    prefix = draw.integers(0, vocab_size, prefix_len).tolist()
    return [
        Job(prefix + draw.integers(0, vocab_size, length).tolist(), output)
        for length, output in zip(inputs, outputs, strict=True)
    ]


def _read(given: argparse.Namespace) -> list[Job]:
    """sharegpt: a JSON list of conversations; custom: a line {"prompt": ..., "output_len": ...} each."""
    try:
        text = Path(given.dataset_path).read_text("utf-8")
        if given.dataset_name == "custom":
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            return [Job(row["prompt"], int(row.get("output_len", given.random_output_len))) for row in rows]
        turns = [row["conversations"] for row in json.loads(text) if len(row["conversations"]) >= 2]
        # a token is about four characters, until a tokenizer says it better
        return [Job(t[0]["value"], max(1, len(t[1]["value"]) // 4), t[1]["value"]) for t in turns]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--dataset-path {given.dataset_path} cannot be read: {error!r}") from None
