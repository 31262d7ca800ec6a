"""Entries of ratio 4, from the rows of their read windows to the pool, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4_triton_kernels.compressor_rows import _compress_row, _load_new_rows, _store_state_rows
from dsv4_triton_kernels.kv_store import _angle, _norm, _rotate, _store_entries


@triton.jit
def _load_c4_row(
    i: tl.constexpr,
    first_row,  # [ROWS], as all up to `stored`: row of the step that the window begins with
    buffer_len,
    present,  # the entry, and its last row
    has_previous,
    stored,  # whether the page of state exists
    new_place,  # [ROWS]: the window's first row in kv_score
    page_place,  # [ROWS]: the page of state
    kv_stride,
    D: tl.constexpr,
):
    """Token `i` of the read windows: values and scores of the half of its channels that the entries read."""
    from_state = i < buffer_len
    # Pages of the plan are trusted as little as row ids: nothing outside of the buffers is read.
    present &= tl.where(from_state, stored, first_row + i >= 0)
    if i < 4:
        present &= has_previous
    HALF: tl.constexpr = 0 if i < 4 else D
    place = tl.where(from_state, page_place + (i % 4) * (4 * D), new_place + i * kv_stride * 4)
    place = place[:, None] + (HALF + tl.arange(0, D)[None, :])
    value = tl.load(place, mask=present[:, None], other=0.0, eviction_policy="evict_first")
    score = tl.load(place + 2 * D, mask=present[:, None], other=0.0, eviction_policy="evict_first")
    return value, score


@triton.jit
def _load_bias(i: tl.constexpr, bias_ptr, D: tl.constexpr):
    """Bias of token `i` of the read window, [1, D]: the half for the next group, or for the own one."""
    return tl.load(bias_ptr + (i % 4 * 2 + i // 4) * D + tl.arange(0, D)[None, :])


@triton.jit
def _store_c4_entries(
    seq_len,  # [ROWS], as all up to `live`
    row,
    buffer_len,
    page_0,
    page_1,
    live,
    kv_score_ptr,
    kv_stride,
    num_tokens,
    state_ptr,
    num_state_rows,
    b0,  # [1, D], as all up to `b7`: bias of the read window's tokens
    b1,
    b2,
    b3,
    b4,
    b5,
    b6,
    b7,
    norm_weight,  # [D]
    eps,
    rope_ptr,
    num_positions,
    out_loc_ptr,
    data_ptr,
    extra_ptr,
    num_slots,
    FORMAT: tl.constexpr,
    INDEXER: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Pools, norms, ropes and stores ROWS entries."""
    present = live & (row >= 0) & (row < num_tokens)
    window = (row - 7, buffer_len, present, seq_len > 4)
    stored_0 = (page_0 >= 0) & (page_0 < num_state_rows // 4)
    stored_1 = (page_1 >= 0) & (page_1 < num_state_rows // 4)
    stride = kv_stride.to(tl.int64)
    new_place = kv_score_ptr + (row.to(tl.int64) - 7) * stride * 4
    place_0 = state_ptr + page_0.to(tl.int64) * (16 * D)
    place_1 = state_ptr + page_1.to(tl.int64) * (16 * D)
    # All loads before the first use.
    v0, s0 = _load_c4_row(0, *window, stored_0, new_place, place_0, stride, D)
    v1, s1 = _load_c4_row(1, *window, stored_0, new_place, place_0, stride, D)
    v2, s2 = _load_c4_row(2, *window, stored_0, new_place, place_0, stride, D)
    v3, s3 = _load_c4_row(3, *window, stored_0, new_place, place_0, stride, D)
    v4, s4 = _load_c4_row(4, *window, stored_1, new_place, place_1, stride, D)
    v5, s5 = _load_c4_row(5, *window, stored_1, new_place, place_1, stride, D)
    v6, s6 = _load_c4_row(6, *window, stored_1, new_place, place_1, stride, D)
    v7, s7 = _load_c4_row(7, *window, stored_1, new_place, place_1, stride, D)
    slot = tl.load(out_loc_ptr + row, mask=present, other=0)
    angle = _angle(seq_len - 4, live, rope_ptr, num_positions, D, ROPE)
    # The first entry of a request has nothing before it.
    has_previous = (seq_len > 4)[:, None]
    s0, s1 = tl.where(has_previous, s0 + b0, float("-inf")), tl.where(has_previous, s1 + b1, float("-inf"))
    s2, s3 = tl.where(has_previous, s2 + b2, float("-inf")), tl.where(has_previous, s3 + b3, float("-inf"))
    s4, s5, s6, s7 = s4 + b4, s5 + b5, s6 + b6, s7 + b7
    most = tl.maximum(
        tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)), tl.maximum(tl.maximum(s4, s5), tl.maximum(s6, s7))
    )
    e0, e1, e2, e3 = tl.exp(s0 - most), tl.exp(s1 - most), tl.exp(s2 - most), tl.exp(s3 - most)
    e4, e5, e6, e7 = tl.exp(s4 - most), tl.exp(s5 - most), tl.exp(s6 - most), tl.exp(s7 - most)
    total = ((e0 + e1) + (e2 + e3)) + ((e4 + e5) + (e6 + e7))
    pooled = ((v0 * e0 + v1 * e1) + (v2 * e2 + v3 * e3)) + ((v4 * e4 + v5 * e5) + (v6 * e6 + v7 * e7))
    value = _rotate(_norm(pooled / total, norm_weight, eps, D), angle, ROWS, D, ROPE)
    _store_entries(
        value, slot, live, data_ptr, extra_ptr, num_slots, FORMAT, INDEXER, PAGE, PAGE_BYTES, ROWS, D, LOG_D, ROPE
    )


