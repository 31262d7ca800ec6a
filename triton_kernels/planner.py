"""Planner launchers, and the decode kernel. The prefill kernels are in `planner_prefill` and `planner_chunked`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsv4_triton_kernels.common import Launcher, pdl_options
from dsv4_triton_kernels.planner_chunked import _plan_prefill_chunked_kernel
from dsv4_triton_kernels.planner_prefill import _plan_prefill_kernel
from dsv4_triton_kernels.planner_rows import ERROR_LENGTHS, ERROR_SLOT, _c4_state_loc, _store_words, _swa_slot

PACKED_MAX_ROWS = 65_536
INT32_MAX = 2**31 - 1


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
_launch_chunked = Launcher(_plan_prefill_chunked_kernel)
_launch_decode = Launcher(_plan_decode_kernel)

# Largest batch, most rows, and what serves them (see the kernel). The first line that serves is taken; few lines, so
# that a handful of compilations serves every batch. One warp needs no barriers; many rows want wider programs.
PREFILL_TIERS = (
    (32, 65_536, dict(CHUNK=32, BLOCK=32, num_warps=1)),
    (128, 4096, dict(CHUNK=128, BLOCK=16, num_warps=1)),
    (256, 4096, dict(CHUNK=256, BLOCK=32, num_warps=1)),
    (128, 2**31, dict(CHUNK=128, BLOCK=128, num_warps=4)),
    (512, 2**31, dict(CHUNK=512, BLOCK=128, num_warps=4)),
    (1024, 2**31, dict(CHUNK=1024, BLOCK=128, num_warps=4)),
)
# Largest batch, and how the chunked kernel serves it. Each program reads all lengths, so there are at most about as
# many as the chip has multiprocessors.
CHUNKED_TIERS = (
    (8192, dict(CHUNK=1024, SEARCH=512, BLOCK=512, num_warps=8)),
    (2**31, dict(CHUNK=2048, SEARCH=1024, BLOCK=1024, num_warps=16)),
)
CHUNKED_PROGRAMS = 128
DECODE_BLOCK = 32


class RowLayout(NamedTuple):
    """What a plan that is part of metadata reads and writes besides: see LAYOUT in the kernels.

    Args:
        num_batch_rows: rows that the batch has slots for; more make all of it padding.
        extend_limit: most rows of a request.
        max_seq_len: longest length of a request, at most the columns of the table.
        seq_before: `seq_lens` come without the rows of the batch.
        row_req: int64 [num_rows], written: request of each row, 0 for padding; None: not wanted, as for the others.
        row_position: int32 [num_rows], written.
        row_owner: int32 [num_rows], written: place of the request in the batch, its size for padding.
    """

    num_batch_rows: int
    extend_limit: int
    max_seq_len: int
    seq_before: bool
    row_req: torch.Tensor | None = None
    row_position: torch.Tensor | None = None
    row_owner: torch.Tensor | None = None


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
    layout: RowLayout | None = None,
) -> None:
    """One launch that fills `out`; arguments as in `dsv4_backend.planner.plan_prefill`, checked there.

    With `layout`, request 0 is padding, and whose each row is may be written, too. `force_uniform` overrides the
    uniform-or-ragged decision: a test shows with it that the decision matters.
    """
    batch_size = seq_lens.shape[0]
    req_to_token, c4, c128 = tables.req_to_token, out.c4, out.c128
    row_stride = req_to_token.stride(0)
    wide = num_rows > PACKED_MAX_ROWS
    sizes = next((sizes for most, rows, sizes in PREFILL_TIERS if batch_size <= most and num_rows <= rows), None)
    chunked = sizes is None
    if sizes is None:
        sizes = next(sizes for most, sizes in CHUNKED_TIERS if batch_size <= most)
        dense = seq_lens.stride(0) == extend_lens.stride(0) == 1
        aligned = seq_lens.data_ptr() % 16 == extend_lens.data_ptr() % 16 == 0
        sizes = dict(sizes, DENSE=dense and aligned)
    key = (
        *sizes.values(),
        seq_lens.dtype,
        extend_lens.dtype,
        req_pool_indices.dtype,
        geom,
        c4 is None,
        c128 is None,
        wide,
        force_uniform,
        layout is not None and (layout.seq_before, layout.row_req is None, layout.row_owner is None),
        *(s > INT32_MAX for s in (row_stride, seq_lens.stride(0), extend_lens.stride(0), req_pool_indices.stride(0))),
    )
    lengths = (
        seq_lens,
        seq_lens.stride(0),
        extend_lens,
        extend_lens.stride(0),
        req_pool_indices,
        req_pool_indices.stride(0),
        batch_size,
        num_rows,
    )
    rest = (
        req_to_token,
        row_stride,
        tables.num_requests,
        tables.max_seq_len if layout is None else layout.max_seq_len,
        tables.full_to_swa,
        tables.num_slots,
        out.header,
        out.error,
        # Absent lists are never touched; the header stands in for their pointers.
        c4.compress_words if c4 else out.header,
        c4.write_words if c4 else out.header,
        c128.compress_words if c128 else out.header,
        c128.write_words if c128 else out.header,
        *((None,) * 5 if layout is None else (*layout[:2], *layout[4:])),
    )

    def constants() -> dict[str, Any]:
        return dict(
            SWA_PAGE=geom.swa_page_size,
            C4_RING=geom.c4_ring,
            C4_WRITE_PAD=geom.write_pad(4),
            C128_RING=geom.c128_ring,
            C128_WRITE_PAD=geom.write_pad(128),
            HAS_C4=c4 is not None,
            HAS_C128=c128 is not None,
            WIDE=wide,
            LAYOUT=layout is not None,
            SEQ_BEFORE=layout is not None and layout.seq_before,
            FORCE_UNIFORM=force_uniform,
            **sizes,
            **pdl_options(out.device),
        )

    blocks = max(1, -(-num_rows // sizes["BLOCK"]))
    if chunked:
        blocks_each = -(-blocks // CHUNKED_PROGRAMS)
        _launch_chunked(out.device, key, (-(-blocks // blocks_each),), (*lengths, blocks_each, *rest), constants)
    else:
        _launch_prefill(out.device, key, (blocks,), (*lengths, *rest), constants)


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
            *(s > INT32_MAX for s in (row_stride, seq_lens.stride(0), req_pool_indices.stride(0))),
        ),
        (-(-batch_size // DECODE_BLOCK),),
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
