"""The indexer in plain torch: queries, scores of paged keys, and the selection of the best entries."""

from __future__ import annotations

import torch
from einops import rearrange, repeat

from dsv4_backend.layouts import EntryPool
from dsv4_backend.reference import kv_store

_LOWEST, _INFINITY = -(2**31), 0x7F800000


def index_query(
    *,
    q: torch.Tensor,
    head_weights: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    keys: EntryPool,
    values: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Fills `values` and `weights`; arguments as in `dsv4_backend.indexer.index_query`."""
    num_rows, heads, dim = q.shape
    each = repeat(positions, "row -> (row head)", head=heads)
    vectors = kv_store.rotate(rearrange(q.float(), "row head channel -> (row head) channel"), each, rope)
    if keys.layout.hadamard:
        vectors = kv_store.hadamard(vectors)
    scaled = head_weights.float() * (dim**-0.5 * heads**-0.5)
    if keys.layout.format == "fp8":
        scale = vectors.abs().amax(dim=-1, keepdim=True).clamp(min=kv_store.MIN_AMAX) / kv_store.E4M3_MAX
        vectors = kv_store.to_e4m3(vectors / scale)
        scaled = scaled * scale.view(num_rows, heads)
    values.copy_(vectors.view(values.shape))
    weights.copy_(scaled)


def index_scores(
    *,
    values: torch.Tensor,
    weights: torch.Tensor,
    keys: EntryPool,
    page_table: torch.Tensor,
    table_rows: torch.Tensor | None,
    lengths: torch.Tensor,
    num_pages: int,
    out: torch.Tensor,
) -> None:
    """Scores the entries of each row, in float64 until the end; arguments as in `dsv4_backend.indexer.index_scores`.

    `num_pages`: pages of the pool whose slots int32 can name.
    """
    queries = kv_store.from_e4m3(values) if keys.layout.format == "fp8" else values
    for row, length in enumerate(lengths.clamp(0, out.shape[1]).tolist()):
        entry = torch.arange(length, device=out.device)
        table = _tables(page_table, None if table_rows is None else table_rows[row : row + 1], row)
        slot = entry_slots(entry[None], table, keys.layout.page_entries, num_pages).squeeze(0)
        vectors = kv_store.load_entries(keys, slot.clamp(min=0)).double()
        products = (queries[row].double() @ vectors.T).relu()
        score = (weights[row].double()[:, None] * products).sum(dim=0)
        out[row, :length] = score.where(slot >= 0, -torch.inf)


def select_topk(
    *,
    scores: torch.Tensor | None,
    lengths: torch.Tensor,
    width: int,
    page_table: torch.Tensor,
    table_rows: torch.Tensor | None,
    page_entries: int,
    num_pages: int,
    out: torch.Tensor,
    raw: torch.Tensor | None,
) -> None:
    """Selects by a stable sort; arguments as in `dsv4_backend.indexer.select_topk`.

    `scores` may be None where `width`, its number of columns, is at most k.
    """
    num_rows, k = out.shape
    length = lengths.clamp(0, width)[:, None]
    column = torch.arange(k, device=out.device)
    if scores is None:
        found = column.expand(num_rows, k)
    else:
        order = order_keys(scores).masked_fill(torch.arange(width, device=out.device) >= length, _LOWEST - 1)
        found = order.sort(dim=1, descending=True, stable=True).indices[:, :k]
        # Rows that select everything do not depend on what the scores are.
        found = torch.where(length <= k, column[: found.shape[1]], found)
        found = torch.nn.functional.pad(found, (0, k - found.shape[1]))
    found = found.masked_fill(column >= length, width).sort(dim=1).values
    chosen = column < length
    slots = entry_slots(found, _tables(page_table, table_rows), page_entries, num_pages)
    out.copy_(slots.masked_fill(~chosen, -1))
    if raw is not None:
        raw.copy_(found.masked_fill(~chosen, -1))


def order_keys(scores: torch.Tensor) -> torch.Tensor:
    """int64 in the order of float32 scores: zeros of both signs are equal, any NaN is below minus infinity."""
    bits = scores.contiguous().view(torch.int32)
    size = (bits & 0x7FFFFFFF).long()
    return torch.where(bits < 0, -size, size).masked_fill(size > _INFINITY, _LOWEST)


def entry_slots(entry: torch.Tensor, table: torch.Tensor, page_entries: int, num_pages: int) -> torch.Tensor:
    """int64: slots of entries, [T, n], of rows whose pages are `table`, [T, P]; -1 where there is no such page."""
    column = entry // page_entries
    listed = column < table.shape[1]
    if not table.shape[1]:
        return torch.full_like(entry, -1)
    page = table.gather(1, column.where(listed, 0)).long()
    present = listed & (page >= 0) & (page < num_pages)
    return (page * page_entries + entry % page_entries).where(present, -1)


def _tables(page_table: torch.Tensor, table_rows: torch.Tensor | None, row: int | None = None) -> torch.Tensor:
    """The pages of every row, or of one of them; -1 in rows that name a table that there is not."""
    if table_rows is None:
        return page_table if row is None else page_table[row : row + 1]
    if not len(page_table):
        return page_table.new_full((len(table_rows), page_table.shape[1]), -1)
    known = (table_rows >= 0) & (table_rows < len(page_table))
    return page_table[table_rows.where(known, 0).long()].where(known[:, None], -1)
