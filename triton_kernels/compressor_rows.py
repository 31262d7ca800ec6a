"""Rows of plans, and the copying of rows that are kept as state: what the compressor kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


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
def _write_row(write_ptr, k, num_rows):
    """Rows `k` of a write list: row of the step and state row; -1 for both where there is none."""
    place = write_ptr + k.to(tl.int64) * 2
    return tl.load(place, mask=k < num_rows, other=-1), tl.load(place + 1, mask=k < num_rows, other=-1)


@triton.jit
def _load_new_rows(row, live, kv_score_ptr, kv_stride, num_tokens, WIDTH: tl.constexpr):
    """Rows of `kv_score`, [ROWS, WIDTH]."""
    live &= (row >= 0) & (row < num_tokens)
    place = kv_score_ptr + (row.to(tl.int64) * kv_stride * 4)[:, None] + tl.arange(0, WIDTH)[None, :]
    return tl.load(place, mask=live[:, None], other=0.0)


@triton.jit
def _store_state_rows(row, state_row, value, num_tokens, state_ptr, num_state_rows, WIDTH: tl.constexpr):
    """Keeps `value`, rows `row` of `kv_score`, as state; where either row is not there, nothing is stored."""
    live = (state_row >= 0) & (state_row < num_state_rows) & (row >= 0) & (row < num_tokens)
    place = state_ptr + (state_row.to(tl.int64) * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    tl.store(place, value, mask=live[:, None])
