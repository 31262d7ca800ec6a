"""The prefill planner for batches of any size; the idea is that of `planner_prefill`.

A program scans the lengths in chunks, then plans several blocks of rows, looking for the owners of each block from the
request on where the last one ended. The scan takes all lengths for good ones, and is done again, carefully, where that
may have been wrong.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4_triton_kernels.planner_rows import (
    ERROR_LENGTHS,
    _bad_bits,
    _check_layout,
    _check_lengths,
    _count_compress,
    _count_ended,
    _count_write,
    _is_uniform,
    _load_chunk,
    _load_lengths,
    _plan_rows,
    _rows_before,
    _store_header,
    _sum_pair,
)

INT32_MAX = tl.constexpr(2**31 - 1)


@triton.jit
def _scan_lengths(
    first_row,
    seq_ptr,
    stride_seq,
    extend_ptr,
    stride_extend,
    req_ptr,
    stride_req,
    batch_size,
    num_requests,
    max_seq_len,
    num_batch_rows,
    extend_limit,
    error_ptr,
    SWA_PAGE: tl.constexpr,
    C4_WRITE_PAD: tl.constexpr,
    C128_WRITE_PAD: tl.constexpr,
    WIDE: tl.constexpr,
    LAYOUT: tl.constexpr,
    SEQ_BEFORE: tl.constexpr,
    CHUNK: tl.constexpr,
    DENSE: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Reads all lengths, a chunk at a time. Returns the extremes and the sum of the extend lengths, the request that
    `first_row` belongs to, the row where that request begins, how many rows of each list come before `first_row`,
    whether all this may be wrong, since a length was bad or a sum did not fit: then it takes a careful scan, and the
    extremes and the sum of the rows that are planned, which differ from the first ones only with LAYOUT."""
    smallest = tl.full([CHUNK], INT32_MAX, tl.int32)
    largest = tl.zeros([CHUNK], tl.int32)
    bad_bits = tl.zeros([CHUNK], tl.int32)
    c4_compress_rows = tl.zeros([CHUNK], tl.int32)
    c4_write_rows = tl.zeros([CHUNK], tl.int32)
    c128_compress_rows = tl.zeros([CHUNK], tl.int32)
    c128_write_rows = tl.zeros([CHUNK], tl.int32)
    total = tl.full([], 0, tl.int64)
    smallest_planned = smallest
    largest_planned = largest
    total_planned = total
    first_owner = 0
    first_owner_begin = 0
    next_seq, next_extend = _load_chunk(seq_ptr, stride_seq, extend_ptr, stride_extend, 0, batch_size, CHUNK, DENSE)
    for start in range(0, batch_size, CHUNK):
        seq = next_seq.to(tl.int32)
        extend = next_extend.to(tl.int32)
        bad_bits |= _bad_bits(next_seq, next_extend, max_seq_len)
        begin = total
        if LAYOUT:
            index = start + tl.arange(0, CHUNK)
            ids = tl.load(req_ptr + index.to(tl.int64) * stride_req, mask=index < batch_size, other=0)
            seq, extend, planned, lost, bad = _check_layout(
                next_seq, next_extend, ids, max_seq_len, num_requests, extend_limit, SEQ_BEFORE
            )
            planned_rows = tl.where(planned, extend, 0)
            extend = tl.where(lost, num_batch_rows + 1, extend)
            tl.store(error_ptr + tl.zeros([CHUNK], tl.int32), ERROR_LENGTHS, mask=bad)
            total += tl.sum(extend.to(tl.int64), 0)
            total_planned += tl.sum(planned_rows.to(tl.int64), 0)
            smallest_planned = tl.minimum(smallest_planned, tl.where(index < batch_size, planned_rows, INT32_MAX))
            largest_planned = tl.maximum(largest_planned, planned_rows)
        elif CAREFUL:
            seq, extend, bad = _check_lengths(next_seq, next_extend, max_seq_len)
            tl.store(error_ptr + tl.zeros([CHUNK], tl.int32), ERROR_LENGTHS, mask=bad)
            total += tl.sum(extend.to(tl.int64), 0)
        else:
            total += tl.sum(extend, 0)
        next_seq, next_extend = _load_chunk(
            seq_ptr, stride_seq, extend_ptr, stride_extend, start + CHUNK, batch_size, CHUNK, DENSE
        )
        present = extend
        if start + CHUNK > batch_size:
            present = tl.where(start + tl.arange(0, CHUNK) < batch_size, extend, INT32_MAX)
        smallest = tl.minimum(smallest, present)
        largest = tl.maximum(largest, extend)
        if begin < first_row:
            before = extend
            if total <= first_row:
                first_owner = tl.minimum(start + CHUNK, batch_size)
                first_owner_begin = total.to(tl.int32)
            else:
                end = begin.to(tl.int32) + tl.cumsum(extend, 0)
                ended = end <= first_row
                first_owner = start + tl.sum(ended.to(tl.int32), 0)
                first_owner_begin = tl.maximum(begin.to(tl.int32), tl.max(tl.where(ended, end, 0), 0))
                before = _rows_before(end, extend, first_row)
            if LAYOUT:
                before = tl.where(planned, before, 0)
            prefix = seq - extend
            c4_compress_rows += _count_compress(prefix, before, 2)
            c128_compress_rows += _count_compress(prefix, before, 7)
            c4_write_rows += _count_write(prefix, before, seq, 4, C4_WRITE_PAD, SWA_PAGE)
            c128_write_rows += _count_write(prefix, before, seq, 128, C128_WRITE_PAD, SWA_PAGE)
    min_extend = tl.min(smallest, 0)
    max_extend = tl.max(largest, 0)
    suspect = (tl.min(bad_bits, 0) < 0) | (max_extend.to(tl.int64) * batch_size > INT32_MAX)
    c4_compress_before, c4_write_before = _sum_pair(c4_compress_rows, c4_write_rows, True, WIDE)
    c128_compress_before, c128_write_before = _sum_pair(c128_compress_rows, c128_write_rows, True, WIDE)
    return (
        min_extend,
        max_extend,
        total,
        first_owner,
        first_owner_begin,
        c4_compress_before,
        c4_write_before,
        c128_compress_before,
        c128_write_before,
        suspect,
        tl.min(smallest_planned, 0),
        tl.max(largest_planned, 0),
        total_planned,
    )


