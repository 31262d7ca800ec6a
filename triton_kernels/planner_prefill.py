"""The prefill planner for up to a thousand requests: both ratios, both lists and all page look-ups, in one launch.

Every program takes a block of batch rows and works alone. It reads the lengths of all requests, which gives it the
batch's extremes, where its own rows begin, and how many rows of each list lie before them; there is nothing to share
between programs, so there are no atomics, no scratch and no order to get wrong. `planner_chunked` does the same for
larger batches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4_triton_kernels.planner_rows import (
    ERROR_LENGTHS,
    _check_layout,
    _check_lengths,
    _count_compress,
    _count_ended,
    _count_write,
    _is_uniform,
    _load_lengths,
    _plan_rows,
    _rows_before,
    _store_header,
    _sum_pair,
)

INT32_MAX = tl.constexpr(2**31 - 1)


@triton.jit(
    do_not_specialize=[
        "stride_seq",
        "stride_extend",
        "stride_req",
        "batch_size",
        "num_rows",
        "row_stride",
        "num_requests",
        "max_seq_len",
        "num_slots",
        "num_batch_rows",
        "extend_limit",
    ],
    do_not_specialize_on_alignment=["seq_ptr", "extend_ptr", "req_ptr", "req_to_token_ptr", "full_to_swa_ptr"],
)
def _plan_prefill_kernel(
    seq_ptr,  # [B], int32 or int64; as extend_ptr and req_ptr
    stride_seq,
    extend_ptr,
    stride_extend,
    req_ptr,
    stride_req,
    batch_size,
    num_rows,
    req_to_token_ptr,  # int32 [num_requests, max_seq_len]
    row_stride,
    num_requests,
    max_seq_len,
    full_to_swa_ptr,  # int64 [num_slots]
    num_slots,
    header_ptr,  # int32 [8]
    error_ptr,  # int32 [1]
    c4_compress_ptr,  # int32 [num_rows, 4 or 5]
    c4_write_ptr,  # int32 [num_rows, 2]
    c128_compress_ptr,
    c128_write_ptr,
    num_batch_rows,  # LAYOUT: rows that the batch has slots for, at most num_rows
    extend_limit,  # LAYOUT: most rows of a request
    row_req_ptr,  # LAYOUT: int64 [num_rows], the request of each row; None: not wanted, as the others
    row_position_ptr,  # LAYOUT: int32 [num_rows]
    row_owner_ptr,  # LAYOUT: int32 [num_rows], place of the request in the batch
    SWA_PAGE: tl.constexpr,
    C4_RING: tl.constexpr,
    C4_WRITE_PAD: tl.constexpr,
    C128_RING: tl.constexpr,
    C128_WRITE_PAD: tl.constexpr,
    HAS_C4: tl.constexpr,
    HAS_C128: tl.constexpr,
    WIDE: tl.constexpr,
    LAYOUT: tl.constexpr,  # request 0 is padding, and the owners of rows are stored
    SEQ_BEFORE: tl.constexpr,  # LAYOUT: lengths come without the rows of the batch
    FORCE_UNIFORM: tl.constexpr,  # None; a test sets True or False to see that the decision matters
    CHUNK: tl.constexpr,  # room for the batch
    BLOCK: tl.constexpr,  # batch rows of a program
    PDL: tl.constexpr,
):
    """A program for each block of rows; each holds all lengths of the batch at once."""
    if PDL:
        # The next kernel may get ready; what the previous one wrote is visible once the wait is over. Programs of more
        # than one warp wait first: measured, the next grid otherwise takes room from this one.
        if BLOCK <= 32:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if BLOCK > 32:
            tl.extra.cuda.gdc_launch_dependents()
    first_row = tl.program_id(0) * BLOCK
    row = first_row + tl.arange(0, BLOCK)
    index = tl.arange(0, CHUNK)
    inside = index < batch_size
    seq, extend = _load_lengths(seq_ptr, stride_seq, extend_ptr, stride_extend, index, inside)
    # Rows look ids up one by one; reading them here as well brings them into the nearest cache.
    ids = tl.load(req_ptr + index.to(tl.int64) * stride_req, mask=inside, other=0).to(tl.int64)
    if LAYOUT:
        seq, extend, planned, lost, bad = _check_layout(
            seq, extend, ids, max_seq_len, num_requests, extend_limit, SEQ_BEFORE
        )
        planned_rows = tl.where(planned, extend, 0)
        # Nobody knows where rows belong then: too many for the batch, which makes all of it padding.
        extend = tl.where(lost, num_batch_rows + 1, extend)
    else:
        seq, extend, bad = _check_lengths(seq, extend, max_seq_len)
        bad |= (extend > 0) & ((ids < 0) | (ids >= num_requests))
    tl.store(error_ptr + index * 0, ERROR_LENGTHS, mask=bad)

    min_extend = tl.min(tl.where(inside, extend, INT32_MAX), 0)
    max_extend = tl.max(extend, 0)
    uniform = _is_uniform(min_extend, max_extend, batch_size)
    take_division = uniform
    if FORCE_UNIFORM is not None:
        take_division = tl.full([], FORCE_UNIFORM, tl.int1)
    most = max_extend.to(tl.int64) * batch_size
    if take_division:
        total = most
        end = (index + 1) * max_extend
        width = tl.maximum(max_extend, 1)
        owner = row // width
        owner_begin = owner * width
    else:
        end = tl.cumsum(extend, 0)
        total = tl.max(end, 0).to(tl.int64)
        if most > INT32_MAX:
            total = tl.sum(extend.to(tl.int64), 0)
        owner = _count_ended(end, row, CHUNK)
        owner_begin = tl.where(owner > 0, tl.gather(end, tl.maximum(owner - 1, 0), 0), 0)
    # A batch with more rows than the plan is planned as if it had none.
    fits = total <= (num_batch_rows if LAYOUT else num_rows)
    total_rows = tl.where(fits, total, 0).to(tl.int32)

    prefix = seq - extend
    before = _rows_before(end, extend, first_row)
    if LAYOUT:
        before = tl.where(planned, before, 0)
    c4_compress_before, c4_write_before = _sum_pair(
        _count_compress(prefix, before, 2), _count_write(prefix, before, seq, 4, C4_WRITE_PAD, SWA_PAGE), fits, WIDE
    )
    c128_compress_before, c128_write_before = _sum_pair(
        _count_compress(prefix, before, 7), _count_write(prefix, before, seq, 128, C128_WRITE_PAD, SWA_PAGE), fits, WIDE
    )
    c4_compress, c4_write, c128_compress, c128_write = _plan_rows(
        row,
        row < total_rows,
        owner,
        owner_begin,
        c4_compress_before,
        c4_write_before,
        c128_compress_before,
        c128_write_before,
        seq_ptr,
        stride_seq,
        extend_ptr,
        stride_extend,
        req_ptr,
        stride_req,
        batch_size,
        num_rows,
        req_to_token_ptr,
        row_stride,
        num_requests,
        max_seq_len,
        full_to_swa_ptr,
        num_slots,
        error_ptr,
        c4_compress_ptr,
        c4_write_ptr,
        c128_compress_ptr,
        c128_write_ptr,
        extend_limit,
        row_req_ptr,
        row_position_ptr,
        row_owner_ptr,
        SWA_PAGE,
        C4_RING,
        C4_WRITE_PAD,
        C128_RING,
        C128_WRITE_PAD,
        HAS_C4,
        HAS_C128,
        WIDE,
        LAYOUT,
        SEQ_BEFORE,
        BLOCK,
    )
    if tl.program_id(0) == tl.num_programs(0) - 1:
        if LAYOUT:
            min_extend = tl.min(tl.where(inside, planned_rows, INT32_MAX), 0)
            max_extend = tl.max(planned_rows, 0)
            uniform = _is_uniform(min_extend, max_extend, batch_size)
            total_rows = tl.where(fits, tl.sum(planned_rows, 0), 0)
        _store_header(
            header_ptr,
            error_ptr,
            batch_size,
            fits,
            min_extend,
            max_extend,
            uniform,
            total_rows,
            c4_compress_before + tl.sum(c4_compress.to(tl.int32), 0),
            c4_write_before + tl.sum(c4_write.to(tl.int32), 0),
            c128_compress_before + tl.sum(c128_compress.to(tl.int32), 0),
            c128_write_before + tl.sum(c128_write.to(tl.int32), 0),
            HAS_C4,
            HAS_C128,
        )
