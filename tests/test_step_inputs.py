"""Inputs at fixed addresses: what a load leaves in them, what is built from them, refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backend_harness import World
from backends import each_backend
from dsv4_backend import ForwardMode, RawBatch, StepInputs

DECODE, EXTEND, VERIFY = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY


def state(inputs: StepInputs) -> list[list[int]]:
    batch = inputs.batch
    return [each.tolist() for each in (batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc, inputs.ids)]


@each_backend
@pytest.mark.parametrize(
    ("mode", "width"),
    [(DECODE, 1), (VERIFY, 2), (ForwardMode.DRAFT_EXTEND, 3)],
    ids=["decode", "verify", "draft-extend"],
)
def test_loading_resets_what_is_behind_a_batch(impl: str, device: str, mode: ForwardMode, width: int) -> None:
    world = World(impl, device)
    inputs = world.backend.bind(mode, 4, width)
    clean = state(inputs)
    assert clean == [[0] * 4, [1] * 4, [0] * (4 * width), [0] * (4 * width)]
    lanes = [world.open() for _ in range(3)]
    world.skip(dict.fromkeys(lanes, 9))
    full, ids = world.batch(mode, dict.fromkeys(lanes, width))
    for size in (3, 1, 2, 0):
        for each in (inputs.batch.req_pool_indices, inputs.batch.seq_lens, inputs.batch.out_cache_loc, inputs.ids):
            each.fill_(-77)
        rows = size * width
        parts = full.req_pool_indices[:size], full.seq_lens[:size], full.out_cache_loc[:rows]
        batch = dataclasses.replace(
            full, req_pool_indices=parts[0], seq_lens=parts[1], out_cache_loc=parts[2], extend_lens=None
        )
        world.backend.load(inputs, batch, ids[:rows])
        live = [[*part.tolist()] for part in (*parts, ids[:rows])]
        assert state(inputs) == [part + pad[len(part) :] for part, pad in zip(live, clean, strict=True)]
        world.backend.record(inputs)
        padded = [torch.tensor(each, dtype=torch.int32, device=device) for each in state(inputs)]
        whole = RawBatch(mode, *padded[:3], num_draft_tokens=full.num_draft_tokens)
        assert inputs.meta.difference(world.new_backend(impl).prepare(whole)) is None
        unpadded = world.new_backend(impl).prepare(batch)
        for name in ("positions", "swa_page_indices", "c4_lengths", "c128_out_loc"):
            assert torch.equal(getattr(inputs.meta, name)[:rows], getattr(unpadded, name))
        narrow = dataclasses.replace(
            batch,
            req_pool_indices=parts[0].int(),
            seq_lens=torch.stack((parts[1], parts[1]), dim=1)[:, 0],
            out_cache_loc=parts[2].int(),
        )
        before = state(inputs)
        inputs.ids.fill_(-77)
        world.backend.load(inputs, narrow, ids[:rows].int())
        assert state(inputs) == before


def test_refusals_of_binding() -> None:
    backend = World("torch", "cpu").backend
    for arguments, message in (
        ((EXTEND, 2), "mode: expected one of DECODE, TARGET_VERIFY, DRAFT_EXTEND, got EXTEND"),
        (("DECODED", 2), "mode: expected one of .* got DECODED"),
        ((DECODE, 0), "batch_size: expected an int of at least 1, got 0"),
        ((VERIFY, 1, True), "width: expected an int of at least 1, got True"),
        ((DECODE, 1, 2), "width: expected 1 in mode DECODE, got 2"),
        ((VERIFY, 1, 11), "num_draft_tokens: expected at most 10, got 11"),
        ((DECODE, 1 << 20), "padded_rows: expected at most max_rows"),
    ):
        with pytest.raises(ValueError, match=message):
            backend.bind(*arguments)  # type: ignore[arg-type]


def test_refusals_of_loading_before_anything_is_written() -> None:
    world = World("torch", "cpu")
    inputs = world.backend.bind(VERIFY, 2, 2)
    lanes = [world.open() for _ in range(3)]
    world.skip(dict.fromkeys(lanes, 9))
    good, ids = world.batch(VERIFY, dict.fromkeys(lanes[:2], 2))
    world.backend.load(inputs, good, ids)
    before = state(inputs)
    many, many_ids = world.batch(VERIFY, dict.fromkeys(lanes, 2))
    wide, wide_ids = world.batch(VERIFY, dict.fromkeys(lanes[:2], 3))
    ragged, ragged_ids = world.batch(VERIFY, {lanes[0]: 3, lanes[1]: 1})
    for arguments, message in (
        ((many, many_ids), "batch: expected at most 2 requests, got 3"),
        ((wide, wide_ids), r"out_cache_loc: expected 4 slots \(2 requests x 2\), got 6"),
        ((ragged, ragged_ids), "extend_lens: expected none, since each request has 2 rows"),
        ((world.batch(DECODE, {lanes[0]: 1})[0], ids[:1]), "batch: expected mode TARGET_VERIFY, got DECODE"),
        ((good, ids[:3]), "ids: expected 4 elements, got 3"),
        ((good, ids.float()), "ids: expected dtype int32 or int64, got float32"),
    ):
        with pytest.raises(ValueError, match=message):
            world.backend.load(inputs, *arguments)
    assert state(inputs) == before
