"""The page ledger and the radix cache: every page has one owner, and eviction never takes a held page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.block_pool import BlockPool
from runtime.prefix_cache import ROOT, PrefixCache

SIZE = 2


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def cache_of(pages: int = 9, enabled: bool = True) -> PrefixCache:
    return PrefixCache(BlockPool(pages), SIZE, enabled)


def test_the_scratch_page_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.take(4).tolist()) == [1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="1 pages wanted, 0 free"):
        pool.take(1)


def test_dropping_twice_is_caught() -> None:
    pool = BlockPool(3)
    page = pool.take(1)
    pool.free(pool.drop(page))
    with pytest.raises(RuntimeError, match="did not hold"):
        pool.drop(page)


def test_a_wholly_cached_prompt_still_leaves_a_token() -> None:
    cache = cache_of()
    pages = cache.take(2)
    assert cache.insert(ROOT, pages, ids(1, 2, 3, 4)) == 2
    assert cache.match(ids(1, 2, 3, 4)).tolist() == pages[:1].tolist()
    assert cache.match(ids(1, 2, 3, 4, 5)).tolist() == pages.tolist()
    assert cache.match(ids(1, 9, 3, 4, 5)).tolist() == []


def test_a_second_page_with_the_same_tokens_stays_private() -> None:
    cache = cache_of()
    first, second = cache.take(1), cache.take(1)
    assert cache.insert(ROOT, first, ids(1, 2)) == 1
    assert cache.insert(ROOT, second, ids(1, 2)) == 0
    cache.release(second)
    assert cache.pool.num_free == 7


def test_eviction_takes_leaves_the_least_recently_used_first() -> None:
    cache = cache_of()
    old, new = cache.take(2), cache.take(2)
    cache.insert(ROOT, old, ids(1, 1, 2, 2))
    cache.insert(ROOT, new, ids(3, 3, 4, 4))
    cache.release(old)
    cache.release(new)
    assert cache.evict(1) == 1
    cache.release(cache.match(ids(1, 1, 2, 2, 0)))  # the root half of the old path is still there
    assert len(cache) == 3
    assert cache.evict(9) == 3
    assert cache.num_available == cache.pool.num_free == 8


def test_a_disabled_cache_keeps_nothing() -> None:
    cache = cache_of(enabled=False)
    pages = cache.take(2)
    assert cache.insert(ROOT, pages, ids(1, 2, 3, 4)) == 0
    cache.release(pages)
    assert cache.pool.num_free == 8


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=12)), max_size=40))
def test_the_ledger_balances(steps: list[tuple[int, list[int]]]) -> None:
    cache = cache_of(20)
    held: list[np.ndarray] = []
    for action, tokens in steps:
        prompt = np.array(tokens, np.int32)
        if action == 0 and held:
            cache.release(held.pop(len(tokens) % len(held)))
        elif action == 1:
            cache.evict(len(tokens))
        else:
            prefix = cache.match(prompt)
            need = len(prompt) // SIZE - len(prefix)
            if need > cache.num_available:
                cache.release(prefix)
                continue
            fresh = cache.take(max(need, 0))
            parent = int(prefix[-1]) if len(prefix) else ROOT
            cache.insert(parent, fresh, prompt[len(prefix) * SIZE :])
            held.append(np.concatenate((prefix, fresh)))
        counts = np.bincount(np.concatenate([*held, np.zeros(0, np.int32)]).astype(np.int64), minlength=20)
        assert (cache.pool.refs[1:] == counts[1:]).all()
        unheld = [page for page in cache._keys if not cache.pool.refs[page]]
        assert cache.num_unheld == len(unheld)
        assert cache.pool.num_free + len(unheld) + int((counts[1:] > 0).sum()) == 19
    for pages in held:
        cache.release(pages)
    cache.evict(20)
    assert cache.pool.num_free == 19
