"""Faults that others met in production, through plans, metadata and cache."""

from __future__ import annotations

import pytest
import torch

from backends import INTERPRET, each_backend
from cache_harness import Harness, Lane, small_geometry
from dsv4_backend import CacheGeometry

SPEC = small_geometry(drafts=True)
RATIOS = pytest.mark.parametrize("ratio", [4, 128], ids=["c4", "c128"])
POISON = 0xFF


@each_backend
@pytest.mark.parametrize(("prefix", "drafts"), [(1000, 8), (1003, 5), (1002, 6)], ids=str)
def test_more_than_four_drafts_keep_their_state(impl: str, device: str, prefix: int, drafts: int) -> None:
    """B03: the write plan kept the last four rows only; what a roll-back brought back was stale."""
    # The interpreter gets a prefix that lies alike in groups, rings and pages.
    prefix, tokens = (prefix - 960, 70) if INTERPRET else (prefix, 1100)
    harness = Harness(impl, device, 4, geom=SPEC, tokens=tokens, lanes=drafts)
    lanes = [harness.open() for _ in range(drafts)]
    harness.extend(dict.fromkeys(lanes, prefix))
    harness.verify(dict.fromkeys(lanes, drafts), {lane: place + 1 for place, lane in enumerate(lanes)})
    harness.verify(dict.fromkeys(lanes, drafts), dict.fromkeys(lanes, 1))
    for _ in range(2 if INTERPRET else 5):
        harness.decode(lanes)
    for lane in lanes:
        harness.check(lane)


def test_more_drafts_than_the_rings_hold_are_refused() -> None:
    """B03."""
    CacheGeometry.for_drafts(10)
    with pytest.raises(
        ValueError, match=r"num_draft_tokens: expected at most 10, got 11 \(needs 17 rows in the ratio-4"
    ):
        CacheGeometry.for_drafts(11)
    harness = Harness("torch", "cpu", 4, lanes=1)
    lane = harness.open()
    harness.extend({lane: 9})
    harness.verify({lane: 2}, {lane: 1})
    with pytest.raises(ValueError, match="num_draft_tokens: expected at most 2, got 3"):
        harness.verify({lane: 3}, {lane: 1})


@each_backend
def test_ratio_128_reads_the_rings_of_its_requests(impl: str, device: str) -> None:
    """B05: pages of the state were left at a placeholder, the place in the batch."""
    harness = Harness(impl, device, 128, geom=SPEC, lanes=12, tokens=400)
    by_row = {lane.row: lane for lane in (harness.open() for _ in range(12))}
    lanes = [by_row[row] for row in (7, 3, 11)]
    harness.extend(dict(zip(lanes, (126, 250, 383), strict=True)))
    harness.extend(dict(zip(lanes, (4, 8, 2), strict=True)))
    for lane in lanes:
        harness.check(lane)
    assert [lane.length // 128 for lane in lanes] == [1, 2, 3]


@each_backend
@RATIOS
def test_prompts_of_any_length(impl: str, device: str, ratio: int) -> None:
    """B11: prompts that are no multiple of the ratio; what is left over is kept as state."""
    sizes = (1, 2, 3, 5, 21, 127, 129)
    harness = Harness(impl, device, ratio, lanes=len(sizes), tokens=160)
    lanes = [harness.open() for _ in sizes]
    harness.extend(dict(zip(lanes, sizes, strict=True)))
    entries = [len(harness.entry_slots(lane)) for lane in lanes]
    assert entries == {4: [0, 0, 0, 1, 5, 31, 32], 128: [0, 0, 0, 0, 0, 0, 1]}[ratio]
    harness.extend({lane: 1 + place % 3 for place, lane in enumerate(lanes)})
    harness.decode(lanes)
    for lane in lanes:
        harness.check(lane)


@each_backend
@RATIOS
@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_first_border(impl: str, device: str, ratio: int, decode: bool) -> None:
    """B13: the first group closes at its own length, reads nothing before itself, and leaves others alone."""
    lengths = {4: (3, 4, 5), 128: (127, 128, 129)}[ratio]
    harness = Harness(impl, device, ratio, lanes=3, tokens=140)
    lanes = [harness.open() for _ in lengths]
    if decode:
        harness.extend({lane: length - 1 for lane, length in zip(lanes, lengths, strict=True)})
        harness.decode(lanes)
    else:
        harness.extend(dict(zip(lanes, lengths, strict=True)))
    assert [len(harness.entry_slots(lane)) for lane in lanes] == [0, 1, 1]
    for lane in lanes:
        harness.check(lane)
    assert stray_entries(harness, lanes) == set()


@each_backend
@pytest.mark.parametrize("start", [5, 129], ids=str)
def test_rows_that_complete_nothing_store_nothing(impl: str, device: str, start: int) -> None:
    """B38: rows without an entry wrote to slot 0, or over an entry; slot 0 belongs to nobody and stays as it was."""
    harness = Harness(impl, device, 4, lanes=4, tokens=140)
    lanes = [harness.open() for _ in range(4)]
    harness.extend({lane: start - 1 + place for place, lane in enumerate(lanes)})
    before = {name: harness.tensors()[name].clone() for name in ("compressed", "index_keys")}
    harness.decode(lanes, padding=3)
    last = lanes[3]
    slot = int(harness.mirror.tables.req_to_token[last.row, last.length - 1]) // 4
    for name, old in before.items():
        changed = (harness.tensors()[name].view(torch.int32) != old.view(torch.int32)).any(dim=1).nonzero()[:, 0]
        assert changed.tolist() == [slot]
    for lane in lanes:
        harness.check(lane)
    assert stray_entries(harness, lanes) == set()


def stray_entries(harness: Harness, lanes: list[Lane]) -> set[int]:
    """Slots of the compressed pool that were stored to but belong to none of the requests' closed entries."""
    owned = {slot for lane in lanes for slot in harness.entry_slots(lane).tolist()}
    data = harness.tensors()["compressed"].view(torch.uint8)
    written = (data != POISON).any(dim=1).nonzero()[:, 0].tolist()
    assert owned <= set(written)
    return set(written) - owned
