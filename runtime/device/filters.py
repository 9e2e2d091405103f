"""top_k and top_p on a device, as `runtime.sampling_ops` has them: cut-offs, in this order, equals share their fate.

Members: torch, which sorts, and flashinfer's kernels (github.com/flashinfer-ai/flashinfer, read at 0.6.13), which count
digits instead. `torch.where` with a number would copy it to the device and wait: hence `masked_fill` everywhere.
"""

from __future__ import annotations

import importlib
from typing import Protocol

import torch
from torch import Tensor


class Filters(Protocol):
    def cut(self, logits: Tensor, weights: Tensor, top_k: Tensor | None, top_p: Tensor | None, most: int) -> Tensor:
        """`weights`, float32[S, vocab], with 0 where an id is left out; rows without a distribution come back anyhow.

        `top_k` int64[S] in 1..vocab, vocab where it is off; `top_p` float64[S], 1 where it is off; None: off for all.
        All cut-offs lie among the `most` largest `logits`, float32[S, vocab]. The largest one always stays.
        """


class TorchFilters:
    """`Filters`, anywhere."""

    def cut(self, logits: Tensor, weights: Tensor, top_k: Tensor | None, top_p: Tensor | None, most: int) -> Tensor:
        values, ids = logits.topk(most)
        sorted_weights = weights.gather(-1, ids).double()
        if top_k is not None:
            kth = values.gather(-1, top_k.clamp(max=most)[:, None] - 1)
            kth.masked_fill_((top_k >= logits.shape[1])[:, None], -torch.inf)
            weights = weights.masked_fill(logits < kth, 0.0)
            sorted_weights.masked_fill_(values < kth, 0.0)
        if top_p is not None:
            share = top_p * weights.sum(-1, dtype=torch.float64)
            stays = sorted_weights.cumsum(-1) - sorted_weights < share[:, None]
            stays[:, :1].fill_(True)
            cutoff = values.masked_fill(~stays, torch.inf).amin(-1).masked_fill(top_p >= 1, -torch.inf)
            weights = weights.masked_fill(logits < cutoff[:, None], 0.0)
        return weights


class FlashinferFilters:
    """`Filters` on a GPU that flashinfer knows. Its top_p compares weights, to which different logits may round alike.

    Raises `ImportError` where flashinfer is not there. Its kernels are built now if they have to be, not at a request.
    """

    def __init__(self, device: str) -> None:
        self._kernels = importlib.import_module("flashinfer.sampling")
        one = torch.ones(1, 8, device=device)
        self.cut(one, one, torch.full_like(one[:, 0], 4, dtype=torch.int64), one[:, 0] / 2, 8)

    def cut(self, logits: Tensor, weights: Tensor, top_k: Tensor | None, top_p: Tensor | None, most: int) -> Tensor:
        if top_k is not None:
            kept = self._kernels.top_k_mask_logits(logits, top_k.int())
            weights = weights.masked_fill(kept == -torch.inf, 0.0)
        if top_p is not None:
            total = weights.sum(-1, keepdim=True)
            shares = (weights / total).masked_fill_(~(total > 0), 0.0)  # a search among NaN would not end
            # sums that do not depend on the order in which threads come to them
            kept = self._kernels.top_p_renorm_probs(shares, top_p.float(), is_deterministic=True)
            weights = weights.masked_fill((kept <= 0) & (top_p < 1)[:, None], 0.0)
        return weights
