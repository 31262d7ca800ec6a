"""Faults that people met in production, as far as a row's metadata is concerned. Each test carries the id of its case.

Not applicable: B46 and B53 (a runner's), B56 (nothing here is indexed by accepted lengths).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import dsv4_backend as d4
from backends import each_backend, each_fast_backend
from dsv4_backend import ForwardMode
from metadata_checks import FIELD_NAMES, check_build, setting_of
from metadata_steps import GEOM, POISON_WORD, Setting, Step
from strategies import Pool, make_pool

LONG = setting_of(2**20, num_requests=2)
SHORT = setting_of(600, num_requests=7)


def run(impl: str, device: str, step: Step, setting: Setting = SHORT) -> d4.AttnMetadata:
    """The metadata of a step, which is as the oracle says."""
    builder = setting.builder(impl, device)
    metas = step.build(builder)
    check_build(builder, metas, setting, step)
    return metas[0]


def decode(seqs: list[int], **options: object) -> Step:
    """A decode step of request 1 at several lengths."""
    return Step(ForwardMode.DECODE, [1] * len(seqs), seqs, [300 + b for b in range(len(seqs))], **options)


@each_backend
@pytest.mark.parametrize("padding", ["padded rows", "request 0"])
@pytest.mark.parametrize("width", [4, 6])
def test_b17_padded_draft_extend_rows_have_no_negative_lengths(
    impl: str, device: str, width: int, padding: str
) -> None:
    reqs, seqs = [1, 2, 3], [40, 17, 9]
    if padding == "request 0":
        reqs, seqs = [*reqs, 0], [*seqs, 1]
    slots = list(range(300, 300 + width * len(reqs)))
    step = Step(ForwardMode.DRAFT_EXTEND, reqs, seqs, slots, drafts=width, padded=4 * width)
    meta = run(impl, device, step)
    expected = [n for seq in (40, 17, 9) for n in range(seq - width + 1, seq + 1)]
    assert meta.seq_lens_causal.tolist() == expected + [1] * width
    for value in (meta.positions, meta.raw_out_cache_loc, meta.swa_out_cache_loc, meta.req_pool_indices_per_row):
        assert value[-width:].tolist() == [0] * width
    for name in FIELD_NAMES:
        low = -1 if name in ("swa_page_indices", "c4_sparse_page_indices", "c128_page_indices") else 0
        assert int(getattr(meta, name)[-width:, ...].reshape(width, -1)[:, :1].min()) >= low, name


@each_backend
@pytest.mark.parametrize("live", [False, True], ids=["none", "one live row"])
@pytest.mark.parametrize("batch_size", [1, 31, 32, 33, 64, 256])
def test_b19_all_compressed_lengths_are_zero(impl: str, device: str, batch_size: int, live: bool) -> None:
    """There is no scheduling array here; what a scheduler adds up is well defined."""
    for length in (1, 3):
        meta = run(impl, device, decode([length] * (batch_size - 1) + [4 if live else length]))
        total = int(live)
        assert int(meta.c4_lengths.sum()) == int(meta.c4_sparse_lengths.sum()) == total
        assert int(meta.c128_lengths.sum()) == 0
        assert (meta.c128_page_indices[:, 0] == -1).all()
        assert (meta.c4_sparse_page_indices == -1).all()
        if batch_size > 64:
            break


@each_backend
@pytest.mark.parametrize(
    ("topk", "expected"),
    [(512, [0, 0, 1, 511, 511, 512, 512, 512, 512]), (1024, [0, 0, 1, 511, 511, 512, 513, 1024, 1024])],
)
def test_b21_fewer_candidates_than_k(impl: str, device: str, topk: int, expected: list[int]) -> None:
    """k is the model's, and what is not filled in is -1, whatever the buffer held."""
    setting = dataclasses.replace(LONG, topk=topk)
    step = decode([1, 3, 4, 2044, 2047, 2048, 2052, 4096, 2**20])
    builder = setting.builder(impl, device)
    step.build(builder)
    builder.poison()
    (meta,) = step.build(builder)
    check_build(builder, [meta], setting, step)
    assert meta.c4_sparse_lengths.tolist() == expected
    assert meta.c4_lengths.tolist() == [n // 4 for n in step.seqs]
    assert meta.index_topk == topk == meta.c4_sparse_page_indices.shape[1]
    for cfg, k in ((d4.DSV4Config.v4_flash(), 512), (d4.DSV4Config.v4_pro(), 1024)):
        model = d4.MetadataBuilder(cfg, GEOM, SHORT.tables(device), max_rows=4, max_seq_len=600, impl=impl)
        assert decode([9]).build(model)[0].index_topk == k


@each_backend
def test_b23_the_row_stride_is_that_of_the_capacity(impl: str, device: str) -> None:
    builder, places = LONG.builder(impl, device), []
    for seqs, lengths in (([300, 128, 5000, 64000], [2, 1, 39, 500]), ([64000, 128, 300, 5000], [500, 1, 2, 39])):
        step = decode(seqs, padded=4)
        (meta,) = step.build(builder)
        check_build(builder, [meta], LONG, step)
        assert meta.c128_lengths.tolist() == lengths
        assert meta.c128_page_indices.shape == (4, 8192)
        assert meta.c128_page_indices.stride() == (8192, 1)
        places.append(meta.c128_page_indices.data_ptr())
    assert places[0] == places[1]
    # A row is written up to the end of its last page; here by the longer one of both builds.
    written = (meta.c128_page_indices != POISON_WORD).sum(dim=1)
    assert written.tolist() == [500, 2, 40, 500]


@each_backend
def test_b25_an_idle_rank_keeps_nothing(impl: str, device: str) -> None:
    tables = SHORT.tables(device)
    builder = SHORT.builder(impl, device, tables=tables)
    Step(ForwardMode.DECODE, [1], [13], [268]).build(builder)
    tables.full_to_swa[268] = 0
    tables.req_to_token[1] = 0
    stale = Step(ForwardMode.IDLE, [1], [13], [268], padded=4)
    for step in (Step(ForwardMode.IDLE, [], [], []), stale, dataclasses.replace(stale, reqs=[], seqs=[], slots=[])):
        (meta,) = step.build(builder)
        rows = step.padded or 0
        assert meta.num_rows == rows
        check_build(builder, [meta], SHORT, step)
        for name in ("raw_out_cache_loc", "swa_out_cache_loc", "req_pool_indices_per_row", "positions"):
            assert getattr(meta, name).tolist() == [0] * rows
        assert meta.seq_lens_causal.tolist() == [1] * rows
        assert meta.plans.c4.records().tolist() == [(1, 0, 0, 0)] * rows


@pytest.mark.parametrize(
    ("extends", "padded"), [([1000, 15], 1024), ([200, 142], 352)], ids=["1015 to 1024", "342 to 352"]
)
@each_fast_backend
def test_b26_padded_after_it_was_planned(impl: str, device: str, extends: list[int], padded: int) -> None:
    """There are no prefix arrays here: every tensor has a row a row."""
    setting, total = setting_of(1100, num_requests=3), sum(extends)
    step = Step(ForwardMode.EXTEND, [1, 2], [1050, 300], list(range(300, 300 + total)), extends)
    expect_padded(impl, device, setting, step, total, padded)


@each_backend
@pytest.mark.parametrize("mode", [ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND], ids=lambda mode: mode.value)
def test_b26_three_requests_padded_to_four(impl: str, device: str, mode: ForwardMode) -> None:
    step = Step(mode, [4, 1, 2], [300, 40, 9], list(range(300, 312)), drafts=4)
    expect_padded(impl, device, SHORT, step, 12, 16)


def expect_padded(impl: str, device: str, setting: Setting, step: Step, total: int, padded: int) -> None:
    plain, more = (run(impl, device, dataclasses.replace(step, padded=p), setting) for p in (None, padded))
    assert (plain.num_rows, more.num_rows) == (total, padded)
    for name in FIELD_NAMES:
        one, other = getattr(plain, name), getattr(more, name)
        assert one.shape[0] == total
        assert other.shape[0] == padded
        assert torch.equal(plain.readable(name), more.readable(name)[:total]), name
    assert more.seq_lens_causal[total:].tolist() == [1] * (padded - total)
    assert more.raw_out_cache_loc[total:].tolist() == [0] * (padded - total)
    assert plain.plans.header.tolist() == more.plans.header.tolist()


NOTHING = {
    "decode": Step(ForwardMode.DECODE, [], [], []),
    "extend": Step(ForwardMode.EXTEND, [], [], [], []),
    "extend without rows": Step(ForwardMode.EXTEND, [1, 0], [9, 0], [], [0, 0]),
    "verify": Step(ForwardMode.TARGET_VERIFY, [], [], [], drafts=4),
    "ragged verify": Step(ForwardMode.TARGET_VERIFY, [1, 0], [9, 0], [], [0, 0]),
    "draft extend": Step(ForwardMode.DRAFT_EXTEND, [], [], [], drafts=4),
    "idle": Step(ForwardMode.IDLE, [], [], []),
    "growing": Step(ForwardMode.DRAFT_DECODE, [], [], [], num_steps=3),
    "frozen": Step(ForwardMode.DRAFT_DECODE, [], [], [], num_steps=3, grows=False),
    "a dummy of length 0": Step(ForwardMode.DECODE, [0], [0], [0]),
}


@each_backend
@pytest.mark.parametrize("padded", [None, 4])
@pytest.mark.parametrize("name", NOTHING)
def test_b28_nothing_to_build(impl: str, device: str, name: str, padded: int | None) -> None:
    step = dataclasses.replace(NOTHING[name], padded=padded)
    meta = run(impl, device, step)
    assert meta.num_rows == (padded if padded is not None else len(step.slots))
    assert (meta.positions == 0).all()


@each_backend
def test_b29_a_new_mapping_is_seen(impl: str, device: str) -> None:
    """Translations are made anew: of a map that is changed in place, and of another one with fewer slots."""
    pool, slots = SHORT.pool, [10, 11, 12, 13]
    for first in (4, 0):
        full_to_swa = pool.full_to_swa.copy()
        full_to_swa[:] = 0
        full_to_swa[10:14] = np.arange(first, first + 4)
        setting = dataclasses.replace(SHORT, pool=Pool(pool.req_to_token, full_to_swa))
        tables = setting.tables(device)
        builder = setting.builder(impl, device, tables=tables)
        step = Step(ForwardMode.DECODE, [1, 2, 3, 4], [9, 9, 9, 9], slots)
        (meta,) = step.build(builder)
        assert meta.swa_out_cache_loc.tolist() == list(range(first, first + 4))
        assert int(meta.swa_page_indices.max()) == 0
        tables.full_to_swa[10:14] = torch.tensor([3, 2, 1, 0], device=device)
        (meta,) = step.build(builder)
        assert meta.swa_out_cache_loc.tolist() == [3, 2, 1, 0]


@each_backend
@pytest.mark.parametrize("evicted", [0, -1])
def test_b31_evicted_window_entries(impl: str, device: str, evicted: int) -> None:
    pool = make_pool(GEOM, 3, 400, 0)
    full_to_swa = pool.full_to_swa.copy()
    full_to_swa[pool.req_to_token[1, :128]] = evicted
    full_to_swa[pool.req_to_token[2, 1]] = evicted
    setting = Setting(Pool(pool.req_to_token, full_to_swa))
    meta = run(impl, device, Step(ForwardMode.DECODE, [1, 2, 2], [300, 130, 129], [300, 301, 302]), setting)
    live = [int(full_to_swa[slot]) for slot in pool.req_to_token[1, 299:171:-1]]
    assert meta.swa_page_indices[0].tolist() == live
    assert min(live) > 0
    # Position 1 is not in the window of length 130; it is the oldest entry of length 129.
    assert (meta.swa_page_indices[1] > 0).all()
    assert meta.swa_page_indices[2].tolist().index(evicted) == 127
    assert meta.swa_lengths.tolist() == [128, 128, 128]


@each_backend
def test_b31_an_entry_of_minus_one_stays_minus_one(impl: str, device: str) -> None:
    pool = make_pool(GEOM, 3, 400, 0)
    pool.req_to_token[1, [256, 290]] = -1
    meta = run(impl, device, Step(ForwardMode.DECODE, [1], [300], [-1]), Setting(pool))
    assert meta.swa_page_indices[0].tolist().index(-1) == 299 - 290
    assert meta.swa_out_cache_loc.tolist() == [-1]
    # Division truncates: slot -1 is on page 0, not on page -1.
    assert meta.page_table[0].tolist() == [int(pool.req_to_token[1, 0]) // 256, 0]


@each_backend
@pytest.mark.parametrize("window", [128, 16, 100])
def test_b32_window_lengths_are_not_the_width(impl: str, device: str, window: int) -> None:
    geom = dataclasses.replace(GEOM, window=window)
    setting = dataclasses.replace(SHORT, geom=geom)
    seqs = [1, 2, 127, 128, 129, 255, 256, 257]
    meta = run(impl, device, decode(seqs), setting)
    assert meta.swa_lengths.tolist() == [min(n, window) for n in seqs]
    assert meta.swa_page_indices.shape[1] % 64 == 0
    assert ((meta.swa_page_indices >= 0).sum(dim=1) == meta.swa_lengths).all()
    assert [int(n) for n in (meta.readable("page_table") != -2).sum(dim=1)] == [1, 1, 1, 1, 1, 1, 1, 2]
    verify = Step(ForwardMode.TARGET_VERIFY, [1], [125], list(range(300, 306)), drafts=6)
    meta = run(impl, device, verify, setting)
    assert meta.seq_lens_causal.tolist() == [126, 127, 128, 129, 130, 131]
    assert meta.swa_lengths.tolist() == [min(n, window) for n in (126, 127, 128, 128, 128, 128)]


@each_backend
@pytest.mark.parametrize(("ratio", "seqs"), [(4, [5, 6, 7, 8]), (128, [129, 130, 131, 132]), (128, [126, 127, 128, 1])])
def test_b38_rows_that_complete_no_group(impl: str, device: str, ratio: int, seqs: list[int]) -> None:
    """They go to slot 0, which no live entry owns."""
    meta = run(impl, device, decode(seqs))
    for r, out_loc in ((4, meta.c4_out_loc), (128, meta.c128_out_loc)):
        expected = [(300 + b) // r if n % r == 0 else 0 for b, n in enumerate(seqs)]
        assert out_loc.tolist() == expected
        assert sum(map(bool, expected)) == sum(n % r == 0 for n in seqs)
    # Page 0 is never handed out, so that no slot of a live row is below 256.
    assert min(slot // ratio for slot in SHORT.pool.req_to_token[1:].flat) >= 256 // ratio