@triton.jit(
    do_not_specialize=[
        "kv_stride",
        "num_tokens",
        "num_state_rows",
        "num_rows",
        "num_positions",
        "num_slots",
    ],
    do_not_specialize_on_alignment=["out_loc_ptr"],
)
def _compress_c4_kernel(
    kv_score_ptr,  # float32 [num_tokens, 4 * D]
    kv_stride,  # in units of 4 elements, so that loads are known to be aligned
    num_tokens,
    state_ptr,  # float32 [num_state_rows, 4 * D]
    num_state_rows,
    plan_ptr,  # int32 [num_rows, 4 or 5]
    num_rows,
    header_ptr,  # int32 [8]: the plan's; not read for decode
    out_loc_ptr,  # int64 [num_tokens]
    bias_ptr,  # float32 [4, 2 * D]
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
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS entries of ratio 4 at a time, from the rows of their read windows to the pool; in the decode form, state."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = (kv_score_ptr, kv_stride, num_tokens, state_ptr, num_state_rows)
    b0, b1, b2, b3 = (
        _load_bias(0, bias_ptr, D),
        _load_bias(1, bias_ptr, D),
        _load_bias(2, bias_ptr, D),
        _load_bias(3, bias_ptr, D),
    )
    b4, b5, b6, b7 = (
        _load_bias(4, bias_ptr, D),
        _load_bias(5, bias_ptr, D),
        _load_bias(6, bias_ptr, D),
        _load_bias(7, bias_ptr, D),
    )
    norm_weight = tl.load(weight_ptr + tl.arange(0, D))
    weights = (b0, b1, b2, b3, b4, b5, b6, b7, norm_weight, eps, rope_ptr, num_positions)
    target = (out_loc_ptr, data_ptr, extra_ptr, num_slots)
    if FORM == "decode":
        k = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        seq_len, row, buffer_len, page_0, page_1, live = _compress_row(plan_ptr, k, k < num_rows, 8, 4, FORM)
        state_row = tl.load(plan_ptr + k.to(tl.int64) * 4 + 1, mask=k < num_rows, other=-1)
        new = _load_new_rows(k, k < num_rows, kv_score_ptr, kv_stride, num_tokens, 4 * D)
        _store_state_rows(k, state_row, new, num_tokens, state_ptr, num_state_rows, 4 * D)
        if tl.max(live.to(tl.int32), 0) > 0:
            window = (seq_len, row, buffer_len, page_0, page_1, live)
            _store_c4_entries(
                *window, *source, *weights, *target, FORMAT, INDEXER, PAGE, PAGE_BYTES, D, LOG_D, ROPE, ROWS
            )
    else:
        # Most programs have one turn, which does not wait for the count.
        count = tl.minimum(tl.load(header_ptr + 4), num_rows)
        first = tl.program_id(0) * ROWS
        more = first < num_rows
        while more:
            k = first + tl.arange(0, ROWS)
            window = _compress_row(plan_ptr, k, k < num_rows, 8, 4, FORM)
            if tl.max(window[5].to(tl.int32), 0) > 0:
                _store_c4_entries(
                    *window, *source, *weights, *target, FORMAT, INDEXER, PAGE, PAGE_BYTES, D, LOG_D, ROPE, ROWS
                )
            first += tl.num_programs(0) * ROWS
            more = first < count
