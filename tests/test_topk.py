"""Selection of the best entries: exact, in order of entry, and blind to what it must not read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import EXAMPLES, each_backend, each_fast_backend, repeats
from dsv4_backend.indexer import select_topk

POISON = -1234
PAGE = 8
INF, NAN = float("inf"), float("nan")
DENORMAL = 1e-45


def best(scores: np.ndarray, length: int, k: int) -> list[int]:
    """The oracle: the k best of a row's first entries, NaN last, of equal ones the lowest."""
    row = scores[: max(length, 0)]
    nan = np.isnan(row)
    order = np.lexsort((np.arange(len(row)), -np.where(nan, 0, row).astype(np.float64), nan))
    return sorted(order[:k].tolist())


def padded(values: list[int], k: int) -> list[int]:
    return values + [-1] * (k - len(values))


def pages_for(rows: int, width: int, page: int = PAGE, seed: int = 0) -> torch.Tensor:
    """int32 [rows, pages]: shuffled pages from 1 on, others for each row."""
    columns = -(-width // page)
    order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(seed)) + 1
    return order.view(rows, columns).int()


def inside(rows: int, columns: int, value: float, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in the middle of a larger one that is full of `value`, and the larger one."""
    base = torch.full((rows + 2, columns + 3), value, dtype=dtype, device=device)
    return base[1 : rows + 1, 1 : columns + 1], base


def select(
    impl: str,
    device: str,
    scores: torch.Tensor,
    lengths: list[int],
    k: int,
    table: torch.Tensor,
    page: int = PAGE,
    **rest: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries and slots on the CPU; checks that nothing around them is written."""
    rows = len(scores)
    given, _ = inside(rows, scores.shape[1], NAN, torch.float32, device)
    given.copy_(scores)
    raw, raw_base = inside(rows, k, POISON, torch.int32, device)
    out, out_base = inside(rows, k, POISON, torch.int32, device)
    each_other = torch.full((rows, 2), 2**30, dtype=torch.int32, device=device)
    each_other[:, 0] = torch.tensor(lengths, dtype=torch.int32)
    select_topk(given, each_other[:, 0], table.to(device), page, out=out, raw=raw, impl=impl, **rest)  # type: ignore[arg-type]
    found = raw.cpu().clone(), out.cpu().clone()
    for view, base in ((raw, raw_base), (out, out_base)):
        view.fill_(POISON)
        assert (base == POISON).all()
    return found


def check(impl: str, device: str, scores: torch.Tensor, lengths: list[int], k: int, page: int = PAGE) -> None:
    """Entries are the oracle's, and slots those of the entries; slots are the same where entries are not asked for."""
    width = scores.shape[1]
    table = pages_for(len(scores), width, page)
    raw, slots = select(impl, device, scores, lengths, k, table, page)
    for row, length in enumerate(lengths):
        expected = best(scores[row].numpy(), min(length, width), k)
        assert raw[row].tolist() == padded(expected, k), f"row {row}"
        placed = [int(table[row, w // page]) * page + w % page for w in expected]
        assert slots[row].tolist() == padded(placed, k), f"row {row}"


def noise(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, width), generator=torch.Generator().manual_seed(seed))


def repeated(values: list[float], width: int = 40) -> torch.Tensor:
    """One row of `values` over and over."""
    return torch.tensor((values * width)[:width])[None]


@dataclass(frozen=True)
class Awkward:
    scores: torch.Tensor
    k: int


AWKWARD = {
    "all equal": Awkward(repeated([0.5]), 7),
    "zeros of both signs": Awkward(repeated([-0.0, 0.0, -1.0]), 11),
    "negative zeros first": Awkward(torch.cat((repeated([-0.0], 20), repeated([0.0], 20)), dim=1), 5),
    "a tie at the border": Awkward(repeated([3.0, 1.0, 2.0, 1.0, 1.0]), 12),
    "a tie that ends at the border": Awkward(repeated([1.0, 0.0]), 20),
    "denormals": Awkward(repeated([0.0, DENORMAL, -DENORMAL, 2 * DENORMAL, 1e-40]), 17),
    "a denormal is not zero": Awkward(repeated([0.0] * 39 + [DENORMAL]), 1),
    "infinities": Awkward(repeated([INF, -INF, 3.0e38, -3.0e38]), 23),
    "minus infinity only": Awkward(repeated([-INF]), 3),
    "NaN below minus infinity": Awkward(repeated([NAN, -INF, -NAN, NAN]), 15),
    "NaN of both signs are equal": Awkward(repeated([-NAN, NAN, -NAN]), 9),
    "NaN among others": Awkward(repeated([1.0, NAN, -2.0]), 9),
    "neighbours": Awkward(torch.arange(40, dtype=torch.int32).add(0x3F800000).view(torch.float32)[None], 13),
    "negative neighbours": Awkward(torch.arange(40, dtype=torch.int32).add(-0x40800000).view(torch.float32)[None], 13),
    "bytes borders": Awkward(
        torch.arange(-20, 20, dtype=torch.int32).mul(128).add(0x40000000).view(torch.float32)[None], 19
    ),
}


@each_backend
@pytest.mark.parametrize("case", AWKWARD.values(), ids=AWKWARD)
def test_awkward_scores(impl: str, device: str, case: Awkward) -> None:
    check(impl, device, case.scores, [case.scores.shape[1]], case.k)
    check(impl, device, case.scores, [case.scores.shape[1] - 2], 1)


@each_backend
@pytest.mark.parametrize("k", [1, 2, 7, 8, 100, 512, 1000, 1024, 2048])
def test_sizes(impl: str, device: str, k: int) -> None:
    """Rows without entries, with few, k, one more than k, all that there are, and more than that."""
    width = k + k // 2 + 3
    lengths = [0, 1, k - 1, k, k + 1, width, width + 1, 2**31 - 1, -1, -(2**31)]
    check(impl, device, noise(len(lengths), width), lengths, k)


@each_backend
@pytest.mark.parametrize("page", [1, 3, 64])
def test_pages_of_other_sizes(impl: str, device: str, page: int) -> None:
    check(impl, device, noise(2, 131), [131, 7], 20, page)


@each_backend
def test_rows_longer_than_a_turn(impl: str, device: str) -> None:
    """Ties and winners on both sides of where a program goes on with the next columns."""
    scores = noise(3, 9000).round(decimals=1)
    scores[1, 4000:4200] = 5.0
    scores[2] = 0.0
    check(impl, device, scores, [9000, 8999, 4097], 300)


@each_fast_backend
@pytest.mark.parametrize("k", [1, 512, 1024])
def test_a_million_tokens(impl: str, device: str, k: int) -> None:
    scores = noise(2, 262_144)
    scores[1] = scores[1].relu()  # half of it equal
    scores[1, :100_000] = 0.0
    check(impl, device, scores, [262_144, 200_001], k, 64)


@each_backend
def test_what_lies_behind_a_row_does_not_matter(impl: str, device: str) -> None:
    lengths, k = [33, 20, 5, 0], 20
    results = []
    for poison in (NAN, INF, -INF, 0.0):
        scores = noise(4, 50)
        for row, length in enumerate(lengths):
            # A row that selects all that it has is not read at all.
            scores[row, length if length > k else 0 :] = poison
        results.append(select(impl, device, scores, lengths, k, pages_for(4, 50)))
    for raw, slots in results[1:]:
        assert torch.equal(raw, results[0][0])
        assert torch.equal(slots, results[0][1])


@each_backend
def test_pages_do_not_change_entries(impl: str, device: str) -> None:
    scores = noise(2, 100).round(decimals=1)
    found = [select(impl, device, scores, [100, 77], 30, pages_for(2, 100, seed=seed)) for seed in range(3)]
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][0], found[2][0])
    assert not torch.equal(found[0][1], found[1][1])


@each_backend
def test_equal_calls_give_equal_bits(impl: str, device: str) -> None:
    scores = noise(3, 6000).round(decimals=1)
    first = select(impl, device, scores, [6000, 5000, 300], 512, pages_for(3, 6000))
    for _ in range(repeats(impl, device, 20, 20) - 1):
        again = select(impl, device, scores, [6000, 5000, 300], 512, pages_for(3, 6000))
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@each_backend
@pytest.mark.parametrize("k", [4, 12], ids=["selected", "everything"])
def test_pages_are_not_trusted(impl: str, device: str, k: int) -> None:
    """Of a bad page the entries stay, the slots are -1: negative, beyond the pool, beyond int32, beyond the table."""
    table = torch.tensor([[1, -1, 7, 2**31 - 1, -(2**31)]], dtype=torch.int32)
    scores = torch.arange(12.0)[None].flip(1)
    scores[0, [1, 3, 5, 10]] = INF  # one on each of the pages but the good one, and one behind the table
    for num_pages, seven in ((7, -1), (8, 15), (None, 15)):
        raw, slots = select(impl, device, scores, [12], k, table, page=2, num_pages=num_pages)
        entries = [1, 3, 5, 10] if k == 4 else list(range(12))
        place = {0: 2, 1: 3, 5: seven, 4: seven - 1 if seven > 0 else -1}
        assert raw[0].tolist() == entries
        assert slots[0].tolist() == [place.get(w, -1) for w in entries]


@each_backend
def test_last_slot_of_int32(impl: str, device: str) -> None:
    table = torch.tensor([[2**24 - 1, 2**24]], dtype=torch.int32)
    raw, slots = select(impl, device, noise(1, 256), [256], 256, table, page=128)
    assert raw[0].tolist() == list(range(256))
    assert slots[0].tolist() == [*range(2**31 - 128, 2**31), *[-1] * 128]


@each_backend
@pytest.mark.parametrize("k", [3, 30], ids=["selected", "everything"])
def test_tables_once_a_request(impl: str, device: str, k: int) -> None:
    scores, lengths = noise(5, 30), [30, 29, 28, 30, 30]
    table = pages_for(2, 30)
    rows = torch.tensor([1, 0, 1, 2, -1], dtype=torch.int32)
    spread = torch.full((5, table.shape[1]), -1, dtype=torch.int32)
    spread[:3] = table[rows[:3].long()]
    found = select(impl, device, scores, lengths, k, table, table_rows=rows.to(device))
    expected = select(impl, device, scores, lengths, k, spread)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert (found[1][3:] == -1).all()
    assert (found[1][:3, :3] > 0).all()


@each_backend
@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=["no rows", "no columns"])
def test_nothing_to_select(impl: str, device: str, shape: tuple[int, int]) -> None:
    rows, width = shape
    raw, slots = select(impl, device, noise(rows, width), [3] * rows, 4, pages_for(rows, 8))
    assert (raw == -1).all()
    assert (slots == -1).all()


