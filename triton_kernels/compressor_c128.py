"""Pooling of entries of ratio 128; and what comes last in a step: the rest of these entries, and state."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4_triton_kernels.compressor_rows import (
    _compress_row,
    _load_new_rows,
    _store_state_rows,
    _write_row,
)
from dsv4_triton_kernels.kv_store import _angle, _norm, _rotate, _store_entries


@triton.jit
def _pool_c128_window(
    row,  # scalar, as the next two
    buffer_len,
    page_1,
    kv_score_ptr,
    kv_stride,
    num_tokens,
    state_ptr,
    num_state_rows,
    bias_ptr,
    start,  # first channel
    D: tl.constexpr,
    PART: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """PART channels of an entry: the values of 128 tokens, weighted by the softmax of their scores.

    LANES tokens are side by side, each lane with a softmax of its own over every LANES-th token, so that nothing passes
    between threads until the end; meanwhile the next tokens are on their way to shared memory.
    """
    channel = start + tl.arange(0, PART)
    # Rows from which on there is something to read: of state, and of the step.
    first_stored = tl.where((page_1 >= 0) & (page_1 < num_state_rows // 128), 0, 128)
    first_known = tl.where((row >= 0) & (row < num_tokens), 127 - row, 128)
    page_place = state_ptr + page_1.to(tl.int64) * (256 * D)
    stride = kv_stride.to(tl.int64) * 4
    new_place = kv_score_ptr + (row.to(tl.int64) - 127) * stride
    most = tl.full([LANES, PART], -3.0e38, tl.float32)
    total = tl.zeros([LANES, PART], tl.float32)
    pooled = tl.zeros([LANES, PART], tl.float32)
    for first in tl.range(0, 128, LANES, num_stages=STAGES):
        i = first + tl.arange(0, LANES)
        from_state = i < buffer_len
        inside = (i >= tl.where(from_state, first_stored, first_known))[:, None]
        place = tl.where(from_state, page_place + i * (2 * D), new_place + i * stride)[:, None] + channel[None, :]
        score = tl.load(place + D, mask=inside, other=0.0, eviction_policy="evict_first")
        value = tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")
        score += tl.load(bias_ptr + (i * D)[:, None] + channel[None, :], eviction_policy="evict_last")
        higher = tl.maximum(most, score)
        shrink = tl.exp(most - higher)
        weight = tl.exp(score - higher)
        total = total * shrink + weight
        pooled = pooled * shrink + weight * value
        most = higher
    shrink = tl.exp(most - tl.max(most, 0)[None, :])
    return tl.sum(pooled * shrink, 0) / tl.sum(total * shrink, 0)


@triton.jit(do_not_specialize=["kv_stride", "num_tokens", "num_state_rows", "num_rows", "share"])
def _pool_c128_kernel(
    kv_score_ptr,  # float32 [num_tokens, 2 * D]
    kv_stride,  # in units of 4 elements
    num_tokens,
    state_ptr,  # float32 [num_state_rows, 2 * D]
    num_state_rows,
    plan_ptr,  # int32 [num_rows, 4 or 5]
    num_rows,
    bias_ptr,  # float32 [128, D]
    pooled_ptr,  # float32 [num_rows, D]
    share,
    FORM: tl.constexpr,
    D: tl.constexpr,
    PART: tl.constexpr,  # channels of a program
    LANES: tl.constexpr,  # tokens side by side
    STAGES: tl.constexpr,
    SCAN: tl.constexpr,  # decode form: requests that `share` programs look at together
    PDL: tl.constexpr,
):
    """Pools PART channels of entries of ratio 128, one after the other."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = (kv_score_ptr, kv_stride, num_tokens, state_ptr, num_state_rows, bias_ptr)
    start = tl.program_id(0) * PART
    part_ptr = pooled_ptr + start + tl.arange(0, PART)
    # While an entry is pooled, the row of the next one is on its way.
    if FORM == "decode":
        # Few requests complete an entry, or all of them do: the programs take turns.
        each = tl.program_id(1) // share * SCAN + tl.arange(0, SCAN)
        seq_len = tl.load(plan_ptr + each.to(tl.int64) * 4, mask=each < num_rows, other=-1)
        complete = ((seq_len > 0) & (seq_len % 128 == 0)).to(tl.int32)
        mine = (complete > 0) & ((tl.cumsum(complete, 0) - 1) % share == tl.program_id(1) % share)
        k = tl.min(tl.where(mine, each, 0x7FFFFFFF), 0)
        page_1 = tl.load(plan_ptr + k.to(tl.int64) * 4 + 3, mask=k < num_rows, other=-1)
        while k < num_rows:
            window = (k, k * 0 + 127, page_1)
            place = part_ptr + k.to(tl.int64) * D
            k = tl.min(tl.where(mine & (each > k), each, 0x7FFFFFFF), 0)
            page_1 = tl.load(plan_ptr + k.to(tl.int64) * 4 + 3, mask=k < num_rows, other=-1)
            tl.store(place, _pool_c128_window(*window, *source, start, D, PART, LANES, STAGES))
    else:
        # Valid rows come first.
        k = tl.program_id(1)
        _seq_len, row, buffer_len, _page_0, page_1, live = _compress_row(plan_ptr, k, k < num_rows, 128, 128, FORM)
        while live:
            window = (row, buffer_len, page_1)
            place = part_ptr + k.to(tl.int64) * D
            k += tl.num_programs(1)
            _seq_len, row, buffer_len, _page_0, page_1, live = _compress_row(plan_ptr, k, k < num_rows, 128, 128, FORM)
            tl.store(place, _pool_c128_window(*window, *source, start, D, PART, LANES, STAGES))


