"""The buffers of a builder: one set for each mode and bucket, allocated once; and what `debug` sees."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random

import pytest
import torch

import dsv4_backend as d4
from backends import each_backend, each_fast_backend
from dsv4_backend import ForwardMode, metadata_builder
from metadata_checks import FIELD_NAMES, assert_same_bits, check_build, contents, few, setting_of
from metadata_steps import POISON_WORD, Setting, Step, UncheckedBuilder

SETTING = setting_of(600, num_requests=9)
SLOTS = list(range(300, 400))


def step_of(mode: ForwardMode, batch_size: int, **options: object) -> Step:
    """A step of requests 1, 2, ... with 3 rows each where the mode has several, 3 steps where it has several."""
    reqs = [1 + b % 8 for b in range(batch_size)]
    seqs = [50 + 31 * b % 500 for b in range(batch_size)]
    rows = batch_size * (3 if mode not in (ForwardMode.DECODE, ForwardMode.IDLE) else 1)
    if mode is ForwardMode.EXTEND:
        options["extends"] = [3] * batch_size
    if mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
        options["drafts"] = 3
    if mode is ForwardMode.DRAFT_DECODE:
        options["num_steps"] = 3
    return Step(mode, reqs, seqs, SLOTS[:rows], **options)


EVERY_KIND = {
    **{mode.value: step_of(mode, 2) for mode in ForwardMode},
    "frozen": step_of(ForwardMode.DRAFT_DECODE, 2, grows=False),
    "ragged verify": Step(ForwardMode.TARGET_VERIFY, [1, 2], [50, 81], SLOTS[:5], [2, 3]),
    "ragged draft extend": Step(ForwardMode.DRAFT_EXTEND, [1, 2], [50, 81], SLOTS[:5], [2, 3]),
}
each_kind = pytest.mark.parametrize("name", EVERY_KIND)


@each_backend
@each_kind
def test_builds_of_a_bucket_return_the_same_tensors(impl: str, device: str, name: str) -> None:
    builder, step = SETTING.builder(impl, device), EVERY_KIND[name]
    first = step.build(builder)
    before, places, size = contents(builder), builder.fingerprint(), builder.nbytes
    other = dataclasses.replace(step, seqs=[seq + 7 for seq in step.seqs], reqs=[5, 6])
    check_build(builder, other.build(builder), SETTING, other)
    builder.poison()
    again = step.build(builder)
    assert [id(meta) for meta in again] == [id(meta) for meta in first]
    assert_same_bits(contents(builder), before)
    assert (builder.fingerprint(), builder.nbytes) == (places, size)
    (tensors,) = builder.buffers().values()
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert {t.untyped_storage().data_ptr() for meta in again for _, t in meta.tensors()} <= storages


# Batches that have the rows of a step in common, and little else.
ALIKE = {
    "verify": [
        Step(ForwardMode.TARGET_VERIFY, reqs, [50 + 9 * b for b in range(len(reqs))], SLOTS[:12], extends, drafts)
        for reqs, extends, drafts in (
            ([1, 2, 3], None, 4),
            ([1, 2, 3, 4], None, 3),
            ([1, 2, 3, 4], [4, 4, 1, 3], 4),
            ([1, 2, 3], [3, 1, 8], 0),
            ([1, 2, 3], [5, 5, 2], 5),
            ([1, 2], None, 6),
        )
    ],
    "extend": [
        Step(ForwardMode.EXTEND, list(range(1, n + 1)), [50 + 9 * b for b in range(n)], SLOTS[:12], extends)
        for n, extends in ((3, [4, 4, 4]), (4, [3, 1, 2, 6]), (1, [12]), (3, [0, 12, 0]))
    ],
    "drafts": [
        dataclasses.replace(step_of(ForwardMode.DRAFT_DECODE, 2), slots=SLOTS[: 2 * n], num_steps=n, grows=grows)
        for n in (3, 4, 2)
        for grows in (True, False)
    ],
}


@each_backend
@few({name: name for name in ALIKE}, 3)
def test_batches_with_the_same_number_of_rows(impl: str, device: str, value: str) -> None:
    """Another width, ragged or not, more requests, more draft steps: each is built as what it is, in any order."""
    builder = SETTING.builder(impl, device)
    for step in (*ALIKE[value], *reversed(ALIKE[value])):
        check_build(builder, step.build(builder), SETTING, step)


@each_backend
def test_the_limit_of_a_ragged_batch_is_its_own(impl: str, device: str) -> None:
    """Of two batches with the same rows, the one that allows fewer drafts is padding."""
    builder = SETTING.builder(impl, device, UncheckedBuilder)
    for drafts in (4, 3, 0):
        step = Step(ForwardMode.TARGET_VERIFY, [1, 2], [50, 81], SLOTS[:5], [1, 4], drafts)
        check_build(builder, step.build(builder), SETTING, step)
        assert bool(builder._error) == (drafts == 3)
        builder._error.zero_()


@each_fast_backend
def test_buckets_and_modes_never_share_memory(impl: str, device: str) -> None:
    builder = SETTING.builder(impl, device)
    for step in EVERY_KIND.values():
        for padded in (None, 12, 15):
            dataclasses.replace(step, padded=padded).build(builder)
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
        for tensors in builder.buffers().values()
        for tensor in tensors.values()
    )
    spans.append((builder._error.data_ptr(), builder._error.data_ptr() + 4))
    spans.sort()
    assert len(spans) > 300
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    # Three numbers of rows of each mode, growing and frozen being two; a ragged batch uses the buffers of its mode.
    assert len(builder.buffers()) == 3 * 7


@each_fast_backend
@pytest.mark.parametrize("name", EVERY_KIND)
def test_a_build_leaves_other_buckets_alone(impl: str, device: str, name: str) -> None:
    builder, alone = (SETTING.builder(impl, device) for _ in range(2))
    for step in EVERY_KIND.values():
        dataclasses.replace(step, padded=12).build(builder)
    builder.poison()
    for each in (builder, alone):
        dataclasses.replace(EVERY_KIND[name], padded=12).build(each)
    found = contents(builder)
    ((key, expected),) = contents(alone).items()
    assert [k for k, tensors in found.items() if (tensors["positions"] != POISON_WORD).any()] == [key]
    assert_same_bits({key: found[key]}, {key: expected})


@each_backend
@few({mode.value: mode for mode in (ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.DRAFT_DECODE)})
def test_builds_without_a_bucket_use_the_first_rows_of_a_power_of_two(
    impl: str, device: str, value: ForwardMode
) -> None:
    builder = SETTING.builder(impl, device, max_rows=30)
    expected = {3: 4, 5: 8, 7: 8, 8: 8, 9: 16, 15: 16, 21: 30, 24: 30, 27: 30}
    for batch_size in (5, 7, 3, 9, 8):
        step = step_of(value, batch_size)
        metas = step.build(builder)
        rows = metas[0].num_rows
        check_build(builder, metas, SETTING, step)
        (key,) = (key for key in builder.buffers() if key.num_rows == expected[rows])
        assert key.eager
        # Rows behind those of the batch are not touched.
        builder.poison()
        step.build(builder)
        for field in FIELD_NAMES:
            assert (builder.buffers()[key][field][:, rows:] == POISON_WORD).all(), field


@each_fast_backend
def test_memory_does_not_grow(impl: str, device: str) -> None:
    """Any sequence of batches whose buckets have been built."""
    builder, rng = SETTING.builder(impl, device), random.Random(0)
    steps = [
        dataclasses.replace(step_of(mode, batch_size), padded=padded)
        for mode in ForwardMode
        for batch_size in (1, 3, 4)
        for padded in (None, 12)
    ]
    inputs = [step.tensors(device) for step in steps]
    for step, tensors in zip(steps, inputs, strict=True):
        step.build(builder, tensors)
    places, size, found = builder.fingerprint(), builder.nbytes, []
    for i in range(120):
        if i in (40, 119):
            gc.collect()
            found.append((len(gc.get_objects()), torch.cuda.memory_allocated() if device == "cuda" else 0))
        k = rng.randrange(len(steps))
        steps[k].build(builder, inputs[k])
    assert abs(found[1][0] - found[0][0]) < 50
    assert found[1][1] == found[0][1]
    assert (builder.fingerprint(), builder.nbytes) == (places, size)


def test_views_of_many_shapes_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of any length is a shape of its own; the buffers are few."""
    monkeypatch.setattr(metadata_builder, "_MAX_VIEWS", 8)
    builder = SETTING.builder("torch", "cpu")
    for batch_size in range(1, 34):
        step = step_of(ForwardMode.DECODE, batch_size)
        check_build(builder, step.build(builder), SETTING, step)
        assert len(builder._bound) <= 8
    assert sorted(key.num_rows for key in builder.buffers()) == [1, 2, 4, 8, 16, 32, 64]


