"""Compression of a step, and the entries of its sliding window: what fills the cache.

What is computed: docs/cache.md. The semantics live in `dsv4_backend.reference.compressor` and
`dsv4_backend.reference.kv_store`.
"""

from __future__ import annotations

import torch

from dsv4_backend import dispatch
from dsv4_backend.geometry import RATIOS
from dsv4_backend.layouts import STATE_DTYPE, EntryPool, bias_shape, state_width
from dsv4_backend.plans import DecodePlans, PrefillPlan
from dsv4_backend.validation import INT_DTYPES, expect_aligned, expect_dense, expect_tensor, expect_type


def compress(
    kv_score: torch.Tensor,
    state: torch.Tensor,
    plans: PrefillPlan | DecodePlans,
    ratio: int,
    pool: EntryPool,
    *,
    out_loc: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor,
    rope: torch.Tensor,
    eps: float = 1e-6,
    impl: str = "auto",
) -> None:
    """Pools what a step completes into entries, norms, ropes and stores them; keeps the rows that later steps read.

    With d = `pool.layout.head_dim`, and everything on the pool's device:

    Args:
        kv_score: float32 [T, width], unit column stride, row stride a multiple of 4 elements, on a 16-byte boundary. A
            row for each of the step's, padding included: width 4 d for ratio 4 (values for the next group, values for
            the own group, scores for the next, scores for the own), 2 d for ratio 128 (values, scores).
        state: float32 [rows, width], contiguous, on a 16-byte boundary, whole groups of `ratio` rows: the rings
            (`layouts.state_rows`), one at least for each request of the plan. Read and written. Rows are kept as they
            are in `kv_score`.
        plans: the step's plans, of this ratio at least: PrefillPlan or DecodePlans, of T rows. A prefill plan may have
            room for more.
        ratio: 4 or 128.
        pool: where the entries go. Indexer keys are Hadamard-transformed unless it holds float32.
        out_loc: int64 [T], contiguous: slot of the entry that row t completes (`AttnMetadata.c4_out_loc` or
            `c128_out_loc`). Slot 0, negative slots and slots beyond the pool are not stored.
        bias: float32 [4, 2 d] for ratio 4 (for the next group, for the own), [128, d] for ratio 128, contiguous, on a
            16-byte boundary: what checkpoints call ape, added to the scores of each token of a group.
        norm_weight: float32 [d], contiguous.
        rope: float32 [positions, rope_dim], contiguous (`rope.rope_table` of the layer). An entry turns by the position
            of its group's first token; where the table does not have that, the channels that turn are 0.
        eps: what the norm adds to the mean square.
        impl: "auto" (Triton on a GPU, torch on a CPU), "triton" or "torch".

    Row ids, pages and state rows of the plan that lie outside of the tensors are read as nothing and not written.
    Chunking, batching and paging do not change an entry. Nothing waits for the device; a CUDA graph can record it.

    Raises:
        ValueError: before anything is written; the message says what was expected and what came.

    Source: spec/attention_math.md, sections 4 and 6; spec/sglang_contract.md, section 5.4.
    """
    expect_type("pool", pool, EntryPool)
    layout, device = pool.layout, pool.device
    if ratio not in RATIOS:
        raise ValueError(f"ratio: expected 4 or 128, got {ratio!r}")
    if layout.indexer and ratio != 4:
        raise ValueError(f"ratio: expected 4 for a pool of indexer keys, got {ratio}")
    rows = _check_rows("kv_score", kv_score, (STATE_DTYPE,), state_width(ratio, layout.head_dim), device)
    _check_plans(plans, ratio, rows, device)
    expect_dense("state", state, (STATE_DTYPE,), (None, state_width(ratio, layout.head_dim)), device, aligned=True)
    if state.shape[0] % ratio or not state.shape[0]:
        raise ValueError(f"state: expected a multiple of {ratio} rows, at least that many, got {state.shape[0]}")
    expect_dense("out_loc", out_loc, (torch.int64,), (rows,), device)
    expect_dense("bias", bias, (torch.float32,), bias_shape(ratio, layout.head_dim), device, aligned=True)
    _check_norm_rope(norm_weight, rope, eps, pool)
    dispatch.compressor(impl, device).compress(
        kv_score=kv_score,
        state=state,
        plans=plans,
        ratio=ratio,
        bias=bias,
        norm_weight=norm_weight,
        eps=eps,
        rope=rope,
        out_loc=out_loc,
        pool=pool,
    )


