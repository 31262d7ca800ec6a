"""Batches of more than a thousand requests, and steps of more than 65,536 rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import dsv4_backend as d4
from backends import INTERPRET, each_backend, each_compiled_backend, each_fast_backend
from dsv4_backend import ForwardMode
from metadata_checks import assert_same_bits, check_build, contents, setting_of
from metadata_steps import Setting, Step, UncheckedBuilder

SETTING = setting_of(300, num_requests=40, topk=1)


def step_of(mode: ForwardMode, counts: list[int], uniform: int = 0, **options: object) -> Step:
    """A step with `counts` rows a request, of which some are padding."""
    rng = np.random.default_rng(len(counts))
    reqs = rng.integers(0, 40, len(counts)).tolist()
    seqs = [count + int(rng.integers(0, 295 - count)) for count in counts]
    slots = rng.integers(1, 600, sum(counts)).tolist()
    if uniform:
        return Step(mode, reqs, seqs, slots, drafts=uniform, **options)
    return Step(mode, reqs, seqs, slots, counts, **options)


def ragged(batch_size: int) -> list[int]:
    return np.random.default_rng(batch_size).integers(0, 4, batch_size).tolist()


MANY = {
    "ragged extend": step_of(ForwardMode.EXTEND, ragged(1025)),
    "uniform verify": step_of(ForwardMode.TARGET_VERIFY, [1] * 1025, 1),
    "ragged verify": step_of(ForwardMode.TARGET_VERIFY, ragged(3000)),
    "uniform draft extend": step_of(ForwardMode.DRAFT_EXTEND, [2] * 1100, 2, padded=2 * 1200),
    "equal extends": step_of(ForwardMode.EXTEND, [1] * 2100),
    "rows at the end": step_of(ForwardMode.EXTEND, [0] * 5000 + [3]),
    "rows at the start": step_of(ForwardMode.EXTEND, [3] + [0] * 5000, padded=40),
    "a long prompt among empty ones": step_of(ForwardMode.EXTEND, [0] * 1500 + [200] + [0] * 3000 + [1, 0, 7]),
    "9,000 requests": step_of(ForwardMode.TARGET_VERIFY, [int(b % 9 == 0) for b in range(9000)]),
}
INTERPRETED = ("rows at the end", "rows at the start", "ragged extend", "uniform verify")
each_large_step = pytest.mark.parametrize("name", INTERPRETED if INTERPRET else MANY)


@each_backend
@each_large_step
def test_more_than_a_thousand_requests(impl: str, device: str, name: str) -> None:
    step, setting = MANY[name], SETTING
    if name == "ragged extend":
        setting = dataclasses.replace(SETTING, once_a_request=True)
    builder = setting.builder(impl, device)
    with setting.limits():
        metas = step.build(builder)
    check_build(builder, metas, setting, step)
    assert int(builder._error) == 0


BAD = [("reqs", 40, 1024), ("seqs", -9, 0), ("seqs", 301, 2999), ("extends", 301, 1500), ("extends", -1, 2048)]


@each_fast_backend
@pytest.mark.parametrize(("name", "value", "where"), BAD, ids=str)
def test_one_bad_request_of_thousands(impl: str, device: str, name: str, value: int, where: int) -> None:
    step = MANY["ragged verify"]
    lists = {key: list(getattr(step, key)) for key in ("reqs", "seqs", "extends")}
    lists["reqs"][where], lists["extends"][where] = 1, 2
    slots = [300] * sum(lists["extends"])
    lists[name][where] = value
    step = dataclasses.replace(step, slots=slots, **lists)
    builder = SETTING.builder(impl, device, UncheckedBuilder)
    check_build(builder, step.build(builder), SETTING, step)
    assert int(builder._error) == 1


@each_fast_backend
@pytest.mark.parametrize(
    "mode", [ForwardMode.DECODE, ForwardMode.DRAFT_DECODE, ForwardMode.IDLE], ids=lambda m: m.value
)
def test_thousands_of_rows_of_one_request_each(impl: str, device: str, mode: ForwardMode) -> None:
    each = 3 if mode is ForwardMode.DRAFT_DECODE else 1
    step = step_of(ForwardMode.DECODE, [1] * 3000)
    step = dataclasses.replace(step, mode=mode, extends=None, slots=step.slots * each, num_steps=each, padded=3001)
    builder = SETTING.builder(impl, device)
    check_build(builder, step.build(builder), SETTING, step)


WIDE = setting_of(40_000, num_requests=4, topk=1)


def wide_step(num_rows: int, padded: int | None = None) -> Step:
    extends = [40_000, 0, num_rows - 40_000 - 128, 128]
    slots = np.random.default_rng(0).integers(1, 40_000, num_rows).tolist()
    return Step(ForwardMode.EXTEND, [1, 2, 3, 0], [40_000, 7, extends[2] + 3, 9], slots, extends, padded=padded)


def check_wide(builder: d4.MetadataBuilder, meta: d4.AttnMetadata, setting: Setting, step: Step) -> None:
    """The oracle's loops would take minutes: arrays instead."""
    total = len(step.slots)
    rows, extends = meta.num_rows, step.extends
    prefixes = [seq - extend for seq, extend in zip(step.seqs, extends, strict=True)]
    position = np.concatenate([prefix + np.arange(n) for prefix, n in zip(prefixes, extends, strict=True)])
    req = np.repeat(step.reqs, extends)
    live, slots = req > 0, np.array(step.slots)
    position, slots = np.where(live, position, 0), np.where(live, slots, 0)
    table, full_to_swa = setting.pool.req_to_token, setting.pool.full_to_swa

    def padded(values: np.ndarray, pad: int) -> list[int]:
        return [*values.tolist(), *[pad] * (rows - total)]

    assert meta.positions.tolist() == padded(position, 0)
    assert meta.seq_lens_causal.tolist() == padded(position + 1, 1)
    assert meta.req_pool_indices_per_row.tolist() == padded(req, 0)
    assert meta.raw_out_cache_loc.tolist() == padded(slots, 0)
    assert meta.swa_out_cache_loc.tolist() == padded(full_to_swa[slots], 0)
    assert meta.c4_out_loc.tolist() == padded(np.where(position % 4 == 3, slots // 4, 0), 0)
    assert meta.c128_out_loc.tolist() == padded(np.where(position % 128 == 127, slots // 128, 0), 0)
    back = position[:, None] - np.arange(128)
    window = np.where(back >= 0, full_to_swa[table[req[:, None], back.clip(0)]], -1)
    assert np.array_equal(meta.swa_page_indices[:total].cpu().numpy(), window)
    for ratio in (4, 128):
        records = meta.plans.ratio(ratio).compress_records()
        closing = np.flatnonzero(live & (position % ratio == ratio - 1))
        assert records["ragged_id"].tolist() == closing.tolist()
        assert records["seq_len"].tolist() == (position[closing] + 1).tolist()
    assert meta.plans.header.tolist()[:4] == [0, 40_000, int(live.sum()), 0]
    builder.check()


@each_fast_backend
@pytest.mark.parametrize(
    ("num_rows", "padded", "row_bytes"),
    [(65_536, None, 16), (65_537, None, 20), (60_000, 70_000, 20)],
    ids=["packed", "wide", "a wide bucket"],
)
def test_around_65536_rows(impl: str, device: str, num_rows: int, padded: int | None, row_bytes: int) -> None:
    step = wide_step(num_rows, padded)
    builder = WIDE.builder(impl, device)
    (meta,) = step.build(builder)
    check_wide(builder, meta, WIDE, step)
    assert meta.plans.c4.compress.shape == (padded or num_rows, row_bytes)
    assert meta.table_rows is not None
    builder.check_guards()


@each_compiled_backend
def test_wide_steps_are_those_of_the_reference(impl: str, device: str) -> None:
    step = wide_step(70_000, 70_001)
    ours, theirs = (WIDE.builder(each, device) for each in (impl, "torch"))
    (meta,), (expected,) = step.build(ours), step.build(theirs)
    assert meta.difference(expected) is None
    assert_same_bits(contents(ours), contents(theirs))
    assert torch.equal(ours._error, theirs._error)
