"""Tables once a request: what EXTEND keeps where a page table for each row would take too much memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings

import dsv4_backend as d4
from backends import each_backend, each_fast_backend
from dsv4_backend import ForwardMode
from dsv4_backend.metadata_buffers import MAX_TABLE_BYTES
from metadata_checks import FIELD_NAMES, TABLES, check_build, contents, few, setting_of
from metadata_steps import GEOM, POISON_WORD, GuardedBuilder, Setting, Step
from metadata_strategies import EXAMPLES, scenes

SETTING = dataclasses.replace(setting_of(1100, num_requests=9), once_a_request=True)
# Requests of one page, of five, without rows, and padding.
STEP = Step(ForwardMode.EXTEND, [4, 1, 0, 3, 2], [130, 1100, 77, 500, 9], list(range(300, 314)), [3, 4, 2, 0, 5])


def build(
    impl: str, device: str, step: Step = STEP, setting: Setting = SETTING
) -> tuple[GuardedBuilder, d4.AttnMetadata]:
    builder = setting.builder(impl, device)
    with setting.limits():
        metas = step.build(builder)
    check_build(builder, metas, setting, step)
    return builder, metas[0]


@each_backend
@settings(max_examples=EXAMPLES // 2)
@given(scene=scenes([ForwardMode.EXTEND]))
def test_a_consumer_cannot_tell_the_two_apart(impl: str, device: str, scene: tuple[Setting, Step]) -> None:
    setting, step = scene
    found = []
    for once in (False, True):
        setting = dataclasses.replace(setting, once_a_request=once)
        with setting.limits():
            found += step.build(setting.builder(impl, device))
    rows, requests = found
    assert rows.table_rows is None
    assert requests.table_rows is not None or not rows.num_rows  # no rows take no memory
    assert rows.difference(requests) is None
    assert requests.difference(rows) is None


@each_backend
@few({str(padded): padded for padded in (20, None)}, 1)
def test_tables_have_a_row_a_request_and_one_for_padding(impl: str, device: str, value: int | None) -> None:
    _, meta = build(impl, device, dataclasses.replace(STEP, padded=value))
    rows = value or 14
    assert meta.table_rows.tolist() == [0] * 3 + [1] * 4 + [5] * 2 + [4] * 5 + [5] * (rows - 14)
    assert meta.page_table.shape == (6, 5)
    assert meta.c128_page_indices.shape == (6, 64)
    for name in set(FIELD_NAMES) - set(TABLES):
        assert getattr(meta, name).shape[0] == rows, name
    # The padding row: request 0, length 1.
    assert meta.page_table[5, 0] == 0
    assert meta.c128_page_indices[5, 0] == -1


@each_backend
def test_a_row_of_a_table_is_written_up_to_the_length_of_its_request(impl: str, device: str) -> None:
    builder, meta = build(impl, device)
    (tensors,) = contents(builder).values()
    table = torch.from_numpy(SETTING.pool.req_to_token)
    for name in TABLES:
        live = {"page_table": [1, 5, 1, 2, 1, 1], "c128_page_indices": [2, 10, 2, 4, 2, 2]}[name]
        assert (tensors[name][0, :6] != POISON_WORD).sum(dim=1).tolist() == live
        assert (tensors[name][0, 6:] == POISON_WORD).all()
    assert meta.page_table[1].tolist() == (table[1, ::256] // 256).tolist()
    # 1,100 tokens are 8 groups of 128; what lies behind on the last page is -1.
    assert meta.c128_page_indices[1, :10].tolist() == [
        *(page * 2 + half for page in meta.page_table[1, :4].tolist() for half in (0, 1)),
        -1,
        -1,
    ]


@each_backend
def test_buckets_have_room_for_a_power_of_two_of_requests(impl: str, device: str) -> None:
    """So that few buckets serve all batches of a size."""
    builder = SETTING.builder(impl, device)
    with SETTING.limits():
        for batch_size in (1, 5, 3, 8, 6):
            step = Step(ForwardMode.EXTEND, [1] * batch_size, [9] * batch_size, [300] * batch_size, [1] * batch_size)
            step = dataclasses.replace(step, padded=16)
            metas = step.build(builder)
            check_build(builder, metas, SETTING, step)
            assert metas[0].page_table.shape[0] == batch_size + 1
    assert sorted(key.num_requests for key in builder.buffers()) == [1, 4, 8]
    assert {key.num_rows for key in builder.buffers()} == {16}
    for key, tensors in builder.buffers().items():
        assert tensors["page_table"].shape[1] == key.num_requests + 1


@pytest.mark.parametrize(("ratios", "bytes_a_row"), [((4, 128), 4 * (4096 + 8192)), ((4,), 4 * 4096), ((), 4 * 4096)])
def test_it_takes_many_rows_of_a_large_table(ratios: tuple[int, ...], bytes_a_row: int) -> None:
    """The limit is 32 MiB for the tables of a bucket, and only EXTEND has such batches."""
    assert MAX_TABLE_BYTES == 32 << 20
    setting = dataclasses.replace(setting_of(600), max_seq_len=1 << 20, ratios=ratios, topk=1)
    builder = setting.builder("torch", "cpu", d4.MetadataBuilder)
    most = MAX_TABLE_BYTES // bytes_a_row
    for rows in (most, most + 1):
        step = Step(ForwardMode.EXTEND, [1], [4], [300, 301], [2], padded=rows)
        (meta,) = step.build(builder)
        assert (meta.table_rows is None) == (rows == most)
    for step in (
        Step(ForwardMode.DECODE, [1], [4], [300], padded=most + 1),
        Step(ForwardMode.DRAFT_EXTEND, [1], [4], [300], drafts=1, padded=most + 1),
    ):
        assert step.build(builder)[0].table_rows is None
    sizes = {key.mode: key.num_requests for key in builder.buffers()}
    assert sizes[ForwardMode.DECODE] == sizes[ForwardMode.DRAFT_EXTEND] == 0


@each_fast_backend
def test_a_prompt_of_a_million_tokens_takes_one_row_of_tables(impl: str, device: str) -> None:
    """8,192 rows at that capacity: 400 MB, were there a table a row."""
    setting = setting_of(1 << 20, num_requests=2, topk=1)
    builder = setting.builder(impl, device)
    step = Step(ForwardMode.EXTEND, [1, 0], [1 << 20, 3], [300] * 8195, [8192, 3])
    (meta,) = step.build(builder)
    assert meta.page_table.shape == (3, 4096)
    assert sum(getattr(meta, name).nbytes for name in TABLES) == 3 * 4 * (4096 + 8192)
    assert meta.positions[[0, 8191]].tolist() == [(1 << 20) - 8192, (1 << 20) - 1]
    pages = torch.from_numpy(setting.pool.req_to_token[1, ::256] // 256)
    assert torch.equal(meta.page_table[0].cpu(), pages)
    assert meta.c128_page_indices[0].tolist() == [2 * page + half for page in pages.tolist() for half in (0, 1)]
    assert meta.table_rows.tolist() == [0] * 8192 + [2] * 3
    builder.check()
    builder.check_guards()


@each_backend
def test_lengths_of_rows_limit_what_they_read(impl: str, device: str) -> None:
    """`readable` hides what a row may not read: the pages and entries that only later rows of its request have."""
    step = Step(ForwardMode.EXTEND, [1], [258], list(range(300, 304)), [4])
    _, meta = build(impl, device, step, dataclasses.replace(SETTING, geom=GEOM))
    assert (meta.readable("page_table") != -2).sum(dim=1).tolist() == [1, 1, 2, 2]
    assert (meta.readable("c128_page_indices") >= 0).sum(dim=1).tolist() == [1, 2, 2, 2]
