"""Sizes, rings and state rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4_backend import CacheGeometry
from dsv4_backend.geometry import READ_WINDOW, trunc_div, trunc_rem

SPECULATIVE = CacheGeometry(c4_ring=16, c128_ring=256)
# a, b, a / b and a % b as C has them.
C_DIVISION = [
    (-1, 256, 0, -1),
    (-1, 8, 0, -1),
    (-4, 4, -1, 0),
    (-5, 4, -1, -1),
    (-257, 256, -1, -1),
    (0, 128, 0, 0),
    (3, 4, 0, 3),
    (2**40 + 1, 4, 2**38, 1),
]


@pytest.mark.parametrize(("a", "b", "quotient", "remainder"), C_DIVISION)
def test_division_truncates(a: int, b: int, quotient: int, remainder: int) -> None:
    assert (trunc_div(a, b), trunc_rem(a, b)) == (quotient, remainder)
    tensor = torch.tensor([a])
    assert (trunc_div(tensor, b).tolist(), trunc_rem(tensor, b).tolist()) == ([quotient], [remainder])


@given(a=st.integers(-(2**62), 2**62), b=st.integers(1, 2**20))
def test_division_is_exact_and_signed_like_the_dividend(a: int, b: int) -> None:
    quotient, remainder = trunc_div(a, b), trunc_rem(a, b)
    assert quotient * b + remainder == a
    assert abs(remainder) < b
    assert remainder == 0 or (remainder < 0) == (a < 0)
    assert int(trunc_div(torch.tensor(a), b)) == quotient


def test_defaults() -> None:
    assert CacheGeometry() == CacheGeometry(page_size=256, swa_page_size=256, window=128, c4_ring=8, c128_ring=128)


@pytest.mark.parametrize("name", ["page_size", "swa_page_size", "window", "c4_ring", "c128_ring"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "expected a positive number, got 0"),
        (-256, "expected a positive number, got -256"),
        (256.0, "expected an int, got 256.0"),
        ("256", "expected an int, got '256'"),
        (True, "expected an int, got True"),
        (None, "expected an int, got None"),
    ],
    ids=repr,
)
def test_sizes_are_positive_ints(name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: {message}$"):
        CacheGeometry(**{name: value})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"page_size": 64}, "page_size: expected a multiple of 128, got 64"),
        ({"page_size": 192}, "page_size: expected a multiple of 128, got 192"),
        ({"c4_ring": 10}, "c4_ring: expected a multiple of 4, got 10"),
        ({"c4_ring": 4}, "c4_ring: expected at least the read window 8, got 4"),
        ({"c128_ring": 192}, "c128_ring: expected a multiple of 128, got 192"),
        ({"c128_ring": 64}, "c128_ring: expected a multiple of 128, got 64"),
        ({"swa_page_size": 100}, "swa_page_size: expected a multiple of 8, got 100"),
        ({"swa_page_size": 8, "c4_ring": 16}, "swa_page_size: expected a multiple of 16, got 8"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_sizes_fit_each_other(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        CacheGeometry(**sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        {"page_size": 128},
        {"page_size": 384, "swa_page_size": 192, "c4_ring": 12, "c128_ring": 384},
        {"swa_page_size": 64, "c4_ring": 64},
        {"swa_page_size": 8},
        {"window": 1},
    ],
    ids=str,
)
def test_unusual_sizes_are_allowed(sizes: dict[str, int]) -> None:
    geom = CacheGeometry(**sizes)
    assert {name: getattr(geom, name) for name in sizes} == sizes


@pytest.mark.parametrize(
    ("drafts", "rings"), [(0, (8, 128)), (1, (16, 256)), (2, (16, 256)), (4, (16, 256)), (10, (16, 256))]
)
def test_rings_for_drafts(drafts: int, rings: tuple[int, int]) -> None:
    geom = CacheGeometry.for_drafts(drafts)
    assert (geom.c4_ring, geom.c128_ring) == rings
    assert (geom.page_size, geom.swa_page_size, geom.window) == (256, 256, 128)


@pytest.mark.parametrize("drafts", [-1, 2.0, True, None, "4"], ids=repr)
def test_drafts_are_counted_by_ints(drafts: object) -> None:
    with pytest.raises(ValueError, match=f"^num_draft_tokens: expected an int of at least 0, got {drafts!r}$"):
        CacheGeometry.for_drafts(drafts)


@pytest.mark.parametrize(
    ("c4_ring", "c128_ring", "capacity"),
    [(8, 128, 2), (16, 128, 2), (8, 256, 2), (16, 256, 10), (12, 256, 6), (256, 256, 130), (256, 384, 250)],
)
def test_draft_capacity_is_that_of_the_tighter_ring(c4_ring: int, c128_ring: int, capacity: int) -> None:
    geom = CacheGeometry(swa_page_size=768, c4_ring=c4_ring, c128_ring=c128_ring)
    assert geom.draft_capacity == capacity
    geom.check_drafts(capacity)
    with pytest.raises(
        ValueError, match=rf"^num_draft_tokens: expected at most {capacity}, got {capacity + 1} \(needs"
    ):
        geom.check_drafts(capacity + 1)


def test_the_refusal_names_the_ring_that_is_too_small() -> None:
    with pytest.raises(ValueError, match=r"\(needs 17 rows in the ratio-4 ring of 16\)$"):
        CacheGeometry.for_drafts(11)
    with pytest.raises(ValueError, match=r"\(needs 129 rows in the ratio-128 ring of 128\); "):
        CacheGeometry(c4_ring=16).check_drafts(3)


@pytest.mark.parametrize("drafts", [3, 10])
def test_the_refusal_names_the_geometry_that_is_large_enough(drafts: int) -> None:
    hint = "; c4_ring=16, c128_ring=256 hold them$"
    with pytest.raises(ValueError, match=hint):
        CacheGeometry().check_drafts(drafts)
    CacheGeometry.for_drafts(drafts).check_drafts(drafts)


@pytest.mark.parametrize(
    ("ratio", "ring", "pad"),
    [(4, 8, 0), (4, 12, 6), (4, 16, 10), (4, 32, 26), (128, 128, 0), (128, 256, 130), (128, 384, 258)],
)
def test_write_pad(ratio: int, ring: int, pad: int) -> None:
    geom = CacheGeometry(swa_page_size=384, **{f"c{ratio}_ring": ring})
    assert geom.ring(ratio) == ring
    assert geom.write_pad(ratio) == pad


# geometry, ratio, window slot, request, position, state row, state page
STATE_ROWS = [
    (CacheGeometry(), 4, 0, 5, 77, 0, 0),
    (CacheGeometry(), 4, -1, 5, 77, -1, 0),
    (CacheGeometry(), 4, 255, 5, 77, 7, 1),
    (CacheGeometry(), 4, 256, 5, 77, 8, 2),
    (CacheGeometry(), 4, 1000, 5, 77, 24, 6),
    (SPECULATIVE, 4, 1000, 5, 77, 56, 14),
    (SPECULATIVE, 4, 271, 5, 77, 31, 7),
    (CacheGeometry(swa_page_size=128), 4, 1000, 5, 77, 56, 14),
    (CacheGeometry(swa_page_size=192, c4_ring=12), 4, 1000, 5, 77, 64, 16),
    (CacheGeometry(), 128, 1000, 0, 0, 0, 0),
    (CacheGeometry(), 128, 1000, 5, 77, 717, 5),
    (CacheGeometry(), 128, -1, 5, 128, 640, 5),
    (SPECULATIVE, 128, 1000, 5, 255, 1535, 11),
    (SPECULATIVE, 128, 1000, 5, 256, 1280, 10),
    (SPECULATIVE, 128, 1000, 2**20, 300, 2**28 + 44, 2**21),
]


@pytest.mark.parametrize(("geom", "ratio", "swa_slot", "req", "position", "row", "page"), STATE_ROWS)
def test_state_rows(
    geom: CacheGeometry, ratio: int, swa_slot: int, req: int, position: int, row: int, page: int
) -> None:
    assert geom.state_loc(ratio, swa_slot, req, position) == row
    assert geom.state_page(ratio, row) == page
    rows = geom.state_loc(ratio, *(torch.tensor([x, x]) for x in (swa_slot, req, position)))
    assert rows.dtype == torch.int64
    assert rows.tolist() == [row, row]
    assert geom.state_page(ratio, rows).tolist() == [page, page]


@pytest.mark.parametrize("ratio", [4, 128])
@given(data=st.data())
def test_a_read_window_lies_in_distinct_rows_and_groups_in_whole_pages(ratio: int, data: st.DataObject) -> None:
    ring = data.draw(st.sampled_from((8, 16) if ratio == 4 else (128, 256)))
    geom = CacheGeometry(**{f"c{ratio}_ring": ring})
    first = data.draw(st.integers(0, 5000)) * ratio
    rows = [geom.state_loc(ratio, 256 + p, 3, p) for p in range(first, first + READ_WINDOW[ratio])]
    assert len(set(rows)) == READ_WINDOW[ratio]
    for group in np.split(np.array(rows), len(rows) // ratio):
        page = geom.state_page(ratio, int(group[0]))
        assert group.tolist() == list(range(page * ratio, page * ratio + ratio))
