"""Values that are only seen on the device: lengths, ids, slots and row counts that make no sense."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest

from backends import each_backend
from dsv4_backend import ForwardMode
from metadata_checks import assert_same_bits, check_build, contents, few, setting_of
from metadata_oracle import LENGTHS, SLOT, UNOWNED
from metadata_steps import GEOM, Setting, Step, UncheckedBuilder
from strategies import Pool, make_pool

SETTING = setting_of(600, num_requests=5)
BEYOND = len(SETTING.pool.full_to_swa)

# Three good requests in each mode that looks at lengths; the one in the middle is spoiled.
STEPS = {
    "decode": Step(ForwardMode.DECODE, [1, 2, 3], [130, 8, 9], [500, 501, 502], padded=4),
    "extend": Step(ForwardMode.EXTEND, [1, 2, 3], [130, 8, 9], [*range(500, 509)], [4, 2, 3], padded=10),
    "verify": Step(ForwardMode.TARGET_VERIFY, [1, 2, 3], [130, 8, 9], [*range(500, 506)], drafts=2, padded=8),
    "ragged verify": Step(ForwardMode.TARGET_VERIFY, [1, 2, 3], [130, 8, 9], [*range(500, 509)], [4, 2, 3]),
    "draft extend": Step(ForwardMode.DRAFT_EXTEND, [1, 2, 3], [130, 8, 9], [*range(500, 506)], drafts=2),
    "ragged draft extend": Step(ForwardMode.DRAFT_EXTEND, [1, 2, 3], [130, 8, 9], [*range(500, 509)], [4, 2, 3]),
    "growing": Step(ForwardMode.DRAFT_DECODE, [1, 2, 3], [130, 8, 9], [*range(500, 509)], num_steps=3, padded=4),
    "frozen": Step(ForwardMode.DRAFT_DECODE, [1, 2, 3], [130, 8, 9], [*range(500, 509)], num_steps=3, grows=False),
}
RAGGED = [name for name, step in STEPS.items() if step.extends]
each_step = pytest.mark.parametrize("name", STEPS)
each_ragged_step = pytest.mark.parametrize("name", RAGGED)


def spoil(step: Step, **values: int) -> Step:
    """The step with another length, id or number of rows of its second request."""
    lists = {name: list(getattr(step, name)) for name in values}
    for name, value in values.items():
        lists[name][1] = value
    return dataclasses.replace(step, **lists)


def build(impl: str, device: str, step: Step, setting: Setting = SETTING) -> tuple[UncheckedBuilder, int]:
    """A builder that built `step`, which is as the oracle says, and the error flag."""
    builder = setting.builder(impl, device, UncheckedBuilder)
    check_build(builder, step.build(builder), setting, step)
    return builder, int(builder._error)


@cache
def contents_with_padding(impl: str, device: str, name: str, max_seq_len: int | None) -> dict:
    """What is built where the second request is padding."""
    setting = dataclasses.replace(SETTING, max_seq_len=max_seq_len)
    builder, error = build(impl, device, spoil(STEPS[name], reqs=0), setting)
    assert error == 0
    return contents(builder)


def check_is_padding(
    impl: str, device: str, name: str, max_seq_len: int | None = None, **values: int
) -> UncheckedBuilder:
    """Spoiled by `values`, the second request is flagged, and built as padding; the others are as ever."""
    setting = dataclasses.replace(SETTING, max_seq_len=max_seq_len)
    builder, error = build(impl, device, spoil(STEPS[name], **values), setting)
    assert error == LENGTHS
    assert_same_bits(contents(builder), contents_with_padding(impl, device, name, max_seq_len))
    return builder


@each_backend
@each_step
def test_good_steps_are_not_flagged(impl: str, device: str, name: str) -> None:
    _, error = build(impl, device, STEPS[name])
    assert error == 0


BAD_LENGTHS = {
    "one too long": 601,
    "smallest int64": -(2**63),
    "largest int64": 2**63 - 1,
    "negative": -1,
    "far too long": 2**31 - 1,
    "smallest int32": -(2**31),
    "legal once cut to 32 bits": 2**32 + 8,
}


@each_backend
@each_step
@few(BAD_LENGTHS, 3)
def test_a_bad_length_makes_its_rows_padding(impl: str, device: str, name: str, value: int) -> None:
    builder = check_is_padding(impl, device, name, seqs=value)
    with pytest.raises(ValueError, match=r"^device input: a length or request id was out of range"):
        builder.check()
    builder.check()


@each_backend
@each_step
@few({str(req): req for req in (5, 2**32 + 2, -1, 2**31 - 1, -(2**63))})
def test_a_bad_id_makes_its_rows_padding(impl: str, device: str, name: str, value: int) -> None:
    check_is_padding(impl, device, name, reqs=value)


@each_backend
@each_step
@few({"by one row": 0, "as long as the table": 600}, 1)
def test_a_length_above_max_seq_len_is_bad_though_the_table_has_it(
    impl: str, device: str, name: str, value: int
) -> None:
    """Page tables have columns for `max_seq_len` tokens only."""
    verified = STEPS[name].mode is ForwardMode.TARGET_VERIFY
    check_is_padding(impl, device, name, max_seq_len=300, seqs=value or (299 if verified else 301))


@each_backend
@pytest.mark.parametrize("length", [598, 599])
def test_draft_steps_are_padding_from_where_a_request_is_too_long(impl: str, device: str, length: int) -> None:
    step = dataclasses.replace(spoil(STEPS["growing"], seqs=length), num_steps=4, slots=list(range(500, 512)))
    builder = SETTING.builder(impl, device, UncheckedBuilder)
    metas = step.build(builder)
    check_build(builder, metas, SETTING, step)
    good = 600 - length
    assert [meta.seq_lens_causal[1].item() for meta in metas] == [length + i + 1 if i < good else 1 for i in range(3)]
    assert int(builder._error) == LENGTHS


def check_all_padding(builder: UncheckedBuilder) -> None:
    ((key, tensors),) = contents(builder).items()
    assert tensors["seq_lens_causal"][0, :9].tolist() == [1] * 9
    assert not tensors["req_pool_indices_per_row"][0, :9].any()
    assert not tensors["raw_out_cache_loc"][0, :9].any()
    assert tensors["header"].tolist() == [0, 0, 0, 1, 0, 0, 0, 0], key


@each_backend
@each_ragged_step
@few({str(count): count for count in (-1, 601, 2**31 - 1, 2**32 + 2, -(2**63))})
def test_a_count_that_makes_no_sense_makes_all_rows_padding(impl: str, device: str, name: str, value: int) -> None:
    """Nobody's place is known then."""
    builder, error = build(impl, device, spoil(STEPS[name], extends=value))
    assert error == LENGTHS
    check_all_padding(builder)