@triton.jit(
    do_not_specialize=[
        "stride_seq",
        "stride_extend",
        "stride_req",
        "batch_size",
        "num_rows",
        "blocks_per_program",
        "row_stride",
        "num_requests",
        "max_seq_len",
        "num_slots",
        "num_batch_rows",
        "extend_limit",
    ],
    do_not_specialize_on_alignment=["seq_ptr", "extend_ptr", "req_ptr", "req_to_token_ptr", "full_to_swa_ptr"],
)
def _plan_prefill_chunked_kernel(
    seq_ptr,  # [B], int32 or int64; as extend_ptr and req_ptr
    stride_seq,
    extend_ptr,
    stride_extend,
    req_ptr,
    stride_req,
    batch_size,
    num_rows,
    blocks_per_program,  # of rows, for each program
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
    num_batch_rows,  # these five as in `planner_prefill`
    extend_limit,
    row_req_ptr,
    row_position_ptr,
    row_owner_ptr,
    SWA_PAGE: tl.constexpr,
    C4_RING: tl.constexpr,
    C4_WRITE_PAD: tl.constexpr,
    C128_RING: tl.constexpr,
    C128_WRITE_PAD: tl.constexpr,
    HAS_C4: tl.constexpr,
    HAS_C128: tl.constexpr,
    WIDE: tl.constexpr,
    LAYOUT: tl.constexpr,
    SEQ_BEFORE: tl.constexpr,
    FORCE_UNIFORM: tl.constexpr,  # None; a test sets True or False to see that the decision matters
    CHUNK: tl.constexpr,  # requests read at a time
    SEARCH: tl.constexpr,  # requests read at a time when looking for the owners of rows
    BLOCK: tl.constexpr,  # batch rows planned at a time
    DENSE: tl.constexpr,  # strides of the lengths are 1, addresses multiples of 16
    PDL: tl.constexpr,
):
    """The same for batches of any size: lengths are read in chunks, and a program plans several blocks of rows."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first_row = tl.program_id(0) * blocks_per_program * BLOCK

    # Pass 1 over the lengths. Most batches need no more than the quick scan.
    (
        min_extend,
        max_extend,
        total,
        first_owner,
        first_owner_begin,
        c4_compress_before,
        c4_write_before,
        c128_compress_before,
        c128_write_before,
        suspect,
        min_planned,
        max_planned,
        total_planned,
    ) = _scan_lengths(
        first_row,
        seq_ptr,
        stride_seq,
        extend_ptr,
        stride_extend,
        req_ptr,
        stride_req,
        batch_size,
        num_requests,
        max_seq_len,
        num_batch_rows,
        extend_limit,
        error_ptr,
        SWA_PAGE,
        C4_WRITE_PAD,
        C128_WRITE_PAD,
        WIDE,
        LAYOUT,
        SEQ_BEFORE,
        CHUNK,
        DENSE,
        False,
    )
    if not LAYOUT:
        if suspect:
            (
                min_extend,
                max_extend,
                total,
                first_owner,
                first_owner_begin,
                c4_compress_before,
                c4_write_before,
                c128_compress_before,
                c128_write_before,
                suspect,
                min_planned,
                max_planned,
                total_planned,
            ) = _scan_lengths(
                first_row,
                seq_ptr,
                stride_seq,
                extend_ptr,
                stride_extend,
                req_ptr,
                stride_req,
                batch_size,
                num_requests,
                max_seq_len,
                num_batch_rows,
                extend_limit,
                error_ptr,
                SWA_PAGE,
                C4_WRITE_PAD,
                C128_WRITE_PAD,
                WIDE,
                LAYOUT,
                SEQ_BEFORE,
                CHUNK,
                DENSE,
                True,
            )
    uniform = _is_uniform(min_extend, max_extend, batch_size)
    take_division = uniform
    if FORCE_UNIFORM is not None:
        take_division = tl.full([], FORCE_UNIFORM, tl.int1)
    fits = total <= (num_batch_rows if LAYOUT else num_rows)
    total_rows = tl.where(fits, total, 0).to(tl.int32)
    if not fits:
        c4_compress_before = 0
        c4_write_before = 0
        c128_compress_before = 0
        c128_write_before = 0

    # Pass 2: the rows of this program, a block at a time.
    width = tl.maximum(max_extend, 1)
    for _block in range(blocks_per_program):
        row = first_row + tl.arange(0, BLOCK)
        valid = row < total_rows
        if take_division:
            owner = row // width
            owner_begin = owner * width
        else:
            owner = row * 0 + first_owner
            owner_begin = row * 0 + first_owner_begin
            request = first_owner
            begin_row = first_owner_begin
            stop_row = tl.where(first_row < total_rows, tl.minimum(first_row + BLOCK, total_rows), 0)
            while (request < batch_size) & (begin_row < stop_row):
                index = request + tl.arange(0, SEARCH)
                more_seq, more_extend = _load_lengths(
                    seq_ptr, stride_seq, extend_ptr, stride_extend, index, index < batch_size
                )
                if LAYOUT:
                    _seq, rows, _planned, _lost, _bad = _check_layout(
                        more_seq, more_extend, more_extend * 0, max_seq_len, num_requests, extend_limit, SEQ_BEFORE
                    )
                else:
                    _seq, rows, _bad = _check_lengths(more_seq, more_extend, max_seq_len)
                row_end = begin_row + tl.cumsum(rows, 0)
                ended_here = _count_ended(row_end, row, SEARCH)
                ended_here += (tl.gather(row_end, ended_here, 0) <= row).to(tl.int32)
                owner += ended_here
                last_end = tl.gather(row_end, tl.maximum(ended_here - 1, 0), 0)
                owner_begin = tl.where(ended_here > 0, last_end, owner_begin)
                begin_row = tl.max(row_end, 0)
                request += SEARCH
        c4_compress, c4_write, c128_compress, c128_write = _plan_rows(
            row,
            valid,
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
        # On to the next block.
        compress, write = _sum_pair(c4_compress.to(tl.int32), c4_write.to(tl.int32), True, False)
        c4_compress_before += compress
        c4_write_before += write
        compress, write = _sum_pair(c128_compress.to(tl.int32), c128_write.to(tl.int32), True, False)
        c128_compress_before += compress
        c128_write_before += write
        first_owner = tl.max(tl.where(valid, owner, 0), 0)
        first_owner_begin = tl.max(tl.where(valid, owner_begin, 0), 0)
        first_row += BLOCK

    if tl.program_id(0) == tl.num_programs(0) - 1:
        if LAYOUT:
            min_extend = min_planned
            max_extend = max_planned
            uniform = _is_uniform(min_planned, max_planned, batch_size)
            total_rows = tl.where(fits, total_planned, 0).to(tl.int32)
        _store_header(
            header_ptr,
            error_ptr,
            batch_size,
            fits,
            min_extend,
            max_extend,
            uniform,
            total_rows,
            c4_compress_before,
            c4_write_before,
            c128_compress_before,
            c128_write_before,
            HAS_C4,
            HAS_C128,
        )
