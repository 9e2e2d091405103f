"""What a scheduler may use: slots, rows, tokens and pages, checked against one another once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What a scheduler may use. Raises `ValueError` where the numbers contradict one another."""

    num_blocks: int  # KV pages, scratch page 0 included
    block_size: int = 16
    max_model_len: int = 2048  # tokens of a request, prompt and output
    max_num_seqs: int = 64  # rows of a step
    max_num_batched_tokens: int = 2048  # tokens of a step
    max_num_queued: int | None = None  # waiting requests; None: no limit
    depth: int = 1  # steps planned past the last result
    prefix_cache: bool = True
    num_slots: int | None = None  # tests only; default 1 + (1 + depth) * max_num_seqs

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs, a token for each row")
        if self.max_model_len > (self.num_blocks - 1) * self.block_size:
            raise ValueError(f"max_model_len {self.max_model_len} does not fit {self.num_blocks - 1} KV pages")

    @property
    def slots(self) -> int:
        return self.num_slots or 1 + (1 + self.depth) * self.max_num_seqs
