"""Rotary embeddings: the frequencies of each scaling kind, and their application.

Sources: RoFormer (Su et al. 2021), YaRN (Peng et al. 2023), Llama 3.1.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch

from runtime.model.config import ModelConfig

Tensor = torch.Tensor


class Rope:
    """cos and sin of every position a request may have, on `device`."""

    def __init__(self, config: ModelConfig, max_len: int, device: torch.device | str = "cpu") -> None:
        self.config = config
        self.dynamic = config.rope["rope_type"] == "dynamic"
        inverse, scale = frequencies(config)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse)
        angles = torch.cat((angles, angles), -1)
        self.cos, self.sin = (part.to(device) for part in (angles.cos() * scale, angles.sin() * scale))

    @cached_property
    def halves(self) -> Tensor:
        """float32[max_len, head_dim]: the cosines of half the dimensions, which the others repeat, then the sines."""
        half = self.cos.shape[1] // 2
        return torch.cat((self.cos[:, :half], self.sin[:, :half]), -1)

    def at(self, positions: Tensor, reach: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each [T, 1, head_dim], for positions int64[T].

        `reach` int64[T]: how long the request was, as far as transformers sees, when the token was computed: its
        prompt, or all tokens up to a later one. Only the dynamic kind looks at it.
        """
        if not self.dynamic:
            return self.cos[positions].unsqueeze(1).to(dtype), self.sin[positions].unsqueeze(1).to(dtype)
        angles = positions[:, None] * dynamic_frequencies(self.config, reach)
        angles = torch.cat((angles, angles), -1).unsqueeze(1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x[T, heads, head_dim], rotated."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def dynamic_frequencies(config: ModelConfig, reach: Tensor) -> Tensor:
    """float32[T, head_dim / 2]: NTK scaling, whose base grows with a request beyond what the model was made for."""
    dim, factor, made_for = config.head_dim, config.rope["factor"], config.made_for
    length = reach.clamp(min=made_for).float()
    base = config.rope_theta * (factor * length / made_for - (factor - 1)) ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=reach.device) / dim
    inverse: Tensor = base[:, None].pow(exponents).reciprocal()
    return inverse


def frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Inverse frequencies float32[head_dim / 2], and the factor on cos and sin."""
    rope, dim = config.rope, config.head_dim
    plain = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kind = rope["rope_type"]
    if kind == "linear":
        return plain / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(plain, rope), 1.0
    if kind == "yarn":
        return _yarn(plain, config)
    return plain, 1.0


def _llama3(plain: Tensor, rope: dict[str, float]) -> Tensor:
    length, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    waves = 2 * math.pi / plain
    smooth = ((length / waves - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / rope["factor"] + smooth * plain


def _yarn(plain: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    rope, dim = config.rope, config.head_dim
    length = rope.get("original_max_position_embeddings") or config.made_for

    def dimension(rotations: float) -> float:
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension(rope.get("beta_fast") or 32)), 0)
    high = min(math.ceil(dimension(rope.get("beta_slow") or 1)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    scale = rope.get("attention_factor") or 0.1 * math.log(rope["factor"]) + 1.0
    return plain / rope["factor"] * ramp + plain * (1 - ramp), scale
