"""Planner kernels: the compression plans of both ratios, both lists and all page look-ups, in one launch.

Every program takes a block of batch rows and works alone. It reads all lengths once, which gives it the batch's
extremes, where its own rows begin, and how many rows of each list lie before them; there is nothing to share between
programs, so there are no atomics, no scratch and no order to get wrong.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton_kernels.common import Launcher, pdl_options

# Mirrored from dsv4_backend.plans; a test compares them.
ERROR_LENGTHS = tl.constexpr(1)
ERROR_SLOT = tl.constexpr(2)

PACKED_MAX_ROWS = 65_536

INT32_MAX = tl.constexpr(2**31 - 1)
LOW_16 = tl.constexpr(0xFFFF)
LOW_32 = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _load_raw_lengths(seq_ptr, stride_seq, extend_ptr, stride_extend, index, mask):
    seq = tl.load(seq_ptr + index.to(tl.int64) * stride_seq, mask=mask, other=0)
    extend = tl.load(extend_ptr + index.to(tl.int64) * stride_extend, mask=mask, other=0)
    return seq, extend


@triton.jit
def _check_lengths(seq, extend, max_seq_len, error_ptr):
    """Both lengths as int32; a bad request has length and extend 0 and sets the flag."""
    seq = seq.to(tl.int64)
    extend = extend.to(tl.int64)
    # Unsigned, a negative length is larger than any table.
    bad = (extend.to(tl.uint64) > seq.to(tl.uint64)) | (seq.to(tl.uint64) > max_seq_len.to(tl.uint64))
    tl.store(error_ptr + tl.zeros_like(bad).to(tl.int32), ERROR_LENGTHS, mask=bad)
    return tl.where(bad, 0, seq.to(tl.int32)), tl.where(bad, 0, extend.to(tl.int32))


@triton.jit
def _load_lengths(seq_ptr, stride_seq, extend_ptr, stride_extend, index, mask, max_seq_len, error_ptr):
    seq, extend = _load_raw_lengths(seq_ptr, stride_seq, extend_ptr, stride_extend, index, mask)
    return _check_lengths(seq, extend, max_seq_len, error_ptr)


@triton.jit
def _first_kept(seq, RATIO: tl.constexpr, WRITE_PAD: tl.constexpr):
    """First position that is kept as state at the end of a request of length `seq`: the open group, for ratio 4 with
    the group that it overlaps, or `WRITE_PAD` rows, whichever is more."""
    OVERLAP: tl.constexpr = 4 if RATIO == 4 else 0
    if WRITE_PAD <= OVERLAP:
        return (seq & -RATIO) - OVERLAP
    if WRITE_PAD >= OVERLAP + RATIO - 1:
        return seq - WRITE_PAD
    return tl.minimum((seq & -RATIO) - OVERLAP, seq - WRITE_PAD)


@triton.jit
def _page_tail_rows(end, SWA_PAGE: tl.constexpr):
    """How many positions in [0, end) are among the last 4 of a window page."""
    pages = (end.to(tl.uint32) // SWA_PAGE).to(tl.int32)  # unsigned: a shift where the page is a power of two
    return pages * 4 + tl.maximum(end - pages * SWA_PAGE - (SWA_PAGE - 4), 0)


@triton.jit
def _count_compress(prefix, stop, SHIFT: tl.constexpr):
    """Groups of 2^SHIFT tokens that close among the positions [prefix, stop)."""
    return (stop >> SHIFT) - (prefix >> SHIFT)


@triton.jit
def _count_write(prefix, stop, seq, RATIO: tl.constexpr, WRITE_PAD: tl.constexpr, SWA_PAGE: tl.constexpr):
    """Rows kept as state among the positions [prefix, stop): a tail and, for ratio 4, the last 4 rows of each window
    page before that tail."""
    kept_from = tl.minimum(tl.maximum(_first_kept(seq, RATIO, WRITE_PAD), prefix), stop)
    write = stop - kept_from
    if RATIO == 4:
        write += _page_tail_rows(kept_from, SWA_PAGE) - _page_tail_rows(prefix, SWA_PAGE)
    return write


@triton.jit
def _sum_pair(a, b, keep, WIDE: tl.constexpr):
    """Sums of two counts; 0 unless `keep`. Neither exceeds the rows of the plan, so in a packed plan one reduction
    adds both."""
    if WIDE:
        sum_a = tl.sum(a, 0)
        sum_b = tl.sum(b, 0)
    else:
        both = tl.sum((b << 16) + a, 0)
        sum_a = both & LOW_16
        sum_b = (both >> 16) & LOW_16
    return tl.where(keep, sum_a, 0), tl.where(keep, sum_b, 0)


@triton.jit
def _rows_before(end, extend, row):
    """How many of each request's rows, which stop at batch row `end`, lie before batch row `row`."""
    return tl.minimum(tl.maximum(row - (end - extend), 0), extend)