@triton.jit(
    do_not_specialize=["kv_stride", "num_tokens", "num_state_rows", "num_rows", "num_positions", "num_slots"],
    do_not_specialize_on_alignment=["out_loc_ptr"],
)
def _compress_c128_kernel(
    kv_score_ptr,  # float32 [num_tokens, 2 * D]
    kv_stride,  # in units of 4 elements
    num_tokens,
    state_ptr,  # float32 [num_state_rows, 2 * D]
    num_state_rows,
    plan_ptr,  # int32 [num_rows, 4 or 5]
    num_rows,
    out_loc_ptr,  # int64 [num_tokens]
    bias_ptr,  # float32 [128, D]
    weight_ptr,  # float32 [D]
    eps,
    rope_ptr,  # float32 [num_positions, ROPE]
    num_positions,
    data_ptr,
    extra_ptr,
    num_slots,
    FORM: tl.constexpr,
    FORMAT: tl.constexpr,
    INDEXER: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    ROPE: tl.constexpr,
    LANES: tl.constexpr,  # tokens side by side
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Entries of ratio 128 from the rows of their groups to the pool, where there are many: a program for each."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = (kv_score_ptr, kv_stride, num_tokens, state_ptr, num_state_rows, bias_ptr)
    weight = tl.load(weight_ptr + tl.arange(0, D))
    one = tl.zeros([1], tl.int32)
    # Valid rows come first. While an entry is pooled, the row of the next one is on its way.
    k = tl.program_id(0)
    seq_len, row, buffer_len, _page_0, page_1, live = _compress_row(plan_ptr, k, k < num_rows, 128, 128, FORM)
    while live:
        window = (row, buffer_len, page_1)
        slot = tl.load(out_loc_ptr + row, mask=(row >= 0) & (row < num_tokens), other=0)
        angle = _angle(seq_len - 128 + one, one == 0, rope_ptr, num_positions, D, ROPE)
        k += tl.num_programs(0)
        seq_len, row, buffer_len, _page_0, page_1, live = _compress_row(plan_ptr, k, k < num_rows, 128, 128, FORM)
        pooled = _pool_c128_window(*window, *source, 0, D, D, LANES, STAGES)[None, :]
        value = _rotate(_norm(pooled, weight, eps, D), angle, 1, D, ROPE)
        _store_entries(
            value,
            slot + one,
            one == 0,
            data_ptr,
            extra_ptr,
            num_slots,
            FORMAT,
            INDEXER,
            PAGE,
            PAGE_BYTES,
            1,
            D,
            LOG_D,
            ROPE,
        )


@triton.jit(
    do_not_specialize=[
        "entry_programs",
        "kv_stride",
        "num_tokens",
        "num_state_rows",
        "num_rows",
        "num_write_rows",
        "num_positions",
        "num_slots",
    ],
    do_not_specialize_on_alignment=["out_loc_ptr"],
)
def _finish_step_kernel(
    entry_programs,  # programs that finish entries; those behind them write state
    kv_score_ptr,  # float32 [num_tokens, WIDTH]
    kv_stride,  # in units of 4 elements
    num_tokens,
    state_ptr,  # float32 [num_state_rows, WIDTH]
    num_state_rows,
    plan_ptr,  # int32 [num_rows, 4 or 5]
    write_ptr,  # int32 [num_write_rows, 2]; not read for decode
    num_rows,
    num_write_rows,
    pooled_ptr,  # float32 [num_rows, D]
    out_loc_ptr,  # int64 [num_tokens]
    weight_ptr,  # float32 [D]
    eps,
    rope_ptr,  # float32 [num_positions, ROPE]
    num_positions,
    data_ptr,
    extra_ptr,
    num_slots,
    FORM: tl.constexpr,
    ENTRIES: tl.constexpr,  # there are pooled entries of ratio 128 to finish; else this only writes state
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    INDEXER: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,  # entries of a program
    WRITE_ROWS: tl.constexpr,  # rows of state that a program has on their way
    PDL: tl.constexpr,
):
    """What comes after pooling: norm, rope and store of entries of ratio 128, and the rows kept as state."""
    # What stands before a wait reads what the launch before this one only reads, too, and waited for.
    pid = tl.program_id(0)
    if pid >= entry_programs:
        if FORM == "decode":
            return
        # Valid rows come first.
        k = (pid - entry_programs) * WRITE_ROWS + tl.arange(0, WRITE_ROWS)
        row, state_row = _write_row(write_ptr, k, num_write_rows)
        value = _load_new_rows(row, row >= 0, kv_score_ptr, kv_stride, num_tokens, WIDTH)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        while tl.max(row, 0) >= 0:
            _store_state_rows(row, state_row, value, num_tokens, state_ptr, num_state_rows, WIDTH)
            k += (tl.num_programs(0) - entry_programs) * WRITE_ROWS
            row, state_row = _write_row(write_ptr, k, num_write_rows)
            value = _load_new_rows(row, row >= 0, kv_score_ptr, kv_stride, num_tokens, WIDTH)
        return
    if ENTRIES:
        k = pid * ROWS + tl.arange(0, ROWS)
        seq_len, row, _buffer_len, _page_0, _page_1, live = _compress_row(plan_ptr, k, k < num_rows, 128, 128, FORM)
        slot = tl.load(out_loc_ptr + row, mask=live & (row >= 0) & (row < num_tokens), other=0)
        angle = _angle(seq_len - 128, live, rope_ptr, num_positions, D, ROPE)
        weight = tl.load(weight_ptr + tl.arange(0, D))
        if FORM == "decode":
            state_row = tl.load(plan_ptr + k.to(tl.int64) * 4 + 1, mask=k < num_rows, other=-1)
            new = _load_new_rows(k, k < num_rows, kv_score_ptr, kv_stride, num_tokens, WIDTH)
            _store_state_rows(k, state_row, new, num_tokens, state_ptr, num_state_rows, WIDTH)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        while tl.max(live.to(tl.int32), 0) > 0:
            place = pooled_ptr + (k.to(tl.int64) * D)[:, None] + tl.arange(0, D)[None, :]
            value = _norm(tl.load(place, mask=live[:, None], other=0.0), weight, eps, D)
            value = _rotate(value, angle, ROWS, D, ROPE)
            _store_entries(
                value,
                slot,
                live,
                data_ptr,
                extra_ptr,
                num_slots,
                FORMAT,
                INDEXER,
                PAGE,
                PAGE_BYTES,
                ROWS,
                D,
                LOG_D,
                ROPE,
            )
            k += entry_programs * ROWS
            seq_len, row, _buffer_len, _page_0, _page_1, live = _compress_row(plan_ptr, k, k < num_rows, 128, 128, FORM)
            slot = tl.load(out_loc_ptr + row, mask=live & (row >= 0) & (row < num_tokens), other=0)
            angle = _angle(seq_len - 128, live, rope_ptr, num_positions, D, ROPE)