@each_backend
@each_ragged_step
def test_more_rows_than_slots_make_all_rows_padding(impl: str, device: str, name: str) -> None:
    builder, error = build(impl, device, spoil(STEPS[name], extends=3))
    assert error == LENGTHS
    check_all_padding(builder)


@each_backend
@each_ragged_step
def test_a_slot_that_no_row_has_is_left_out(impl: str, device: str, name: str) -> None:
    step = spoil(STEPS[name], extends=1)
    builder, error = build(impl, device, step)
    assert error == UNOWNED
    with pytest.raises(ValueError, match=r"^device input: out_cache_loc holds a slot for a row that no request has"):
        builder.check()
    (tensors,) = contents(builder).values()
    assert tensors["raw_out_cache_loc"][0, :9].tolist() == [500, 501, 502, 503, 504, 505, 506, 507, 0]
    # Slot 0 is nobody's: a list of slots may be longer than the rows are.
    _, error = build(impl, device, dataclasses.replace(step, slots=[*range(500, 508), 0]))
    assert error == 0


@each_backend
@each_step
@few({str(slot): slot for slot in (BEYOND, -2, 2**31 - 1, 2**31 + 1024, -(2**31), 2**40)})
def test_a_write_slot_beyond_the_map_is_window_slot_zero(impl: str, device: str, name: str, value: int) -> None:
    slots = list(STEPS[name].slots)
    slots[3 if len(slots) > 3 else 1] = value
    builder, error = build(impl, device, dataclasses.replace(STEPS[name], slots=slots))
    assert error == SLOT
    with pytest.raises(ValueError, match=r"^device input: a slot in req_to_token or out_cache_loc lies beyond"):
        builder.check()