@triton.jit
def _add_and_larger(count_a, begin_a, count_b, begin_b):
    return count_a + count_b, tl.maximum(begin_a, begin_b)


@triton.jit
def _swa_slot(req_to_token_ptr, row_stride, full_to_swa_ptr, num_slots, req, position, mask):
    """Window slot of a position: -1 where the table says -1, 0 where it points outside; and whether it does."""
    slot = tl.load(req_to_token_ptr + (req.to(tl.int64) * row_stride + position), mask=mask, other=-1)
    outside = (slot < -1) | (slot >= num_slots)
    swa = tl.load(full_to_swa_ptr + slot.to(tl.int64), mask=(slot >= 0) & (slot < num_slots), other=-1).to(tl.int32)
    return tl.where(outside, 0, swa), outside


@triton.jit
def _c4_state_loc(swa_slot, SWA_PAGE: tl.constexpr, RING: tl.constexpr):
    return swa_slot // SWA_PAGE * RING + swa_slot % RING  # C division: slot -1 gives -1


@triton.jit
def _pair(low, high):
    """Two 32-bit words as one 64-bit store."""
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & LOW_32)


@triton.jit
def _store_words(ptr, row, mask, word_0, word_1, word_2, word_3):
    """Stores rows of four 32-bit words, 16 bytes a row."""
    pair_ptr = ptr.to(tl.pointer_type(tl.int64)) + row.to(tl.int64) * 2
    tl.store(pair_ptr, _pair(word_0, word_1), mask=mask)
    tl.store(pair_ptr + 1, _pair(word_2, word_3), mask=mask)


@triton.jit
def _store_lists(
    compress_ptr,
    write_ptr,
    row,
    num_rows,
    compress_before,
    write_before,
    is_compress,
    is_write,
    seq_len,
    buffer_len,
    read_page_0,
    read_page_1,
    write_loc,
    WIDE: tl.constexpr,
):
    """Stores what each batch row contributes to the two lists of a ratio.

    A row that is in a list goes behind those before it. One that is not leaves an invalid marker at the end of the
    list, counted from the back; so every place is written exactly once, without knowing the list's length.
    """
    mask = row < num_rows
    compress_row = tl.where(is_compress, compress_before, num_rows - 1 - (row - compress_before))
    seq_len = tl.where(is_compress, seq_len, -1)
    ragged_id = tl.where(is_compress, row, 0)
    buffer_len = tl.where(is_compress, buffer_len, 0)
    if WIDE:
        words_ptr = compress_ptr + compress_row.to(tl.int64) * 5
        tl.store(words_ptr, seq_len, mask=mask)
        tl.store(words_ptr + 1, ragged_id, mask=mask)
        tl.store(words_ptr + 2, buffer_len, mask=mask)
        tl.store(words_ptr + 3, read_page_0, mask=mask)
        tl.store(words_ptr + 4, read_page_1, mask=mask)
    else:
        packed = ragged_id + (buffer_len << 16)
        _store_words(compress_ptr, compress_row, mask, seq_len, packed, read_page_0, read_page_1)
    write_row = tl.where(is_write, write_before, num_rows - 1 - (row - write_before))
    pair_ptr = write_ptr.to(tl.pointer_type(tl.int64)) + write_row.to(tl.int64)
    tl.store(pair_ptr, _pair(tl.where(is_write, row, -1), tl.where(is_write, write_loc, -1)), mask=mask)


