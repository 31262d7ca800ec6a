"""Norm, rope, quantisation and storing of cache entries; and the kernel for the entries of the sliding window.

Roundings are done on the bits of a value, so that every chip, and the interpreter, gives the same bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton_kernels.common import INTERPRET, Launcher, pdl_options

# Rows of a program: the interpreter takes as long for one as for many.
INTERPRET_ROWS = 32


@triton.jit
def _bfloat16_bits(value):
    """Bits of the nearest bfloat16, ties to even, in the upper half of an int32; the lower half is zero."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) & -65536
    return tl.where(value != value, 0x7FC00000, rounded)


@triton.jit
def _e4m3_bits(value):
    """Bits of the nearest float8 e4m3, ties to even, as int32; beyond 448, those of 448."""
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(value), 448.0)
    size_bits = size.to(tl.int32, bitcast=True)
    normal = ((size_bits + (0x7FFFF + ((size_bits >> 20) & 1))) >> 20) - (120 << 3)
    # Below 2^-6 a code is a multiple of 2^-9, which is the ulp of 2^14.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    return sign | tl.where(value != value, 0x7F, code)


@triton.jit
def _norm(value, weight, eps, D: tl.constexpr):
    """RMS norm of each row of `value`, [ROWS, D], with `weight`, [D]."""
    mean = tl.sum(value * value, 1) / D
    return value * tl.rsqrt(mean + eps)[:, None] * weight[None, :]


@triton.jit
def _angle(position, live, rope_ptr, num_positions, D: tl.constexpr, ROPE: tl.constexpr):
    """Cosine and sine of each pair of channels, [ROWS, D], at the places of the pairs; only the last ROPE are used."""
    channel = tl.arange(0, D)[None, :]
    known = live & (position >= 0) & (position < num_positions)
    return tl.load(
        rope_ptr + (position.to(tl.int64) * ROPE)[:, None] + (channel - (D - ROPE)),
        mask=known[:, None] & (channel >= D - ROPE),
        other=0.0,
    )