def store_window(
    kv: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    pool: EntryPool,
    *,
    norm_weight: torch.Tensor,
    rope: torch.Tensor,
    eps: float = 1e-6,
    impl: str = "auto",
) -> None:
    """Norms, ropes and stores the window entries of a step, in one launch.

    Args:
        kv: float32 or bfloat16 [T, d], unit column stride, row stride a multiple of 8 elements, on a 16-byte boundary.
        slots: int32 or int64 [T], any stride: window slots (`AttnMetadata.swa_out_cache_loc`). Slot 0, negative slots
            and slots beyond the pool are not stored.
        positions: int32 or int64 [T], any stride (`AttnMetadata.positions`). Outside of the table, the channels that
            turn are stored as 0.
        pool: where the entries go.
        norm_weight, rope, eps, impl: as for `compress`; the table is that of the layer, also for the window.

    Raises:
        ValueError: before anything is written.
    """
    expect_type("pool", pool, EntryPool)
    rows = _check_rows("kv", kv, (torch.float32, torch.bfloat16), pool.layout.head_dim, pool.device, unit=8)
    for name, value in (("slots", slots), ("positions", positions)):
        expect_tensor(name, value, dtypes=INT_DTYPES, ndim=1, size=rows, device=pool.device)
    _check_norm_rope(norm_weight, rope, eps, pool)
    kernels = dispatch.kv_store(impl, pool.device)
    if rows:
        kernels.store_window(
            kv=kv, slots=slots, positions=positions, norm_weight=norm_weight, eps=eps, rope=rope, pool=pool
        )


def store_entries(values: torch.Tensor, slots: torch.Tensor, pool: EntryPool, *, impl: str = "auto") -> None:
    """Quantises and stores entries that are normed and roped.

    Args:
        values: float32 or bfloat16 [T, d], as `kv` of `store_window`. Indexer keys come without Hadamard transform.
        slots, pool, impl: as for `store_window`.

    Raises:
        ValueError: before anything is written.
    """
    expect_type("pool", pool, EntryPool)
    rows = _check_rows("values", values, (torch.float32, torch.bfloat16), pool.layout.head_dim, pool.device, unit=8)
    expect_tensor("slots", slots, dtypes=INT_DTYPES, ndim=1, size=rows, device=pool.device)
    kernels = dispatch.kv_store(impl, pool.device)
    if rows:
        kernels.store_entries(values=values, slots=slots, pool=pool)


def _check_rows(
    name: str, value: object, dtypes: tuple[torch.dtype, ...], width: int, device: torch.device, unit: int = 4
) -> int:
    """Checks a matrix whose rows kernels load 16 bytes at a time, and returns their number."""
    rows = expect_tensor(name, value, dtypes=dtypes, ndim=2, device=device)
    if rows.shape[1] != width:
        raise ValueError(f"{name}: expected {width} columns, got {rows.shape[1]}")
    if rows.stride(1) != 1 or rows.stride(0) % unit:
        raise ValueError(
            f"{name}: expected unit column stride and a row stride that is a multiple of {unit}, got "
            f"{list(rows.stride())}"
        )
    expect_aligned(name, rows)
    return rows.shape[0]


def _check_norm_rope(norm_weight: torch.Tensor, rope: torch.Tensor, eps: float, pool: EntryPool) -> None:
    layout, device = pool.layout, pool.device
    expect_dense("norm_weight", norm_weight, (torch.float32,), (layout.head_dim,), device, aligned=True)
    expect_dense("rope", rope, (torch.float32,), (None, layout.rope_dim), device, aligned=True)
    if rope.shape[0] < 1:
        raise ValueError("rope: expected at least one position, got none")
    if isinstance(eps, bool) or not isinstance(eps, float) or not eps >= 0:
        raise ValueError(f"eps: expected a float of at least 0, got {eps!r}")


def _check_plans(plans: object, ratio: int, rows: int, device: torch.device) -> None:
    if not isinstance(plans, (PrefillPlan, DecodePlans)):
        raise ValueError(f"plans: expected a PrefillPlan or DecodePlans, got {type(plans).__name__}")
    if plans.ratio(ratio) is None:
        raise ValueError(f"plans: expected a plan of ratio {ratio}, got one of {plans.ratios}")
    if plans.device != device:
        raise ValueError(f"plans: expected plans on {device}, got some on {plans.device}")
    most = plans.num_rows or 0
    if rows > most or (isinstance(plans, DecodePlans) and rows != most):
        raise ValueError(f"kv_score: expected the {most} rows of the plans, got {rows}")
