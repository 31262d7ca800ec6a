"""Attention over index lists in plain torch, in float64 but for the roundings that docs name."""

from __future__ import annotations

import torch
from torch.nn import functional

from dsv4_backend.layouts import EntryPool
from dsv4_backend.reference import kv_store

GATHERED = 1 << 22
"""Values that are gathered at once."""


def sparse_attention(
    *,
    q: torch.Tensor,
    window: EntryPool,
    window_indices: torch.Tensor,
    window_lengths: torch.Tensor,
    compressed: EntryPool | None,
    compressed_indices: torch.Tensor | None,
    compressed_lengths: torch.Tensor | None,
    compressed_rows: torch.Tensor | None,
    sink: torch.Tensor | None,
    scale: float,
    positions: torch.Tensor | None,
    rope: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Fills `out` and `lse`; arguments as in `dsv4_backend.attention.sparse_attention`."""
    every = torch.arange(q.shape[0], device=q.device)
    lists = [(window, window_indices, window_lengths, every)]
    if compressed is not None:
        assert compressed_indices is not None
        assert compressed_lengths is not None
        if compressed_rows is not None:
            known = (compressed_rows >= 0) & (compressed_rows < compressed_indices.shape[0])
            every = compressed_rows.long().where(known, 0)
            compressed_lengths = compressed_lengths.where(known, 0)
            if not compressed_indices.shape[0]:
                compressed_indices = compressed_indices.new_full((1, compressed_indices.shape[1]), -1)
        lists.append((compressed, compressed_indices, compressed_lengths, every))
    rounded = window.layout.format != "fp32"
    if rounded:
        q = q.bfloat16()
    columns = 1 + sum(indices.shape[1] for _, indices, _, _ in lists)
    step = max(1, GATHERED // (columns * q.shape[2]))
    for start in range(0, q.shape[0], step):
        rows = slice(start, start + step)
        parts = [gather(pool, indices[at[rows]], lengths[rows]) for pool, indices, lengths, at in lists]
        values, live = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        result, log_sum = attend(q[rows].double(), values, live, sink, scale, rounded)
        result = result.to(out.dtype)
        if rope is not None:
            assert positions is not None
            result = rotate_back(result, positions[rows], rope)
        out[rows] = result
        if lse is not None:
            lse[rows] = log_sum


def gather(pool: EntryPool, indices: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [n, columns, D] and bool [n, columns]: the entries of a list, 0 for those that do not count."""
    column = torch.arange(indices.shape[1], device=indices.device)
    live = (column < lengths[:, None]) & (indices >= 0) & (indices < pool.num_slots)
    values = kv_store.load_entries(pool, indices.where(live, 0).flatten()).unflatten(0, indices.shape)
    return values.where(live[..., None], 0.0).double(), live


def attend(
    q: torch.Tensor, values: torch.Tensor, live: torch.Tensor, sink: torch.Tensor | None, scale: float, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [n, H, D] and [n, H]: the result, not turned back, and the logarithm of the sum.

    Args:
        q: float64 [n, H, D].
        values, live: what `gather` gives, of all lists.
        sink: [H] or None.
        rounded: whether weights are rounded to bfloat16 for the values.
    """
    # One more column that does not count: then there is always a largest logit.
    values, live = functional.pad(values, (0, 0, 0, 1)), functional.pad(live, (0, 1))
    logits = (torch.einsum("nhd,ncd->nhc", q, values) * scale).where(live[:, None], -torch.inf)
    most = logits.amax(dim=-1, keepdim=True)
    most = most.where(most != -torch.inf, 0.0)
    weight = (logits - most).exp()
    total = weight.sum(dim=-1, keepdim=True)
    denominator = total if sink is None else total + (sink.double()[:, None] - most).exp()
    if rounded:
        weight = weight.bfloat16().double()
    result = torch.einsum("nhc,ncd->nhd", weight, values) / denominator
    return result.where(denominator != 0, 0.0), (most + total.log()).squeeze(-1)


def rotate_back(values: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """float32 [n, H, D]: the last channels turned by minus the position; 0 for a position outside of the table."""
    cos, sin = kv_store.angles_at(positions, rope).unflatten(-1, (-1, 2)).unbind(dim=-1)
    back = torch.stack((cos, -sin), dim=-1).flatten(-2)
    heads = values.shape[1]
    row = torch.arange(len(values), device=values.device).repeat_interleave(heads)
    return kv_store.rotate(values.float().flatten(0, 1), row, back).unflatten(0, (-1, heads))
