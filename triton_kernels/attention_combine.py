"""The result of a row from those of the splits of its entries."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton_kernels.attention_attend import _LOWEST, kinds
from dsv4_triton_kernels.attention_entries import _load_angles, _load_sink, _log_sum, _normed, _store_results
from dsv4_triton_kernels.common import Launcher, pdl_options

MAX_SPLITS = 64
_MAX_SPLITS = tl.constexpr(MAX_SPLITS)
RESULTS = 16
"""Results that a program loads at once: of as many splits as there are, and of more heads where these are few."""


@triton.jit(
    do_not_specialize=["num_positions", "out_stride_row", "out_stride_head", "num_heads", "num_splits"],
    do_not_specialize_on_alignment=["sink_ptr", "position_ptr", "lse_ptr"],
)
def _combine_splits_kernel(
    partial_ptr,  # float32 [T, num_splits, num_heads, D]
    partial_lse_ptr,  # float32 [T, num_splits, num_heads]: minus infinity where there is no result
    sink_ptr,  # as all up to `lse_ptr` for _attend_entries_kernel
    position_ptr,
    rope_ptr,
    num_positions,
    out_ptr,
    out_stride_row,
    out_stride_head,
    lse_ptr,
    num_heads,
    num_splits,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
    SPLITS: tl.constexpr,  # whose results are loaded at once
    PDL: tl.constexpr,
):
    """HEADS heads of one row; their splits are added up in order."""
    program, head_blocks = tl.program_id(0), tl.cdiv(num_heads, HEADS)
    row = (program // head_blocks).to(tl.int64)
    head = program % head_blocks * HEADS + tl.arange(0, HEADS)
    live = head < num_heads
    # What stands before the wait reads what the launch before this one only reads, too, and waited for.
    sink = _load_sink(sink_ptr, head, live)
    cos, sin = _load_angles(row, position_ptr, rope_ptr, num_positions, ROPE)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = row * num_splits * num_heads + head
    every = tl.arange(0, _MAX_SPLITS)[None, :]
    known = live[:, None] & (every < num_splits)
    log_sum = tl.load(partial_lse_ptr + place[:, None] + every * num_heads, mask=known, other=float("-inf"))
    most = tl.maximum(tl.max(log_sum, 1), _LOWEST)
    total = tl.sum(tl.exp2(log_sum - most[:, None]), 1)
    value = tl.zeros([HEADS, D], tl.float32)
    for start in range(0, num_splits, SPLITS):
        split = start + tl.arange(0, SPLITS)[None, :]
        at = place[:, None] + split * num_heads
        part = tl.load(partial_lse_ptr + at, mask=live[:, None] & (split < num_splits), other=float("-inf"))
        result = tl.load(
            partial_ptr + (at * D)[:, :, None] + tl.arange(0, D)[None, None, :],
            mask=(part != float("-inf"))[:, :, None],
            other=0.0,
        )
        value += tl.sum(result * tl.exp2(part - most[:, None])[:, :, None], 1)
    if lse_ptr is not None:
        tl.store(lse_ptr + row * num_heads + head, _log_sum(total, most) * 0.6931471805599453, mask=live)
    value = _normed(value, total, most, sink)
    target = (out_ptr, out_stride_row, out_stride_head)
    _store_results(value, row, head, live, cos, sin, *target, D, ROPE, HEADS, rope_ptr is not None)


_combine = Launcher(_combine_splits_kernel)


def combine_sizes(num_splits: int, head_dim: int) -> dict[str, int]:
    """Heads of a program, splits that it loads at once, and its warps."""
    splits = min(RESULTS, triton.next_power_of_2(num_splits))
    return dict(HEADS=RESULTS // splits, SPLITS=splits, num_warps=4 if head_dim > 128 else 1)


def combine_splits(
    *,
    partial: tuple[torch.Tensor, torch.Tensor],
    target: tuple[Any, ...],
    shape: tuple[int, int, int],
    num_splits: int,
    layout: Any,
) -> None:
    """One launch, over all rows and heads.

    Args:
        partial: the splits' results.
        target: the kernel's arguments from `sink_ptr` to `lse_ptr`.
        shape: rows, heads and channels of the result.
        layout: of the window pool.
    """
    rows, heads, dim = shape
    device = partial[0].device
    sizes = combine_sizes(num_splits, dim)
    args = (*partial, *target, heads, num_splits)
    _combine(
        device,
        (dim, layout.rope_dim, sizes["HEADS"], kinds(args)),
        (rows * -(-heads // sizes["HEADS"]),),
        args,
        lambda: dict(D=dim, ROPE=layout.rope_dim, **sizes, **pdl_options(device)),
    )
