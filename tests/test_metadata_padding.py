"""Padding: requests with id 0 wherever they stand, rows that the bucket adds, and idle steps."""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4_backend as d4
from backends import each_backend
from dsv4_backend import ForwardMode
from metadata_checks import FIELD_NAMES, check_build, few, setting_of
from metadata_steps import Setting, Step
from metadata_strategies import EXAMPLES, scenes

SETTING = setting_of(600, num_requests=9)
ROWS = list(range(300, 340))
# The request in the middle of three is padding: what its length and its slots say is not looked at.
STEPS = {
    "decode": Step(ForwardMode.DECODE, [4, 0, 2], [300, 77, 128], ROWS[:3]),
    "extend": Step(ForwardMode.EXTEND, [4, 0, 2], [300, 77, 128], ROWS[:12], [4, 3, 5]),
    "verify": Step(ForwardMode.TARGET_VERIFY, [4, 0, 2], [299, 77, 126], ROWS[:12], drafts=4),
    "ragged verify": Step(ForwardMode.TARGET_VERIFY, [4, 0, 2], [299, 77, 126], ROWS[:9], [4, 3, 2], 4),
    "draft extend": Step(ForwardMode.DRAFT_EXTEND, [4, 0, 2], [300, 77, 128], ROWS[:12], drafts=4),
    "ragged draft extend": Step(ForwardMode.DRAFT_EXTEND, [4, 0, 2], [300, 77, 128], ROWS[:9], [4, 3, 2]),
    "growing": Step(ForwardMode.DRAFT_DECODE, [4, 0, 2], [299, 77, 127], ROWS[:9], num_steps=3),
    "frozen": Step(ForwardMode.DRAFT_DECODE, [4, 0, 2], [299, 77, 127], ROWS[:9], num_steps=3, grows=False),
}
PER_ROW = [name for name in FIELD_NAMES if name not in ("page_table", "c128_page_indices")]


def counts_of(step: Step) -> list[int]:
    return step.extends or [step.drafts or 1] * len(step.reqs)


def without_padding(step: Step) -> Step:
    """The step of its live requests alone."""
    keep = [b for b, req in enumerate(step.reqs) if req]
    each = [count * (step.num_steps or 1) for count in counts_of(step)]
    begins = [0, *accumulate(each)]
    slots = [slot for b in keep for slot in step.slots[begins[b] : begins[b] + each[b]]]
    lists = ([values[b] for b in keep] for values in (step.reqs, step.seqs))
    extends = [step.extends[b] for b in keep] if step.extends else None
    return dataclasses.replace(step, **dict(zip(("reqs", "seqs"), lists, strict=True)), slots=slots, extends=extends)


@each_backend
@pytest.mark.parametrize("name", STEPS)
@few({str(length): length for length in (-5, 2**40, 0, 601)}, 1)
def test_a_request_in_the_middle(impl: str, device: str, name: str, value: int) -> None:
    """The rows of later requests keep their places, and those of the padding are padding, whatever its length."""
    step = dataclasses.replace(STEPS[name], seqs=[STEPS[name].seqs[0], value, STEPS[name].seqs[2]])
    builder = SETTING.builder(impl, device)
    metas = step.build(builder)
    check_build(builder, metas, SETTING, step)
    assert int(builder._error) == 0
    alone = without_padding(step).build(SETTING.builder(impl, device))
    first, padding, _ = counts_of(step)
    live = [row for row in range(metas[0].num_rows) if not first <= row < first + padding]
    for meta, other in zip(metas, alone, strict=True):
        for field in FIELD_NAMES:
            rows, expected = meta.readable(field)[live], other.readable(field)
            assert torch.equal(rows, expected), field
        middle = slice(first, first + padding)
        assert meta.seq_lens_causal[middle].tolist() == [1] * padding
        for field in ("positions", "req_pool_indices_per_row", "raw_out_cache_loc", "swa_out_cache_loc"):
            assert getattr(meta, field)[middle].tolist() == [0] * padding
        for field in ("c4_lengths", "c4_sparse_lengths", "c4_out_loc", "c128_lengths", "c128_out_loc"):
            assert getattr(meta, field)[middle].tolist() == [0] * padding
        assert meta.c128_page_indices[middle, 0].tolist() == [-1] * padding


@each_backend
@pytest.mark.parametrize("name", ["extend", "verify", "ragged verify", "draft extend", "ragged draft extend"])
def test_plans_leave_it_out_and_count_its_rows(impl: str, device: str, name: str) -> None:
    step = STEPS[name]
    (meta,) = step.build(SETTING.builder(impl, device))
    (alone,) = without_padding(step).build(SETTING.builder(impl, device))
    first, padding, last = counts_of(step)

    def moved(rows: list[tuple[int, ...]], place: int) -> list[tuple[int, ...]]:
        return [(*r[:place], r[place] + padding * (r[place] >= first), *r[place + 1 :]) for r in rows]

    for ratio in (4, 128):
        ours, theirs = meta.plans.ratio(ratio), alone.plans.ratio(ratio)
        assert ours.compress_records().tolist() == moved(theirs.compress_records().tolist(), 1)
        assert ours.write_records().tolist() == moved(theirs.write_records().tolist(), 0)
        assert len(ours.write_records()) > 0
    assert meta.plans.header[:4].tolist() == [0, max(first, last), first + last, 0]
    assert meta.plans.header[4:].tolist() == alone.plans.header[4:].tolist()


