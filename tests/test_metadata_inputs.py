"""Tensors that come in: integer types, layouts in memory, devices; none is ever written. B numbers are ids of cases."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from backends import each_backend, each_fast_backend
from dsv4_backend import ForwardMode
from metadata_checks import OF_64_BITS, assert_same_bits, check_build, contents, setting_of
from metadata_steps import NAMES, PLAIN, Step, UncheckedBuilder, whole
from strategies import LAYOUTS

SHORT = setting_of(600, num_requests=7)
RAGGED = Step(ForwardMode.EXTEND, [4, 1, 0, 3], [140, 9, 7, 384], list(range(300, 325)), [9, 9, 2, 5], padded=32)
DRAFTS = Step(ForwardMode.DRAFT_DECODE, [4, 1, 2], [140, 9, 384], list(range(300, 309)), num_steps=3)
STEPS = {
    "decode": Step(ForwardMode.DECODE, [4, 1, 0], [140, 9, 384], [300, 301, 302]),
    "extend": RAGGED,
    "verify": Step(ForwardMode.TARGET_VERIFY, [4, 1], [140, 9], list(range(300, 308)), drafts=4),
    "ragged verify": dataclasses.replace(RAGGED, mode=ForwardMode.TARGET_VERIFY),
    "draft extend": Step(ForwardMode.DRAFT_EXTEND, [4, 1], [140, 9], list(range(300, 308)), drafts=4),
    "growing": DRAFTS,
    "frozen": dataclasses.replace(DRAFTS, grows=False),
    "idle": Step(ForwardMode.IDLE, [4, 1], [140, 9], [300, 301]),
}


@each_backend
def test_b33_slots_of_64_bits(impl: str, device: str) -> None:
    slots = [0, 255, 256, 1023, 2**31 + 1024]
    step = Step(ForwardMode.DECODE, [1, 2, 3, 4, 5], [128, 256, 384, 512, 128], slots)
    builder = SHORT.builder(impl, device, UncheckedBuilder)
    (meta,) = step.build(builder)
    check_build(builder, [meta], SHORT, step)
    assert meta.raw_out_cache_loc.tolist() == slots
    assert meta.c4_out_loc.tolist() == [0, 63, 64, 255, 536_871_168]
    assert meta.c128_out_loc.tolist() == [0, 1, 2, 7, 16_777_224]
    assert meta.swa_out_cache_loc[-1] == 0
    with pytest.raises(ValueError, match="lies beyond full_to_swa"):
        builder.check()
    for name, tensor in meta.tensors():
        if not name.startswith("plans"):
            assert tensor.dtype == (torch.int64 if name in OF_64_BITS else torch.int32), name


@each_backend
@pytest.mark.parametrize("name", ["decode", "extend"])
def test_b35_every_choice_of_integer_types(impl: str, device: str, name: str) -> None:
    step, found = STEPS[name], []
    choices = list(itertools.product((torch.int32, torch.int64), repeat=3))
    if name == "extend":  # on a GPU, each of them is two more kernels to compile
        choices = [dtypes for dtypes in choices if dtypes[0] is dtypes[2]]
    for dtypes in choices:
        builder = SHORT.builder(impl, device)
        # Extend lengths have the type of the slots.
        forms = tuple((dtype, "contiguous") for dtype in (*dtypes, dtypes[-1]))
        (meta,) = dataclasses.replace(step, forms=forms).build(builder)
        found.append(contents(builder))
    assert len(found) == {"decode": 8, "extend": 4}[name]
    for other in found[1:]:
        assert_same_bits(other, found[0])
    check_build(builder, [meta], SHORT, step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int16, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("name", ["req_pool_indices", "seq_lens", "out_cache_loc", "extend_lens"])
def test_b35_other_types_and_devices_are_refused(name: str, dtype: torch.dtype) -> None:
    tensors = RAGGED.tensors("cpu")
    with pytest.raises(ValueError, match=f"^{name}: expected dtype int32 or int64, got {str(dtype)[6:]}$"):
        RAGGED.batch({**tensors, name: tensors[name].to(dtype)})
    elsewhere = {**tensors, name: tensors[name].to("meta")}
    with pytest.raises(ValueError, match=r": expected a tensor on (cpu|meta), got one on (meta|cpu)$"):
        RAGGED.batch(elsewhere)
    builder = SHORT.builder("torch", "cpu")
    batch = RAGGED.batch({name: tensor.to("meta") for name, tensor in tensors.items()})
    with pytest.raises(ValueError, match=r"^batch: expected tensors on cpu, got them on meta$"):
        builder.build(batch)


@each_backend
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "contiguous"])
def test_b36_slices_read_like_copies(impl: str, device: str, layout: str) -> None:
    for step in (RAGGED, DRAFTS):
        step = dataclasses.replace(step, forms=((torch.int64, layout),) * 4)
        builder, copied = SHORT.builder(impl, device), SHORT.builder(impl, device)
        tensors = step.tensors(device)
        assert layout == "inside" or not tensors["seq_lens"].is_contiguous()
        step.build(builder, tensors)
        dataclasses.replace(step, forms=PLAIN).build(
            copied, {name: tensor.flip(0).flip(0) for name, tensor in tensors.items()}
        )
        assert_same_bits(contents(builder), contents(copied))


@each_fast_backend
@pytest.mark.parametrize("name", STEPS)
def test_inputs_are_read_and_nothing_more(impl: str, device: str, name: str) -> None:
    """Every one in a layout of its own, and in each integer type."""
    step = STEPS[name]
    plain = SHORT.builder(impl, device)
    step.build(plain)
    for dtype in (torch.int32, torch.int64):
        forms = tuple((dtype, layout) for layout in ("column", "every_other", "inside", "column"))
        tensors, tables = dataclasses.replace(step, forms=forms).tensors(device), SHORT.tables(device)
        builder = SHORT.builder(impl, device, tables=tables)
        inputs = [whole(tensor) for tensor in (*tensors.values(), tables.req_to_token, tables.full_to_swa)]
        before = [tensor.clone() for tensor in inputs]
        step.build(builder, tensors)
        assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))
        assert_same_bits(contents(builder), contents(plain))


@each_backend
def test_one_tensor_may_be_several_inputs(impl: str, device: str) -> None:
    ones = torch.ones(3, dtype=torch.int64, device=device)
    step = Step(ForwardMode.EXTEND, [1] * 3, [1] * 3, [1] * 3, [1] * 3)
    one, other = SHORT.builder(impl, device), SHORT.builder(impl, device)
    step.build(one, dict.fromkeys(NAMES, ones))
    step.build(other)
    assert_same_bits(contents(one), contents(other))