@st.composite
def rows_of_scores(draw: st.DrawFn) -> tuple[torch.Tensor, list[int], int]:
    """A few rows from a handful of values, or of any bits, so that ties are everywhere or nowhere."""
    rows, width = draw(st.integers(1, 3)), draw(st.sampled_from((1, 5, 64, 65, 300, 1025)))
    generator = np.random.default_rng(draw(st.integers(0, 2**16)))
    if draw(st.booleans()):
        bits = generator.integers(-(2**31), 2**31, (rows, width), dtype=np.int64).astype(np.int32)
        scores = bits.view(np.float32)
    else:
        some = draw(st.lists(st.floats(width=32), min_size=1, max_size=4))
        scores = generator.choice(np.array(some, dtype=np.float32), (rows, width))
    lengths = draw(st.lists(st.integers(-1, width + 1), min_size=rows, max_size=rows))
    return torch.from_numpy(scores), lengths, draw(st.integers(1, width + 2))


@each_backend
@settings(max_examples=EXAMPLES)
@given(case=rows_of_scores())
def test_any_scores(impl: str, device: str, case: tuple[torch.Tensor, list[int], int]) -> None:
    check(impl, device, *case)


INT32 = torch.int32
REFUSALS = {
    "scores": (dict(scores=torch.zeros(3, 5).double()), "scores: expected dtype float32, got float64"),
    "columns of scores": (dict(scores=torch.zeros(5, 3).T), r"scores: expected unit column stride, got \[1, 3\]"),
    "lengths": (dict(lengths=torch.zeros(2, dtype=INT32)), "lengths: expected 3 elements, got 2"),
    "wide lengths": (dict(lengths=torch.zeros(3, dtype=torch.int64)), "lengths: expected dtype int32, got int64"),
    "page table": (dict(page_table=torch.zeros(2, 4, dtype=INT32)), "page_table: expected 3 elements, got 2"),
    "table rows": (
        dict(table_rows=torch.zeros(2, dtype=INT32)),
        "table_rows: expected 3 elements, got 2",
    ),
    "page": (dict(page_entries=0), "page_entries: expected an int of at least 1, got 0"),
    "pages": (dict(num_pages=-1), "num_pages: expected an int of at least 1, got -1"),
    "out": (dict(out=torch.zeros(3, 4)), "out: expected dtype int32, got float32"),
    "no column": (dict(out=torch.zeros(3, 0, dtype=INT32)), "out: expected at least one column, got none"),
    "raw": (dict(raw=torch.zeros(3, 5, dtype=INT32)), r"raw: expected the shape of out, \[3, 4\], got \[3, 5\]"),
    "impl": (dict(impl="cuda"), "impl: expected one of"),
}


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_refusals(case: tuple[dict[str, object], str]) -> None:
    arguments: dict[str, object] = dict(
        scores=torch.zeros(3, 5),
        lengths=torch.zeros(3, dtype=INT32),
        page_table=torch.zeros(3, 4, dtype=INT32),
        page_entries=2,
        out=torch.full((3, 4), POISON, dtype=INT32),
    )
    with pytest.raises(ValueError, match=case[1]):
        select_topk(**{**arguments, **case[0]})  # type: ignore[arg-type]
    assert (arguments["out"] == POISON).all()  # type: ignore[attr-defined]
