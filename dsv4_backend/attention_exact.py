"""What attention and the indexer must give for the entries that a cache holds, in float64, row by row.

Shares nothing with `sparse_attention` and `index_scores` but how entries are read back.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from einops import einsum, rearrange

from dsv4_backend.config import DSV4Config
from dsv4_backend.indexer import IndexQuery
from dsv4_backend.layouts import EntryPool
from dsv4_backend.reference.kv_store import from_e4m3, load_entries

_ROWS = 64  # that are gathered at once


def exact_context(
    query: torch.Tensor,
    lists: list[tuple[EntryPool, torch.Tensor, torch.Tensor]],
    sink: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
) -> torch.Tensor:
    """float64 [n, heads, head_dim]: what each head reads, turned back by the row's position.

    Args:
        query: [n, heads, head_dim].
        lists: pool, slots [n, columns] and lengths [n] of each kind of entry.
        sink: [heads].
        positions: [n].
        rope: float32 [positions, rope_dim].
    """
    read = [(_all_entries(pool), slots, lengths) for pool, slots, lengths in lists]
    context = torch.cat([_context(query[rows], read, rows, sink) for rows in _chunks(len(query))])
    split = context.shape[-1] - rope.shape[1]
    table = torch.view_as_complex(rope.double()[positions.long()].unflatten(-1, (-1, 2)).contiguous())
    turning = torch.view_as_complex(context[..., split:].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(turning * table.conj()[:, None]).flatten(-2)
    return torch.cat((context[..., :split], turned), dim=-1)


def _all_entries(pool: EntryPool) -> torch.Tensor:
    """float32 [slots, channels]: a pool as a reader sees it."""
    return load_entries(pool, torch.arange(pool.num_slots, device=pool.device))


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, min(count, start + _ROWS)) for start in range(0, count, _ROWS))


def _context(
    query: torch.Tensor,
    lists: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    rows: slice,
    sink: torch.Tensor,
) -> torch.Tensor:
    values, seen = [], []
    for entries, slots, lengths in lists:
        slots, lengths = slots[rows], lengths[rows]
        named = (torch.arange(slots.shape[1], device=slots.device) < lengths[:, None]) & (slots >= 0)
        values.append(entries[slots.where(named, 0)].where(named[..., None], 0.0).double())
        seen.append(named)
    entries, named = torch.cat(values, dim=1), torch.cat(seen, dim=1)
    logits = einsum(query.double(), entries, "n head channel, n entry channel -> n head entry")
    logits = (logits * query.shape[-1] ** -0.5).masked_fill(~named[:, None], -torch.inf)
    with_sink = torch.cat((logits, sink.double()[:, None].expand(len(logits), -1, 1)), dim=-1)
    return einsum(with_sink.softmax(dim=-1)[..., :-1], entries, "n head entry, n entry channel -> n head channel")


def exact_output(context: torch.Tensor, weights: dict[str, torch.Tensor], cfg: DSV4Config) -> torch.Tensor:
    """float64 [n, hidden_size]: the output projection of float64 contexts [n, heads, head_dim]."""
    heads = rearrange(context, "n (group head) channel -> n group (head channel)", group=cfg.o_groups)
    into = rearrange(weights["wo_a"].double(), "(group rank) width -> group rank width", group=cfg.o_groups)
    parts = einsum(heads, into, "n group width, group rank width -> n group rank")
    return parts.flatten(1) @ weights["wo_b"].double().T


def query_vectors(query: IndexQuery, head_weights: torch.Tensor) -> torch.Tensor:
    """float64 [n, heads, channels]: the indexer's queries as they were rounded, still transformed where they are."""
    if query.values.dtype != torch.uint8:
        return query.values.double()
    heads, channels = query.values.shape[1:]
    # The scale of a vector is what its head weight was multiplied with.
    scale = query.weights.double() / (head_weights.double() * heads**-0.5 * channels**-0.5)
    return from_e4m3(query.values).double() * scale[..., None]


def exact_scores(query: IndexQuery, keys: EntryPool, slots: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """float64 [n, columns]: index scores of the keys in `slots`, [n, columns]; 0 from a row's length on."""
    values = from_e4m3(query.values) if query.values.dtype == torch.uint8 else query.values
    found = torch.zeros(slots.shape, dtype=torch.float64, device=slots.device)
    read = _all_entries(keys)
    for rows in _chunks(len(slots)):
        named = torch.arange(slots.shape[1], device=slots.device) < lengths[rows, None]
        entries = read[slots[rows].where(named, 0)].where(named[..., None], 0.0).double()
        products = einsum(values[rows].double(), entries, "n head channel, n entry channel -> n head entry").relu()
        found[rows] = einsum(products, query.weights[rows].double(), "n head entry, n head -> n entry")
    return found
