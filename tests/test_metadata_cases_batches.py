"""Faults that people met in production, as far as batches and draft steps are concerned, under their ids."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import dsv4_backend as d4
from backends import each_backend, each_compiled_backend, each_fast_backend
from dsv4_backend import ForwardMode
from metadata_checks import check_build, setting_of
from metadata_steps import GEOM, MODES, Step

SETTING = setting_of(600, num_requests=9)
WINDOW_ONLY = dataclasses.replace(SETTING, ratios=())


@each_compiled_backend
def test_b40_no_new_kernel_for_a_new_batch(impl: str, device: str) -> None:
    """Not applicable to impl "torch", which compiles nothing."""
    from triton import knobs

    setting = setting_of(100_000, num_requests=65)
    base = setting.tables(device)
    slots = torch.zeros(65, 100_007, dtype=torch.int32, device=device)
    slots[:, :100_000] = base.req_to_token
    tables = [base, *(d4.RequestTables(slots[:, k : 100_000 + k], base.full_to_swa) for k in (0, 7))]
    builders = [setting.builder(impl, device, d4.MetadataBuilder, tables=each) for each in tables]
    rng = np.random.default_rng(0)

    def call(batch_size: int, padded: int | None) -> None:
        reqs, seqs = rng.integers(0, 65, batch_size), rng.integers(30, rng.integers(31, 99_000), batch_size)
        extends = rng.integers(0, 5, batch_size)
        builder = builders[rng.integers(0, 3)]
        for mode in MODES:
            ragged = mode is ForwardMode.EXTEND or (mode is ForwardMode.TARGET_VERIFY and rng.integers(2))
            rows = int(extends.sum()) if ragged else batch_size * {"DRAFT_DECODE": 3}.get(mode.value, 1)
            width = {} if ragged else {"num_draft_tokens": 1}
            tensors = [torch.from_numpy(x).to(device) for x in (reqs, seqs, rng.integers(0, 9999, rows))]
            lengths = torch.from_numpy(extends).to(device) if ragged else None
            batch = d4.RawBatch(mode, *tensors, lengths, num_steps=3, **width)
            if mode is ForwardMode.DRAFT_DECODE:
                builder.build_draft_steps(batch, padded, ("growing", "frozen")[rng.integers(2)])
            else:
                builder.build(batch, padded)
        builder.check()

    for batch_size in (1, 2, 16, 17, 33, 64):
        for _ in range(4):
            call(batch_size, 256)
            call(batch_size, None)
    compiled: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **event: compiled.append(event["repr"])
    try:
        for i in range(60):
            call(int(rng.integers(1, 65)), (None, 256, int(rng.integers(256, 300)))[i % 3])
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert compiled == []


@each_fast_backend
def test_b43_one_decode_and_several_prefills(impl: str, device: str) -> None:
    setting = setting_of(4096, num_requests=5, topk=1)
    extends = [1, 4096, 4096, 4096]
    step = Step(ForwardMode.EXTEND, [1, 2, 3, 4], [778, 4096, 4096, 4096], [9] * 12_289, extends)
    builder = setting.builder(impl, device)
    (meta,) = step.build(builder)
    assert meta.num_rows == 12_289
    begin = 0
    for extend, c4, c128 in zip(extends, [0, 1024, 1024, 1024], [0, 32, 32, 32], strict=True):
        rows = slice(begin, begin + extend)
        assert int((meta.c4_out_loc[rows] > 0).sum()) == c4
        assert int((meta.seq_lens_causal[rows] % 128 == 0).sum()) == c128
        begin += extend
    assert meta.plans.header.tolist()[:3] == [1, 4096, 12_289]
    assert [len(meta.plans.ratio(r).compress_records()) for r in (4, 128)] == [3 * 1024, 3 * 32]
    assert meta.positions[[0, 1, 4096, 4097, -1]].tolist() == [777, 0, 4095, 0, 4095]
    builder.check_guards()

    extends = [4096, 1, 0, 5]
    step = Step(ForwardMode.EXTEND, [1, 2, 3, 4], [4096, 1, 0, 5], [9] * 4102, extends)
    (meta,) = step.build(builder)
    owners = np.repeat(range(4), extends)
    for ratio, expected in ((4, [1024, 0, 0, 1]), (128, [32, 0, 0, 0])):
        ids = meta.plans.ratio(ratio).compress_records()["ragged_id"]
        assert np.bincount(owners[ids], minlength=4).tolist() == expected


def drafts(batch_size: int, num_steps: int = 3, **options: object) -> Step:
    slots = list(range(100, 100 + batch_size * num_steps))
    seqs = [20 + 9 * b for b in range(batch_size)]
    return Step(ForwardMode.DRAFT_DECODE, list(range(1, batch_size + 1)), seqs, slots, num_steps=num_steps, **options)


@each_backend
@pytest.mark.parametrize("grows", [True, False], ids=["growing", "frozen"])
@pytest.mark.parametrize("by", ["padded batch size", "request 0"])
def test_b44_each_step_has_its_own_slots_though_padded(impl: str, device: str, by: str, grows: bool) -> None:
    step = drafts(3, grows=grows, padded=4)
    if by == "request 0":
        step = dataclasses.replace(
            step, reqs=[1, 2, 3, 0], seqs=[*step.seqs, 1], slots=[*step.slots, 0, 0, 0], padded=None
        )
    builder = SETTING.builder(impl, device)
    metas = step.build(builder)
    check_build(builder, metas, SETTING, step)
    expected = [[100, 103, 106, 0], [101, 104, 107, 0]]
    assert [meta.raw_out_cache_loc.tolist() for meta in metas] == expected
    assert [meta.req_pool_indices_per_row.tolist() for meta in metas] == [[1, 2, 3, 0]] * 2
    assert [(meta.seq_lens_causal[-1].item(), meta.positions[-1].item()) for meta in metas] == [(1, 0)] * 2
    full_to_swa = SETTING.pool.full_to_swa
    assert [meta.swa_out_cache_loc.tolist() for meta in metas] == [full_to_swa[slots].tolist() for slots in expected]


@each_backend
@pytest.mark.parametrize("batch_size", [3, 5])
def test_b45_the_same_slices_without_padding(impl: str, device: str, batch_size: int) -> None:
    step = drafts(batch_size)
    metas = step.build(SETTING.builder(impl, device))
    bucket = dataclasses.replace(step, padded=8).build(SETTING.builder(impl, device))
    assert len(metas) == len(bucket) == 2
    for i, (meta, padded) in enumerate(zip(metas, bucket, strict=True)):
        assert meta.raw_out_cache_loc.tolist() == [100 + 3 * b + i for b in range(batch_size)]
        for name in ("raw_out_cache_loc", "swa_out_cache_loc", "seq_lens_causal", "swa_page_indices", "c4_out_loc"):
            assert torch.equal(getattr(meta, name), getattr(padded, name)[:batch_size]), name


@each_backend
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.DRAFT_DECODE], ids=lambda mode: mode.value)
def test_b47_padding_is_written_by_every_build(impl: str, device: str, mode: ForwardMode) -> None:
    """The same as a builder's first build of the batch, whatever batch was in the buckets before."""
    builder = SETTING.builder(impl, device)

    def step(batch_size: int, bucket: int) -> Step:
        step = drafts(batch_size, padded=bucket)
        if mode is ForwardMode.DECODE:
            step = dataclasses.replace(step, mode=mode, slots=step.slots[:batch_size], num_steps=0)
        return step

    for batch_size, bucket in ((8, 8), (5, 8), (3, 4), (1, 1), (6, 8), (0, 8)):
        made = step(batch_size, bucket)
        metas = made.build(builder)
        check_build(builder, metas, SETTING, made)
        for meta in metas:
            assert meta.seq_lens_causal[batch_size:].tolist() == [1] * (bucket - batch_size)


