"""vLLM's tables in ours. Plain torch: vLLM is not needed. docs/vllm.md maps the rest of its interface."""

from __future__ import annotations

import torch

from dsv4_backend.tables import RequestTables
from dsv4_backend.validation import INT_DTYPES, expect_tensor


def request_tables(
    block_table: torch.Tensor, block_size: int, swa_block_table: torch.Tensor, swa_block_size: int, num_blocks: int
) -> RequestTables:
    """Request tables for block tables, with the batch's row b as request b + 1.

    Args:
        block_table: int32 [B, N]: block of each `block_size` tokens of a request in the full (compressed) cache. Block
            0 is the null block, as in vLLM: tokens on it have no slot, and translate to slot 0.
        block_size: tokens of a block; a multiple of 128, so that a block holds whole groups of both ratios.
        swa_block_table: the same for the sliding-window cache, int32 [B, M]; evicted blocks are the null block.
        swa_block_size: tokens of its blocks.
        num_blocks: blocks of the full cache, the null block included.

    Returns:
        RequestTables of B + 1 requests and N * block_size columns. They hold copies: a step that appends a block needs
        new ones. Where two requests share a block their window blocks must be the same, as for a shared prefix, or
        one of them the null block.

    Raises:
        ValueError: a dtype, shape, size or device is not as above.
    """
    expect_tensor("block_table", block_table, dtypes=INT_DTYPES, ndim=2)
    size, device = block_table.shape[0], block_table.device
    expect_tensor("swa_block_table", swa_block_table, dtypes=INT_DTYPES, ndim=2, size=size, device=device)
    for name, value in (("swa_block_size", swa_block_size), ("num_blocks", num_blocks)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}: expected a positive int, got {value!r}")
    if type(block_size) is not int or block_size < 128 or block_size % 128:
        raise ValueError(f"block_size: expected a multiple of 128, got {block_size!r}")
    if num_blocks * block_size > 2**31:
        raise ValueError(f"num_blocks: expected slots of at most 31 bits, got {num_blocks} blocks of {block_size}")
    if not block_table.shape[1]:
        raise ValueError("block_table: expected at least one column, got none")

    position = torch.arange(block_table.shape[1] * block_size, device=device)
    req_to_token = torch.zeros((size + 1, len(position)), dtype=torch.int32, device=device)
    slots = _slots(block_table, block_size, position)
    req_to_token[1:] = slots
    full_to_swa = torch.zeros(num_blocks * block_size + 1, dtype=torch.int64, device=device)
    # Maximum: of requests that share a block, one may have lost its window block.
    full_to_swa.scatter_reduce_(
        0, slots.flatten(), _slots(swa_block_table, swa_block_size, position).flatten(), reduce="amax"
    )
    full_to_swa[:block_size] = 0
    full_to_swa[-1] = -1
    return RequestTables(req_to_token, full_to_swa)


def request_ids(batch_size: int, padded_size: int, device: torch.device | str) -> torch.Tensor:
    """Ids for the rows of such tables: 1 to `batch_size`, then 0 for padding. int64 [padded_size]."""
    if not 0 <= batch_size <= padded_size:
        raise ValueError(f"padded_size: expected at least batch_size {batch_size}, got {padded_size}")
    ids = torch.arange(1, padded_size + 1, device=device)
    return ids.where(ids <= batch_size, 0)


def extend_lens(query_start_loc: torch.Tensor) -> torch.Tensor:
    """Rows of each request, for `RawBatch.extend_lens`, from vLLM's `query_start_loc` [B + 1]."""
    expect_tensor("query_start_loc", query_start_loc, dtypes=INT_DTYPES, ndim=1)
    return query_start_loc[1:] - query_start_loc[:-1]


def _slots(block_table: torch.Tensor, block_size: int, position: torch.Tensor) -> torch.Tensor:
    """Slot of each position, int64 [B, P]; 0 on the null block and beyond the table."""
    column = torch.div(position, block_size, rounding_mode="floor")
    inside = column < block_table.shape[1]
    if not block_table.shape[1]:
        return position.new_zeros((block_table.shape[0], len(position)))
    block = block_table[:, column.clamp(max=block_table.shape[1] - 1)].long()
    return (block * block_size + position % block_size).where(inside & (block > 0), 0)
