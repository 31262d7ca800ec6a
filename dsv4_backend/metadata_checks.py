"""Checks of a batch whose values lie on the host."""

from __future__ import annotations

import torch

from dsv4_backend.batch import ForwardMode, RawBatch
from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.tables import RequestTables
from dsv4_backend.validation import expect_range


def check_values(batch: RawBatch, tables: RequestTables, longest: int, geom: CacheGeometry, grows: bool) -> None:
    """Raises ValueError for a value that a build on a GPU would flag; requests with id 0 are padding, and pass.

    Args:
        batch: a batch on the CPU.
        tables: where its requests are.
        longest: longest length of a request.
        geom: says how many draft tokens fit.
        grows: DRAFT_DECODE: the window grows with each step.
    """
    if batch.mode is ForwardMode.IDLE:
        return
    req, seq = batch.req_pool_indices.long(), batch.seq_lens.long()
    expect_range("req_pool_indices", req, 0, tables.num_requests - 1, "rows of req_to_token")
    live = req != 0
    width: torch.Tensor | int = {
        ForwardMode.DECODE: 1,
        ForwardMode.DRAFT_DECODE: batch.num_steps - 1 if grows else 1,
    }.get(batch.mode, batch.num_draft_tokens)
    if batch.extend_lens is not None:
        width = _check_extends(batch, longest, geom)
    # `seq_lens` counts the rows of the step, or comes before them.
    before = batch.mode is ForwardMode.TARGET_VERIFY or (batch.mode is ForwardMode.DRAFT_DECODE and grows)
    low, high = (width * 0, longest - width) if before else (width, longest)
    wrong = (live & ((seq < low) | (seq > high))).nonzero()
    if len(wrong):
        b = int(wrong[0])
        low, high = (int(limit[b]) if isinstance(limit, torch.Tensor) else limit for limit in (low, high))
        raise ValueError(
            f"seq_lens[{b}]: expected {low} to {high} in mode {batch.mode.value} (the longest request has {longest} "
            f"tokens), got {int(seq[b])}"
        )


def _check_extends(batch: RawBatch, longest: int, geom: CacheGeometry) -> torch.Tensor:
    assert batch.extend_lens is not None
    extend = batch.extend_lens.long()
    most, limit = longest, "the longest request"
    if batch.mode is not ForwardMode.EXTEND:
        most, limit = batch.num_draft_tokens or geom.draft_capacity, "draft tokens"
    expect_range("extend_lens", extend, 0, most, limit)
    total, slots = int(extend.sum()), batch.out_cache_loc.shape[0]
    if total != slots:
        raise ValueError(f"out_cache_loc: expected {total} slots (the sum of extend_lens), got {slots}")
    return extend
