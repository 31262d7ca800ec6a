"""Entries of pools as operands of matrix products, and results of rows: what the attention kernels share.

Sums of weights and sinks are kept in powers of 2: a logit is one of exp2, thus scaled by log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4_triton_kernels.common import INTERPRET
from dsv4_triton_kernels.kv_store import _bfloat16_bits

# The interpreter cuts bfloat16 off instead of rounding, and multiplies its bits: there, operands are float32 that hold
# bfloat16 values, which gives the same products.
_BITS = tl.constexpr(INTERPRET)


@triton.jit
def _widened(value):
    """float32 of float32 or bfloat16."""
    if value.dtype == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value


@triton.jit
def _rounded(value, dtype: tl.constexpr):
    """float32, rounded to the values of `dtype`, float32 or bfloat16."""
    value = _widened(value)
    if dtype == tl.bfloat16:
        value = _bfloat16_bits(value).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _operand(value, FORMAT: tl.constexpr):
    """float32 or bfloat16 as an operand of products for pools of a format: float32, or rounded to bfloat16."""
    if FORMAT == "fp32":
        return _widened(value)
    elif _BITS:
        return _rounded(value, tl.bfloat16)
    else:
        return value.to(tl.bfloat16)


@triton.jit
def _load_entries(
    slot,  # int64 [N]
    live,  # [N]: entries that count; of others nothing is read, they are 0
    in_window,  # whether they are of the window pool, or of the other one
    window_ptr,  # the pool: float32, bfloat16 or uint8
    window_extra_ptr,  # packed entries: the pool as int16; else not used
    compressed_ptr,  # the same for compressed entries, or None
    compressed_extra_ptr,
    FORMAT: tl.constexpr,
    WINDOW_PAGE: tl.constexpr,
    WINDOW_PAGE_BYTES: tl.constexpr,
    COMPRESSED_PAGE: tl.constexpr,
    COMPRESSED_PAGE_BYTES: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    N: tl.constexpr,
):
    """Entries [N, D] as operands."""
    data_ptr, extra_ptr = window_ptr, window_extra_ptr
    if compressed_ptr is not None:
        data_ptr = tl.where(in_window, window_ptr, compressed_ptr)
        extra_ptr = tl.where(in_window, window_extra_ptr, compressed_extra_ptr)
    if FORMAT != "fp8":
        place = (slot * D)[:, None] + tl.arange(0, D)[None, :]
        return _loaded(tl.load(data_ptr + place, mask=live[:, None], other=0.0))
    else:
        page, entry = slot // WINDOW_PAGE, slot % WINDOW_PAGE
        page_bytes, page_entries = WINDOW_PAGE_BYTES, WINDOW_PAGE
        if compressed_ptr is not None:
            page = tl.where(in_window, page, slot // COMPRESSED_PAGE)
            entry = tl.where(in_window, entry, slot % COMPRESSED_PAGE)
            page_bytes = tl.where(in_window, page_bytes, COMPRESSED_PAGE_BYTES)
            page_entries = tl.where(in_window, page_entries, COMPRESSED_PAGE)
        return _load_packed(page, entry, live, data_ptr, extra_ptr, page_bytes, page_entries, D, ROPE, N)


@triton.jit
def _loaded(value):
    """Entries as they lie in a pool, as operands."""
    if _BITS:
        return _widened(value)
    else:
        return value


@triton.jit
def _load_packed(
    page,  # int64 [N]
    entry,  # [N]: of the page
    live,  # [N]
    data_ptr,
    extra_ptr,
    page_bytes,
    page_entries,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    N: tl.constexpr,
):
    """Packed entries [N, D]: e4m3 with a scale for each 64 channels, then the channels that turn."""
    REST: tl.constexpr = D - ROPE
    ROW: tl.constexpr = REST + 2 * ROPE
    channel, block = tl.arange(0, D)[None, :], tl.arange(0, D // 64)[None, :]
    place = page * page_bytes
    data_place = (place + entry * ROW)[:, None] + channel
    code = tl.load(data_ptr + data_place, mask=live[:, None] & (channel < REST), other=0)
    scale_place = (place + page_entries * ROW + entry * 8)[:, None] + block
    scale = tl.load(data_ptr + scale_place, mask=live[:, None] & (block < REST // 64), other=0)
    # In units of two bytes.
    turning_place = (page * (page_bytes // 2) + entry * (ROW // 2) + REST // 2)[:, None] + tl.arange(0, ROPE)[None, :]
    turning = tl.load(extra_ptr + turning_place, mask=live[:, None], other=0)
    scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    value = tl.reshape(code.to(tl.float8e4nv, bitcast=True).to(tl.float32), [N, D // 64, 64])
    value = _operand(tl.reshape(value * scale[:, :, None], [N, D]), "fp8")
    # The last of D // ROPE groups of channels.
    turning = _operand((turning.to(tl.int32) << 16).to(tl.float32, bitcast=True), "fp8")
    turning = tl.reshape(tl.broadcast_to(turning[:, None, :], [N, D // ROPE, ROPE]), [N, D])
    return tl.where(channel < REST, value, turning)


@triton.jit
def _load_sink(sink_ptr, head, live):
    """Sinks of heads; minus infinity where there is none."""
    if sink_ptr is None:
        return tl.full(head.shape, float("-inf"), tl.float32)
    else:
        return tl.load(sink_ptr + head, mask=live, other=float("-inf")) * 1.4426950408889634


@triton.jit
def _normed(value, total, most, sink):
    """Weighted sums [H, D] over their denominators: the weights' sum `total`, in units of 2**most, and the sink's."""
    # A sink far above all logits makes the denominator infinite and the result 0.
    denominator = total + tl.exp2(sink - most)
    empty = denominator == 0
    return tl.where(empty[:, None], 0.0, value / tl.where(empty, 1.0, denominator)[:, None])


@triton.jit
def _log_sum(total, most):
    """Binary logarithm of total * 2**most; minus infinity for 0."""
    return tl.where(total == 0, float("-inf"), most + tl.log2(tl.where(total == 0, 1.0, total)))


@triton.jit
def _load_angles(row, position_ptr, rope_ptr, num_positions, ROPE: tl.constexpr):
    """cos and sin, [1, W // 2] each, that turn the last W channels at a row's position; 0 where there is no table.

    W is the power of 2 from ROPE on; the channels before the last ROPE do not turn, and have 0, too.
    """
    PAIRS: tl.constexpr = triton.next_power_of_2(ROPE) // 2
    pair = tl.arange(0, PAIRS)[None, :] - (PAIRS - ROPE // 2)
    if rope_ptr is None:
        return pair * 0.0, pair * 0.0
    else:
        position = tl.load(position_ptr + row).to(tl.int64) + tl.zeros([1, PAIRS], tl.int64)
        known = (pair >= 0) & (position >= 0) & (position < num_positions)
        place = rope_ptr + position * ROPE + 2 * pair
        return tl.load(place, mask=known, other=0.0), tl.load(place + 1, mask=known, other=0.0)


@triton.jit
def _store_results(
    value,  # float32 [H, D]
    row,  # int64
    head,  # [H]
    live,  # [H]
    cos,  # of _load_angles
    sin,
    out_ptr,  # [T, num_heads, D]
    out_stride_row,  # in units of 8 elements
    out_stride_head,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    H: tl.constexpr,
    TURN: tl.constexpr,  # whether to turn at all
):
    """Rounds, turns back and stores results of one row."""
    channel = tl.arange(0, D)[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    value = _rounded(value, dtype)
    place = out_ptr + ((row * out_stride_row + head.to(tl.int64) * out_stride_head) * 8)[:, None]
    if TURN:
        # The last channels on their own, so that the others need not be taken apart.
        WIDTH: tl.constexpr = triton.next_power_of_2(ROPE)
        GROUPS: tl.constexpr = D // WIDTH
        group, last = tl.arange(0, GROUPS)[None, :, None], tl.arange(0, WIDTH)[None, :]
        end = tl.sum(tl.where(group == GROUPS - 1, tl.reshape(value, [H, GROUPS, WIDTH]), 0.0), 1)
        even, odd = tl.split(tl.reshape(end, [H, WIDTH // 2, 2]))
        turned = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), [H, WIDTH])
        end = _narrowed(_rounded(tl.where(last >= WIDTH - ROPE, turned, end), dtype), dtype)
        tl.store(place + (D - WIDTH) + last, end, mask=live[:, None])
        tl.store(place + channel, _narrowed(value, dtype), mask=live[:, None] & (channel < D - WIDTH))
    else:
        tl.store(place + channel, _narrowed(value, dtype), mask=live[:, None])


@triton.jit
def _narrowed(value, dtype: tl.constexpr):
    """float32 values of `dtype`, as `dtype`: float32 or bfloat16."""
    if dtype == tl.bfloat16:
        value = (value.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return value
