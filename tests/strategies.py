"""Batches to plan, drawn by Hypothesis: lengths around every border, tables and tensors in every legal layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from backends import INTERPRET
from dsv4_backend import CacheGeometry, RequestTables

GEOMETRIES = (
    CacheGeometry(),
    CacheGeometry(c4_ring=16, c128_ring=256),
    CacheGeometry(swa_page_size=128, c4_ring=16),
    CacheGeometry(swa_page_size=64, c128_ring=256),
    CacheGeometry(swa_page_size=64, c4_ring=32),
    CacheGeometry(page_size=384, swa_page_size=192, c4_ring=12, c128_ring=384),
    CacheGeometry(page_size=128, swa_page_size=8),
)
COLUMNS = (1, 3, 130, 257, 520)
MOST_REQUESTS, MOST_ROWS = (4, 100) if INTERPRET else (7, 520)
EDGES = (
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    11,
    12,
    60,
    64,
    127,
    128,
    129,
    130,
    131,
    191,
    192,
    255,
    256,
    257,
    260,
    383,
    384,
    512,
)
GARBAGE_SLOT = 2**31 - 1
GARBAGE_LENGTH = -77
LAYOUTS = ("contiguous", "every_other", "column", "inside")
INT_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Pool:
    """Contents of the request tables, and how they lie in memory."""

    req_to_token: np.ndarray
    full_to_swa: np.ndarray
    spare_columns: int = 0
    skipped_rows: int = 0

    def tables(self, device: str) -> RequestTables:
        """The tables on `device`; what lies between and before the rows must not be read."""
        rows, columns = self.req_to_token.shape
        shape = (self.skipped_rows + rows, columns + self.spare_columns)
        base = torch.full(shape, GARBAGE_SLOT, dtype=torch.int32, device=device)
        first = self.spare_columns // 2
        table = base[self.skipped_rows :, first : first + columns]
        table.copy_(torch.from_numpy(self.req_to_token))
        return RequestTables(table, torch.from_numpy(self.full_to_swa).to(device))


def make_pool(
    geom: CacheGeometry,
    num_requests: int,
    columns: int,
    seed: int,
    evicted: float = 0.0,
    unmapped: float = 0.0,
    layout: tuple[int, int] = (0, 0),
) -> Pool:
    """A pool with shuffled pages, as an allocator would leave it: request 0, page 0 and slot 0 are reserved.

    Args:
        evicted: share of slots whose window slot is 0 (and a third as many that map to -1).
        unmapped: share of entries of `req_to_token` that are -1.
        layout: spare columns of a row, rows before the first.
    """
    rng = np.random.default_rng(seed)
    page, window_page = geom.page_size, geom.swa_page_size
    pages_a_request = -(-columns // page)
    num_pages = (num_requests - 1) * pages_a_request
    numbers = 1 + rng.permutation(num_pages).reshape(num_requests - 1, pages_a_request)
    position = np.arange(columns)
    req_to_token = np.zeros((num_requests, columns), dtype=np.int32)
    req_to_token[1:] = numbers[:, position // page] * page + position % page
    req_to_token[1:][rng.random((num_requests - 1, columns)) < unmapped] = -1

    size = (num_pages + 1) * page
    full_to_swa = np.zeros(size + 1, dtype=np.int64)
    slot = np.arange(page, size)
    window_numbers = 1 + rng.permutation(-(-size // window_page))
    full_to_swa[slot] = window_numbers[slot // window_page] * window_page + slot % window_page
    chance = rng.random(len(slot))
    full_to_swa[slot[chance < evicted]] = 0
    full_to_swa[slot[chance < evicted / 4]] = -1
    full_to_swa[-1] = -1
    return Pool(req_to_token, full_to_swa, *layout)


def lay_out(values: Sequence[int], dtype: torch.dtype, layout: str, device: str) -> torch.Tensor:
    """`values` as a 1-d tensor of one of `LAYOUTS`; its neighbours in memory are garbage."""
    plain = torch.tensor(values, dtype=dtype, device=device)
    n = len(values)
    if layout == "contiguous":
        return plain
    views = {
        "every_other": lambda base: base[: 2 * n : 2],
        "column": lambda base: base[: 3 * n].view(n, 3)[:, 0],
        "inside": lambda base: base[3 : 3 + n],
    }
    base = torch.full((3 * n + 4,), GARBAGE_LENGTH, dtype=dtype, device=device)
    view = views[layout](base)
    view.copy_(plain)
    return view


@dataclass(frozen=True)
class Batch:
    """A batch and everything around it. `forms` are dtype and layout of seq_lens, extend_lens and req_pool_indices."""

    geom: CacheGeometry
    pool: Pool
    seq_lens: list[int]
    extend_lens: list[int]
    reqs: list[int]
    num_rows: int
    forms: tuple[tuple[torch.dtype, str], ...]

    def __repr__(self) -> str:
        rows, columns = self.pool.req_to_token.shape
        return (
            f"Batch({self.geom}, {rows} requests of {columns} columns, seq_lens={self.seq_lens}, "
            f"extend_lens={self.extend_lens}, reqs={self.reqs}, num_rows={self.num_rows}, forms={self.forms})"
        )

    def tensors(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """seq_lens, extend_lens, req_pool_indices."""
        seq_lens, extend_lens, reqs = (
            lay_out(values, *form, device)
            for values, form in zip((self.seq_lens, self.extend_lens, self.reqs), self.forms, strict=True)
        )
        return seq_lens, extend_lens, reqs


def near_edges(high: int) -> st.SearchStrategy[int]:
    """A length from 0 to `high`, often one where a rule changes."""
    edges = sorted({e for e in EDGES if e <= high} | {high, max(high - 1, 0)})
    return st.one_of(st.sampled_from(edges), st.integers(0, high))


@st.composite
def pools(draw: st.DrawFn, geom: CacheGeometry) -> Pool:
    return make_pool(
        geom,
        num_requests=draw(st.integers(2, 9)),
        columns=draw(st.sampled_from(COLUMNS)),
        seed=draw(st.integers(0, 2**16)),
        evicted=draw(st.sampled_from((0.0, 0.0, 0.4))),
        unmapped=draw(st.sampled_from((0.0, 0.0, 0.3))),
        layout=(draw(st.integers(0, 5)), draw(st.integers(0, 2))),
    )


@st.composite
def batches(draw: st.DrawFn, geometries: Sequence[CacheGeometry] = GEOMETRIES) -> Batch:
    """A legal prefill or verify batch: each extend length is at most its length, ids may repeat."""
    geom = draw(st.sampled_from(geometries))
    pool = draw(pools(geom))
    num_requests, columns = pool.req_to_token.shape
    seq_lens = draw(st.lists(near_edges(columns), max_size=MOST_REQUESTS))
    extend_lens = [draw(_extend_of(seq)) for seq in seq_lens]
    return Batch(
        geom,
        pool,
        seq_lens,
        extend_lens,
        reqs=[draw(st.integers(0, num_requests - 1)) for _ in seq_lens],
        num_rows=sum(extend_lens) + draw(st.sampled_from((0, 0, 1, 7, 20 if INTERPRET else 300))),
        forms=draw(_forms(3)),
    )


@st.composite
def bad_batches(draw: st.DrawFn) -> Batch:
    """A batch in which lengths, ids, slots or the number of rows may be anything that fits its dtype."""
    batch = draw(batches())
    num_requests, columns = batch.pool.req_to_token.shape
    kinds = draw(st.sampled_from((("slots",), ("lengths",), ("rows",), ("slots", "lengths", "rows"))))
    columns_of_batch = [list(batch.seq_lens), list(batch.extend_lens), list(batch.reqs)]
    req_to_token, num_rows = batch.pool.req_to_token.copy(), batch.num_rows
    if "lengths" in kinds:
        wild = st.sampled_from(
            (-1, -2, -(2**31), 2**31 - 1, columns + 1, columns + 128, num_requests, num_requests + 1)
        )
        for values in columns_of_batch:
            for b in range(len(values)):
                if draw(st.integers(0, 3)) == 0:
                    values[b] = draw(wild)
    if "slots" in kinds:
        chance = np.random.default_rng(draw(st.integers(0, 2**16))).random(req_to_token.shape)
        for k, slot in enumerate((-2, -(2**31), len(batch.pool.full_to_swa), 2**31 - 1)):
            req_to_token[(chance >= k / 20) & (chance < (k + 1) / 20)] = slot
    if "rows" in kinds:
        num_rows = max(0, num_rows - draw(st.sampled_from((0, 1, 40))))
    pool = Pool(req_to_token, batch.pool.full_to_swa, batch.pool.spare_columns, batch.pool.skipped_rows)
    return Batch(batch.geom, pool, *columns_of_batch, num_rows, batch.forms)


def _extend_of(seq: int) -> st.SearchStrategy[int]:
    extend = st.one_of(
        st.sampled_from((0, seq)),
        st.integers(0, min(seq, 12)),
        near_edges(seq).map(lambda prefix: seq - prefix),
    )
    return extend.map(lambda rows: min(rows, MOST_ROWS))


@st.composite
def _forms(draw: st.DrawFn, count: int) -> tuple[tuple[torch.dtype, str], ...]:
    one = st.tuples(st.sampled_from(INT_DTYPES), st.sampled_from(LAYOUTS))
    return tuple(draw(one) for _ in range(count))