@each_backend
@each_step
@few(
    {"first of a page": (0, -2), "in the window": (100, BEYOND), "in both": (0, 2**31 - 1), "negative": (99, -(2**31))}
)
def test_a_slot_of_the_table_beyond_the_map(impl: str, device: str, name: str, value: tuple[int, int]) -> None:
    """It is window slot 0, or page 0."""
    position, slot = value
    table = SETTING.pool.req_to_token.copy()
    table[1, position] = slot
    setting = dataclasses.replace(SETTING, pool=Pool(table, SETTING.pool.full_to_swa))
    _, error = build(impl, device, STEPS[name], setting)
    assert error == SLOT


@each_backend
@each_step
def test_what_no_row_reads_is_not_looked_at(impl: str, device: str, name: str) -> None:
    """A page has one slot that counts, and tokens behind every window none."""
    good = SETTING.pool.req_to_token
    table = np.full_like(good, 2**31 - 1)
    table[0, 0], table[1, 0] = good[0, 0], good[1, 0]
    # Rows of request 1 are at positions 126 to 133.
    table[1, 1:134] = good[1, 1:134]
    table[2:4, :13] = good[2:4, :13]
    setting = dataclasses.replace(SETTING, pool=Pool(table, SETTING.pool.full_to_swa))
    _, error = build(impl, device, STEPS[name], setting)
    assert error == 0


@each_backend
@pytest.mark.parametrize("window", [4, 5])
def test_slots_of_the_previous_group_are_looked_at_though_no_window_holds_them(
    impl: str, device: str, window: int
) -> None:
    geom = dataclasses.replace(GEOM, window=window)
    pool = make_pool(geom, 5, 600, 0)
    pool.req_to_token[1, 7] = 2**31 - 1
    step = Step(ForwardMode.DECODE, [1, 2], [12, 9], [500, 501])
    _, error = build(impl, device, step, Setting(pool, geom))
    assert error == SLOT


@each_backend
def test_the_flag_stays_until_checked(impl: str, device: str) -> None:
    builder = SETTING.builder(impl, device, UncheckedBuilder)
    good = STEPS["decode"]
    for step in (good, spoil(good, seqs=-1), good, STEPS["verify"]):
        step.build(builder)
    with pytest.raises(ValueError, match="length or request id"):
        builder.check()
    builder.check()
    good.build(builder)
    builder.check()


@pytest.mark.gpu
def test_values_on_a_gpu_are_flagged_by_the_public_builder() -> None:
    for step in STEPS.values():
        builder = SETTING.builder("auto", "cuda", debug=True)
        with pytest.raises(ValueError, match=r"^device input: a length or request id was out of range"):
            spoil(step, seqs=601).build(builder)
        step.build(builder)


def test_the_same_values_on_a_cpu_are_refused() -> None:
    for step in STEPS.values():
        builder = SETTING.builder("torch", "cpu")
        with pytest.raises(ValueError, match=r"^seq_lens\[1\]: expected "):
            spoil(step, seqs=601).build(builder)
        with pytest.raises(ValueError, match=r"^req_pool_indices\[1\]: expected 0 to 4"):
            spoil(step, reqs=5).build(builder)
        assert builder.nbytes == 0
        assert int(builder._error) == 0
