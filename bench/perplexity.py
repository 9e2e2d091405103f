"""`sidestep bench perplexity`: what quantization costs in quality, as perplexity of a fixed text against none.

The text is the Python language reference that comes with the interpreter, in chunks of `--chunk` tokens, each seen by
the model alone. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
from pydoc_data.topics import topics

from ipc.errors import PromptTooLong
from ipc.sampling_params import SamplingParams
from proc.llm import LLM
from proc.settings import UsageError


def main(given: argparse.Namespace) -> int:
    if given.chunk < 2:
        raise UsageError("--chunk must be at least 2")
    figures = {kind: measure(given, kind) for kind in given.quantization}
    first = figures[given.quantization[0]]
    if not given.json:
        print(f"{given.model}: {given.chunks} chunks of {given.chunk} tokens")
        for kind, value in figures.items():
            print(f"{kind:<8}{value:>10.4f}{value / first:>9.4f}")
    print(json.dumps({"model": given.model, "tokens": given.chunks * given.chunk, "perplexity": figures}))
    return 0


def measure(given: argparse.Namespace, quantization: str) -> float:
    """Perplexity of all tokens but each chunk's first."""
    text = "\n".join(topics[name] for name in sorted(topics))
    with LLM(given.model, quantization=quantization, max_model_len=given.chunk + 8) as llm:
        try:
            ids = llm.client.tokenize(text[: given.chunk * given.chunks * 8])
        except PromptTooLong as error:  # many small chunks
            raise UsageError(f"--chunks {given.chunks} of --chunk {given.chunk}: {error}") from None
        if len(ids) < given.chunk * given.chunks:
            raise UsageError(f"--chunks {given.chunks} of --chunk {given.chunk}: the text has {len(ids)} tokens")
        chunks = [ids[at * given.chunk : (at + 1) * given.chunk] for at in range(given.chunks)]
        told = llm.generate(chunks, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    losses = [
        -entry[token].logprob
        for chunk, answer in zip(chunks, told, strict=True)
        for token, entry in zip(chunk, answer.prompt_logprobs or [], strict=True)
        if entry is not None
    ]
    return round(math.exp(sum(losses) / len(losses)), 4)
