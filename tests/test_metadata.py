"""MetadataBuilder in every mode: against an oracle, and Triton against the reference bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4_backend as d4
from backends import each_backend, each_triton_backend
from metadata_checks import FIELD_NAMES, assert_same_bits, check_build, contents
from metadata_steps import Setting, Step, UncheckedBuilder, whole
from metadata_strategies import COMPILED, EXAMPLES, bad_scenes, scenes


@each_backend
@settings(max_examples=2 * EXAMPLES)
@given(scene=scenes())
def test_a_build_is_the_oracles(impl: str, device: str, scene: tuple[Setting, Step]) -> None:
    setting, step = scene
    tables = setting.tables(device)
    builder, tensors = setting.builder(impl, device, tables=tables), step.tensors(device)
    inputs = [whole(t) for t in (*tensors.values(), tables.req_to_token, tables.full_to_swa)]
    before = [t.clone() for t in inputs]
    with setting.limits():
        metas = step.build(builder, tensors)
    check_build(builder, metas, setting, step)
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))


@each_backend
@settings(max_examples=2 * EXAMPLES)
@given(scene=bad_scenes())
def test_bad_values_are_flagged_and_built_as_padding(impl: str, device: str, scene: tuple[Setting, Step]) -> None:
    setting, step = scene
    builder = setting.builder(impl, device, UncheckedBuilder)
    with setting.limits():
        metas = step.build(builder)
    check_build(builder, metas, setting, step)


@each_triton_backend
@settings(max_examples=EXAMPLES)
@given(scene=scenes())
def test_triton_writes_what_the_reference_writes(impl: str, device: str, scene: tuple[Setting, Step]) -> None:
    """All buffers, those parts that nobody may read included."""
    setting, step = scene
    ours, theirs = setting.builder(impl, device), setting.builder("torch", device)
    with setting.limits():
        metas, expected = step.build(ours), step.build(theirs)
    for meta, reference in zip(metas, expected, strict=True):
        assert meta.difference(reference) is None
    assert_same_bits(contents(ours), contents(theirs))
    assert int(ours._error) == int(theirs._error) == 0


@each_backend
@settings(max_examples=EXAMPLES // (12 if COMPILED else 4))
@given(scene=scenes(), ratios=st.sampled_from([(4,), (128,), ()]))
def test_a_ratio_is_built_alike_alone_and_together(
    impl: str, device: str, scene: tuple[Setting, Step], ratios: tuple[int, ...]
) -> None:
    setting, step = scene
    with setting.limits():
        both = step.build(dataclasses.replace(setting, ratios=(4, 128)).builder(impl, device))
        some = step.build(dataclasses.replace(setting, ratios=ratios).builder(impl, device))
    for one, other in zip(some, both, strict=True):
        for name in FIELD_NAMES:
            if getattr(one, name) is not None:
                assert torch.equal(one.readable(name), other.readable(name)), name
            else:
                assert int(name.split("_")[0].removeprefix("c")) not in ratios
        plans = [dict(meta.plans.tensors()) if meta.plans else {} for meta in (one, other)]
        for name in plans[0].keys() - {"header"}:
            assert torch.equal(plans[0][name], plans[1][name]), name


@each_backend
@settings(max_examples=EXAMPLES // 2)
@given(scene=scenes())
def test_a_second_build_is_like_a_first(impl: str, device: str, scene: tuple[Setting, Step]) -> None:
    """Whatever a buffer held before."""
    setting, step = scene
    builder = setting.builder(impl, device)
    with setting.limits():
        first = step.build(builder)
        before, places = contents(builder), builder.fingerprint()
        builder.poison()
        second = step.build(builder)
    assert [id(meta) for meta in second] == [id(meta) for meta in first]
    assert_same_bits(contents(builder), before)
    assert builder.fingerprint() == places


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_the_comparison_of_two_builds_sees_every_field(name: str) -> None:
    """`difference` is what most other tests and `debug` rely on."""
    from metadata_checks import setting_of

    setting, step = setting_of(600), Step(d4.ForwardMode.DECODE, [3, 1], [384, 515], [9, 700])
    ours, theirs = (step.build(setting.builder("torch", "cpu"))[0] for _ in range(2))
    assert ours.difference(theirs) is None
    value = getattr(ours, name)
    value.view(-1)[-1 if name not in ("page_table", "c128_page_indices") else value.shape[1]] += 1
    assert ours.difference(theirs).startswith(f"{name}[1")