def test_b50_branching_drafts_are_refused() -> None:
    tensors = torch.tensor([1, 2]), torch.tensor([9, 7]), torch.arange(100, 112)
    batch = d4.RawBatch(ForwardMode.DRAFT_DECODE, *tensors, num_steps=3, topk=2)
    builder = SETTING.builder("torch", "cpu")
    with pytest.raises(ValueError, match=r"^topk: expected chains of drafts, topk = 1, got 2$"):
        builder.build_draft_steps(batch)
    assert builder.nbytes == 0


@each_backend
def test_b51_window_slots_of_a_shrinking_batch_lie_in_the_window_pool(impl: str, device: str) -> None:
    """Eager and in buckets alike, with a window pool of two pages."""
    pool = dataclasses.replace(SETTING.pool, full_to_swa=SETTING.pool.full_to_swa.clip(max=511))
    setting = dataclasses.replace(SETTING, pool=pool, ratios=())
    eager, bucketed = (setting.builder(impl, device) for _ in range(2))
    for batch_size in (32, 16, 8, 7, 5, 4, 3, 2, 1):
        reqs = [1 + b % 8 for b in range(batch_size)]
        seqs = [300 - 7 * b for b in range(batch_size)]
        bucket = 1 << (batch_size - 1).bit_length()
        for step in (
            Step(ForwardMode.DECODE, reqs, seqs, [300] * batch_size),
            Step(ForwardMode.DRAFT_EXTEND, reqs, seqs, [300] * 2 * batch_size, drafts=2),
            Step(ForwardMode.DRAFT_DECODE, reqs, seqs, [300] * 3 * batch_size, num_steps=3),
        ):
            plain = step.build(eager)
            padded = dataclasses.replace(step, padded=bucket * max(1, step.drafts)).build(bucketed)
            for one, other in zip(plain, padded, strict=True):
                assert int(one.swa_page_indices.max()) < 512
                assert torch.equal(one.swa_page_indices, other.swa_page_indices[: one.num_rows])
                assert torch.equal(one.swa_lengths, other.swa_lengths[: one.num_rows])


