"""Compression: pooling of groups, norm, rope, quantisation and storing of the entry, and the rows kept as state.

Every value of a `kv_score` row is read by exactly one entry, so nothing is gained by sharing rows between programs:
what counts is that enough bytes are on their way. Ratio 4 is one launch of a program an entry (8 rows of its half of
the channels, all loaded before the first is used). Ratio 128 splits the channels of an entry between programs, since
one could not load its 128 rows fast enough; a second launch finishes the entries.

State that a step keeps may take the ring row of state that the step reads, at a distance of a whole ring. In the
prefill form the write is therefore in the second launch, which waits for the end of the first. In the decode form no
row that is written is read: a request reads the rows of the w - 1 positions before its new token, which lie in other
ring rows than the new one (a ring has at least w rows), on window pages and in request rings that no other request
writes; and the new row itself is taken from `kv_score`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton_kernels.common import INTERPRET, Launcher, pdl_options
from dsv4_triton_kernels.kv_store import INTERPRET_ROWS, _norm, _rotate, _store_entries, pool_args, pool_constants

PACKED_MAX_ROWS = 65_536


@triton.jit
def _compress_row(plan_ptr, k, live, WINDOW: tl.constexpr, RATIO: tl.constexpr, FORM: tl.constexpr):
    """Row `k` of a plan: seq_len, row of the step, rows from state, its pages; and whether an entry is completed.

    FORM: "packed" or "wide" compress lists, or "decode". `k` and `live` are scalars or [ROWS].
    """
    WORDS: tl.constexpr = 5 if FORM == "wide" else 4
    place = plan_ptr + k.to(tl.int64) * WORDS
    seq_len = tl.load(place, mask=live, other=-1)
    second = tl.load(place + 1, mask=live, other=0)
    page_0 = tl.load(place + WORDS - 2, mask=live, other=0)
    page_1 = tl.load(place + WORDS - 1, mask=live, other=0)
    if FORM == "decode":
        live &= (seq_len > 0) & (seq_len % RATIO == 0)
        row = k
        buffer_len = k * 0 + (WINDOW - 1)
    else:
        live &= seq_len > 0
        if FORM == "wide":
            row = second
            buffer_len = tl.load(place + 2, mask=live, other=0)
        else:
            row = second & 0xFFFF
            buffer_len = (second >> 16) & 0xFFFF
    return seq_len, row, buffer_len, page_0, page_1, live


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
def _biased(i: tl.constexpr, score, seq_len, bias_ptr, D: tl.constexpr):
    """Scores of token `i` with its bias; minus infinity where the first entry of a request has nothing before it."""
    score += tl.load(bias_ptr + i * D + tl.arange(0, D)[None, :])
    if i < 4:
        score = tl.where((seq_len > 4)[:, None], score, float("-inf"))
    return score


@triton.jit
def _write_row(write_ptr, k, num_rows):
    """Rows `k` of a write list: row of the step and state row; -1 for both where there is none."""
    place = write_ptr + k.to(tl.int64) * 2
    return tl.load(place, mask=k < num_rows, other=-1), tl.load(place + 1, mask=k < num_rows, other=-1)


@triton.jit
def _copy_state_rows(
    row,  # [ROWS], of kv_score
    state_row,  # [ROWS]
    live,
    kv_score_ptr,
    kv_stride,
    num_tokens,
    state_ptr,
    num_state_rows,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,  # channels at a time
):
    """Keeps rows of `kv_score` as state; negative state rows are left out."""
    live &= (state_row >= 0) & (state_row < num_state_rows) & (row >= 0) & (row < num_tokens)
    source = kv_score_ptr + (row.to(tl.int64) * kv_stride * 4)[:, None]
    target = state_ptr + (state_row.to(tl.int64) * WIDTH)[:, None]
    channel = tl.arange(0, PART)[None, :]
    for start in tl.static_range(0, WIDTH, PART):
        value = tl.load(source + (start + channel), mask=live[:, None], other=0.0)
        tl.store(target + (start + channel), value, mask=live[:, None])


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
    bias_ptr,
    weight_ptr,
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
    s0, s1 = _biased(0, s0, seq_len, bias_ptr, D), _biased(1, s1, seq_len, bias_ptr, D)
    s2, s3 = _biased(2, s2, seq_len, bias_ptr, D), _biased(3, s3, seq_len, bias_ptr, D)
    s4, s5 = _biased(4, s4, seq_len, bias_ptr, D), _biased(5, s5, seq_len, bias_ptr, D)
    s6, s7 = _biased(6, s6, seq_len, bias_ptr, D), _biased(7, s7, seq_len, bias_ptr, D)
    most = tl.maximum(
        tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)), tl.maximum(tl.maximum(s4, s5), tl.maximum(s6, s7))
    )
    e0, e1, e2, e3 = tl.exp(s0 - most), tl.exp(s1 - most), tl.exp(s2 - most), tl.exp(s3 - most)
    e4, e5, e6, e7 = tl.exp(s4 - most), tl.exp(s5 - most), tl.exp(s6 - most), tl.exp(s7 - most)
    total = ((e0 + e1) + (e2 + e3)) + ((e4 + e5) + (e6 + e7))
    pooled = ((v0 * e0 + v1 * e1) + (v2 * e2 + v3 * e3)) + ((v4 * e4 + v5 * e5) + (v6 * e6 + v7 * e7))
    value = _norm(pooled / total, weight_ptr, eps, D)
    value = _rotate(value, seq_len - 4, live, rope_ptr, num_positions, ROWS, D, ROPE)
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
    out_loc_ptr,  # int64 [num_tokens]
    bias_ptr,  # float32 [8, D]
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
    weights = (bias_ptr, weight_ptr, eps, rope_ptr, num_positions)
    target = (out_loc_ptr, data_ptr, extra_ptr, num_slots)
    k = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    seq_len, row, buffer_len, page_0, page_1, live = _compress_row(plan_ptr, k, k < num_rows, 8, 4, FORM)
    if FORM == "decode":
        state_row = tl.load(plan_ptr + k.to(tl.int64) * 4 + 1, mask=k < num_rows, other=-1)
        _copy_state_rows(k, state_row, k < num_rows, *source, 4 * D, D)
        if tl.max(live.to(tl.int32), 0) > 0:
            window = (seq_len, row, buffer_len, page_0, page_1, live)
            _store_c4_entries(
                *window, *source, *weights, *target, FORMAT, INDEXER, PAGE, PAGE_BYTES, D, LOG_D, ROPE, ROWS
            )
    else:
        # Valid rows come first; most programs have one turn. The next turn's row is on its way during this one.
        while tl.max(live.to(tl.int32), 0) > 0:
            window = (seq_len, row, buffer_len, page_0, page_1, live)
            k += tl.num_programs(0) * ROWS
            seq_len, row, buffer_len, page_0, page_1, live = _compress_row(plan_ptr, k, k < num_rows, 8, 4, FORM)
            _store_c4_entries(
                *window, *source, *weights, *target, FORMAT, INDEXER, PAGE, PAGE_BYTES, D, LOG_D, ROPE, ROWS
            )


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


_launch_c4 = Launcher(_compress_c4_kernel)
_launch_pool = Launcher(_pool_c128_kernel)
_launch_finish = Launcher(_finish_step_kernel)

# What serves entries of so many channels. Ratio 4: entries and warps of a program; a warp loads 128 channels of a row
# at a time, four a thread.
C4_ROWS = {512: dict(ROWS=1, num_warps=4), 256: dict(ROWS=1, num_warps=2), 128: dict(ROWS=1, num_warps=1)}
# Ratio 128: channels of a pooling program and requests that it looks at in the decode form, and its warps.
POOL_PARTS = dict(PART=32, SCAN=8, num_warps=4)
FINISH_ROWS = {512: dict(ROWS=1, num_warps=4), 256: dict(ROWS=1, num_warps=4)}
SMALL_ROWS = dict(ROWS=4, num_warps=4)
# Programs at most: enough to fill the largest chip, so that a program keeps the bias for several entries.
POOL_PROGRAMS = 528
WRITE_PROGRAMS = 1024
# Lists are longer than what they hold: programs for one entry in so many rows of a step, but at least so many.
FEW_ROWS = 1024
# In the interpreter programs run one after the other: a few, which take turns.
INTERPRET_PROGRAMS = 4


def compress(
    *,
    kv_score: torch.Tensor,
    state: torch.Tensor,
    plans: Any,
    ratio: int,
    bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    rope: torch.Tensor,
    out_loc: torch.Tensor,
    pool: Any,
) -> None:
    """Two launches, or one for ratio 4 in the decode form; arguments as in `dsv4_backend.compressor.compress`."""
    plan, num_rows = plans.ratio(ratio), plans.num_rows
    if num_rows == 0 or kv_score.shape[0] == 0:
        return
    capacity = num_rows
    if hasattr(plan, "rows"):
        form, words, write = "decode", plan.words, plan.words
    else:
        form = "packed" if num_rows <= PACKED_MAX_ROWS else "wide"
        words, write = plan.compress_words, plan.write_words
        # Each request, and so each ring, closes at most one entry more than its rows alone would.
        capacity = min(num_rows, num_rows // ratio + state.shape[0] // ratio + 1)
    kv = (kv_score, kv_score.stride(0) // 4, kv_score.shape[0], state, state.shape[0])
    end = (norm_weight, eps, rope, rope.shape[0], *pool_args(pool))
    key = (form, pool.layout, pool.num_slots > 2**31 - 1)
    if ratio == 4:
        _compress_c4(kv, (words, num_rows), (out_loc, bias, *end), key, pool)
        if form != "decode":
            finish = (words, write, 0, num_rows, state, out_loc, *end)
            _finish(0, num_rows, kv, finish, (*key, False), pool, 4)
        return
    pooled = torch.empty((capacity, pool.layout.head_dim), dtype=torch.float32, device=pool.device)
    _pool_c128(kv, (words, capacity, bias, pooled), capacity, num_rows, (form, pool.layout.head_dim), pool)
    finish = (words, write, capacity, num_rows, pooled, out_loc, *end)
    writes = 0 if form == "decode" else num_rows
    _finish(_entry_programs(form, 128, num_rows), writes, kv, finish, (*key, True), pool, 2)


def _entry_programs(form: str, ratio: int, num_rows: int) -> int:
    """Entries that get a program of their own. Further ones, where there are many short requests, share them."""
    if form == "decode":
        return num_rows
    wanted = max(min(num_rows, FEW_ROWS // (ratio // 4)), -(-num_rows // ratio))
    return min(wanted, INTERPRET_PROGRAMS * INTERPRET_ROWS) if INTERPRET else wanted


def _compress_c4(
    kv: tuple[Any, ...], plan: tuple[Any, ...], rest: tuple[Any, ...], key: tuple[Any, ...], pool: Any
) -> None:
    sizes = dict(C4_ROWS.get(pool.layout.head_dim, SMALL_ROWS))
    if INTERPRET:
        sizes["ROWS"] = INTERPRET_ROWS
    programs = -(-_entry_programs(key[0], 4, plan[-1]) // sizes["ROWS"])
    _launch_c4(
        pool.device,
        key,
        (programs,),
        (*kv, *plan, *rest),
        lambda: dict(FORM=key[0], **pool_constants(pool.layout), **sizes, **pdl_options(pool.device)),
    )


def _pool_c128(
    kv: tuple[Any, ...],
    plan: tuple[Any, ...],
    capacity: int,
    num_rows: int,
    key: tuple[Any, ...],
    pool: Any,
) -> None:
    form, head_dim = key
    sizes = dict(POOL_PARTS)
    sizes["PART"] = head_dim if INTERPRET else min(head_dim, sizes["PART"])
    parts = head_dim // sizes["PART"]
    if form == "decode":
        programs = -(-num_rows // sizes["SCAN"])
    else:
        programs = min(_entry_programs(form, 128, num_rows), max(1, POOL_PROGRAMS // parts))
    _launch_pool(
        pool.device,
        key,
        (parts, programs),
        (*kv, *plan),
        lambda: dict(FORM=form, D=head_dim, **sizes, **pdl_options(pool.device)),
    )


def _finish(
    entries: int,
    writes: int,
    kv: tuple[Any, ...],
    rest: tuple[Any, ...],
    key: tuple[Any, ...],
    pool: Any,
    parts: int,
) -> None:
    head_dim = pool.layout.head_dim
    sizes = dict(FINISH_ROWS.get(head_dim, SMALL_ROWS))
    if INTERPRET:
        sizes["ROWS"] = INTERPRET_ROWS
    entry_programs = -(-entries // sizes["ROWS"])
    most_writers = INTERPRET_PROGRAMS if INTERPRET else WRITE_PROGRAMS
    programs = entry_programs + min(most_writers, -(-writes // sizes["ROWS"]))
    _launch_finish(
        pool.device,
        key,
        (programs,),
        (entry_programs, *kv, *rest),
        lambda: dict(
            FORM=key[0],
            ENTRIES=key[-1],
            WIDTH=parts * head_dim,
            **pool_constants(pool.layout),
            **sizes,
            **pdl_options(pool.device),
        ),
    )
