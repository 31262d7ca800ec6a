"""The planners in plain torch: the rules of docs/plans.md, those of SGLang 0.5.23."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4_backend.geometry import OVERLAP_ROWS, READ_WINDOW, CacheGeometry
from dsv4_backend.plans import (
    ERROR_LENGTHS,
    ERROR_SLOT,
    INVALID_PACKED_WORDS,
    INVALID_WIDE_WORDS,
    INVALID_WRITE_WORDS,
    PACKED_MAX_ROWS,
    DecodePlans,
    PrefillPlan,
)
from dsv4_backend.tables import RequestTables


class Rows(NamedTuple):
    """The rows of a batch, or a selection of them: int64 [n] each."""

    ragged_id: torch.Tensor  # place in the batch
    j: torch.Tensor  # place among the rows of the request
    position: torch.Tensor
    seq_len: torch.Tensor  # length of the request once the batch is done
    req: torch.Tensor  # row of req_to_token

    def select(self, mask: torch.Tensor) -> Rows:
        return Rows(*(column[mask] for column in self))


def plan_prefill(
    *,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    tables: RequestTables,
    geom: CacheGeometry,
    num_rows: int,
    out: PrefillPlan,
) -> None:
    """Fills `out`; arguments as in `dsv4_backend.planner.plan_prefill`, all tensors on the tables' device."""
    seq, extend, req = seq_lens.long(), extend_lens.long(), req_pool_indices.long()
    bad = (extend < 0) | (seq < extend) | (seq > tables.max_seq_len)
    extend = extend.where(~bad, 0)
    bad_req = (req < 0) | (req >= tables.num_requests)
    req = req.where(~bad_req, 0)
    too_many = extend.sum() > num_rows
    if bad.any() or too_many or (bad_req & (extend > 0)).any():
        out.error.fill_(ERROR_LENGTHS)
    if too_many:
        extend = torch.zeros_like(extend)

    plan_rows(_batch_rows(seq, extend, req), extend, tables, geom, out)


def plan_rows(rows: Rows, extend: torch.Tensor, tables: RequestTables, geom: CacheGeometry, out: PrefillPlan) -> None:
    """Fills `out` for rows in ascending order; `extend`, int64 [B], says how many of them each request has."""
    counts = {4: (0, 0), 128: (0, 0)}
    for plan in out.lists():
        compress = _compress_rows(rows, plan.ratio, tables, geom, out.error)
        write = _write_rows(rows, plan.ratio, tables, geom, out.error)
        counts[plan.ratio] = (len(compress), len(write))
        _store_compress(plan.compress, compress)
        _store(plan.write, write, INVALID_WRITE_WORDS)
    smallest, largest = (int(extend.min()), int(extend.max())) if len(extend) else (0, 0)
    header = [smallest, largest, len(rows.position), int(smallest == largest), *counts[4], *counts[128]]
    out.header.copy_(torch.tensor(header, dtype=torch.int32))


def plan_decode(
    *,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    tables: RequestTables,
    geom: CacheGeometry,
    out: DecodePlans,
) -> None:
    """Fills `out`; arguments as in `dsv4_backend.planner.plan_decode`, all tensors on the tables' device."""
    seq, req = seq_lens.long(), req_pool_indices.long()
    bad = (seq < 1) | (seq > tables.max_seq_len) | (req < 0) | (req >= tables.num_requests)
    seq, req = seq.where(~bad, 1), req.where(~bad, 0)
    if bad.any():
        out.error.fill_(ERROR_LENGTHS)
    for plan in out.lists():
        write_loc = _state_loc(plan.ratio, req, seq - 1, tables, geom, out.error)
        read_page_1 = geom.state_page(plan.ratio, write_loc)
        read_page_0 = _previous_page(plan.ratio, req, seq - 1, tables, geom, out.error)
        _store(plan.rows, torch.stack((seq, write_loc, read_page_0, read_page_1), dim=1))


def _batch_rows(seq: torch.Tensor, extend: torch.Tensor, req: torch.Tensor) -> Rows:
    end = extend.cumsum(0)
    ragged_id = torch.arange(int(extend.sum()), device=extend.device)
    owner = torch.searchsorted(end, ragged_id, right=True)
    j = ragged_id - (end - extend)[owner]
    return Rows(ragged_id, j, (seq - extend)[owner] + j, seq[owner], req[owner])