@each_backend
@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_b58_a_window_only_draft_has_nothing_of_other_ratios(impl: str, device: str, num_steps: int) -> None:
    """No field, no plan and no buffer; and nothing for the last step, which only samples."""
    builder = WINDOW_ONLY.builder(impl, device)
    steps = [
        Step(ForwardMode.EXTEND, [1, 2], [300, 9], list(range(300, 308)), [5, 3]),
        Step(ForwardMode.DRAFT_EXTEND, [1, 2], [300, 9], list(range(300, 308)), drafts=4),
        drafts(3, num_steps),
        drafts(3, num_steps, grows=False),
    ]
    for step in steps:
        metas = step.build(builder)
        check_build(builder, metas, WINDOW_ONLY, step)
        assert len(metas) == (num_steps - 1 if step.mode is ForwardMode.DRAFT_DECODE else 1)
        for meta in metas:
            assert meta.plans is None
            assert [name for name, _ in meta.tensors() if name.startswith(("c4", "c128"))] == []
    names = {name for tensors in builder.buffers().values() for name in tensors}
    assert not [name for name in names if name.startswith(("c4", "c128"))]


@each_backend
@pytest.mark.parametrize(("ratios", "error"), [((), 0), ((4, 128), 2)], ids=str)
def test_b58_a_slot_that_only_ratio_4_reads(impl: str, device: str, ratios: tuple[int, ...], error: int) -> None:
    """The entry at 12 reads the group before its own, which lies outside a window of 2: nobody else looks there."""
    geom, table = dataclasses.replace(GEOM, window=2), SETTING.pool.req_to_token.copy()
    table[1, 7] = 2**31 - 1
    pool = dataclasses.replace(SETTING.pool, req_to_token=table)
    setting = dataclasses.replace(SETTING, geom=geom, ratios=ratios, pool=pool)
    step = Step(ForwardMode.EXTEND, [1], [12], [300], [1])
    builder = setting.builder(impl, device)
    check_build(builder, step.build(builder), setting, step)
    assert int(builder._error) == error