@triton.jit(
    do_not_specialize=[
        "stride_seq",
        "stride_extend",
        "stride_req",
        "batch_size",
        "num_rows",
        "num_blocks",
        "row_stride",
        "num_requests",
        "max_seq_len",
        "num_slots",
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
    num_blocks,  # of rows, for each program
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
    SWA_PAGE: tl.constexpr,
    C4_RING: tl.constexpr,
    C4_WRITE_PAD: tl.constexpr,
    C128_RING: tl.constexpr,
    C128_WRITE_PAD: tl.constexpr,
    HAS_C4: tl.constexpr,
    HAS_C128: tl.constexpr,
    WIDE: tl.constexpr,
    FORCE_UNIFORM: tl.constexpr,  # None; a test sets True or False to see that the decision matters
    CHUNK: tl.constexpr,  # requests read at a time
    SINGLE: tl.constexpr,  # one chunk holds the batch
    SEARCH: tl.constexpr,  # requests read at a time when looking for the owners of rows
    BLOCK: tl.constexpr,  # batch rows planned at a time
    ONE_BLOCK: tl.constexpr,  # num_blocks is 1
    PDL: tl.constexpr,
):
    if PDL:
        # The next kernel may get ready; what the previous one wrote is visible once the wait is over.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first_row = tl.program_id(0) * num_blocks * BLOCK

    # Pass 1 over the lengths: the extremes of the whole batch, how many rows of each list come before this program's
    # first row, the request that this row belongs to (owner) and the row where that request begins (owner_begin).
    # `take_division` is the decision, made here and nowhere else: all requests add the same number of rows, or not.
    owner = 0
    owner_begin = 0
    if SINGLE:
        index = tl.arange(0, CHUNK)
        inside = index < batch_size
        seq, extend = _load_lengths(
            seq_ptr, stride_seq, extend_ptr, stride_extend, index, inside, max_seq_len, error_ptr
        )
        # Rows look ids up one by one; reading them here as well brings them into the nearest cache.
        ids = tl.load(req_ptr + index.to(tl.int64) * stride_req, mask=inside, other=0).to(tl.int64)
        tl.store(error_ptr + index * 0, ERROR_LENGTHS, mask=(extend > 0) & ((ids < 0) | (ids >= num_requests)))
        min_extend = tl.min(tl.where(inside, extend, INT32_MAX), 0)
        max_extend = tl.max(extend, 0)
        is_uniform = (min_extend == max_extend) | (batch_size == 0)
        take_division = is_uniform
        if FORCE_UNIFORM is not None:
            take_division = tl.full([], FORCE_UNIFORM, tl.int1)
        most = max_extend.to(tl.int64) * batch_size
        if take_division:
            total = most
            end = (index + 1) * max_extend
        else:
            end = tl.cumsum(extend, 0)
            total = tl.max(end, 0).to(tl.int64)
            if most > INT32_MAX:
                total = tl.sum(extend.to(tl.int64), 0)
            ended = inside & (end <= first_row)
            owner = tl.sum(ended.to(tl.int32), 0)
            owner_begin = tl.max(tl.where(ended, end, 0), 0)
        prefix = seq - extend
        stop = prefix + _rows_before(end, extend, first_row)
        c4_compress_rows = _count_compress(prefix, stop, 2)
        c128_compress_rows = _count_compress(prefix, stop, 7)
        c4_write_rows = _count_write(prefix, stop, seq, 4, C4_WRITE_PAD, SWA_PAGE)
        c128_write_rows = _count_write(prefix, stop, seq, 128, C128_WRITE_PAD, SWA_PAGE)
    else:
        smallest = tl.full([CHUNK], INT32_MAX, tl.int32)
        largest = tl.zeros([CHUNK], tl.int32)
        c4_compress_rows = tl.zeros([CHUNK], tl.int32)
        c4_write_rows = tl.zeros([CHUNK], tl.int32)
        c128_compress_rows = tl.zeros([CHUNK], tl.int32)
        c128_write_rows = tl.zeros([CHUNK], tl.int32)
        total = tl.full([], 0, tl.int64)
        index = tl.arange(0, CHUNK)
        inside = index < batch_size
        next_seq, next_extend = _load_raw_lengths(seq_ptr, stride_seq, extend_ptr, stride_extend, index, inside)
        for start in range(0, batch_size, CHUNK):
            seq, extend = _check_lengths(next_seq, next_extend, max_seq_len, error_ptr)
            inside = index < batch_size
            index += CHUNK
            next_seq, next_extend = _load_raw_lengths(
                seq_ptr, stride_seq, extend_ptr, stride_extend, index, index < batch_size
            )
            smallest = tl.minimum(smallest, tl.where(inside, extend, INT32_MAX))
            largest = tl.maximum(largest, extend)
            begin = total
            total += tl.sum(extend.to(tl.int64), 0)
            if begin < first_row:
                prefix = seq - extend
                stop = seq
                if total <= first_row:
                    owner = tl.minimum(start + CHUNK, batch_size)
                    owner_begin = total.to(tl.int32)
                else:
                    end = begin.to(tl.int32) + tl.cumsum(extend, 0)
                    ended = inside & (end <= first_row)
                    owner = start + tl.sum(ended.to(tl.int32), 0)
                    owner_begin = tl.maximum(begin.to(tl.int32), tl.max(tl.where(ended, end, 0), 0))
                    stop = prefix + _rows_before(end, extend, first_row)
                c4_compress_rows += _count_compress(prefix, stop, 2)
                c128_compress_rows += _count_compress(prefix, stop, 7)
                c4_write_rows += _count_write(prefix, stop, seq, 4, C4_WRITE_PAD, SWA_PAGE)
                c128_write_rows += _count_write(prefix, stop, seq, 128, C128_WRITE_PAD, SWA_PAGE)
        min_extend = tl.min(smallest, 0)
        max_extend = tl.max(largest, 0)
        is_uniform = min_extend == max_extend
        take_division = is_uniform
        if FORCE_UNIFORM is not None:
            take_division = tl.full([], FORCE_UNIFORM, tl.int1)

    # A batch with more rows than the plan is planned as if it had none.
    fits = total <= num_rows
    total_rows = tl.where(fits, total, 0).to(tl.int32)
    c4_compress_before, c4_write_before = _sum_pair(c4_compress_rows, c4_write_rows, fits, WIDE)
    c128_compress_before, c128_write_before = _sum_pair(c128_compress_rows, c128_write_rows, fits, WIDE)

    # Pass 2: the rows of this program, a block at a time.
    width = tl.maximum(max_extend, 1)
    for _block in range(1 if ONE_BLOCK else num_blocks):
        row = first_row + tl.arange(0, BLOCK)
        valid = row < total_rows
        if take_division:
            row_owner = row // width
            row_begin = row_owner * width
        else:
            # Where requests end among these rows, the next one begins.
            stop_row = tl.minimum(first_row + BLOCK, total_rows)
            ends_here = tl.zeros([BLOCK], tl.int32)
            first_request = owner
            row_end_before = owner_begin
            while (first_request < batch_size) & (row_end_before < stop_row):
                request = first_request + tl.arange(0, SEARCH)
                exists = request < batch_size
                _length, rows = _load_lengths(
                    seq_ptr, stride_seq, extend_ptr, stride_extend, request, exists, max_seq_len, error_ptr
                )
                row_end = row_end_before + tl.cumsum(rows, 0)
                here = exists & (row_end < first_row + BLOCK)
                ends_here += tl.histogram(tl.where(here, tl.maximum(row_end - first_row, 0), 0), BLOCK, mask=here)
                row_end_before = tl.max(row_end, 0)
                first_request += SEARCH
            begins = tl.where(ends_here > 0, row, owner_begin)
            row_owner, row_begin = tl.associative_scan((ends_here, begins), 0, _add_and_larger)
            row_owner += owner
        row_owner = tl.where(valid, tl.minimum(row_owner, batch_size - 1), 0)

        row_seq, row_extend = _load_lengths(
            seq_ptr, stride_seq, extend_ptr, stride_extend, row_owner, valid, max_seq_len, error_ptr
        )
        req = tl.load(req_ptr + row_owner.to(tl.int64) * stride_req, mask=valid, other=0).to(tl.int64)
        bad_req = (req < 0) | (req >= num_requests)
        row_req = tl.where(bad_req, 0, req).to(tl.int32)
        j = row - row_begin
        position = row_seq - row_extend + j

        c4_compress = valid & (position & 3 == 3)
        c128_compress = valid & (position & 127 == 127)
        page_row = (position.to(tl.uint32) % SWA_PAGE).to(tl.int32)
        c4_write = valid & ((position >= _first_kept(row_seq, 4, C4_WRITE_PAD)) | (page_row >= SWA_PAGE - 4))
        c128_write = valid & (position >= _first_kept(row_seq, 128, C128_WRITE_PAD))
        if HAS_C4:
            # These look-ups take longest, so they start before anything is stored.
            c4_reads = c4_compress & (j < 7)
            own_slot, own_outside = _swa_slot(
                req_to_token_ptr, row_stride, full_to_swa_ptr, num_slots, row_req, position, c4_reads | c4_write
            )
            previous_slot, previous_outside = _swa_slot(
                req_to_token_ptr, row_stride, full_to_swa_ptr, num_slots, row_req, tl.maximum(position - 4, 0), c4_reads
            )

        # Rows of each list before each row: four counts below BLOCK in one integer, so that one scan adds all.
        FIELD: tl.constexpr = 8 if BLOCK <= 256 else 16
        MASK: tl.constexpr = (1 << FIELD) - 1
        COUNTS: tl.constexpr = tl.int32 if BLOCK <= 256 else tl.int64
        counts = c4_compress.to(COUNTS) + (c4_write.to(COUNTS) << FIELD)
        counts += (c128_compress.to(COUNTS) << 2 * FIELD) + (c128_write.to(COUNTS) << 3 * FIELD)
        counts = tl.cumsum(counts, 0) - counts

        if HAS_C128:
            c128_reads = c128_compress & (j < 127)
            own = row_req * C128_RING + (position.to(tl.uint32) % C128_RING).to(tl.int32)
            previous = row_req * C128_RING + (tl.maximum(position - 128, 0).to(tl.uint32) % C128_RING).to(tl.int32)
            _store_lists(
                c128_compress_ptr,
                c128_write_ptr,
                row,
                num_rows,
                c128_compress_before + ((counts >> 2 * FIELD) & MASK).to(tl.int32),
                c128_write_before + ((counts >> 3 * FIELD) & MASK).to(tl.int32),
                c128_compress,
                c128_write,
                position + 1,
                tl.maximum(127 - j, 0),
                tl.where(c128_reads, previous >> 7, -1),
                tl.where(c128_reads, own >> 7, -1),
                own,
                WIDE,
            )
        if HAS_C4:
            own = _c4_state_loc(own_slot, SWA_PAGE, C4_RING)
            previous = _c4_state_loc(previous_slot, SWA_PAGE, C4_RING)
            _store_lists(
                c4_compress_ptr,
                c4_write_ptr,
                row,
                num_rows,
                c4_compress_before + (counts & MASK).to(tl.int32),
                c4_write_before + ((counts >> FIELD) & MASK).to(tl.int32),
                c4_compress,
                c4_write,
                position + 1,
                tl.maximum(7 - j, 0),
                tl.where(c4_reads, previous // 4, -1),
                tl.where(c4_reads, own // 4, -1),
                own,
                WIDE,
            )
            tl.store(error_ptr + row * 0, ERROR_SLOT, mask=own_outside | previous_outside)
        tl.store(error_ptr + row * 0, ERROR_LENGTHS, mask=bad_req)

        # On to the next block.
        compress, write = _sum_pair(c4_compress.to(tl.int32), c4_write.to(tl.int32), True, False)
        c4_compress_before += compress
        c4_write_before += write
        compress, write = _sum_pair(c128_compress.to(tl.int32), c128_write.to(tl.int32), True, False)
        c128_compress_before += compress
        c128_write_before += write
        owner = tl.max(row_owner, 0)
        owner_begin = tl.max(tl.where(valid, row_begin, 0), 0)
        first_row += BLOCK

    if tl.program_id(0) == tl.num_programs(0) - 1:
        if not fits:
            tl.store(error_ptr, ERROR_LENGTHS)
        some = fits & (batch_size > 0)
        tl.store(header_ptr, tl.where(some, min_extend, 0))
        tl.store(header_ptr + 1, tl.where(some, max_extend, 0))
        tl.store(header_ptr + 2, total_rows)
        tl.store(header_ptr + 3, (is_uniform | (not fits)).to(tl.int32))
        tl.store(header_ptr + 4, c4_compress_before if HAS_C4 else 0)
        tl.store(header_ptr + 5, c4_write_before if HAS_C4 else 0)
        tl.store(header_ptr + 6, c128_compress_before if HAS_C128 else 0)
        tl.store(header_ptr + 7, c128_write_before if HAS_C128 else 0)


@triton.jit(
    do_not_specialize=[
        "stride_seq",
        "stride_req",
        "batch_size",
        "row_stride",
        "num_requests",
        "max_seq_len",
        "num_slots",
    ],
    do_not_specialize_on_alignment=["seq_ptr", "req_ptr", "req_to_token_ptr", "full_to_swa_ptr"],
)
def _plan_decode_kernel(
    seq_ptr,  # [B], int32 or int64; as req_ptr
    stride_seq,
    req_ptr,
    stride_req,
    batch_size,
    req_to_token_ptr,  # int32 [num_requests, max_seq_len]
    row_stride,
    num_requests,
    max_seq_len,
    full_to_swa_ptr,  # int64 [num_slots]
    num_slots,
    error_ptr,  # int32 [1]
    c4_ptr,  # int32 [B, 4]
    c128_ptr,
    SWA_PAGE: tl.constexpr,
    C4_RING: tl.constexpr,
    C128_RING: tl.constexpr,
    HAS_C4: tl.constexpr,
    HAS_C128: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < batch_size
    seq = tl.load(seq_ptr + row.to(tl.int64) * stride_seq, mask=mask, other=1).to(tl.int64)
    req = tl.load(req_ptr + row.to(tl.int64) * stride_req, mask=mask, other=0).to(tl.int64)
    bad = (seq < 1) | (seq > max_seq_len) | (req < 0) | (req >= num_requests)
    seq = tl.where(bad, 1, seq).to(tl.int32)
    req = tl.where(bad, 0, req).to(tl.int32)
    position = seq - 1
    if HAS_C4:
        own_slot, own_outside = _swa_slot(req_to_token_ptr, row_stride, full_to_swa_ptr, num_slots, req, position, mask)
        previous_slot, previous_outside = _swa_slot(
            req_to_token_ptr, row_stride, full_to_swa_ptr, num_slots, req, tl.maximum(position - 4, 0), mask
        )
        own = _c4_state_loc(own_slot, SWA_PAGE, C4_RING)
        previous = _c4_state_loc(previous_slot, SWA_PAGE, C4_RING)
        _store_words(c4_ptr, row, mask, seq, own, previous // 4, own // 4)
        tl.store(error_ptr + row * 0, ERROR_SLOT, mask=own_outside | previous_outside)
    if HAS_C128:
        own = req * C128_RING + position % C128_RING
        previous = req * C128_RING + tl.maximum(position - 128, 0) % C128_RING
        _store_words(c128_ptr, row, mask, seq, own, previous // 128, own // 128)
    tl.store(error_ptr + row * 0, ERROR_LENGTHS, mask=bad)


_launch_prefill = Launcher(_plan_prefill_kernel)
_launch_decode = Launcher(_plan_decode_kernel)

# Largest batch, most rows, what serves them (see the kernel), and the most programs: each reads all lengths, so more
# of them ask more of the L2 cache. The first line that serves is taken; few lines, so that a handful of compilations
# serves every batch.
PREFILL_TIERS = (
    (32, 4096, dict(CHUNK=32, SINGLE=True, SEARCH=32, BLOCK=32, num_warps=1), 4096),  # one warp needs no barriers
    (256, 4096, dict(CHUNK=256, SINGLE=True, SEARCH=32, BLOCK=32, num_warps=1), 4096),
    (128, 2**31, dict(CHUNK=128, SINGLE=True, SEARCH=64, BLOCK=128, num_warps=4), 4096),
    (1024, 2**31, dict(CHUNK=1024, SINGLE=True, SEARCH=128, BLOCK=256, num_warps=8), 264),
    (2**31, 2**31, dict(CHUNK=4096, SINGLE=False, SEARCH=1024, BLOCK=1024, num_warps=16), 32),
)
DECODE_BLOCK = 32


def plan_prefill(
    *,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    tables: Any,
    geom: Any,
    num_rows: int,
    out: Any,
    force_uniform: bool | None = None,
) -> None:
    """One launch that fills `out`; arguments as in `dsv4_backend.planner.plan_prefill`, checked there.

    `force_uniform` overrides the uniform-or-ragged decision: a test shows with it that the decision matters.
    """
    batch_size = seq_lens.shape[0]
    tier = next(i for i, (batch, rows, *_) in enumerate(PREFILL_TIERS) if batch_size <= batch and num_rows <= rows)
    _, _, sizes, most_programs = PREFILL_TIERS[tier]
    blocks = max(1, -(-num_rows // sizes["BLOCK"]))
    blocks_each = -(-blocks // most_programs)
    req_to_token, full_to_swa, c4, c128 = tables.req_to_token, tables.full_to_swa, out.c4, out.c128
    row_stride = req_to_token.stride(0)
    wide = num_rows > PACKED_MAX_ROWS
    _launch_prefill(
        out.device,
        (
            tier,
            seq_lens.dtype,
            extend_lens.dtype,
            req_pool_indices.dtype,
            geom,
            c4 is None,
            c128 is None,
            wide,
            blocks_each == 1,
            force_uniform,
            row_stride > INT32_MAX.value,
        ),
        -(-blocks // blocks_each),
        (
            seq_lens,
            seq_lens.stride(0),
            extend_lens,
            extend_lens.stride(0),
            req_pool_indices,
            req_pool_indices.stride(0),
            batch_size,
            num_rows,
            blocks_each,
            req_to_token,
            row_stride,
            tables.num_requests,
            tables.max_seq_len,
            full_to_swa,
            tables.num_slots,
            out.header,
            out.error,
            # Absent lists are never touched; the header stands in for their pointers.
            c4.compress_words if c4 else out.header,
            c4.write_words if c4 else out.header,
            c128.compress_words if c128 else out.header,
            c128.write_words if c128 else out.header,
        ),
        lambda: dict(
            SWA_PAGE=geom.swa_page_size,
            C4_RING=geom.c4_ring,
            C4_WRITE_PAD=geom.write_pad(4),
            C128_RING=geom.c128_ring,
            C128_WRITE_PAD=geom.write_pad(128),
            HAS_C4=c4 is not None,
            HAS_C128=c128 is not None,
            WIDE=wide,
            FORCE_UNIFORM=force_uniform,
            **sizes,
            ONE_BLOCK=blocks_each == 1,
            **pdl_options(out.device),
        ),
    )


def plan_decode(*, seq_lens: torch.Tensor, req_pool_indices: torch.Tensor, tables: Any, geom: Any, out: Any) -> None:
    """One launch that fills `out`; arguments as in `dsv4_backend.planner.plan_decode`, checked there."""
    batch_size = seq_lens.shape[0]
    if batch_size == 0:
        return
    req_to_token, c4, c128 = tables.req_to_token, out.c4, out.c128
    row_stride = req_to_token.stride(0)
    _launch_decode(
        out.device,
        (
            seq_lens.dtype,
            req_pool_indices.dtype,
            geom,
            c4 is None,
            c128 is None,
            row_stride > INT32_MAX.value,
        ),
        -(-batch_size // DECODE_BLOCK),
        (
            seq_lens,
            seq_lens.stride(0),
            req_pool_indices,
            req_pool_indices.stride(0),
            batch_size,
            req_to_token,
            row_stride,
            tables.num_requests,
            tables.max_seq_len,
            tables.full_to_swa,
            tables.num_slots,
            out.error,
            c4.words if c4 else out.error,
            c128.words if c128 else out.error,
        ),
        lambda: dict(
            SWA_PAGE=geom.swa_page_size,
            C4_RING=geom.c4_ring,
            C128_RING=geom.c128_ring,
            HAS_C4=c4 is not None,
            HAS_C128=c128 is not None,
            BLOCK=DECODE_BLOCK,
            num_warps=1,
            **pdl_options(out.device),
        ),
    )
