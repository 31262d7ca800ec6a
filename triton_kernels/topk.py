"""Exact selection of the largest scores of each row, in order of entry, without atomics between programs.

A program selects a row. Scores become 32-bit keys of the same order, and the k-th largest key is found 8 bits at a time
from histograms of the row; then one pass over the row stores what lies above it, and the first of what equals it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_triton_kernels.common import Launcher, pdl_options


@triton.jit
def _order_keys(score):
    """uint32 in the order of float32 scores: zeros of both signs are equal, any NaN is 0, below minus infinity.

    By bits alone: comparisons may take denormals for zeros.
    """
    bits = score.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    bits = tl.where(size == 0, 0, bits)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(size > 0x7F800000, tl.zeros_like(key), key)


@triton.jit
def _entry_pages(entry, live, table_ptr, num_columns, num_pages, PAGE: tl.constexpr):
    """Pages of a row's entries, int32, -1 where the row's table or the pool does not have them."""
    column = entry // PAGE
    page = tl.load(table_ptr + column, mask=live & (column < num_columns), other=-1)
    return tl.where((page >= 0) & (page < num_pages), page, -1)


@triton.jit
def _row_of_table(table_ptr, stride_table, num_columns, table_rows_ptr, stride_row, num_tables, row):
    """Where the page table of `row` begins, and its columns; none where it names a table that there is not."""
    if table_rows_ptr is not None:
        row = tl.load(table_rows_ptr + row * stride_row).to(tl.int64)
        num_columns = tl.where((row >= 0) & (row < num_tables), num_columns, 0)
    return table_ptr + row * stride_table, num_columns


@triton.jit
def _store_entries_of_row(place, entry, write, live, out_ptr, raw_ptr, pages, PAGE: tl.constexpr):
    """Stores slots, and the entries themselves, at columns `place`; -1 for what is not `live`."""
    page = _entry_pages(entry, write & live, *pages, PAGE)
    tl.store(out_ptr + place, tl.where(page >= 0, page * PAGE + entry % PAGE, -1), mask=write)
    if raw_ptr is not None:
        tl.store(raw_ptr + place, tl.where(live, entry, -1), mask=write)


@triton.jit(
    do_not_specialize=[
        "stride_score",
        "width",
        "stride_length",
        "stride_table",
        "num_columns",
        "stride_row",
        "num_tables",
        "num_pages",
        "stride_out",
        "stride_raw",
        "k",
    ],
    do_not_specialize_on_alignment=["score_ptr", "length_ptr", "table_ptr", "table_rows_ptr", "out_ptr", "raw_ptr"],
)
def _select_topk_kernel(
    score_ptr,  # float32 [T, width]; None where width <= k
    stride_score,
    width,
    length_ptr,  # int32 [T]
    stride_length,
    table_ptr,  # int32 [num_tables, num_columns]
    stride_table,
    num_columns,
    table_rows_ptr,  # int32 [T], or None
    stride_row,
    num_tables,
    num_pages,
    out_ptr,  # int32 [T, k]
    stride_out,
    raw_ptr,  # int32 [T, k], or None
    stride_raw,
    k,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(length_ptr + row * stride_length), width)
    table_ptr, num_columns = _row_of_table(
        table_ptr, stride_table, num_columns, table_rows_ptr, stride_row, num_tables, row
    )
    pages = (table_ptr, num_columns, num_pages)
    out_ptr += row * stride_out
    if raw_ptr is not None:
        raw_ptr += row * stride_raw
    lane = tl.arange(0, BLOCK)
    if score_ptr is None or length <= k:
        for start in range(0, k, BLOCK):
            entry = start + lane
            _store_entries_of_row(entry, entry, entry < k, entry < length, out_ptr, raw_ptr, pages, PAGE)
    else:
        score_ptr += row * stride_score
        # `bound`: the bits from `shift` on of the k-th largest key. `missing`: how many of the keys with these bits
        # are taken, beside all larger ones.
        bound = tl.zeros([], tl.uint32)
        missing = k
        shift = tl.zeros([], tl.uint32) + 24
        settled = 0
        while settled == 0:
            counts = tl.zeros([256], tl.int32)
            for start in range(0, length, BLOCK):
                entry = start + lane
                key = _order_keys(tl.load(score_ptr + entry, mask=entry < length, other=0.0)) >> shift
                counts += tl.histogram((key & 255).to(tl.int32), 256, mask=(entry < length) & ((key >> 8) == bound))
            at_least = tl.cumsum(counts, 0, reverse=True)
            # The last digit that still leaves enough keys.
            digit = tl.sum((at_least >= missing).to(tl.int32), 0) - 1
            same = tl.arange(0, 256) == digit
            count = tl.sum(tl.where(same, counts, 0), 0)
            missing -= tl.sum(tl.where(same, at_least - counts, 0), 0)
            bound = bound * 256 + digit.to(tl.uint32)
            # Where all of these keys are taken, further bits do not matter.
            settled = ((shift == 0) | (count == missing)).to(tl.int32)
            shift = tl.where(settled == 1, shift, shift - 8)
        done = 0
        equal_before = 0
        start = 0
        while (start < length) & (done < k):
            entry = start + lane
            live = entry < length
            key = _order_keys(tl.load(score_ptr + entry, mask=live, other=0.0)) >> shift
            equal = (live & (key == bound)).to(tl.int32)
            first = equal_before + tl.cumsum(equal, 0) <= missing
            take = live & ((key > bound) | ((equal != 0) & first))
            chosen = take.to(tl.int32)
            place = done + tl.cumsum(chosen, 0) - 1
            _store_entries_of_row(place, entry, take, live, out_ptr, raw_ptr, pages, PAGE)
            done += tl.sum(chosen, 0)
            equal_before += tl.sum(equal, 0)
            start += BLOCK


_launch = Launcher(_select_topk_kernel)

# Columns that a program looks at in a turn, and its warps: for rows up to so many columns.
TURNS = ((1024, dict(BLOCK=1024, num_warps=4)), (None, dict(BLOCK=4096, num_warps=8)))


def select_topk(
    *,
    scores: torch.Tensor | None,
    lengths: torch.Tensor,
    width: int,
    page_table: torch.Tensor,
    table_rows: torch.Tensor | None,
    page_entries: int,
    num_pages: int,
    out: torch.Tensor,
    raw: torch.Tensor | None,
) -> None:
    """One launch; arguments as in `dsv4_backend.reference.indexer.select_topk`, checked before."""
    num_rows, k = out.shape
    columns = k if scores is None else width
    sizes = next(sizes for most, sizes in TURNS if most is None or columns <= most)
    _launch(
        out.device,
        (scores is None, table_rows is None, raw is None, page_entries, sizes["BLOCK"]),
        (num_rows,),
        (
            scores,
            0 if scores is None else scores.stride(0),
            width,
            lengths,
            lengths.stride(0),
            page_table,
            page_table.stride(0),
            page_table.shape[1],
            table_rows,
            0 if table_rows is None else table_rows.stride(0),
            page_table.shape[0],
            num_pages,
            out,
            out.stride(0),
            raw,
            0 if raw is None else raw.stride(0),
            k,
        ),
        lambda: dict(PAGE=page_entries, **sizes, **pdl_options(out.device)),
    )
