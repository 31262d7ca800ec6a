"""Attention over index lists: sizes of programs, over how many of them a row is split, and the launches."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton

from dsv4_triton_kernels.attention_attend import attend_entries
from dsv4_triton_kernels.attention_combine import MAX_SPLITS, combine_splits

LOG2_E = 1.4426950408889634

FP32_SIZES = dict(BLOCK_H=16, BLOCK_N=16, STAGES=1, num_warps=4)
"""Float32 products are made without tensor cores, from operands in registers."""
SMALL_DIM_SIZES = dict(BLOCK_H=64, BLOCK_N=64, STAGES=2, num_warps=4)
"""Up to 128 channels."""
FEW_HEADS_SIZES = dict(BLOCK_H=16, BLOCK_N=32, STAGES=2, num_warps=4)
# Of more than 128 channels and more than 16 heads. Shared memory holds the queries, and the entries of as many steps as
# there are stages: up to 227 KiB on Hopper and data center Blackwell (major 9 and 10), 99 KiB elsewhere.
SIZES = {
    (9, "bf16"): dict(BLOCK_H=64, BLOCK_N=64, STAGES=2, num_warps=8),
    (9, "fp8"): dict(BLOCK_H=64, BLOCK_N=64, STAGES=1, num_warps=8),
    (10, "bf16"): dict(BLOCK_H=64, BLOCK_N=32, STAGES=3, num_warps=8),
    (10, "fp8"): dict(BLOCK_H=64, BLOCK_N=32, STAGES=3, num_warps=8),
    (0, "bf16"): dict(BLOCK_H=32, BLOCK_N=32, STAGES=2, num_warps=8),
    (0, "fp8"): dict(BLOCK_H=16, BLOCK_N=16, STAGES=2, num_warps=4),
}

NO_TARGET = (None, None, None, 0, None, 0, 0, None)
"""Arguments of the first launch where a second one finishes."""


def block_sizes(format: str, head_dim: int, num_heads: int, major: int) -> dict[str, int]:
    """Heads and entries of a program's step, stages and warps, for a chip of compute capability `major`.x."""
    if format == "fp32":
        return FP32_SIZES
    if head_dim <= 128:
        heads = min(SMALL_DIM_SIZES["BLOCK_H"], max(16, triton.next_power_of_2(num_heads)))
        return {**SMALL_DIM_SIZES, "BLOCK_H": heads}
    sizes = SIZES.get((major, format), SIZES[0, format])
    return FEW_HEADS_SIZES if num_heads <= 16 < sizes["BLOCK_H"] else sizes


@cache
def chip(device: torch.device) -> tuple[int, int]:
    """Major compute capability, and how many programs run at a time."""
    if device.type != "cuda":
        return 0, 3
    found = torch.cuda.get_device_properties(device)
    return found.major, found.multi_processor_count


def num_splits(rows: int, head_blocks: int, blocks: int, programs: int) -> int:
    """Over how many programs to split the entries of a row: by shapes alone, so that a graph can hold the launch.

    Args:
        rows: of the step.
        head_blocks: programs that share a row's entries.
        blocks: the most blocks of entries that a row can have.
        programs: how many run at a time.
    """
    return max(1, min(programs // (rows * head_blocks), blocks, MAX_SPLITS))


def sparse_attention(
    *,
    q: torch.Tensor,
    window: Any,
    window_indices: torch.Tensor,
    window_lengths: torch.Tensor,
    compressed: Any,
    compressed_indices: torch.Tensor | None,
    compressed_lengths: torch.Tensor | None,
    compressed_rows: torch.Tensor | None,
    sink: torch.Tensor | None,
    scale: float,
    positions: torch.Tensor | None,
    rope: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    splits: int | None = None,
) -> None:
    """One launch, or two where entries are split; arguments as in `dsv4_backend.attention.sparse_attention`.

    `splits`: over how many programs to split the entries of a row, up to MAX_SPLITS; None: what `num_splits` says.
    """
    rows, heads, dim = q.shape
    major, programs = chip(q.device)
    sizes = block_sizes(window.layout.format, dim, heads, major)
    if splits is None:
        blocks = -(-window_indices.shape[1] // sizes["BLOCK_N"])
        if compressed_indices is not None:
            blocks += -(-compressed_indices.shape[1] // sizes["BLOCK_N"])
        splits = num_splits(rows, -(-heads // sizes["BLOCK_H"]), blocks, programs)
    known = 0 if rope is None else rope.shape[0]
    target = (sink, positions, rope, known, out, out.stride(0) // 8, out.stride(1) // 8, lse)
    partial: tuple[Any, Any] = (None, None)
    if splits > 1:
        count = rows * splits * heads
        workspace = torch.empty(count * (dim + 1), dtype=torch.float32, device=q.device)
        partial = workspace[: count * dim], workspace[count * dim :]
    attend_entries(
        q=q,
        lists=(
            *_list_args(window, window_indices, window_lengths),
            *_list_args(compressed, compressed_indices, compressed_lengths),
            compressed_rows,
            0 if compressed_indices is None else compressed_indices.shape[0],
        ),
        layouts=(window.layout, None if compressed is None else compressed.layout),
        scale=scale * LOG2_E,
        target=target if splits == 1 else NO_TARGET,
        partial=partial,
        num_splits=splits,
        sizes=sizes,
    )
    if splits > 1:
        combine_splits(
            partial=partial, target=target, shape=(rows, heads, dim), num_splits=splits, layout=window.layout
        )


def _list_args(pool: Any, indices: torch.Tensor | None, lengths: torch.Tensor | None) -> tuple[Any, ...]:
    """A kernel's arguments for a list."""
    if pool is None or indices is None:
        return None, None, 0, None, 0, None, 0
    extra = pool.halves if pool.layout.format == "fp8" else pool.data
    return pool.data, extra, pool.num_slots, indices, indices.stride(0), lengths, indices.shape[1]
