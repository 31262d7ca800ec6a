"""What the planner kernels are made of: lengths, counts in closed form, look-ups, and the stores of a block of rows."""

from __future__ import annotations

import triton
import triton.language as tl

# Mirrored from dsv4_backend.plans; a test compares them.
ERROR_LENGTHS = tl.constexpr(1)
ERROR_SLOT = tl.constexpr(2)
ERROR_UNOWNED = tl.constexpr(4)

LOW_16 = tl.constexpr(0xFFFF)
LOW_32 = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _load_lengths(seq_ptr, stride_seq, extend_ptr, stride_extend, index, mask):
    seq = tl.load(seq_ptr + index.to(tl.int64) * stride_seq, mask=mask, other=0)
    extend = tl.load(extend_ptr + index.to(tl.int64) * stride_extend, mask=mask, other=0)
    return seq, extend


@triton.jit
def _load_chunk(
    seq_ptr, stride_seq, extend_ptr, stride_extend, start, batch_size, CHUNK: tl.constexpr, DENSE: tl.constexpr
):
    """Lengths of the requests from `start` on; 0 past the batch."""
    index = start + tl.arange(0, CHUNK)
    if DENSE & (start + CHUNK <= batch_size):
        # Without masks and strides, a thread loads 16 bytes at a time.
        seq = tl.load(tl.multiple_of(seq_ptr + index, 16))
        extend = tl.load(tl.multiple_of(extend_ptr + index, 16))
    else:
        seq, extend = _load_lengths(seq_ptr, stride_seq, extend_ptr, stride_extend, index, index < batch_size)
    return seq, extend


@triton.jit
def _check_lengths(seq, extend, max_seq_len):
    """Both lengths as int32, 0 for a bad request; and whether it is one."""
    seq = seq.to(tl.int64)
    extend = extend.to(tl.int64)
    # Unsigned, a negative length is larger than any table.
    bad = (extend.to(tl.uint64) > seq.to(tl.uint64)) | (seq.to(tl.uint64) > max_seq_len.to(tl.uint64))
    return tl.where(bad, 0, seq.to(tl.int32)), tl.where(bad, 0, extend.to(tl.int32)), bad


@triton.jit
def _check_layout(seq, extend, req, max_seq_len, num_requests, extend_limit, SEQ_BEFORE: tl.constexpr):
    """The same where request 0 is padding, and rows keep their places in the batch whatever is wrong with a request.

    Returns the length with the rows of the batch (0 for padding and bad requests), the rows in the batch, whether
    they are planned, whether the number of rows makes no sense (then it is returned as 0), and whether to flag it.
    """
    seq = seq.to(tl.int64)
    extend = extend.to(tl.int64)
    lost = extend.to(tl.uint64) > extend_limit.to(tl.uint64)
    if SEQ_BEFORE:
        seq += extend
    bad = (extend.to(tl.uint64) > seq.to(tl.uint64)) | (seq.to(tl.uint64) > max_seq_len.to(tl.uint64))
    outside = (req < 0) | (req >= num_requests)
    planned = ~(lost | bad | outside) & (req != 0)
    flagged = lost | (bad & (req != 0)) | (outside & (extend != 0))
    rows = tl.where(lost, 0, extend.to(tl.int32))
    return tl.where(planned, seq.to(tl.int32), 0), rows, planned, lost, flagged


@triton.jit
def _bad_bits(seq, extend, max_seq_len):
    """Negative where a request is bad, cheaper than `_check_lengths`: meant to be combined over many with `|`."""
    low_seq = seq.to(tl.int32)
    low_extend = extend.to(tl.int32)
    bits = low_seq | low_extend | (low_seq - low_extend) | (max_seq_len - low_seq)
    if seq.dtype == tl.int64:
        high = (seq >> 32).to(tl.int32)
        bits |= high | (0 - high)
    if extend.dtype == tl.int64:
        high = (extend >> 32).to(tl.int32)
        bits |= high | (0 - high)
    return bits