@triton.jit
def _rotate(value, angle, ROWS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr):
    """`value`, [ROWS, D], with its last ROPE channels turned pair by pair."""
    # (cos, sin) lie as the pairs do, so both split alike.
    cos, sin = tl.split(tl.reshape(angle, [ROWS, D // 2, 2]))
    even, odd = tl.split(tl.reshape(value, [ROWS, D // 2, 2]))
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.where(tl.arange(0, D)[None, :] >= D - ROPE, tl.reshape(turned, [ROWS, D]), value)


@triton.jit
def _hadamard(value, ROWS: tl.constexpr, D: tl.constexpr, LOG_D: tl.constexpr):
    """The orthonormal Walsh-Hadamard transform of each row, in natural order."""
    channel = tl.arange(0, D)[None, :] + tl.zeros([ROWS, D], tl.int32)
    for k in tl.static_range(LOG_D):
        other = tl.gather(value, channel ^ (1 << k), 1)
        value = tl.where((channel & (1 << k)) != 0, other - value, value + other)
    return value * D**-0.5


@triton.jit
def _store_entries(
    value,  # [ROWS, D]
    slot,  # int64 [ROWS]
    live,  # [ROWS]
    data_ptr,  # of the pool: float32, int16 (bfloat16 by its bits) or uint8
    extra_ptr,  # the pool as int16 for packed entries, as float32 for indexer keys; else not used
    num_slots,
    FORMAT: tl.constexpr,
    INDEXER: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Stores rows that are normed and roped; the reserved slot 0 and slots outside of the pool are left out."""
    channel = tl.arange(0, D)[None, :]
    live &= (slot > 0) & (slot < num_slots)
    if INDEXER and FORMAT != "fp32":
        value = _hadamard(value, ROWS, D, LOG_D)
    if FORMAT == "fp32":
        tl.store(data_ptr + (slot * D)[:, None] + channel, value, mask=live[:, None])
    elif FORMAT == "bf16":
        bits = (_bfloat16_bits(value) >> 16).to(tl.int16)
        tl.store(data_ptr + (slot * D)[:, None] + channel, bits, mask=live[:, None])
    elif INDEXER:
        page, entry = (slot // PAGE) * PAGE_BYTES, slot % PAGE
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(value), 1), 1e-4), 448.0)
        code = _e4m3_bits(tl.div_rn(value, scale[:, None] + tl.zeros([ROWS, D], tl.float32)))
        tl.store(data_ptr + (page + entry * D)[:, None] + channel, code.to(tl.uint8), mask=live[:, None])
        tl.store(extra_ptr + (page + PAGE * D) // 4 + entry, scale, mask=live)
    else:
        REST: tl.constexpr = D - ROPE
        ROW: tl.constexpr = REST + 2 * ROPE
        BLOCKS: tl.constexpr = D // 64
        page, entry = (slot // PAGE) * PAGE_BYTES, slot % PAGE
        place = page + entry * ROW
        bits = _bfloat16_bits(value)
        rounded = tl.reshape(bits.to(tl.float32, bitcast=True), [ROWS, BLOCKS, 64])
        amax = tl.maximum(tl.max(tl.abs(rounded), 2), 1e-4)
        # The exponent of amax / 448, one more unless that is a power of two.
        quotient = tl.div_rn(amax, 448.0 + tl.zeros([ROWS, BLOCKS], tl.float32)).to(tl.int32, bitcast=True)
        exponent = (quotient >> 23) + tl.where((quotient & 0x7FFFFF) != 0, 1, 0)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        code = _e4m3_bits(tl.reshape(rounded * inverse[:, :, None], [ROWS, D]))
        rest = live[:, None] & (channel < REST)
        tl.store(data_ptr + place[:, None] + channel, code.to(tl.uint8), mask=rest)
        turning = live[:, None] & (channel >= REST)
        # In units of two bytes.
        rope_place = (place // 2 + REST // 2)[:, None] + (channel - REST)
        tl.store(extra_ptr + rope_place, (bits >> 16).to(tl.int16), mask=turning)
        block = tl.arange(0, BLOCKS)[None, :]
        scale_place = (page + PAGE * ROW + entry * 8)[:, None] + block
        tl.store(data_ptr + scale_place, exponent.to(tl.uint8), mask=live[:, None] & (block < REST // 64))


@triton.jit(
    do_not_specialize=["value_stride", "stride_slot", "stride_position", "num_rows", "num_positions", "num_slots"],
    do_not_specialize_on_alignment=["slot_ptr", "position_ptr"],
)
def _store_kv_kernel(
    value_ptr,  # [num_rows, D], float32 or bfloat16
    value_stride,  # in units of 8 elements, so that loads are known to be aligned
    slot_ptr,  # [num_rows], int32 or int64
    stride_slot,
    position_ptr,  # [num_rows], int32 or int64
    stride_position,
    num_rows,
    weight_ptr,  # float32 [D]
    eps,
    rope_ptr,  # float32 [num_positions, ROPE]
    num_positions,
    data_ptr,
    extra_ptr,
    num_slots,
    NORM_ROPE: tl.constexpr,  # rows come without norm and rope
    FORMAT: tl.constexpr,
    INDEXER: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    slot = tl.load(slot_ptr + row * stride_slot, mask=live, other=0).to(tl.int64)
    channel = tl.arange(0, D)[None, :]
    value = tl.load(value_ptr + (row * value_stride * 8)[:, None] + channel, mask=live[:, None], other=0.0).to(
        tl.float32
    )
    if NORM_ROPE:
        position = tl.load(position_ptr + row * stride_position, mask=live, other=0).to(tl.int64)
        angle = _angle(position, live, rope_ptr, num_positions, D, ROPE)
        value = _rotate(_norm(value, tl.load(weight_ptr + tl.arange(0, D)), eps, D), angle, ROWS, D, ROPE)
    _store_entries(
        value, slot, live, data_ptr, extra_ptr, num_slots, FORMAT, INDEXER, PAGE, PAGE_BYTES, ROWS, D, LOG_D, ROPE
    )


_launch = Launcher(_store_kv_kernel)

# Rows and warps of a program by channels: a warp serves 128 of them, four a thread.
ROWS_BY_DIM = {512: dict(ROWS=1, num_warps=4), 256: dict(ROWS=2, num_warps=4)}
SMALL_ROWS = dict(ROWS=4, num_warps=4)


def pool_constants(layout: Any) -> dict[str, Any]:
    """Constants of a kernel that stores into a pool of `layout`, in the order of the kernels' signatures."""
    return dict(
        FORMAT=layout.format,
        INDEXER=layout.indexer,
        PAGE=layout.page_entries,
        PAGE_BYTES=layout.page_bytes,
        D=layout.head_dim,
        LOG_D=layout.head_dim.bit_length() - 1,
        ROPE=layout.rope_dim,
    )


def pool_args(pool: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """`data_ptr`, `extra_ptr` and `num_slots` of a pool."""
    layout = pool.layout
    data = pool.halves if layout.format == "bf16" else pool.data
    if layout.format != "fp8":
        return data, data, pool.num_slots
    return data, pool.words if layout.indexer else pool.halves, pool.num_slots


def store_window(
    *,
    kv: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    rope: torch.Tensor,
    pool: Any,
) -> None:
    """One launch; arguments as in `dsv4_backend.compressor.store_window`, checked there."""
    _store(kv, slots, positions, norm_weight, eps, rope, pool, norm_rope=True)


def store_entries(*, values: torch.Tensor, slots: torch.Tensor, pool: Any) -> None:
    """One launch; arguments as in `dsv4_backend.compressor.store_entries`, checked there."""
    # What is not asked for is not read: the slots stand in for its pointers.
    _store(values, slots, slots, slots, 0.0, slots, pool, norm_rope=False)


def _store(
    values: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    rope: torch.Tensor,
    pool: Any,
    norm_rope: bool,
) -> None:
    num_rows, layout = values.shape[0], pool.layout
    sizes = dict(ROWS_BY_DIM.get(layout.head_dim, SMALL_ROWS))
    if INTERPRET:
        sizes["ROWS"] = INTERPRET_ROWS
    _launch(
        pool.device,
        (values.dtype, slots.dtype, positions.dtype, norm_rope, layout, pool.num_slots > 2**31 - 1),
        (-(-num_rows // sizes["ROWS"]),),
        (
            values,
            values.stride(0) // 8,
            slots,
            slots.stride(0),
            positions,
            positions.stride(0),
            num_rows,
            norm_weight,
            eps,
            rope,
            rope.shape[0],
            *pool_args(pool),
        ),
        lambda: dict(NORM_ROPE=norm_rope, **pool_constants(layout), **sizes, **pdl_options(pool.device)),
    )
