"""Queries of the indexer, and scores of paged keys against them; the selection is in topk.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton_kernels.common import INTERPRET, Launcher, pdl_options
from dsv4_triton_kernels.kv_store import INTERPRET_ROWS, _angle, _bfloat16_bits, _e4m3_bits, _hadamard, _rotate
from dsv4_triton_kernels.topk import _entry_pages, _row_of_table, select_topk

__all__ = ["index_query", "index_scores", "select_topk"]


@triton.jit(
    do_not_specialize=["q_stride", "weight_stride", "position_stride", "num_vectors", "num_positions"],
    do_not_specialize_on_alignment=["head_weight_ptr", "position_ptr", "weight_ptr"],
)
def _store_query_kernel(
    q_ptr,  # [T, HEADS, D], float32 or bfloat16
    q_stride,  # in units of 8 elements, so that loads are known to be aligned
    head_weight_ptr,  # [T, HEADS], float32 or bfloat16
    weight_stride,
    position_ptr,  # [T], int32 or int64
    position_stride,
    num_vectors,  # T * HEADS
    rope_ptr,  # float32 [num_positions, ROPE]
    num_positions,
    value_ptr,  # [T, HEADS, D]: float32, int16 (bfloat16 by its bits) or uint8
    weight_ptr,  # float32 [T, HEADS]
    FACTOR: tl.constexpr,
    FORMAT: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS vectors, each a head of a row: rope, transform, rounding; weights times the factor and the scale."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    vector = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = vector < num_vectors
    row, head = vector // HEADS, vector % HEADS
    channel = tl.arange(0, D)[None, :]
    value = tl.load(q_ptr + (row * q_stride * 8 + head * D)[:, None] + channel, mask=live[:, None], other=0.0)
    position = tl.load(position_ptr + row * position_stride, mask=live, other=0).to(tl.int64)
    weight = tl.load(head_weight_ptr + row * weight_stride + head, mask=live, other=0.0).to(tl.float32) * FACTOR
    angle = _angle(position, live, rope_ptr, num_positions, D, ROPE)
    value = _rotate(value.to(tl.float32), angle, ROWS, D, ROPE)
    place = (vector * D)[:, None] + channel
    if FORMAT == "fp32":
        tl.store(value_ptr + place, value, mask=live[:, None])
    else:
        value = _hadamard(value, ROWS, D, LOG_D)
        if FORMAT == "bf16":
            tl.store(value_ptr + place, (_bfloat16_bits(value) >> 16).to(tl.int16), mask=live[:, None])
        else:
            amax = tl.max(tl.abs(value), 1)
            # Not tl.maximum, which may lose NaN; the transform has spread it to all channels.
            amax = tl.where(amax < 1e-4, 1e-4, amax)
            scale = tl.div_rn(amax, 448.0 + tl.zeros([ROWS], tl.float32))
            code = _e4m3_bits(tl.div_rn(value, scale[:, None] + tl.zeros([ROWS, D], tl.float32)))
            tl.store(value_ptr + place, code.to(tl.uint8), mask=live[:, None])
            weight *= scale
    tl.store(weight_ptr + vector, weight, mask=live)


@triton.jit
def _factors(raw, FORMAT: tl.constexpr, INTERPRETED: tl.constexpr):
    """Stored values as what the matrix product multiplies: exactly the same values.

    float8 e4m3 goes to float16, which holds all of its values (2^-9 to 448, 4 significant bits) as normal numbers:
    each product is then exact in the float32 that it is added to, on every chip, whereas float8 products on Hopper are
    summed with fewer bits. In the interpreter, which multiplies bfloat16 by its bits and takes a float8 NaN for 480,
    everything goes to float32.
    """
    if FORMAT == "fp8":
        value = raw.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        if INTERPRETED:
            value = tl.where((raw & 0x7F) == 0x7F, float("nan"), value.to(tl.float32))
        return value
    elif INTERPRETED:
        return raw.to(tl.float32)
    else:
        return raw


@triton.jit(
    do_not_specialize=[
        "length_stride",
        "width",
        "stride_table",
        "num_columns",
        "stride_row",
        "num_tables",
        "num_pages",
        "stride_out",
    ],
    do_not_specialize_on_alignment=["weight_ptr", "length_ptr", "table_ptr", "table_rows_ptr", "out_ptr"],
)
def _score_keys_kernel(
    value_ptr,  # [T, HEADS, D]: float32, bfloat16 or uint8
    weight_ptr,  # float32 [T, HEADS]
    key_ptr,  # the pool: float32, bfloat16 or uint8
    scale_ptr,  # the pool as float32, for fp8; else not used
    length_ptr,  # int32 [T]
    length_stride,
    width,
    table_ptr,  # int32 [num_tables, num_columns]
    stride_table,
    num_columns,
    table_rows_ptr,  # int32 [T], or None
    stride_row,
    num_tables,
    num_pages,
    out_ptr,  # float32 [T, width]
    stride_out,
    FORMAT: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,  # HEADS, rounded up to what a matrix product takes
    D: tl.constexpr,
    STEP: tl.constexpr,  # channels of a matrix product; all of them but for float32
    BLOCK: tl.constexpr,  # keys of a turn
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, s) scores every so many blocks of row t's keys, from block s on, as far as the row goes."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(length_ptr + row * length_stride), width)
    first = tl.program_id(1) * BLOCK
    if first >= length:
        return
    table_ptr, num_columns = _row_of_table(
        table_ptr, stride_table, num_columns, table_rows_ptr, stride_row, num_tables, row
    )
    head = tl.arange(0, HEAD_BLOCK)
    weight = tl.load(weight_ptr + row * HEADS + head, mask=head < HEADS, other=0.0)
    step = tl.arange(0, STEP)
    query_ptr = value_ptr + (row * HEADS + head[None, :]) * D + step[:, None]  # [STEP, HEAD_BLOCK]
    if STEP == D:
        query = _factors(tl.load(query_ptr, mask=(head < HEADS)[None, :], other=0), FORMAT, INTERPRETED)
    for start in tl.range(first, length, tl.num_programs(1) * BLOCK, num_stages=STAGES):
        entry = start + tl.arange(0, BLOCK)
        page = _entry_pages(entry, entry < length, table_ptr, num_columns, num_pages, PAGE)
        present = page >= 0
        if FORMAT == "fp8":
            place = page.to(tl.int64) * PAGE_BYTES + (entry % PAGE) * D
        else:
            place = (page.to(tl.int64) * PAGE + entry % PAGE) * D
        product = tl.zeros([BLOCK, HEAD_BLOCK], tl.float32)
        for channel in tl.static_range(0, D, STEP):
            if STEP != D:
                query = tl.load(query_ptr + channel, mask=(head < HEADS)[None, :], other=0)
            key = tl.load(key_ptr + place[:, None] + (channel + step)[None, :], mask=present[:, None], other=0)
            key = _factors(key, FORMAT, INTERPRETED)
            product = tl.dot(key, query, product, input_precision="ieee")  # float32 stays float32
        # Not tl.maximum, which may lose NaN.
        product = tl.where(product < 0.0, 0.0, product)
        if HEADS != HEAD_BLOCK:
            product = tl.where((head < HEADS)[None, :], product, 0.0)
        score = tl.sum(product * weight[None, :], 1)
        if FORMAT == "fp8":
            scale_place = (page.to(tl.int64) * PAGE_BYTES + PAGE * D) // 4 + entry % PAGE
            score *= tl.load(scale_ptr + scale_place, mask=present, other=0.0)
        tl.store(out_ptr + row * stride_out + entry, tl.where(present, score, float("-inf")), mask=entry < length)


_launch_query = Launcher(_store_query_kernel)
_launch_scores = Launcher(_score_keys_kernel)

# Vectors and warps of a program; a warp serves 128 channels of one.
QUERY_ROWS = dict(ROWS=8, num_warps=4)
# Keys of a turn, turns whose loads are on their way at a time, warps.
SCORE_TURNS = {
    "fp32": dict(BLOCK=64, STAGES=1, num_warps=4),
    "bf16": dict(BLOCK=64, STAGES=3, num_warps=4),
    "fp8": dict(BLOCK=64, STAGES=3, num_warps=4),
}
# Channels at a time where float32 is multiplied, which registers hold all factors of.
FLOAT32_STEP = 16
# Programs at most, unless there are more rows: some for each multiprocessor of the largest chip.
SCORE_PROGRAMS = 1056
# In the interpreter programs run one after the other.
INTERPRET_SPLITS, INTERPRET_BLOCK = 2, 128


def index_query(
    *,
    q: torch.Tensor,
    head_weights: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    keys: Any,
    values: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """One launch; arguments as in `dsv4_backend.indexer.index_query`, checked there."""
    num_rows, heads, dim = q.shape
    layout = keys.layout
    sizes = dict(QUERY_ROWS)
    if INTERPRET:
        sizes["ROWS"] = INTERPRET_ROWS
    stored = values.view(torch.int16) if layout.format == "bf16" else values
    _launch_query(
        q.device,
        (q.dtype, head_weights.dtype, positions.dtype, layout.format, heads, dim, layout.rope_dim),
        (-(-num_rows * heads // sizes["ROWS"]),),
        (
            q,
            q.stride(0) // 8,
            head_weights,
            head_weights.stride(0),
            positions,
            positions.stride(0),
            num_rows * heads,
            rope,
            rope.shape[0],
            stored,
            weights,
        ),
        lambda: dict(
            FACTOR=dim**-0.5 * heads**-0.5,
            FORMAT=layout.format,
            HEADS=heads,
            D=dim,
            LOG_D=dim.bit_length() - 1,
            ROPE=layout.rope_dim,
            **sizes,
            **pdl_options(q.device),
        ),
    )


def index_scores(
    *,
    values: torch.Tensor,
    weights: torch.Tensor,
    keys: Any,
    page_table: torch.Tensor,
    table_rows: torch.Tensor | None,
    lengths: torch.Tensor,
    num_pages: int,
    out: torch.Tensor,
) -> None:
    """One launch; arguments as in `dsv4_backend.reference.indexer.index_scores`, checked before."""
    num_rows, heads, dim = values.shape
    layout, width = keys.layout, out.shape[1]
    sizes = dict(SCORE_TURNS[layout.format])
    most = max(1, SCORE_PROGRAMS // num_rows)
    if INTERPRET:
        sizes["BLOCK"], most = INTERPRET_BLOCK, INTERPRET_SPLITS
    _launch_scores(
        out.device,
        (layout, heads, table_rows is None),
        (num_rows, min(most, -(-width // sizes["BLOCK"]))),
        (
            values,
            weights,
            keys.data,
            keys.words if layout.format == "fp8" else keys.data,
            lengths,
            lengths.stride(0),
            width,
            page_table,
            page_table.stride(0),
            page_table.shape[1],
            table_rows,
            0 if table_rows is None else table_rows.stride(0),
            page_table.shape[0],
            num_pages,
            out,
            out.stride(0),
        ),
        lambda: dict(
            FORMAT=layout.format,
            PAGE=layout.page_entries,
            PAGE_BYTES=layout.page_bytes,
            HEADS=heads,
            HEAD_BLOCK=max(16, triton.next_power_of_2(heads)),
            D=dim,
            STEP=min(dim, FLOAT32_STEP) if layout.format == "fp32" else dim,
            **sizes,
            INTERPRETED=INTERPRET,
            **pdl_options(out.device),
        ),
    )