@each_backend
@pytest.mark.parametrize("kind", ["ragged", "uniform"])
def test_padding_of_more_rows_than_a_block_of_the_planner(impl: str, device: str, kind: str) -> None:
    """It comes before live rows that another program plans, which must not count it."""
    reqs, counts = {"ragged": ([0, 4, 0, 2], [40, 70, 33, 5]), "uniform": ([0, 0, 0, 0, 4, 0, 2, 7], [10] * 8)}[kind]
    step = Step(ForwardMode.EXTEND, reqs, [300 + 7 * b for b in range(len(reqs))], [301] * sum(counts), counts)
    if kind == "uniform":
        step = dataclasses.replace(step, mode=ForwardMode.TARGET_VERIFY, extends=None, drafts=10)
    builder = SETTING.builder(impl, device)
    check_build(builder, step.build(builder), SETTING, step)


@each_backend
@pytest.mark.parametrize("name", ["decode", "growing"])
def test_decode_plans_hold_request_zero_for_it(impl: str, device: str, name: str) -> None:
    for meta in STEPS[name].build(SETTING.builder(impl, device)):
        for plan in (meta.plans.c4, meta.plans.c128):
            assert plan.records()[1].tolist() == (1, 0, 0, 0)


@each_backend
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_nothing_but_padding(impl: str, device: str, name: str) -> None:
    """All modes agree on what a row of padding is."""
    step = dataclasses.replace(STEPS[name], reqs=[0, 0, 0])
    builder = SETTING.builder(impl, device)
    metas = step.build(builder)
    check_build(builder, metas, SETTING, step)
    idle = Step(ForwardMode.IDLE, [], [], [], padded=metas[0].num_rows)
    (expected,) = idle.build(SETTING.builder(impl, device))
    for meta in metas:
        for field in FIELD_NAMES:
            assert torch.equal(meta.readable(field), expected.readable(field)), field


@each_backend
def test_idle_ignores_its_inputs(impl: str, device: str) -> None:
    wild = Step(ForwardMode.IDLE, [-1, 99, 2**40], [0, -7, 2**40], [-9, 2**40], [-1, 5, 2**40], 99, 7)
    builder = SETTING.builder(impl, device)
    (meta,) = wild.build(builder)
    check_build(builder, [meta], SETTING, wild)
    builder.check()
    assert meta.seq_lens_causal.tolist() == [1, 1]
    assert meta.positions.tolist() == meta.raw_out_cache_loc.tolist() == [0, 0]


@each_backend
@settings(max_examples=EXAMPLES // 2)
@given(scene=scenes(), more=st.integers(1, 40))
def test_a_bucket_changes_nothing_for_the_rows_of_the_batch(
    impl: str, device: str, scene: tuple[Setting, Step], more: int
) -> None:
    """The readable part of every field, and the plans but for their tail of unused rows."""
    setting, step = scene
    step = dataclasses.replace(step, padded=None)
    unit = step.drafts if step.drafts and step.extends is None else 1
    rows = len(step.reqs if step.mode is ForwardMode.DRAFT_DECODE else step.slots)
    with setting.limits():
        plain = step.build(setting.builder(impl, device))
        bucket = dataclasses.replace(step, padded=rows + more * unit).build(setting.builder(impl, device))
    for one, other in zip(plain, bucket, strict=True):
        for field in FIELD_NAMES:
            if getattr(one, field) is not None:
                assert torch.equal(one.readable(field), other.readable(field)[:rows]), field
        for ratio in one.plans.ratios if one.plans else ():
            ours, theirs = one.plans.ratio(ratio), other.plans.ratio(ratio)
            if isinstance(one.plans, d4.DecodePlans):
                assert torch.equal(ours.rows, theirs.rows[:rows])
                continue
            assert ours.compress_records().tolist() == theirs.compress_records().tolist()
            assert ours.write_records().tolist() == theirs.write_records().tolist()


@each_backend
def test_rows_that_the_bucket_adds_are_like_request_zero(impl: str, device: str) -> None:
    by_rows = Step(ForwardMode.DECODE, [4, 2], [300, 128], [301, 302], padded=4)
    by_requests = Step(ForwardMode.DECODE, [4, 2, 0, 0], [300, 128, 9, 1], [301, 302, 303, 0])
    (one,), (other,) = (step.build(SETTING.builder(impl, device)) for step in (by_rows, by_requests))
    assert one.difference(other) is None
    for field in PER_ROW:
        assert torch.equal(getattr(one, field), getattr(other, field)), field