@triton.jit
def _kept_rows(seq, RATIO: tl.constexpr, WRITE_PAD: tl.constexpr):
    """Positions at the end of a request of length `seq` that are kept as state: the open group, for ratio 4 with the
    group that it overlaps, or `WRITE_PAD`, whichever is more."""
    OVERLAP: tl.constexpr = 4 if RATIO == 4 else 0
    open_rows = (seq & (RATIO - 1)) + OVERLAP
    if WRITE_PAD <= OVERLAP:
        return open_rows
    if WRITE_PAD >= OVERLAP + RATIO - 1:
        return open_rows * 0 + WRITE_PAD
    return tl.maximum(open_rows, WRITE_PAD)


@triton.jit
def _page_tail_rows(end, SWA_PAGE: tl.constexpr):
    """How many positions in [0, end) are among the last 4 of a window page."""
    pages = (end.to(tl.uint32) // SWA_PAGE).to(tl.int32)  # unsigned: a shift where the page is a power of two
    return pages * 4 + tl.maximum(end - pages * SWA_PAGE - (SWA_PAGE - 4), 0)


@triton.jit
def _count_compress(prefix, before, SHIFT: tl.constexpr):
    """Groups of 2^SHIFT tokens that close among the first `before` positions from `prefix` on."""
    return ((prefix + before) >> SHIFT) - (prefix >> SHIFT)


@triton.jit
def _count_write(prefix, before, seq, RATIO: tl.constexpr, WRITE_PAD: tl.constexpr, SWA_PAGE: tl.constexpr):
    """Rows kept as state among the first `before` positions from `prefix` on: a tail and, for ratio 4, the last 4 rows
    of each window page ahead of that tail."""
    ahead = tl.minimum(tl.maximum(seq - prefix - _kept_rows(seq, RATIO, WRITE_PAD), 0), before)
    write = before - ahead
    if RATIO == 4:
        write += _page_tail_rows(prefix + ahead, SWA_PAGE) - _page_tail_rows(prefix, SWA_PAGE)
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
def _is_uniform(min_extend, max_extend, batch_size):
    """The decision between division and search, made here and nowhere else; it is what the header reports."""
    return (min_extend == max_extend) | (batch_size == 0)


@triton.jit
def _rows_before(end, extend, row):
    """How many of each request's rows, which stop at batch row `end`, lie before batch row `row`."""
    return tl.minimum(tl.maximum(row - (end - extend), 0), extend)


@triton.jit
def _count_ended(end, row, SIZE: tl.constexpr):
    """How many of the ascending `end`, of which there are SIZE, are at most `row`; SIZE counts as SIZE - 1."""
    count = row * 0
    half: tl.constexpr = SIZE // 2
    for step in tl.static_range(0, SIZE.bit_length() - 1):
        ahead = count + ((half >> step) - 1)
        count += tl.where(tl.gather(end, ahead, 0) <= row, half >> step, 0)
    return count


@triton.jit
def _window_slot(slot, full_to_swa_ptr, num_slots):
    """Window slot of a full slot: -1 for -1, 0 for what the table does not hold; and whether that is so."""
    outside = (slot < -1) | (slot >= num_slots)
    swa = tl.load(full_to_swa_ptr + slot.to(tl.int64), mask=(slot >= 0) & (slot < num_slots), other=-1).to(tl.int32)
    return tl.where(outside, 0, swa), outside


@triton.jit
def _swa_slot(req_to_token_ptr, row_stride, full_to_swa_ptr, num_slots, req, position, mask):
    """Window slot of a position: -1 where the table says -1, 0 where it points outside; and whether it does."""
    slot = tl.load(req_to_token_ptr + (req.to(tl.int64) * row_stride + position), mask=mask, other=-1)
    return _window_slot(slot, full_to_swa_ptr, num_slots)


@triton.jit
def _c4_state_loc(swa_slot, SWA_PAGE: tl.constexpr, RING: tl.constexpr):
    return swa_slot // SWA_PAGE * RING + swa_slot % RING  # C division: slot -1 gives -1


@triton.jit
def _pair(low, high):
    """Two 32-bit words as one of 64 bits."""
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


@triton.jit
def _plan_rows(
    row,  # [BLOCK] batch rows
    valid,
    owner,  # the request of each
    owner_begin,  # the row where it begins
    c4_compress_before,  # rows of each list before this block
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
    extend_limit,  # these four: only for LAYOUT
    row_req_ptr,  # int64 [num_rows], or None, as the others
    row_position_ptr,  # int32 [num_rows], -1 behind the last request
    row_owner_ptr,  # int32 [num_rows]
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
    BLOCK: tl.constexpr,
):
    """Plans a block of rows; returns which of them are in each list. With LAYOUT it also stores whose they are."""
    owner = tl.where(valid, tl.minimum(owner, batch_size - 1), 0).to(tl.int64)
    seq = tl.load(seq_ptr + owner * stride_seq, mask=valid, other=0)
    extend = tl.load(extend_ptr + owner * stride_extend, mask=valid, other=0)
    req = tl.load(req_ptr + owner * stride_req, mask=valid, other=0).to(tl.int64)
    bad_req = (req < 0) | (req >= num_requests)
    if LAYOUT:
        seq, extend, planned, _lost, _flagged = _check_layout(
            seq, extend, req, max_seq_len, num_requests, extend_limit, SEQ_BEFORE
        )
        owned = valid
        valid &= planned
    seq = seq.to(tl.int32)
    extend = extend.to(tl.int32)
    req = tl.where(bad_req, 0, req.to(tl.int32))
    j = row - owner_begin
    position = seq - extend + j
    # The lengths were checked when they were read first. Should they have changed since, nothing is looked up outside.
    past_table = position.to(tl.uint32) >= max_seq_len.to(tl.uint32)
    bad = bad_req | (valid & past_table)
    in_table = ~past_table
    if LAYOUT:
        live = valid & in_table
        inside = row < num_rows
        if row_req_ptr is not None:
            tl.store(row_req_ptr + row, tl.where(live, req, 0).to(tl.int64), mask=inside)
            tl.store(row_position_ptr + row, tl.where(live, position, tl.where(owned, 0, -1)), mask=inside)
        if row_owner_ptr is not None:
            tl.store(row_owner_ptr + row, tl.where(live, owner.to(tl.int32), batch_size), mask=inside)

    c4_compress = valid & (position & 3 == 3)
    c128_compress = valid & (position & 127 == 127)
    page_row = (position.to(tl.uint32) % SWA_PAGE).to(tl.int32)
    c4_write = valid & ((position >= seq - _kept_rows(seq, 4, C4_WRITE_PAD)) | (page_row >= SWA_PAGE - 4))
    c128_write = valid & (position >= seq - _kept_rows(seq, 128, C128_WRITE_PAD))
    if HAS_C4:
        # These look-ups take longest, so they start before anything is stored.
        c4_reads = c4_compress & (j < 7)
        own_slot, own_outside = _swa_slot(
            req_to_token_ptr, row_stride, full_to_swa_ptr, num_slots, req, position, in_table & (c4_reads | c4_write)
        )
        previous_slot, previous_outside = _swa_slot(
            req_to_token_ptr,
            row_stride,
            full_to_swa_ptr,
            num_slots,
            req,
            tl.maximum(position - 4, 0),
            in_table & c4_reads,
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
        own = req * C128_RING + (position.to(tl.uint32) % C128_RING).to(tl.int32)
        previous = req * C128_RING + (tl.maximum(position - 128, 0).to(tl.uint32) % C128_RING).to(tl.int32)
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
    tl.store(error_ptr + row * 0, ERROR_LENGTHS, mask=bad)
    return c4_compress, c4_write, c128_compress, c128_write


@triton.jit
def _store_header(
    header_ptr,
    error_ptr,
    batch_size,
    fits,
    min_extend,
    max_extend,
    uniform,
    total_rows,
    c4_compress_rows,
    c4_write_rows,
    c128_compress_rows,
    c128_write_rows,
    HAS_C4: tl.constexpr,
    HAS_C128: tl.constexpr,
):
    if not fits:
        tl.store(error_ptr, ERROR_LENGTHS)
    some = fits & (batch_size > 0)
    tl.store(header_ptr, tl.where(some, min_extend, 0))
    tl.store(header_ptr + 1, tl.where(some, max_extend, 0))
    tl.store(header_ptr + 2, total_rows)
    tl.store(header_ptr + 3, (uniform | (not fits)).to(tl.int32))
    tl.store(header_ptr + 4, c4_compress_rows if HAS_C4 else 0)
    tl.store(header_ptr + 5, c4_write_rows if HAS_C4 else 0)
    tl.store(header_ptr + 6, c128_compress_rows if HAS_C128 else 0)
    tl.store(header_ptr + 7, c128_write_rows if HAS_C128 else 0)
