"""Where the planner tests run, and how they call an implementation past the public edge."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
import torch

from dsv4_backend import CacheGeometry, DecodePlans, PrefillPlan, RequestTables, dispatch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = [("torch", "cpu"), ("torch", "cuda"), ("triton", "cpu"), ("triton", "cuda")]
EXAMPLES = 8 if INTERPRET else 100
"""Hypothesis examples of a property. The interpreter takes 0.1 s for every 32 rows of a plan."""
POISON = 0xAB


def _each(backends: Iterable[tuple[str, str]]) -> pytest.MarkDecorator:
    params = []
    for impl, device in backends:
        if impl == "triton" and (device == "cpu") != INTERPRET:
            continue  # the interpreter takes over from the compiler in the whole process
        marks = [pytest.mark.gpu] if device == "cuda" else [pytest.mark.interpreter] if impl == "triton" else []
        params.append(pytest.param(impl, device, marks=marks, id=f"{impl}-{device}"))
    return pytest.mark.parametrize(("impl", "device"), params)


each_backend = _each(BACKENDS)
# All but the interpreter, for what would take it minutes.
each_fast_backend = _each(backend for backend in BACKENDS if not (INTERPRET and backend[0] == "triton"))
each_gpu_backend = _each(backend for backend in BACKENDS if backend[1] == "cuda")
each_triton_backend = _each(backend for backend in BACKENDS if backend[0] == "triton")
each_compiled_backend = _each(backend for backend in BACKENDS if backend == ("triton", "cuda"))


def repeats(impl: str, device: str, on_gpu: int, on_cpu: int) -> int:
    """How often to repeat a call that must give the same answer every time; twice in the interpreter."""
    if impl == "triton" and INTERPRET:
        return 2
    return on_gpu if device == "cuda" else on_cpu


def poisoned_prefill(num_rows: int, ratios: Iterable[int], device: str) -> PrefillPlan:
    """Buffers full of a value that nobody plans, so that a word which is not written shows."""
    plan = PrefillPlan.empty(num_rows, ratios, device)
    plan.header.fill_(-POISON)
    for lists in (plan.c4, plan.c128):
        if lists is not None:
            lists.compress.fill_(POISON)
            lists.write.fill_(POISON)
    return plan


def poisoned_decode(batch_size: int, ratios: Iterable[int], device: str) -> DecodePlans:
    plan = DecodePlans.empty(batch_size, ratios, device)
    for rows in (plan.c4, plan.c128):
        if rows is not None:
            rows.rows.fill_(POISON)
    return plan


def prefill_past_checks(
    impl: str,
    tables: RequestTables,
    geom: CacheGeometry,
    lengths: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    num_rows: int,
    ratios: Iterable[int] = (4, 128),
) -> PrefillPlan:
    """Plans `lengths` (seq_lens, extend_lens, req_pool_indices) as device input, which no host check has seen."""
    out = poisoned_prefill(num_rows, ratios, str(tables.device))
    seq_lens, extend_lens, req_pool_indices = lengths
    dispatch.planner(impl, tables.device).plan_prefill(
        seq_lens=seq_lens,
        extend_lens=extend_lens,
        req_pool_indices=req_pool_indices,
        tables=tables,
        geom=geom,
        num_rows=num_rows,
        out=out,
    )
    return out


def decode_past_checks(
    impl: str,
    tables: RequestTables,
    geom: CacheGeometry,
    lengths: tuple[torch.Tensor, torch.Tensor],
    ratios: Iterable[int] = (4, 128),
) -> DecodePlans:
    """Plans `lengths` (seq_lens, req_pool_indices) as device input, which no host check has seen."""
    seq_lens, req_pool_indices = lengths
    out = poisoned_decode(len(seq_lens), ratios, str(tables.device))
    dispatch.planner(impl, tables.device).plan_decode(
        seq_lens=seq_lens, req_pool_indices=req_pool_indices, tables=tables, geom=geom, out=out
    )
    return out