def _compress_rows(
    rows: Rows, ratio: int, tables: RequestTables, geom: CacheGeometry, error: torch.Tensor
) -> torch.Tensor:
    """int64 [n, 5]: a row for each token that is the last of its group."""
    rows = rows.select((rows.position + 1) % ratio == 0)
    window = READ_WINDOW[ratio]
    buffer_len = window - (rows.j + 1).clamp(max=window)
    # State is looked up only for rows that read it: the others may have no resident slot.
    reads = buffer_len > 0
    reading = rows.select(reads)
    read_page_0, read_page_1 = torch.full_like(buffer_len, -1), torch.full_like(buffer_len, -1)
    read_page_0[reads] = _previous_page(ratio, reading.req, reading.position, tables, geom, error)
    loc = _state_loc(ratio, reading.req, reading.position, tables, geom, error)
    read_page_1[reads] = geom.state_page(ratio, loc)
    return torch.stack((rows.position + 1, rows.ragged_id, buffer_len, read_page_0, read_page_1), dim=1)


def _write_rows(
    rows: Rows, ratio: int, tables: RequestTables, geom: CacheGeometry, error: torch.Tensor
) -> torch.Tensor:
    """int64 [n, 2]: a row for each token that a later batch may read as state."""
    # The open group, for ratio 4 with the closed one that it overlaps; and what rejected drafts may bring back.
    first_open = rows.seq_len // ratio * ratio - (OVERLAP_ROWS if ratio == 4 else 0)
    keep = rows.position >= torch.minimum(first_open, rows.seq_len - geom.write_pad(ratio))
    if ratio == 4:
        # A request that shares this page as its prefix goes on from the end of the page.
        keep |= rows.position % geom.swa_page_size >= geom.swa_page_size - OVERLAP_ROWS
    rows = rows.select(keep)
    return torch.stack((rows.ragged_id, _state_loc(ratio, rows.req, rows.position, tables, geom, error)), dim=1)


def _previous_page(
    ratio: int,
    req: torch.Tensor,
    position: torch.Tensor,
    tables: RequestTables,
    geom: CacheGeometry,
    error: torch.Tensor,
) -> torch.Tensor:
    """State page of the group before the one that `position` belongs to."""
    loc = _state_loc(ratio, req, (position - ratio).clamp(min=0), tables, geom, error)
    return geom.state_page(ratio, loc)


def _state_loc(
    ratio: int,
    req: torch.Tensor,
    position: torch.Tensor,
    tables: RequestTables,
    geom: CacheGeometry,
    error: torch.Tensor,
) -> torch.Tensor:
    swa_slot = position
    if ratio == 4:
        swa_slot = window_slot(tables.req_to_token[req, position].long(), tables, error)
    return geom.state_loc(ratio, swa_slot, req, position)


def window_slot(slot: torch.Tensor, tables: RequestTables, error: torch.Tensor) -> torch.Tensor:
    """Window slots of int64 full slots: -1 for -1, and 0 for those that the table does not hold, which are flagged."""
    last = tables.num_slots - 1
    beyond = (slot < -1) | (slot > last)
    if beyond.any():
        error.fill_(ERROR_SLOT)
    return tables.full_to_swa[slot.clamp(0, last)].where(~beyond, 0).where(slot != -1, -1)


def _store_compress(out: torch.Tensor, rows: torch.Tensor) -> None:
    if len(out) > PACKED_MAX_ROWS:
        _store(out, rows, INVALID_WIDE_WORDS)
        return
    seq_len, ragged_id, buffer_len, read_page_0, read_page_1 = rows.unbind(dim=1)
    packed = torch.stack((seq_len, ragged_id + (buffer_len << 16), read_page_0, read_page_1), dim=1)
    _store(out, packed, INVALID_PACKED_WORDS)


def _store(out: torch.Tensor, rows: torch.Tensor, invalid: tuple[int, ...] = ()) -> None:
    """Writes `rows`, int64 [n, words], as 32-bit words to `out`, uint8 [num_rows, 4 * words]; the rest is `invalid`."""
    words = out.view(torch.int32)
    words[: len(rows)] = rows.int()
    if len(rows) < len(words):
        words[len(rows) :] = torch.tensor(invalid, dtype=torch.int32, device=out.device)