@each_fast_backend
def test_builds_in_and_out_of_inference_mode(impl: str, device: str) -> None:
    """Buffers that were made in it are written out of it, and the other way round."""
    step, tables = EVERY_KIND["ragged verify"], SETTING.tables(device)
    with torch.inference_mode():
        builder = SETTING.builder(impl, device, d4.MetadataBuilder, tables=tables)
        (first,) = step.build(builder)
        kept = {name: tensor.clone() for name, tensor in first.tensors()}
    (second,) = step.build(builder)
    with torch.inference_mode():
        (third,) = step.build(builder)
        builder.check()
    assert first is second is third
    assert all(torch.equal(tensor, kept[name]) for name, tensor in third.tensors())


def test_the_size_is_that_of_the_tensors() -> None:
    builder = SETTING.builder("torch", "cpu")
    for step in EVERY_KIND.values():
        step.build(builder)
    assert builder.nbytes == sum(
        tensor.numel() * tensor.element_size() for tensors in builder.buffers().values() for tensor in tensors.values()
    )
    (meta,) = dataclasses.replace(EVERY_KIND["EXTEND"], padded=6).build(builder)
    assert meta.nbytes == sum(tensor.numel() * tensor.element_size() for _, tensor in meta.tensors())
    assert (meta.num_rows, meta.c4_page_size, meta.max_c4_length) == (6, 64, 3 * 64)


