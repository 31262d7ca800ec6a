"""The page pool and the prefix cache: whatever happens, tables, holders and free lists agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4_backend import RequestTables, table_mirror
from dsv4_backend.replay import PagePool, PrefixCache
from dsv4_backend.table_mirror import TableMirror

WINDOW, BLOCK = 128, 512


def make_pool(pages: int = 12, window_pages: int = 8, window_page: int = 256, requests: int = 4) -> PagePool:
    return PagePool(
        page_size=256,
        window_page_size=window_page,
        num_pages=pages,
        num_window_pages=window_pages,
        max_requests=requests,
        max_len=3000,
        seed=1,
    )


def check(pool: PagePool, rows: Sequence[int], cached: Sequence[int] = ()) -> None:
    """Derives everything from the requests' page lists and compares."""
    holders: Counter[int] = Counter(cached)
    for row in rows:
        pages = list(pool.pages(row))
        holders.update(pages)
        slots = (np.array(pages)[:, None] * 256 + np.arange(256)).ravel() if pages else np.zeros(0)
        assert np.array_equal(pool.req_to_token[row, : len(slots)], slots)
        assert not pool.req_to_token[row, len(slots) :].any()
    assert {page: int(pool.refs[page]) for page in np.flatnonzero(pool.refs)} == dict(holders)
    assert 0 not in holders
    assert pool.free_pages == pool.num_pages - len(holders)
    idle_rows = set(range(len(pool.req_to_token))) - set(rows)
    assert not pool.req_to_token[sorted(idle_rows)].any()

    mapped = pool.window_of[pool.window_of > 0]
    assert len(np.unique(mapped)) == len(mapped) == pool.num_window_pages - pool.free_window_pages
    assert np.array_equal(pool.window_of > 0, pool.window_refs > 0)
    size = pool.window_page_size
    expected = np.zeros(len(pool.full_to_swa), np.int64)
    for page, part in np.argwhere(pool.window_of):
        start = page * 256 + part * size
        expected[start : start + size] = pool.window_of[page, part] * size + np.arange(size)
    expected[-1] = -1
    assert np.array_equal(pool.full_to_swa, expected)
    for row in rows:
        for index in pool.window_pages(row):
            page = pool.pages(row)[index // pool.parts]
            assert pool.window_of[page, index % pool.parts]


def test_tables_have_the_engine_shapes() -> None:
    pool = make_pool()
    assert pool.req_to_token.dtype == np.int32
    assert pool.req_to_token.shape == (5, 3072)
    assert pool.full_to_swa.dtype == np.int64
    assert len(pool.full_to_swa) == 12 * 256 + 256 + 1
    assert pool.full_to_swa[-1] == -1


def test_pages_and_rows_come_shuffled_and_the_same_for_a_seed() -> None:
    orders = []
    for _ in range(2):
        pool = make_pool()
        rows = [pool.open() for _ in range(4)]
        for row in rows:
            pool.grow(row, 700 if row == rows[0] else 256)
        orders.append((rows, [list(pool.pages(row)) for row in rows]))
    assert orders[0] == orders[1]
    assert orders[0][0] != sorted(orders[0][0]) or orders[0][1][0] != sorted(orders[0][1][0])


def test_grow_takes_pages_at_borders_only() -> None:
    pool = make_pool()
    row = pool.open()
    used = []
    for length in (1, 255, 256, 257, 512, 513):
        pool.grow(row, length)
        used.append(len(pool.pages(row)))
    assert used == [1, 1, 1, 2, 2, 3]
    pool.grow(row, 100)
    assert len(pool.pages(row)) == 3, "a request keeps what it has"
    check(pool, [row])


@pytest.mark.parametrize(("pages", "window_pages"), [(3, 8), (8, 3)])
def test_grow_that_does_not_fit_changes_nothing(pages: int, window_pages: int) -> None:
    pool = make_pool(pages, window_pages)
    row = pool.open()
    pool.grow(row, 300)
    assert pool.reach(row) == 768
    before = pool.req_to_token.copy(), pool.full_to_swa.copy(), pool.free_pages, pool.free_window_pages
    assert pool.missing(row, 769) == (2, 2)
    wanted = f"2 full and 2 window pages .* request {row} .* 769 .* got {pages - 2} and {window_pages - 2} .* reach 768"
    with pytest.raises(ValueError, match=wanted):
        pool.grow(row, 769)
    after = pool.req_to_token, pool.full_to_swa, pool.free_pages, pool.free_window_pages
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    pool.grow(row, 768)
    check(pool, [row])


@pytest.mark.parametrize("window_page", [256, 128, 64])
def test_window_pages_go_once_no_query_sees_them(window_page: int) -> None:
    pool = make_pool(window_pages=40, window_page=window_page)
    row = pool.open()
    pool.grow(row, 1000)
    for keep_from in (-5, 0, window_page - 1, window_page, 600, 872):
        pool.trim_window(row, keep_from)
        resident = pool.full_to_swa[pool.slots(row, 0, 1000)] > 0
        first = max(0, keep_from // window_page * window_page)
        assert not resident[:first].any()
        assert resident[first:].all()
        check(pool, [row])
    pool.close(row)
    check(pool, [])
    assert pool.free_window_pages == 40


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="num_pages: expected at least 1, got 0"):
        make_pool(pages=0)
    with pytest.raises(ValueError, match="divisor of page_size 256, got 96"):
        make_pool(window_page=96)
    pool = make_pool(requests=1)
    row = pool.open()
    with pytest.raises(ValueError, match="length: expected at most 3072 for request 1, got 3073"):
        pool.grow(row, 3073)
    with pytest.raises(ValueError, match=r"expected a free request row, got none \(max_requests is 1: close one first"):
        pool.open()


def test_changes_name_all_that_a_copy_must_follow() -> None:
    pool = make_pool()
    early = pool.open()
    pool.grow(early, 300)
    assert [len(part) for part in pool.take_changes()] == [5, 1], "the first call reports both tables as a whole"
    copies = pool.req_to_token.copy(), pool.full_to_swa.copy()
    first = pool.open()
    pool.grow(first, 800)
    second = pool.open()
    pool.grow(second, 10)
    pool.trim_window(first, 600)
    pool.close(second)
    pool.close(early)
    rows, slots = pool.take_changes()
    for row, start, stop in rows:
        copies[0][row, start:stop] = pool.req_to_token[row, start:stop]
    for start, stop in slots:
        copies[1][start:stop] = pool.full_to_swa[start:stop]
    assert np.array_equal(copies[0], pool.req_to_token)
    assert np.array_equal(copies[1], pool.full_to_swa)
    assert pool.take_changes() == ([], [])
    pool.forget_changes()
    assert [len(part) for part in pool.take_changes()] == [5, 1]
    assert pool.take_changes() == ([], [])


def test_fresh_window_pages_are_reported_once() -> None:
    pool = make_pool()
    pool.take_fresh_window_pages()
    row = pool.open()
    pool.grow(row, 600)
    assert sorted(pool.take_fresh_window_pages()) == sorted(pool.window_of[pool.window_of > 0])
    assert len(pool.take_fresh_window_pages()) == 0


def fill(pool: PagePool, cache: PrefixCache, chain: list[int], close: bool = True) -> int:
    """Computes the blocks of `chain` in a request of their own and offers them."""
    row = pool.open()
    pool.grow(row, len(chain) * BLOCK + 1)
    for index in range(len(chain)):
        cache.insert(chain, index, pool.pages(row)[2 * index : 2 * index + 2])
    pool.trim_window(row, len(chain) * BLOCK + 1 - WINDOW)
    if close:
        pool.close(row)
    return row


def test_a_hit_shares_pages_and_the_window_before_its_end() -> None:
    pool = make_pool()
    cache = PrefixCache(pool, BLOCK, WINDOW)
    fill(pool, cache, [7, 8])
    pages = cache.match([7, 8, 9], limit=3)
    assert len(pages) == 4
    row = pool.open(pages, WINDOW)
    assert list(pool.window_pages(row)) == [3]
    assert (pool.full_to_swa[pool.slots(row, 896, 1024)] > 0).all()
    assert not pool.full_to_swa[pool.slots(row, 512, 768)].any(), "pages that left the window are gone"
    check(pool, [row], cached=pages)
    other = pool.open(pages, WINDOW)
    pool.close(row)
    check(pool, [other], cached=pages)


def test_matches_stop_at_the_limit_and_at_the_first_unknown_block() -> None:
    pool = make_pool()
    cache = PrefixCache(pool, BLOCK, WINDOW)
    fill(pool, cache, [7, 8])
    assert len(cache.match([7, 8], limit=1)) == 2
    assert len(cache.match([7, 3, 8], limit=3)) == 2
    assert cache.match([3, 7], limit=2) == []


def test_a_chain_is_usable_only_where_its_window_is_resident() -> None:
    pool = make_pool()
    cache = PrefixCache(pool, BLOCK, WINDOW)
    fill(pool, cache, [7, 8, 9])
    cache.match([7], limit=1)  # the first block was used last
    cache.evict(0, 2)
    assert pool.free_window_pages == 7
    assert len(cache.match([7, 8, 9], limit=3)) == 2
    with pytest.raises(ValueError, match="resident"):
        pool.open([*cache.match([7], 1), *(cache._blocks[8].pages)], WINDOW)
    assert pool.free_rows == 4, "a refused call takes no row"


def test_a_block_takes_new_pages_when_its_window_was_lost() -> None:
    pool = make_pool(pages=14)
    cache = PrefixCache(pool, BLOCK, WINDOW)
    fill(pool, cache, [7])
    cache.evict(0, 1)
    assert cache.match([7], limit=1) == []
    old = list(cache._blocks[7].pages)
    fill(pool, cache, [7])
    assert len(cache.match([7], limit=1)) == 2
    assert set(old).isdisjoint(cache._blocks[7].pages)
    check(pool, [], cached=cache._blocks[7].pages)


def test_eviction_takes_what_was_used_longest_ago_and_ends_first() -> None:
    pool = make_pool()
    cache = PrefixCache(pool, BLOCK, WINDOW)
    fill(pool, cache, [1, 2])
    fill(pool, cache, [5])
    cache.match([1, 2], limit=2)
    cache.evict(pool.num_pages - 6 - pool.free_pages + 1, 0)
    assert set(cache._blocks) == {1, 2}
    cache.evict(1, 0)
    assert set(cache._blocks) == {1}


def test_eviction_frees_idle_blocks_below_blocks_in_use() -> None:
    """Block 1 is idle, but block 2 behind it is in use by a request that computed its own copy of block 1."""
    pool = make_pool(pages=10)
    cache = PrefixCache(pool, BLOCK, WINDOW)
    fill(pool, cache, [1])
    row = fill(pool, cache, [1, 2], close=False)
    assert cache.idle_pages == 2
    assert pool.free_pages == 3
    cache.evict(2, 0)
    assert pool.free_pages == 5
    assert len(cache) == 0
    check(pool, [row])


def test_blocks_in_use_stay() -> None:
    pool = make_pool()
    cache = PrefixCache(pool, BLOCK, WINDOW)
    fill(pool, cache, [1, 2])
    row = pool.open(cache.match([1, 2], 2), WINDOW)
    cache.evict(100, 100)
    assert list(pool.window_pages(row)) == [3]
    assert len(cache.match([1, 2], 2)) == 4, "it can still be hit"
    check(pool, [row], cached=pool.pages(row))


def test_long_chains_are_evicted_without_recursion() -> None:
    pool = PagePool(
        page_size=512, window_page_size=128, num_pages=3000, num_window_pages=16, max_requests=1, max_len=512 * 3000
    )
    cache = PrefixCache(pool, BLOCK, WINDOW)
    row = pool.open()
    chain = list(range(2900))
    for index in range(len(chain)):
        if pool.reach(row) < (index + 1) * BLOCK:
            cache.evict(0, 4)
        pool.grow(row, (index + 1) * BLOCK)
        cache.insert(chain, index, [pool.pages(row)[index]])
        pool.trim_window(row, (index + 1) * BLOCK - WINDOW)
    for page in pool.pages(row)[1:]:
        pool.hold(page)  # in use elsewhere, but for the first block
    pool.close(row)
    cache.evict(1, 0)
    assert len(cache) == 0


@pytest.mark.parametrize("window_page", [256, 64])
@given(data=st.data())
def test_no_sequence_of_calls_loses_a_page(window_page: int, data: st.DataObject) -> None:
    pool = make_pool(pages=10, window_pages=5 * 256 // window_page, window_page=window_page)
    cache = PrefixCache(pool, BLOCK, WINDOW)
    rows: dict[int, tuple[list[int], int, int]] = {}  # chain, length, blocks offered
    names: dict[tuple[int, ...], int] = {}  # of chains
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["open", "grow", "grow", "offer", "trim", "close", "evict"]))
        if action == "open" and pool.free_rows:
            chain = [0, *data.draw(st.lists(st.integers(1, 3), max_size=3))]
            chain = [names.setdefault(tuple(chain[: depth + 1]), len(names)) for depth in range(len(chain))]
            shared = cache.match(chain, len(chain))
            rows[pool.open(shared, WINDOW)] = (chain, len(shared) * 256, len(shared) // 2)
        elif action == "evict":
            cache.evict(data.draw(st.integers(0, 4)), data.draw(st.integers(0, 3)))
        elif rows:
            row = data.draw(st.sampled_from(sorted(rows)))
            chain, length, offered = rows[row]
            if action == "grow":
                more = data.draw(st.integers(1, 600))
                more = min(more, 2000 - length)
                if length + more <= pool.reach(row):
                    pool.grow(row, length + more)
                    rows[row] = (chain, length + more, offered)
                else:
                    with pytest.raises(ValueError, match="pages: expected"):
                        pool.grow(row, length + more)
            elif action == "offer" and offered < min(len(chain), length // BLOCK):
                first = pool.window_pages(row).start * pool.window_page_size
                if first <= (offered + 1) * BLOCK - WINDOW:
                    cache.insert(chain, offered, pool.pages(row)[2 * offered : 2 * offered + 2])
                rows[row] = (chain, length, offered + 1)
            elif action == "trim":
                pool.trim_window(row, length - WINDOW)
            elif action == "close":
                pool.close(row)
                del rows[row]
        cached = [page for block in cache._blocks.values() for page in block.pages]
        check(pool, list(rows), cached)
    for row in rows:
        pool.close(row)
    cache.evict(100, 100)
    assert (pool.free_pages, pool.free_window_pages) == (pool.num_pages, pool.num_window_pages)


def test_tables_are_copied_whole_after_a_copy_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PagePool(page_size=256, window_page_size=128, num_pages=6, num_window_pages=9, max_requests=2, max_len=1024)
    mirror = TableMirror(pool, torch.device("cpu"))
    # As on a GPU: tables of their own.
    own = RequestTables(mirror.tables.req_to_token.clone(), mirror.tables.full_to_swa.clone())
    monkeypatch.setattr(mirror, "_shared", False)
    monkeypatch.setattr(mirror, "tables", own)
    mirror.refresh()
    row = pool.open()

    def fails(*given: object) -> None:
        raise MemoryError

    pool.grow(row, 300)
    with monkeypatch.context() as broken:
        broken.setattr(table_mirror, "_copy_ranges", fails)
        with pytest.raises(MemoryError):
            mirror.refresh()
    pool.trim_window(row, 128)
    mirror.refresh()
    assert own.req_to_token.tolist() == pool.req_to_token.tolist()
    assert own.full_to_swa.tolist() == pool.full_to_swa.tolist()
