"""Pooling of entries of ratio 128; and what comes last in a step: the rest of these entries, and state."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4_triton_kernels.compressor_rows import _compress_row, _copy_state_rows, _write_row
from dsv4_triton_kernels.kv_store import _norm, _rotate, _store_entries


@triton.jit
def _pool_c128_window(
    k,  # of the plan, scalar, as all up to `page_1`
    row,
    buffer_len,
    page_1,
    kv_score_ptr,
    kv_stride,
    num_tokens,
    state_ptr,
    num_state_rows,
    bias,  # [128, PART]
    pooled_ptr,
    start,  # first channel
    D: tl.constexpr,
    PART: tl.constexpr,
):
    """PART channels of one entry: the values of 128 tokens, weighted by the softmax of their scores."""
    i = tl.arange(0, 128)
    channel = start + tl.arange(0, PART)
    from_state = i < buffer_len
    stored = (page_1 >= 0) & (page_1 < num_state_rows // 128)
    inside = tl.where(from_state, stored, (row - 127 + i >= 0) & (row >= 0) & (row < num_tokens))
    stride = kv_stride.to(tl.int64)
    page_place = state_ptr + page_1.to(tl.int64) * (256 * D)
    new_place = kv_score_ptr + (row.to(tl.int64) - 127) * stride * 4
    place = tl.where(from_state, page_place + i * (2 * D), new_place + i * stride * 4)
    place = place[:, None] + channel[None, :]
    score = tl.load(place + D, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
    value = tl.load(place, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
    score += bias
    weight = tl.exp(score - tl.max(score, 0)[None, :])
    pooled = tl.sum(value * weight, 0) / tl.sum(weight, 0)
    tl.store(pooled_ptr + k.to(tl.int64) * D + channel, pooled)


@triton.jit(do_not_specialize=["kv_stride", "num_tokens", "num_state_rows", "num_rows"])
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
    FORM: tl.constexpr,
    D: tl.constexpr,
    PART: tl.constexpr,  # channels of a program
    SCAN: tl.constexpr,  # requests that a program looks at, in the decode form
    PDL: tl.constexpr,
):
    """Pools PART channels of entries of ratio 128."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = (kv_score_ptr, kv_stride, num_tokens, state_ptr, num_state_rows)
    start = tl.program_id(0) * PART
    bias_place = bias_ptr + (tl.arange(0, 128) * D)[:, None] + (start + tl.arange(0, PART))[None, :]
    k = tl.program_id(1)
    if FORM == "decode":
        # Few requests complete an entry: look at all of a program's at once.
        k *= SCAN
        end = tl.minimum(num_rows, k + SCAN)
        each = k + tl.arange(0, SCAN)
        seq_len = tl.load(plan_ptr + each.to(tl.int64) * 4, mask=each < end, other=1)
        if tl.max(((seq_len > 0) & (seq_len % 128 == 0)).to(tl.int32), 0) == 0:
            return
        bias = tl.load(bias_place)
        while k < end:
            _seq_len, row, buffer_len, _page_0, page_1, live = _compress_row(plan_ptr, k, k < end, 128, 128, FORM)
            if live:
                _pool_c128_window(k, row, buffer_len, page_1, *source, bias, pooled_ptr, start, D, PART)
            k += 1
    else:
        _seq_len, row, buffer_len, _page_0, page_1, live = _compress_row(plan_ptr, k, k < num_rows, 128, 128, FORM)
        if live:
            bias = tl.load(bias_place)
            while live:
                # The next turn's row is on its way during this one.
                window = (k, row, buffer_len, page_1)
                k += tl.num_programs(1)
                _seq_len, row, buffer_len, _page_0, page_1, live = _compress_row(
                    plan_ptr, k, k < num_rows, 128, 128, FORM
                )
                _pool_c128_window(*window, *source, bias, pooled_ptr, start, D, PART)


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
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """What comes after pooling: norm, rope and store of entries of ratio 128, and the rows kept as state."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = (kv_score_ptr, kv_stride, num_tokens, state_ptr, num_state_rows)
    pid = tl.program_id(0)
    if pid >= entry_programs:
        if FORM != "decode":
            # Valid rows come first.
            k = (pid - entry_programs) * ROWS + tl.arange(0, ROWS)
            row, state_row = _write_row(write_ptr, k, num_write_rows)
            while tl.max(row, 0) >= 0:
                this_row, this_state_row = row, state_row
                k += (tl.num_programs(0) - entry_programs) * ROWS
                row, state_row = _write_row(write_ptr, k, num_write_rows)
                _copy_state_rows(this_row, this_state_row, this_row >= 0, *source, WIDTH, D)
        return
    if ENTRIES:
        k = pid * ROWS + tl.arange(0, ROWS)
        seq_len, row, _buffer_len, _page_0, _page_1, live = _compress_row(plan_ptr, k, k < num_rows, 128, 128, FORM)
        if FORM == "decode":
            state_row = tl.load(plan_ptr + k.to(tl.int64) * 4 + 1, mask=k < num_rows, other=-1)
            _copy_state_rows(k, state_row, k < num_rows, *source, WIDTH, D)
        while tl.max(live.to(tl.int32), 0) > 0:
            place = pooled_ptr + (k.to(tl.int64) * D)[:, None] + tl.arange(0, D)[None, :]
            value = _norm(tl.load(place, mask=live[:, None], other=0.0), weight_ptr, eps, D)
            value = _rotate(value, seq_len - 128, live, rope_ptr, num_positions, ROWS, D, ROPE)
            slot = tl.load(out_loc_ptr + row, mask=live & (row >= 0) & (row < num_tokens), other=0)
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
