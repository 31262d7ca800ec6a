"""The metadata of a step: everything about its rows but the prefill plans, in one launch.

Where every request has the same number of rows, a row finds its request by division. Ragged batches take two launches:
the planner, which has to find the owners of rows anyway, stores them for this kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_triton_kernels.common import INTERPRET, FixedArgs, Launcher, pdl_options
from dsv4_triton_kernels.planner import INT32_MAX, RowLayout, plan_prefill
from dsv4_triton_kernels.planner_rows import (
    ERROR_LENGTHS,
    ERROR_SLOT,
    ERROR_UNOWNED,
    _c4_state_loc,
    _store_words,
    _swa_slot,
    _window_slot,
)

# Rows of a program. On a GPU one, by one warp: many small programs hide the latency of their look-ups. The interpreter
# takes as long for a program of one row as for one of many.
ROWS = 64 if INTERPRET else 1
PAGES = 256
"""Pages that a program reads at a time."""


@triton.jit
def _store_pages(
    table_row,  # [ROWS] rows of the tables
    inside,
    req,
    length,
    req_to_token_ptr,
    row_stride,
    num_slots,
    error_ptr,
    page_table_ptr,
    page_columns,
    c128_page_indices_ptr,
    c128_columns,
    PAGE_SIZE: tl.constexpr,
    HAS_C128: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Stores the live pages of requests, and the ratio-128 entries on them."""
    EACH: tl.constexpr = PAGE_SIZE // 128
    live_pages = tl.where(inside, (length + (PAGE_SIZE - 1)) // PAGE_SIZE, 0)
    entries = length // 128
    source_ptr = req_to_token_ptr + (req.to(tl.int64) * row_stride)[:, None]
    page_row_ptr = page_table_ptr + (table_row.to(tl.int64) * page_columns)[:, None]
    for start in range(0, tl.max(live_pages, 0), PAGES):
        column = (start + tl.arange(0, PAGES))[None, :]
        live = column < live_pages[:, None]
        slot = tl.load(source_ptr + column.to(tl.int64) * PAGE_SIZE, mask=live, other=0)
        outside = (slot < -1) | (slot >= num_slots)
        page = tl.where(outside, 0, slot // PAGE_SIZE)  # C division: slot -1 is on page 0
        tl.store(page_row_ptr + column, page, mask=live)
        if HAS_C128:
            entry_row_ptr = c128_page_indices_ptr + (table_row.to(tl.int64) * c128_columns)[:, None]
            for k in tl.static_range(EACH):
                entry = column * EACH + k
                value = tl.where(entry < entries[:, None], page * EACH + k, -1)
                tl.store(entry_row_ptr + entry, value, mask=live)
        tl.store(error_ptr + column * 0 + tl.zeros_like(slot), ERROR_SLOT, mask=outside)


@triton.jit(
    do_not_specialize=[
        "stride_seq",
        "stride_req",
        "stride_loc",
        "batch_size",
        "num_rows",
        "bucket_rows",
        "num_batch_rows",
        "width",
        "offset",
        "loc_steps",
        "row_stride",
        "num_requests",
        "max_seq_len",
        "num_slots",
        "page_columns",
        "c128_columns",
    ],
    do_not_specialize_on_alignment=["seq_ptr", "req_ptr", "loc_ptr", "req_to_token_ptr", "full_to_swa_ptr"],
)
def _build_metadata_kernel(
    seq_ptr,  # [B], int32 or int64; as req_ptr
    stride_seq,
    req_ptr,
    stride_req,
    loc_ptr,  # [num_batch_rows * loc_steps], int32 or int64
    stride_loc,
    batch_size,
    num_rows,  # of a step, padding included
    bucket_rows,  # rows from one step to the next in the buffers
    num_batch_rows,  # rows of a step that have a slot
    width,  # rows of a request
    offset,  # position of a request's first row, from its length on
    loc_steps,  # slots of a row, one for each step
    req_to_token_ptr,  # int32 [num_requests, max_seq_len]
    row_stride,
    num_requests,
    max_seq_len,
    full_to_swa_ptr,  # int64 [num_slots]
    num_slots,
    error_ptr,  # int32 [1]
    req_per_row_ptr,  # int64 [steps, bucket_rows], as all without another shape; read where FROM_ROWS
    positions_ptr,  # int32; read where FROM_ROWS
    seq_lens_causal_ptr,  # int32
    raw_out_ptr,  # int64
    swa_out_ptr,  # int32
    page_table_ptr,  # int32 [steps, bucket_rows, page_columns], or [B + 1, page_columns] where PER_REQUEST
    page_columns,
    swa_lengths_ptr,  # int32
    swa_page_indices_ptr,  # int32 [steps, bucket_rows, SWA_COLUMNS]
    c4_lengths_ptr,  # int32
    c4_sparse_lengths_ptr,  # int32
    c4_sparse_page_indices_ptr,  # int32 [steps, bucket_rows, TOPK]
    c4_out_ptr,  # int64
    c4_plan_ptr,  # int32 [steps, bucket_rows, 4]
    c128_lengths_ptr,  # int32
    c128_page_indices_ptr,  # int32, as page_table_ptr, with c128_columns
    c128_columns,
    c128_out_ptr,  # int64
    c128_plan_ptr,  # int32 [steps, bucket_rows, 4]
    PAGE_SIZE: tl.constexpr,
    SWA_PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SWA_COLUMNS: tl.constexpr,
    SWA_SIZE: tl.constexpr,  # SWA_COLUMNS as a power of two
    TOPK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    C4_RING: tl.constexpr,
    C128_RING: tl.constexpr,
    HAS_C4: tl.constexpr,
    HAS_C128: tl.constexpr,
    HAS_DECODE_PLAN: tl.constexpr,
    FROM_ROWS: tl.constexpr,  # requests and positions of rows were stored before
    PER_REQUEST: tl.constexpr,  # tables have a row a request, and one for padding
    GROWS: tl.constexpr,  # each step counts one token more
    ROWS: tl.constexpr,
    PAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program for a few rows of a step; where PER_REQUEST, more programs for the tables of the requests."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    step = tl.program_id(1)
    row_programs = (num_rows + ROWS - 1) // ROWS
    if PER_REQUEST:
        if tl.program_id(0) >= row_programs:
            request = (tl.program_id(0) - row_programs) * ROWS + tl.arange(0, ROWS)
            present = request < batch_size
            seq = tl.load(seq_ptr + request.to(tl.int64) * stride_seq, mask=present, other=1).to(tl.int64)
            req = tl.load(req_ptr + request.to(tl.int64) * stride_req, mask=present, other=0).to(tl.int64)
            live = (seq > 0) & (seq <= max_seq_len) & (req > 0) & (req < num_requests)
            _store_pages(
                request,
                request <= batch_size,
                tl.where(live, req, 0),
                tl.where(live, seq, 1).to(tl.int32),
                req_to_token_ptr,
                row_stride,
                num_slots,
                error_ptr,
                page_table_ptr,
                page_columns,
                c128_page_indices_ptr,
                c128_columns,
                PAGE_SIZE,
                HAS_C128,
                PAGES,
            )
            return

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    out_row = (step * bucket_rows + row).to(tl.int64)
    has_slot = row < num_batch_rows
    loc_index = row.to(tl.int64) * loc_steps + step
    slot = tl.load(loc_ptr + loc_index * stride_loc, mask=has_slot, other=0).to(tl.int64)
    if FROM_ROWS:
        req = tl.load(req_per_row_ptr + row, mask=inside, other=0)
        position = tl.load(positions_ptr + row, mask=inside, other=0)
        live = req > 0
        # Slots of padding requests are left out in silence, those behind the last request are not: what is wrong with
        # the batch may have been flagged already, more precisely.
        unowned = position < 0
        flagged = tl.load(error_ptr + row * 0) != 0
        tl.store(error_ptr + row * 0, ERROR_UNOWNED, mask=unowned & (slot != 0) & ~flagged)
        position = tl.maximum(position, 0)
        tl.store(positions_ptr + row, position, mask=inside & unowned)
    else:
        owner = row // tl.maximum(width, 1)
        owned = owner < batch_size  # an idle step has no requests
        seq = tl.load(seq_ptr + owner.to(tl.int64) * stride_seq, mask=owned, other=0).to(tl.int64)
        req = tl.load(req_ptr + owner.to(tl.int64) * stride_req, mask=owned, other=0).to(tl.int64)
        first = seq + offset
        if GROWS:
            first += step
        # The length itself is tested, too: the smallest int64 minus one is a large number.
        bad = (seq < 0) | (seq > max_seq_len) | (first < 0) | (first + width > max_seq_len)
        bad |= (req < 0) | (req >= num_requests)
        live = owned & ~bad & (req != 0)
        tl.store(error_ptr + row * 0, ERROR_LENGTHS, mask=owned & bad & (req != 0))
        req = tl.where(live, req, 0)
        position = tl.where(live, first + (row - owner * width), 0).to(tl.int32)
        tl.store(req_per_row_ptr + out_row, req, mask=inside)
        tl.store(positions_ptr + out_row, position, mask=inside)
    length = position + 1
    slot = tl.where(live, slot, 0)

    # The window, newest first.
    back = tl.arange(0, SWA_SIZE)[None, :]
    window_position = position[:, None] - back
    seen = inside[:, None] & (window_position >= 0)
    if WINDOW < SWA_SIZE:
        seen &= back < WINDOW
    window_slot = tl.load(req_to_token_ptr + ((req * row_stride)[:, None] + window_position), mask=seen, other=-1)
    window, window_outside = _window_slot(window_slot, full_to_swa_ptr, num_slots)
    swa_out, out_outside = _window_slot(slot, full_to_swa_ptr, num_slots)
    if HAS_DECODE_PLAN:
        if HAS_C4:
            own_slot, own_outside = _swa_slot(
                req_to_token_ptr, row_stride, full_to_swa_ptr, num_slots, req, position, inside
            )
            previous_slot, previous_outside = _swa_slot(
                req_to_token_ptr, row_stride, full_to_swa_ptr, num_slots, req, tl.maximum(position - 4, 0), inside
            )

    if not PER_REQUEST:
        _store_pages(
            out_row,
            inside,
            req,
            length,
            req_to_token_ptr,
            row_stride,
            num_slots,
            error_ptr,
            page_table_ptr,
            page_columns,
            c128_page_indices_ptr,
            c128_columns,
            PAGE_SIZE,
            HAS_C128,
            PAGES,
        )

    tl.store(seq_lens_causal_ptr + out_row, length, mask=inside)
    tl.store(raw_out_ptr + out_row, slot, mask=inside)
    tl.store(swa_lengths_ptr + out_row, tl.minimum(length, WINDOW), mask=inside)
    if HAS_C4:
        tl.store(c4_lengths_ptr + out_row, length // 4, mask=inside)
        tl.store(c4_sparse_lengths_ptr + out_row, tl.minimum(length // 4, TOPK), mask=inside)
        tl.store(c4_out_ptr + out_row, tl.where(length % 4 == 0, slot // 4, 0), mask=inside)
        for begin in tl.static_range(0, TOPK, TOPK_BLOCK):
            column = begin + tl.arange(0, TOPK_BLOCK)[None, :]
            ptr = c4_sparse_page_indices_ptr + (out_row * TOPK)[:, None] + column
            tl.store(ptr, tl.full([ROWS, TOPK_BLOCK], -1, tl.int32), mask=inside[:, None] & (column < TOPK))
    if HAS_C128:
        tl.store(c128_lengths_ptr + out_row, length // 128, mask=inside)
        tl.store(c128_out_ptr + out_row, tl.where(length % 128 == 0, slot // 128, 0), mask=inside)
    if HAS_DECODE_PLAN:
        if HAS_C4:
            own = _c4_state_loc(own_slot, SWA_PAGE, C4_RING)
            previous = _c4_state_loc(previous_slot, SWA_PAGE, C4_RING)
            _store_words(c4_plan_ptr, out_row, inside, length, own, previous // 4, own // 4)
            # A window narrower than the read window does not hold these.
            tl.store(error_ptr + row * 0, ERROR_SLOT, mask=own_outside | previous_outside)
        if HAS_C128:
            req_32 = req.to(tl.int32)
            own = req_32 * C128_RING + position % C128_RING
            previous = req_32 * C128_RING + tl.maximum(position - 128, 0) % C128_RING
            _store_words(c128_plan_ptr, out_row, inside, length, own, previous // 128, own // 128)
    tl.store(swa_out_ptr + out_row, swa_out, mask=inside)
    tl.store(
        swa_page_indices_ptr + (out_row * SWA_COLUMNS)[:, None] + back,
        tl.where(seen, window, -1),
        mask=inside[:, None] & (back < SWA_COLUMNS),
    )
    tl.store(error_ptr + row * 0, ERROR_SLOT, mask=out_outside)
    tl.store(error_ptr + window_slot * 0, ERROR_SLOT, mask=window_outside)


_launch = Launcher(_build_metadata_kernel)


def bind(*, steps: Any, tables: Any, geom: Any, max_seq_len: int) -> Callable[[Any], None]:
    """A function that fills `steps` (`dsv4_backend.metadata_buffers.StepBuffers`) for a batch, in one launch or two.

    Everything but the batch is looked at here, once.
    """
    first = steps.metas[0]
    has_c4, has_c128 = first.c4_lengths is not None, first.c128_lengths is not None
    per_request = first.table_rows is not None
    decode_plans = first.plans if steps.plan is None else None
    planned = steps.plan is not None and (steps.ragged or steps.plan.ratios)
    fixed = FixedArgs(
        (
            tables.req_to_token,
            tables.req_to_token.stride(0),
            tables.num_requests,
            max_seq_len,
            tables.full_to_swa,
            tables.num_slots,
            *_outputs(first, decode_plans, steps.error),
        )
    )
    name = _launch.name(
        (
            geom,
            first.index_topk,
            has_c4,
            has_c128,
            decode_plans is None,
            steps.ragged,
            per_request,
            steps.grows,
            tables.req_to_token.stride(0) > INT32_MAX,
        )
    )
    device = steps.error.device
    offset = 0 if steps.seq_before else -steps.width

    def constants() -> dict[str, Any]:
        return dict(
            PAGE_SIZE=geom.page_size,
            SWA_PAGE=geom.swa_page_size,
            WINDOW=geom.window,
            SWA_COLUMNS=first.swa_page_indices.shape[1],
            SWA_SIZE=triton.next_power_of_2(first.swa_page_indices.shape[1]),
            TOPK=first.index_topk,
            TOPK_BLOCK=min(1024, triton.next_power_of_2(first.index_topk)),
            C4_RING=geom.c4_ring,
            C128_RING=geom.c128_ring,
            HAS_C4=has_c4,
            HAS_C128=has_c128,
            HAS_DECODE_PLAN=decode_plans is not None,
            FROM_ROWS=steps.ragged,
            PER_REQUEST=per_request,
            GROWS=steps.grows,
            ROWS=ROWS,
            PAGES=PAGES,
            num_warps=1,
            **pdl_options(device),
        )

    def build(batch: Any) -> None:
        seq, req, loc = batch.seq_lens, batch.req_pool_indices, batch.out_cache_loc
        idle = steps.width == 0 and not steps.ragged
        batch_size = 0 if idle else req.shape[0]
        num_batch_rows = 0 if idle else loc.shape[0] // steps.slots_per_row
        if planned:
            extend = batch.extend_lens if steps.ragged else steps.width_word.expand(batch_size)
            rows = (first.req_pool_indices_per_row, first.positions, first.table_rows) if steps.ragged else ()
            plan_prefill(
                seq_lens=seq,
                extend_lens=extend,
                req_pool_indices=req,
                tables=tables,
                geom=geom,
                num_rows=steps.num_rows,
                out=steps.plan,
                layout=RowLayout(num_batch_rows, steps.max_extend, max_seq_len, steps.seq_before, *rows),
            )
        programs = -(-steps.num_rows // ROWS) + (-(-(batch_size + 1) // ROWS) if per_request else 0)
        if programs == 0:
            return
        strides = seq.stride(0), req.stride(0), loc.stride(0)
        _launch(
            device,
            (seq.dtype, req.dtype, loc.dtype, *(stride > INT32_MAX for stride in strides), name),
            (programs, len(steps.metas)),
            (
                seq,
                strides[0],
                req,
                strides[1],
                loc,
                strides[2],
                batch_size,
                steps.num_rows,
                steps.bucket_rows,
                num_batch_rows,
                steps.width,
                offset,
                steps.slots_per_row,
            ),
            constants,
            fixed,
        )

    return build


def _outputs(meta: Any, decode_plans: Any, error: torch.Tensor) -> list[Any]:
    """The kernel's output arguments. Those of a ratio left out are never touched; `error` stands in for them."""
    c4, c128 = (decode_plans.c4, decode_plans.c128) if decode_plans is not None else (None, None)
    outputs = (
        error,
        meta.req_pool_indices_per_row,
        meta.positions,
        meta.seq_lens_causal,
        meta.raw_out_cache_loc,
        meta.swa_out_cache_loc,
        meta.page_table,
        meta.page_table.shape[1],
        meta.swa_lengths,
        meta.swa_page_indices,
        meta.c4_lengths,
        meta.c4_sparse_lengths,
        meta.c4_sparse_page_indices,
        meta.c4_out_loc,
        c4.words if c4 else None,
        meta.c128_lengths,
        meta.c128_page_indices,
        0 if meta.c128_page_indices is None else meta.c128_page_indices.shape[1],
        meta.c128_out_loc,
        c128.words if c128 else None,
    )
    return [error if output is None else output for output in outputs]
