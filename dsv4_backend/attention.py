"""Attention of a step over the entries that its index lists name: sliding window and compressed, in one softmax.

The semantics live in `dsv4_backend.reference.attention`.
"""

from __future__ import annotations

import torch

from dsv4_backend import dispatch
from dsv4_backend.layouts import EntryPool
from dsv4_backend.validation import (
    INT_DTYPES,
    expect_aligned,
    expect_dense,
    expect_separate,
    expect_tensor,
    expect_type,
)

QUERY_DTYPES = (torch.float32, torch.bfloat16)
HEAD_DIMS = (16, 512)
"""The least and the most channels; a layout allows powers of two only."""
MAX_SCALE = 1e30
"""Kernels multiply by scale * log2(e) in float32, which must stay finite."""


def sparse_attention(
    q: torch.Tensor,
    window: EntryPool,
    window_indices: torch.Tensor,
    window_lengths: torch.Tensor,
    compressed: EntryPool | None = None,
    compressed_indices: torch.Tensor | None = None,
    compressed_lengths: torch.Tensor | None = None,
    *,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
    positions: torch.Tensor | None = None,
    rope: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    compressed_rows: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Attends, for each row and head, the entries of both lists; an entry is key and value at once.

    With logits l_u = scale * <q, u> an entry u weighs exp(l_u) / (exp(sink) + sum of all exp(l)). With everything on
    the window pool's device, and D = `window.layout.head_dim`, a power of two from 16 to 512:

    Args:
        q: float32 or bfloat16 [T, H, D], any H from 1; unit channel stride, other strides multiples of 8 elements, on a
            16-byte boundary. For pools of bf16 and fp8 it is rounded to bfloat16.
        window: entries of the sliding window. Not indexer keys; in format fp8 `rope_dim` is a power of two.
        window_indices: int32 [T, W], unit column stride, any row stride: slots of the window pool
            (`AttnMetadata.swa_page_indices`). Negative slots and slots beyond the pool are skipped wherever they stand;
            a slot that stands twice counts twice.
        window_lengths: int32 [T], contiguous: how many columns of a row count, taken as 0 to W
            (`AttnMetadata.swa_lengths`). What stands behind them is not used.
        compressed: compressed entries, with format, head and rope dimension of the window pool; None, as the two
            arguments that follow, for a layer without.
        compressed_indices, compressed_lengths: the same for slots of the compressed pool, int32 [T, K]
            (`c4_sparse_page_indices` and `c4_sparse_lengths`, or `c128_page_indices` and `c128_lengths`).
        compressed_rows: int32 [T], contiguous: row of `compressed_indices`, then [R, K], that serves row t
            (`AttnMetadata.table_rows`); a row that is not there has no entries. None: row t serves row t.
        sink: float32 [H], contiguous: a raw logit for each head, without scale and value. +inf gives zeros; -inf, like
            None, a plain softmax.
        scale: of the logits, above 0 and at most 1e30; None: D ** -0.5.
        positions, rope: int32 or int64 [T], contiguous, and float32 [positions, rope_dim], contiguous, on a 16-byte
            boundary (`AttnMetadata.positions` and `rope.rope_table` of the layer); both or none. Given, the last
            rope_dim channels of the result are turned back by the row's position. For a position outside of the table
            they are 0.
        out: where the result goes, with shape and dtype of `q` and the same demands on strides and address; it does
            not overlap with other arguments. None: a new tensor.
        lse: float32 [T, H], contiguous, to be filled: natural logarithm of the sum of exp(l) without the sink; -inf for
            a row without entries.
        impl: "auto" (Triton on a GPU, torch on a CPU), "triton" or "torch".

    Returns:
        [T, H, D], with the dtype of `q`. A row without entries is 0.

    Entries that no counting column names are never used, whatever they hold. With pools of bf16 and fp8 products are
    of bfloat16 with float32 sums, and weights are rounded to bfloat16 for the values but not for the denominator; with
    fp32 nothing is rounded to less than float32. The result is rounded to the dtype of `q`, turned in float32, and
    rounded again.

    A row's result does not depend on the other rows' values, nor on the row's place. How its entries are split over
    programs depends on the shapes, so among calls with other T, H, W or K it may differ in the last bits. Equal calls
    give equal bits. Nothing waits for the device; a CUDA graph can record it (a workspace, where one is needed, is from
    torch's allocator, thus from the graph's pool).

    Raises:
        ValueError: before anything is written; the message says what was expected and what came.

    Source: spec/attention_math.md, sections 3 and 6.
    """
    expect_type("window", window, EntryPool)
    layout, device = window.layout, window.device
    _check_pool("window", window)
    expect_tensor("q", q, dtypes=QUERY_DTYPES, ndim=3, device=device)
    rows, heads, _ = q.shape
    if heads < 1 or q.shape[2] != layout.head_dim:
        raise ValueError(f"q: expected shape [T, at least 1, {layout.head_dim}], got {list(q.shape)}")
    _check_rows("q", q)
    _check_list("window", window_indices, window_lengths, rows, device)
    if compressed is not None:
        expect_type("compressed", compressed, EntryPool)
        _check_pool("compressed", compressed)
        _check_alike(compressed, window)
        if compressed_indices is None or compressed_lengths is None:
            raise ValueError("compressed: expected indices and lengths with it, got none")
        _check_list("compressed", compressed_indices, compressed_lengths, rows, device, compressed_rows)
    elif any(given is not None for given in (compressed_indices, compressed_lengths, compressed_rows)):
        raise ValueError("compressed: expected a pool for its indices, lengths and rows, got none")
    if sink is not None:
        expect_dense("sink", sink, (torch.float32,), (heads,), device)
    scale = _check_scale(scale, layout.head_dim)
    _check_rope(positions, rope, rows, layout.rope_dim, device)
    if lse is not None:
        expect_dense("lse", lse, (torch.float32,), (rows, heads), device)
    if out is not None:
        expect_tensor("out", out, dtypes=(q.dtype,), ndim=3, device=device)
        if out.shape != q.shape:
            raise ValueError(f"out: expected shape {list(q.shape)}, got {list(out.shape)}")
        _check_rows("out", out)
        expect_separate("out", out)
    kernels = dispatch.attention(impl, device)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=device)
    if rows:
        kernels.sparse_attention(
            q=q,
            window=window,
            window_indices=window_indices,
            window_lengths=window_lengths,
            compressed=compressed,
            compressed_indices=compressed_indices,
            compressed_lengths=compressed_lengths,
            compressed_rows=compressed_rows,
            sink=sink,
            scale=scale,
            positions=positions,
            rope=rope,
            out=out,
            lse=lse,
        )
    return out


def _check_pool(name: str, pool: EntryPool) -> None:
    layout = pool.layout
    if layout.indexer:
        raise ValueError(f"{name}: expected a pool of window or compressed entries, got one of indexer keys")
    least, most = HEAD_DIMS
    if not least <= layout.head_dim <= most:
        raise ValueError(f"{name}: expected a head_dim of {least} to {most}, got {layout.head_dim}")
    if layout.format == "fp8" and layout.rope_dim & (layout.rope_dim - 1):
        raise ValueError(f"{name}: expected a rope_dim that is a power of two in format fp8, got {layout.rope_dim}")
    if not pool.num_slots:
        raise ValueError(f"{name}: expected at least the reserved page, got an empty pool")


def _check_alike(compressed: EntryPool, window: EntryPool) -> None:
    """Only the entries of a page may differ."""
    wanted, got = ((pool.layout.format, pool.layout.head_dim, pool.layout.rope_dim) for pool in (window, compressed))
    if wanted != got:
        raise ValueError(f"compressed: expected format, head_dim and rope_dim of the window pool, {wanted}, got {got}")
    if compressed.device != window.device:
        raise ValueError(f"compressed: expected a pool on {window.device}, got one on {compressed.device}")


def _check_list(
    name: str, indices: object, lengths: object, rows: int, device: torch.device, list_rows: object = None
) -> None:
    """An index list, its lengths, and which of its rows serve which, if not their own."""
    name_indices, name_lengths = f"{name}_indices", f"{name}_lengths"
    size = rows if list_rows is None else None
    slots = expect_tensor(name_indices, indices, dtypes=(torch.int32,), ndim=2, size=size, device=device)
    if list_rows is not None:
        expect_dense(f"{name}_rows", list_rows, (torch.int32,), (rows,), device)
    if slots.shape[1] > 1 and slots.stride(1) != 1:
        raise ValueError(f"{name_indices}: expected unit column stride, got strides {list(slots.stride())}")
    expect_dense(name_lengths, lengths, (torch.int32,), (rows,), device)


def _check_rows(name: str, tensor: torch.Tensor) -> None:
    """Checks that the channels of each row and head can be loaded 16 bytes at a time."""
    strides = tensor.stride()
    if strides[2] != 1 or any(size > 1 and stride % 8 for size, stride in zip(tensor.shape[:2], strides, strict=False)):
        raise ValueError(
            f"{name}: expected unit channel stride and other strides that are multiples of 8, got {list(strides)}"
        )
    expect_aligned(name, tensor)


def _check_scale(scale: object, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale <= MAX_SCALE:
        raise ValueError(f"scale: expected a number above 0, at most {MAX_SCALE:g}, got {scale!r}")
    return float(scale)


def _check_rope(positions: object, rope: object, rows: int, rope_dim: int, device: torch.device) -> None:
    if (positions is None) != (rope is None):
        missing = "positions" if positions is None else "rope"
        raise ValueError(f"{missing}: expected positions and rope, or none of them, got one")
    if rope is None:
        return
    expect_dense("positions", positions, INT_DTYPES, (rows,), device)
    table = expect_tensor("rope", rope, dtypes=(torch.float32,), ndim=2, device=device)
    if table.shape[0] < 1 or table.shape[1] != rope_dim or not table.is_contiguous():
        raise ValueError(
            f"rope: expected a contiguous tensor of shape [at least 1, {rope_dim}], got shape {list(table.shape)}, "
            f"strides {list(table.stride())}"
        )
    expect_aligned("rope", table)
