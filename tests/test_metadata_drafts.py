"""Draft steps: what each of them is, all in one build; and what a graph runner is given."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings

import dsv4_backend as d4
from backends import each_backend
from dsv4_backend import ForwardMode
from dsv4_graph_runner.protocols import MetadataProvider
from metadata_checks import FIELD_NAMES, assert_same_bits, check_build, contents, setting_of
from metadata_steps import Setting, Step
from metadata_strategies import EXAMPLES, scenes

SETTING = setting_of(600, num_requests=9)
STEP = Step(ForwardMode.DRAFT_DECODE, [4, 0, 2, 7], [255, 9, 126, 0], list(range(300, 316)), num_steps=4)
OF_LENGTHS = [
    name for name in FIELD_NAMES if name not in ("raw_out_cache_loc", "swa_out_cache_loc", "c4_out_loc", "c128_out_loc")
]


def as_decode(step: Step, i: int) -> Step:
    """The decode step that draft step i is."""
    counted = i + 1 if step.grows else 0
    return dataclasses.replace(
        step,
        mode=ForwardMode.DECODE,
        seqs=[seq + counted for seq in step.seqs],
        slots=step.slots[i :: step.num_steps],
        num_steps=0,
        forms=((torch.int64, "contiguous"),) * 4,
    )


@each_backend
@settings(max_examples=EXAMPLES // 2)
@given(scene=scenes([ForwardMode.DRAFT_DECODE]))
def test_a_step_is_a_decode_build(impl: str, device: str, scene: tuple[Setting, Step]) -> None:
    """A growing one of lengths + i + 1, a frozen one of the committed lengths and without plans."""
    setting, step = scene
    with setting.limits():
        metas = step.build(setting.builder(impl, device))
    assert len(metas) == step.num_steps - 1
    for i, meta in enumerate(metas):
        (expected,) = as_decode(step, i).build(setting.builder(impl, device))
        if not step.grows:
            assert meta.plans is None
            expected = dataclasses.replace(expected, plans=None)
        assert meta.difference(expected) is None


@each_backend
def test_growing_steps_by_hand(impl: str, device: str) -> None:
    builder = SETTING.builder(impl, device)
    metas = STEP.build(builder)
    check_build(builder, metas, SETTING, STEP)
    assert [meta.positions.tolist() for meta in metas] == [[255, 0, 126, 0], [256, 0, 127, 1], [257, 0, 128, 2]]
    assert [meta.raw_out_cache_loc.tolist() for meta in metas] == [
        [300 + i, 0, 308 + i, 312 + i] for i in range(STEP.num_steps - 1)
    ]
    # The window of a step holds the tokens of the steps before it.
    table, full_to_swa = SETTING.pool.req_to_token, SETTING.pool.full_to_swa
    assert metas[2].swa_page_indices[0, :3].tolist() == full_to_swa[table[4, [257, 256, 255]]].tolist()
    assert [meta.c128_lengths.tolist() for meta in metas] == [[2, 0, 0, 0], [2, 0, 1, 0], [2, 0, 1, 0]]
    assert [meta.c128_out_loc.tolist() for meta in metas] == [[300 // 128, 0, 0, 0], [0, 0, 309 // 128, 0], [0] * 4]
    assert [meta.plans.c4.records()["seq_len"].tolist() for meta in metas] == [
        [256, 1, 127, 1],
        [257, 1, 128, 2],
        [258, 1, 129, 3],
    ]


@each_backend
def test_frozen_steps_differ_in_their_slots_alone(impl: str, device: str) -> None:
    step = dataclasses.replace(STEP, seqs=[256, 9, 128, 4], grows=False)
    builder = SETTING.builder(impl, device)
    metas = step.build(builder)
    check_build(builder, metas, SETTING, step)
    for i, meta in enumerate(metas):
        assert meta.plans is None
        assert meta.seq_lens_causal.tolist() == [256, 1, 128, 4]
        for name in OF_LENGTHS:
            assert torch.equal(meta.readable(name), metas[0].readable(name)), name
        assert meta.raw_out_cache_loc.tolist() == [300 + i, 0, 308 + i, 312 + i]
        assert meta.c4_out_loc.tolist() == [(300 + i) // 4, 0, (308 + i) // 4, (312 + i) // 4]


@each_backend
@pytest.mark.parametrize("grows", [True, False], ids=["growing", "frozen"])
def test_the_longest_length_that_fits(impl: str, device: str, grows: bool) -> None:
    length = 597 if grows else 600
    step = Step(ForwardMode.DRAFT_DECODE, [8], [length], [300, 301, 302, 303], num_steps=4, grows=grows)
    builder = SETTING.builder(impl, device)
    metas = step.build(builder)
    check_build(builder, metas, SETTING, step)
    assert [int(meta.seq_lens_causal) for meta in metas] == ([598, 599, 600] if grows else [600] * 3)


@pytest.mark.parametrize("grows", [True, False], ids=["growing", "frozen"])
def test_one_step_only_samples(grows: bool) -> None:
    builder = SETTING.builder("torch", "cpu")
    step = dataclasses.replace(STEP, slots=STEP.slots[:4], num_steps=1, grows=grows, seqs=[255, 9, 126, 1])
    assert step.build(builder) == []
    assert builder.nbytes == 0


def inputs_of(step: Step, device: str) -> SimpleNamespace:
    """What a graph runner shows of a batch."""
    return SimpleNamespace(
        **step.tensors(device), batch_size=len(step.reqs), num_steps=step.num_steps, topk=1, seq_lens_cpu=None
    )


@each_backend
@pytest.mark.parametrize("window", ["growing", "frozen"])
def test_a_graph_runner_gets_the_same_buffers_every_time(impl: str, device: str, window: str) -> None:
    step = dataclasses.replace(STEP, seqs=[255, 9, 126, 1], grows=window == "growing")
    builder = SETTING.builder(impl, device, draft_window=window)
    assert isinstance(builder, MetadataProvider)
    inputs = inputs_of(step, device)
    bound, places = builder.bind_draft(inputs), builder.draft_fingerprint()
    check_build(builder, bound, SETTING, step)
    before, fingerprint = contents(builder), builder.fingerprint()
    builder.poison()
    builder.prepare_draft(inputs, 3)
    builder.record_draft(inputs)
    assert_same_bits(contents(builder), before)
    # A batch that runs without a graph does not touch what is bound.
    builder.poison()
    eager = builder.build_draft(inputs_of(dataclasses.replace(step, seqs=[9, 9, 9, 9]), device))
    builder.record_draft(inputs)
    check_build(builder, bound, SETTING, step)
    check_build(builder, eager, SETTING, dataclasses.replace(step, seqs=[9, 9, 9, 9]))
    assert [meta.positions.data_ptr() for meta in eager] != [meta.positions.data_ptr() for meta in bound]
    assert builder.draft_fingerprint() == places
    assert builder.fingerprint() != fingerprint  # the buffers of the batch without a graph are new


def test_a_graph_runner_sees_tables_that_moved() -> None:
    one, other = (SETTING.builder("torch", "cpu") for _ in range(2))
    assert one.draft_fingerprint() == one.draft_fingerprint()
    assert one.draft_fingerprint() != other.draft_fingerprint()
    hash(one.draft_fingerprint())


@pytest.mark.parametrize("window", ["Growing", "", None, 1])
def test_other_windows_are_refused(window: object) -> None:
    with pytest.raises(ValueError, match=r"^draft_window: expected one of \('growing', 'frozen'\), got "):
        SETTING.builder("torch", "cpu", draft_window=window)
    builder = SETTING.builder("torch", "cpu")
    batch = STEP.batch(STEP.tensors("cpu"))
    with pytest.raises(ValueError, match=r"^draft_window: expected one of \('growing', 'frozen'\), got "):
        d4.MetadataBuilder.build_draft_steps(builder, batch, draft_window=window)
    assert builder.nbytes == 0
