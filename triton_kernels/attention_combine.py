"""The result of a row from those of the splits of its entries."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton_kernels.attention_attend import _LOWEST, kinds
from dsv4_triton_kernels.attention_entries import _load_sink, _log_sum, _normed, _store_results
from dsv4_triton_kernels.common import Launcher, pdl_options

MAX_SPLITS = 64
_MAX_SPLITS = tl.constexpr(MAX_SPLITS)
# Splits whose results are loaded at once.
_STEP = tl.constexpr(16)


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
    PDL: tl.constexpr,
):
    """One head of one row; its splits are added up in their order."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    row = (program // num_heads).to(tl.int64)
    head = program % num_heads + tl.arange(0, 1)
    live = head < num_heads
    place = row * num_splits * num_heads + program % num_heads
    every = tl.arange(0, _MAX_SPLITS)
    log_sum = tl.load(partial_lse_ptr + place + every * num_heads, mask=every < num_splits, other=float("-inf"))
    most = tl.maximum(tl.max(log_sum[None, :], 1), _LOWEST)
    total = tl.sum(tl.exp2(log_sum[None, :] - most[:, None]), 1)
    value = tl.zeros([D], tl.float32)
    for start in range(0, num_splits, _STEP):
        split = start + tl.arange(0, _STEP)
        at = place + split * num_heads
        part = tl.load(partial_lse_ptr + at, mask=split < num_splits, other=float("-inf"))
        result = tl.load(
            partial_ptr + (at * D)[:, None] + tl.arange(0, D)[None, :],
            mask=(part != float("-inf"))[:, None],
            other=0.0,
        )
        value += tl.sum(result * tl.exp2(part - most)[:, None], 0)
    if lse_ptr is not None:
        tl.store(lse_ptr + row * num_heads + head, _log_sum(total, most) * 0.6931471805599453, mask=live)
    value = _normed(value[None, :], total, most, _load_sink(sink_ptr, head, live))
    target = (position_ptr, rope_ptr, num_positions, out_ptr, out_stride_row, out_stride_head)
    _store_results(value, row, head, live, *target, D, ROPE, 1)


_combine = Launcher(_combine_splits_kernel)


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
    args = (*partial, *target, heads, num_splits)
    _combine(
        device,
        (dim, layout.rope_dim, kinds(args)),
        (rows * heads,),
        args,
        lambda: dict(D=dim, ROPE=layout.rope_dim, num_warps=4 if dim > 128 else 1, **pdl_options(device)),
    )
