"""The metadata in plain torch: the rules of docs/metadata.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from dsv4_backend.batch import ForwardMode, RawBatch
from dsv4_backend.geometry import CacheGeometry, trunc_div
from dsv4_backend.metadata import AttnMetadata
from dsv4_backend.metadata_buffers import StepBuffers
from dsv4_backend.plans import ERROR_LENGTHS, ERROR_SLOT, ERROR_UNOWNED, DecodePlans, PrefillPlan
from dsv4_backend.reference import planner
from dsv4_backend.tables import RequestTables


class Requests(NamedTuple):
    """The requests of a step: int64 [B] each. Those that are padding, or bad, have request 0 and no planned rows."""

    req: torch.Tensor
    first: torch.Tensor  # position of the first row
    rows: torch.Tensor  # rows in the batch
    planned: torch.Tensor  # rows that the plans see: `rows`, or 0


class Rows(NamedTuple):
    """The rows of a step: int64 [T] each, padding included."""

    req: torch.Tensor
    position: torch.Tensor
    slot: torch.Tensor
    owner: torch.Tensor  # place of the row's request in the batch; B for padding behind the last one


def bind(
    *, steps: StepBuffers, tables: RequestTables, geom: CacheGeometry, max_seq_len: int
) -> Callable[[RawBatch], None]:
    """A function that fills `steps` for a batch that was checked; `max_seq_len` is the longest length it accepts."""
    return partial(_build, steps, tables, geom, max_seq_len)


def _build(steps: StepBuffers, tables: RequestTables, geom: CacheGeometry, max_seq_len: int, batch: RawBatch) -> None:
    for step, meta in enumerate(steps.metas):
        requests = _requests(batch, step, steps, tables, max_seq_len)
        rows = _rows(batch, step, steps, requests)
        _store_rows(meta, rows, tables, geom, steps.error)
        _store_tables(meta, requests, rows, tables, geom, steps.error)
        if isinstance(meta.plans, DecodePlans):
            planner.plan_decode(
                seq_lens=rows.position + 1, req_pool_indices=rows.req, tables=tables, geom=geom, out=meta.plans
            )
        elif isinstance(meta.plans, PrefillPlan):
            _plan_prefill(meta.plans, requests, rows, tables, geom)


def _requests(batch: RawBatch, step: int, steps: StepBuffers, tables: RequestTables, max_seq_len: int) -> Requests:
    req, seq = batch.req_pool_indices.long(), batch.seq_lens.long()
    if batch.mode is ForwardMode.IDLE:
        req = seq = req[:0]
    if batch.extend_lens is not None and batch.mode is not ForwardMode.IDLE:
        count = batch.extend_lens.long()
    else:
        count = torch.full_like(seq, steps.width)
    # A count that makes no sense leaves nobody's place in the batch known: then all of it is padding.
    slots = len(batch.out_cache_loc)
    lost = bool(((count < 0) | (count > steps.max_extend)).any()) or (steps.ragged and int(count.sum()) > slots)
    if lost:
        count = torch.zeros_like(count)
    # Tested first, so that nothing below overflows.
    bad = (seq < 0) | (seq > max_seq_len)
    seq = seq.where(~bad, 0)
    first = seq if steps.seq_before else seq - count
    if steps.grows:
        first = first + step
    bad |= (first < 0) | (first + count > max_seq_len) | ((count > 0) & ((req < 0) | (req >= tables.num_requests)))
    if lost or (bad & (req != 0)).any():
        steps.error.fill_(ERROR_LENGTHS)
    live = ~bad & (req > 0) & (req < tables.num_requests)
    return Requests(req.where(live, 0), first, count, count.where(live, 0))


def _rows(batch: RawBatch, step: int, steps: StepBuffers, requests: Requests) -> Rows:
    size, total = len(requests.req), int(requests.rows.sum())
    owner = torch.full((steps.num_rows,), size, device=requests.req.device)
    owner[:total] = torch.repeat_interleave(torch.arange(size, device=owner.device), requests.rows)
    begin = requests.rows.cumsum(0) - requests.rows
    j = torch.arange(total, device=owner.device) - begin[owner[:total]]
    req, position, slot = torch.zeros_like(owner), torch.zeros_like(owner), torch.zeros_like(owner)
    req[:total] = requests.req[owner[:total]]
    position[:total] = (requests.first[owner[:total]] + j).where(req[:total] > 0, 0)
    idle = batch.mode is ForwardMode.IDLE
    slots = batch.out_cache_loc[: 0 if idle else None].long()[step :: steps.slots_per_row]
    if slots[total:].any() and not steps.error.any():
        steps.error.fill_(ERROR_UNOWNED)
    slot[:total] = slots[:total].where(req[:total] > 0, 0)
    return Rows(req, position, slot, owner)


def _store_rows(
    meta: AttnMetadata, rows: Rows, tables: RequestTables, geom: CacheGeometry, error: torch.Tensor
) -> None:
    length = rows.position + 1
    meta.req_pool_indices_per_row.copy_(rows.req)
    meta.positions.copy_(rows.position)
    meta.seq_lens_causal.copy_(length)
    meta.raw_out_cache_loc.copy_(rows.slot)
    meta.swa_out_cache_loc.copy_(planner.window_slot(rows.slot, tables, error))
    meta.swa_lengths.copy_(length.clamp(max=geom.window))
    back = torch.arange(meta.swa_page_indices.shape[1], device=length.device)
    position = rows.position[:, None] - back
    seen = (position >= 0) & (back < geom.window)
    slot = tables.req_to_token[rows.req[:, None], position.clamp(min=0)].long().where(seen, -1)
    meta.swa_page_indices.copy_(planner.window_slot(slot, tables, error))
    for ratio, lengths, out_loc in ((4, meta.c4_lengths, meta.c4_out_loc), (128, meta.c128_lengths, meta.c128_out_loc)):
        if lengths is not None and out_loc is not None:
            lengths.copy_(length // ratio)
            out_loc.copy_(trunc_div(rows.slot, ratio).where(length % ratio == 0, 0))
    if meta.c4_sparse_lengths is not None and meta.c4_sparse_page_indices is not None:
        meta.c4_sparse_lengths.copy_((length // 4).clamp(max=meta.index_topk))
        meta.c4_sparse_page_indices.fill_(-1)


def _store_tables(
    meta: AttnMetadata,
    requests: Requests,
    rows: Rows,
    tables: RequestTables,
    geom: CacheGeometry,
    error: torch.Tensor,
) -> None:
    req, length = rows.req, rows.position + 1
    if meta.table_rows is not None:
        size = len(requests.req)
        meta.table_rows.copy_(rows.owner.where(rows.req > 0, size))
        # One more for padding: request 0, length 1.
        live = requests.req > 0
        length = (requests.first + requests.rows).where(live, 1).clamp(min=1)
        req, length = torch.cat((requests.req, req.new_zeros(1))), torch.cat((length, length.new_ones(1)))
    pages = int((-(-length // geom.page_size)).max()) if len(length) else 0
    column = torch.arange(pages, device=length.device)
    live = column * geom.page_size < length[:, None]
    slot = tables.req_to_token[req[:, None], (column * geom.page_size).where(live, 0)].long()
    page = trunc_div(_inside(slot, live, tables, error), geom.page_size)
    meta.page_table[: len(req), :pages].masked_scatter_(live, page[live].int())
    if meta.c128_page_indices is None:
        return
    each = geom.page_size // 128
    entry = torch.arange(pages * each, device=length.device)
    value = page.repeat_interleave(each, dim=1) * each + entry % each
    closed = entry < (length // 128)[:, None]
    wanted = live.repeat_interleave(each, dim=1)
    meta.c128_page_indices[: len(req), : pages * each].masked_scatter_(wanted, value.where(closed, -1)[wanted].int())


def _plan_prefill(
    plans: PrefillPlan, requests: Requests, rows: Rows, tables: RequestTables, geom: CacheGeometry
) -> None:
    ragged_id = (rows.req > 0).nonzero()[:, 0]
    owner = rows.owner[ragged_id]
    position = rows.position[ragged_id]
    seq_len = (requests.first + requests.rows)[owner]
    planned = planner.Rows(ragged_id, position - requests.first[owner], position, seq_len, rows.req[ragged_id])
    planner.plan_rows(planned, requests.planned, tables, geom, plans)


def _inside(slot: torch.Tensor, live: torch.Tensor, tables: RequestTables, error: torch.Tensor) -> torch.Tensor:
    """Slots, 0 for those beyond full_to_swa, which are flagged."""
    beyond = live & ((slot < -1) | (slot >= tables.num_slots))
    if beyond.any():
        error.fill_(ERROR_SLOT)
    return slot.where(~beyond, 0)
