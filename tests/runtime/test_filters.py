"""Cut-offs on a device against the plain rule; for flashinfer's kernels stands what their source says they do."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.device.filters import Filters, FlashinferFilters, TorchFilters


def top_k_mask_logits(logits: Tensor, top_k: Tensor) -> Tensor:
    """The k-th largest and all that are not smaller stay."""
    assert top_k.dtype == torch.int32 and logits.is_contiguous() and (top_k >= 1).all()
    kth = logits.sort(-1, descending=True).values.gather(-1, top_k.clamp(max=logits.shape[1]).long()[:, None] - 1)
    return torch.where(logits >= kth, logits, -torch.inf)


def top_p_renorm_probs(probs: Tensor, top_p: Tensor, is_deterministic: bool = False) -> Tensor:
    """The threshold is where the sum of probabilities, the largest first, reaches top_p; all of it may be missed."""
    assert top_p.dtype == torch.float32 and is_deterministic and not probs.isnan().any()
    values = probs.sort(-1, descending=True).values
    sums = values.double().cumsum(-1)
    at = (sums < (top_p * probs.sum(-1))[:, None]).sum(-1, keepdim=True).clamp(max=probs.shape[1] - 1)
    kept = torch.where(probs >= values.gather(-1, at), probs, 0.0)
    kept[top_p >= 1, -1] = 0  # rounding
    return kept / kept.sum(-1, keepdim=True).clamp(min=1e-8)


@pytest.fixture(params=["torch", "flashinfer"])
def filters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Filters:
    if request.param == "torch":
        return TorchFilters()
    kernels = SimpleNamespace(top_k_mask_logits=top_k_mask_logits, top_p_renorm_probs=top_p_renorm_probs)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(sampling=kernels))
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", kernels)
    return FlashinferFilters("cpu")


def plain(logits: np.ndarray, weights: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """One row; which ids stay."""
    stays = logits >= np.sort(logits)[-top_k]
    if top_p < 1:
        left = np.where(stays, weights.astype(float), 0)
        before = np.array([left[logits > one].sum() for one in logits])
        stays &= (before < top_p * left.sum()) | (logits == logits.max())
    return stays & (weights > 0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("wish", ["top_k", "top_p", "both", "both where top_k is wide"])
def test_what_stays_is_what_the_rule_says(filters: Filters, wish: str, tied: bool) -> None:
    draw = np.random.default_rng(len(wish) + tied)
    for vocab in (5, 60, 300):
        logits = draw.normal(0, draw.choice([0.3, 3.0], (24, 1)), (24, vocab)).astype(np.float32)
        logits = np.round(logits * 2) / 2 if tied else logits
        logits[:2, 1:] = -np.inf
        weights = np.exp(logits - logits.max(1, keepdims=True))
        weights[weights < 0.01] = 0
        top_k = draw.choice([1, 2, 4, vocab // 2, vocab] if "wide" in wish else [1, 2, 4], 24)
        top_k = np.full(24, vocab) if wish == "top_p" else top_k
        top_p = np.ones(24) if wish == "top_k" else draw.choice([1.0, 0.9, 0.4, 1e-9], 24)
        most = int(max(top_k))
        kept = filters.cut(
            torch.from_numpy(logits), torch.from_numpy(weights),
            torch.from_numpy(top_k) if wish != "top_p" else None,
            torch.from_numpy(top_p) if wish != "top_k" else None, most,
        ).numpy()  # fmt: skip
        for row in range(24):
            expected = plain(logits[row], weights[row], int(top_k[row]), float(top_p[row]))
            assert np.array_equal(kept[row], np.where(expected, weights[row], 0)), (row, top_k[row], top_p[row])


def test_the_best_stays_and_a_row_of_nan_harms_no_other(filters: Filters) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [torch.nan] * 4, [0.0, 0.0, 1.0, 0.0]])
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    kept = filters.cut(logits, weights, torch.full((3,), 4), torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64), 4)
    assert (kept[0] > 0).tolist() == [False, True, True, False]
    assert (kept[2] > 0).tolist() == [True, True, True, True]  # 0.475 of it is the best's


def test_flashinfer_is_asked_for_only_by_those_who_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", None)
    TorchFilters()
    with pytest.raises(ImportError):
        FlashinferFilters("cpu")