@each_fast_backend
def test_a_capacity_above_the_table_only_adds_columns(impl: str, device: str) -> None:
    step = step_of(ForwardMode.DECODE, 3)
    (small,), (large,) = (
        step.build(dataclasses.replace(SETTING, max_seq_len=n).builder(impl, device)) for n in (600, 1 << 20)
    )
    assert (small.page_table.shape, large.page_table.shape) == ((3, 3), (3, 4096))
    assert (small.c128_page_indices.shape, large.c128_page_indices.shape) == ((3, 64), (3, 8192))
    assert small.difference(large) is None
    assert large.difference(small) is None


DEBUGGED = [name for name in EVERY_KIND if name != "IDLE"]


@each_backend
@few({name: name for name in DEBUGGED}, 3)
def test_debug_says_nothing_about_good_builds(impl: str, device: str, value: str) -> None:
    builder, step = SETTING.builder(impl, device, debug=True), EVERY_KIND[value]
    metas = step.build(builder)
    check_build(builder, metas, SETTING, step)
    assert len(builder.buffers()) == 1


def spoilt(setting: Setting, impl: str, device: str, name: str, step: int) -> d4.MetadataBuilder:
    """A builder with `debug`, whose builds are changed in one place of one field before anyone looks."""
    builder = setting.builder(impl, device, debug=True)
    bind = builder._impl.bind

    class Spoilt:
        @staticmethod
        def bind(**arguments: object) -> object:
            run = bind(**arguments)

            def build(batch: d4.RawBatch) -> None:
                run(batch)
                value = dict(arguments["steps"].metas[step].tensors())[name]
                value.view(-1)[0] += 1

            return build

    builder._impl = Spoilt
    return builder


@each_fast_backend
@pytest.mark.parametrize("field", [*FIELD_NAMES, "plans.c4.rows", "plans.c128.rows"])
def test_debug_notices_a_wrong_value(impl: str, device: str, field: str) -> None:
    step = step_of(ForwardMode.DRAFT_DECODE, 2)
    step = dataclasses.replace(step, seqs=[500, 81])
    builder = spoilt(SETTING, impl, device, field, step=1)
    message = f"^DRAFT_DECODE step 1: differs from the reference: {field}\\[0"
    with pytest.raises(RuntimeError, match=message):
        step.build(builder)


@each_fast_backend
@pytest.mark.parametrize("field", ["plans.header", "plans.c4.compress", "plans.c128.write"])
def test_debug_notices_a_wrong_plan(impl: str, device: str, field: str) -> None:
    builder = spoilt(SETTING, impl, device, field, step=0)
    with pytest.raises(RuntimeError, match=f"^EXTEND step 0: differs from the reference: {field}\\[0"):
        EVERY_KIND["EXTEND"].build(builder)


@each_backend
def test_debug_raises_what_was_flagged(impl: str, device: str) -> None:
    step = dataclasses.replace(EVERY_KIND["DECODE"], seqs=[601, 9])
    builder = SETTING.builder(impl, device, UncheckedBuilder, debug=True)
    with pytest.raises(ValueError, match=r"^device input: a length or request id was out of range"):
        step.build(builder)
    builder.check()
