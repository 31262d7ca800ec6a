"""Attention of rows over their entries, or over a split of them, block by block under an online softmax."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton_kernels.attention_entries import (
    _load_angles,
    _load_entries,
    _load_sink,
    _log_sum,
    _normed,
    _operand,
    _store_results,
)
from dsv4_triton_kernels.common import Launcher, pdl_options

INT32_MAX = 2**31 - 1
# Less than any logit, and finite: differences to it are no NaN where no entry counts.
_LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _load_slots(
    block, window_list, window_length, window_blocks, compressed_list, compressed_length, BLOCK_N: tl.constexpr
):
    """Slots of a block of the window's list, or of the other list behind it; -1 past the length."""
    in_window = block < window_blocks
    column = (block - tl.where(in_window, 0, window_blocks)) * BLOCK_N + tl.arange(0, BLOCK_N)
    list_ptr = tl.where(in_window, window_list, compressed_list)
    return tl.load(list_ptr + column, mask=column < tl.where(in_window, window_length, compressed_length), other=-1)


@triton.jit(
    do_not_specialize=[
        "q_stride_row",
        "q_stride_head",
        "window_slots",
        "window_stride",
        "window_columns",
        "compressed_slots",
        "compressed_stride",
        "compressed_columns",
        "num_compressed_lists",
        "num_positions",
        "out_stride_row",
        "out_stride_head",
        "num_heads",
        "num_splits",
    ],
    do_not_specialize_on_alignment=[
        "window_index_ptr",
        "window_length_ptr",
        "compressed_index_ptr",
        "compressed_length_ptr",
        "compressed_row_ptr",
        "sink_ptr",
        "position_ptr",
        "lse_ptr",
    ],
)
def _attend_entries_kernel(
    q_ptr,  # [T, num_heads, D], float32 or bfloat16
    q_stride_row,  # in units of 8 elements, so that loads are known to be aligned
    q_stride_head,
    window_ptr,  # the pool: float32, bfloat16 or uint8
    window_extra_ptr,  # packed entries: the pool as int16; else not used
    window_slots,
    window_index_ptr,  # int32 [T, window_columns]
    window_stride,
    window_length_ptr,  # int32 [T]
    window_columns,
    compressed_ptr,  # the same for compressed entries, or None
    compressed_extra_ptr,
    compressed_slots,
    compressed_index_ptr,
    compressed_stride,
    compressed_length_ptr,
    compressed_columns,
    compressed_row_ptr,  # int32 [T]: row of the list that serves each, or None
    num_compressed_lists,
    scale,  # times log2(e)
    sink_ptr,  # float32 [num_heads], or None; as all up to `lse_ptr` for a single split
    position_ptr,  # int32 or int64 [T]
    rope_ptr,  # float32 [num_positions, ROPE], or None
    num_positions,
    out_ptr,  # [T, num_heads, D]
    out_stride_row,  # in units of 8 elements
    out_stride_head,
    lse_ptr,  # float32 [T, num_heads], or None
    partial_ptr,  # float32 [T, num_splits, num_heads, D]: the result of each split; None for a single one
    partial_lse_ptr,  # float32 [T, num_splits, num_heads]: binary logarithm of its sum
    num_heads,
    num_splits,
    FORMAT: tl.constexpr,
    WINDOW_PAGE: tl.constexpr,
    WINDOW_PAGE_BYTES: tl.constexpr,
    COMPRESSED_PAGE: tl.constexpr,
    COMPRESSED_PAGE_BYTES: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_H heads of one row over one split of its entries: the window's blocks, then those of the other list."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Programs that read the same entries are neighbours.
    program, head_blocks = tl.program_id(0), tl.cdiv(num_heads, BLOCK_H)
    head = program % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    split = program // head_blocks % num_splits
    row = (program // (head_blocks * num_splits)).to(tl.int64)
    live_head = head < num_heads

    window_list = window_index_ptr + row * window_stride
    window_length = tl.minimum(tl.load(window_length_ptr + row), window_columns)
    window_blocks = tl.cdiv(tl.maximum(window_length, 0), BLOCK_N)
    compressed_list, compressed_length, blocks = window_list, 0, window_blocks
    if compressed_ptr is not None:
        list_row, compressed_length = row, tl.minimum(tl.load(compressed_length_ptr + row), compressed_columns)
        if compressed_row_ptr is not None:
            list_row = tl.load(compressed_row_ptr + row).to(tl.int64)
            known = (list_row >= 0) & (list_row < num_compressed_lists)
            compressed_length = tl.where(known, compressed_length, 0)
        compressed_list = compressed_index_ptr + list_row * compressed_stride
        blocks += tl.cdiv(tl.maximum(compressed_length, 0), BLOCK_N)
    lists = (window_list, window_length, window_blocks, compressed_list, compressed_length)
    first, last = split * blocks // num_splits, (split + 1) * blocks // num_splits

    channel = tl.arange(0, D)[None, :]
    q_place = (row * q_stride_row + head.to(tl.int64) * q_stride_head) * 8
    q = _operand(tl.load(q_ptr + q_place[:, None] + channel, mask=live_head[:, None], other=0.0), FORMAT)
    most = tl.full([BLOCK_H], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    value = tl.zeros([BLOCK_H, D], tl.float32)
    ahead = _load_slots(first, *lists, BLOCK_N)
    # One loop over both lists: loads run ahead across the border between them.
    for block in tl.range(first, last, num_stages=STAGES):
        slot = ahead
        # A step early, so that the places of entries are known when their loads can begin.
        ahead = _load_slots(block + 1, *lists, BLOCK_N)
        in_window, num_slots = block < window_blocks, window_slots
        if compressed_ptr is not None:
            num_slots = tl.where(in_window, window_slots, compressed_slots)
        live = (slot >= 0) & (slot < num_slots)
        entries = _load_entries(
            slot.to(tl.int64),
            live,
            in_window,
            window_ptr,
            window_extra_ptr,
            compressed_ptr,
            compressed_extra_ptr,
            FORMAT,
            WINDOW_PAGE,
            WINDOW_PAGE_BYTES,
            COMPRESSED_PAGE,
            COMPRESSED_PAGE_BYTES,
            D,
            ROPE,
            BLOCK_N,
        )
        logit = tl.dot(q, tl.trans(entries), input_precision="ieee") * scale
        logit = tl.where(live[None, :], logit, float("-inf"))
        # Always so; values of the other case are never used. Where Triton sees that one product follows from another,
        # it gives all warps to the heads of the first one, and those that there are too many of repeat the work of
        # others. The branch, which is gone in the end, keeps it from seeing that.
        above, shrink, weight = most, most, _operand(logit, FORMAT)
        if block < last:
            above = tl.maximum(most, tl.max(logit, 1))
            exact = tl.exp2(logit - above[:, None])
            shrink = tl.exp2(most - above)
            # The denominator takes weights as they are, the values take rounded ones.
            total = total * shrink + tl.sum(exact, 1)
            weight = _operand(exact, FORMAT)
        value = tl.dot(weight, entries, value * shrink[:, None], input_precision="ieee")
        most = above

    if partial_ptr is None:
        if lse_ptr is not None:
            log_sum = _log_sum(total, most) * 0.6931471805599453
            tl.store(lse_ptr + row * num_heads + head, log_sum, mask=live_head)
        value = _normed(value, total, most, _load_sink(sink_ptr, head, live_head))
        cos, sin = _load_angles(row, position_ptr, rope_ptr, num_positions, ROPE)
        target = (out_ptr, out_stride_row, out_stride_head)
        _store_results(value, row, head, live_head, cos, sin, *target, D, ROPE, BLOCK_H, rope_ptr is not None)
    else:
        place = (row * num_splits + split) * num_heads + head
        tl.store(partial_lse_ptr + place, _log_sum(total, most), mask=live_head)
        # The result of a split without blocks is not read.
        if last > first:
            value = _normed(value, total, most, tl.full([BLOCK_H], float("-inf"), tl.float32))
            tl.store(partial_ptr + (place * D)[:, None] + channel, value, mask=live_head[:, None])


_attend = Launcher(_attend_entries_kernel)


def kinds(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What decides about a compilation: dtypes, what is missing, and which integers need 64 bits."""
    return tuple(
        arg.dtype if isinstance(arg, torch.Tensor) else arg is None or (isinstance(arg, int) and arg > INT32_MAX)
        for arg in args
    )


def entry_constants(window: Any, compressed: Any) -> dict[str, Any]:
    """Constants that the layouts of both pools give; `compressed` None: there is no second list."""
    second = window if compressed is None else compressed
    return dict(
        FORMAT=window.format,
        WINDOW_PAGE=window.page_entries,
        WINDOW_PAGE_BYTES=window.page_bytes,
        COMPRESSED_PAGE=second.page_entries,
        COMPRESSED_PAGE_BYTES=second.page_bytes,
        D=window.head_dim,
        ROPE=window.rope_dim,
    )


def attend_entries(
    *,
    q: torch.Tensor,
    lists: tuple[Any, ...],
    layouts: tuple[Any, Any],
    scale: float,
    target: tuple[Any, ...],
    partial: tuple[torch.Tensor | None, torch.Tensor | None],
    num_splits: int,
    sizes: dict[str, int],
) -> None:
    """One launch, over all rows, blocks of heads and splits.

    Args:
        lists: the kernel's arguments for both lists, from `window_ptr` to `num_compressed_lists`.
        layouts: of both pools; None for a list that is missing.
        scale: of logits that are raised to powers of 2.
        target: the kernel's arguments from `sink_ptr` to `lse_ptr`.
        partial: where the splits' results go; None for a single split.
        sizes: BLOCK_H, BLOCK_N, STAGES and num_warps.
    """
    rows, heads, _ = q.shape
    args = (q, q.stride(0) // 8, q.stride(1) // 8, *lists, scale, *target, *partial, heads, num_splits)
    _attend(
        q.device,
        (layouts, tuple(sizes.values()), kinds(args)),
        (rows * -(-heads // sizes["BLOCK_H"]) * num_splits,),
        args,
        lambda: dict(**entry_constants(*layouts), **sizes, **pdl_options(q.device)),
    )
