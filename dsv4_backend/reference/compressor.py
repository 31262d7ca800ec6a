"""Compression in plain torch: what docs/cache.md says, driven by a step's plans."""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange, reduce

from dsv4_backend.geometry import READ_WINDOW
from dsv4_backend.layouts import EntryPool
from dsv4_backend.plans import PACKED_MAX_ROWS, DecodePlan, DecodePlans, PrefillPlan
from dsv4_backend.reference import kv_store

_INVALID = -1  # the invalid marker of seq_len as int32


class Entries(NamedTuple):
    """The entries that a step completes: int64 [n] each."""

    seq_len: torch.Tensor
    row: torch.Tensor  # of the step, the one that completes the entry
    buffer_len: torch.Tensor  # tokens of the read window, from its front, that come from state
    read_page_0: torch.Tensor
    read_page_1: torch.Tensor


def compress(
    *,
    kv_score: torch.Tensor,
    state: torch.Tensor,
    plans: PrefillPlan | DecodePlans,
    ratio: int,
    bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    rope: torch.Tensor,
    out_loc: torch.Tensor,
    pool: EntryPool,
) -> None:
    """Stores the entries that a step completes and the state rows that it keeps.

    Arguments as in `dsv4_backend.compressor.compress`.
    """
    entries = completed(plans, ratio)
    pooled = pool_windows(read_windows(kv_score, state, entries, ratio), entries, bias, ratio)
    values = kv_store.norm_rope(pooled, norm_weight, eps, entries.seq_len - ratio, rope)
    known = (entries.row >= 0) & (entries.row < len(out_loc))
    slots = out_loc[entries.row.where(known, 0)].where(known, 0)
    kv_store.store_entries(values=values, slots=slots, pool=pool)
    # After all reads: a row that is kept may take the place of one that was just read.
    write_state(kv_score, state, plans, ratio)


def completed(plans: PrefillPlan | DecodePlans, ratio: int) -> Entries:
    """The entries of a plan."""
    plan = plans.ratio(ratio)
    assert plan is not None
    if isinstance(plan, DecodePlan):
        seq_len, _, page_0, page_1 = plan.words.long().unbind(dim=1)
        row = torch.arange(len(seq_len), device=seq_len.device)
        # All but the new token come from state.
        found = Entries(seq_len, row, torch.full_like(seq_len, READ_WINDOW[ratio] - 1), page_0, page_1)
        return Entries(*(column[seq_len % ratio == 0] for column in found))
    words = plan.compress_words.long()
    words = words[words[:, 0] != _INVALID]
    if len(plan.compress) > PACKED_MAX_ROWS:
        return Entries(*words.unbind(dim=1))
    seq_len, packed, page_0, page_1 = words.unbind(dim=1)
    return Entries(seq_len, packed & 0xFFFF, (packed >> 16) & 0xFFFF, page_0, page_1)


def read_windows(kv_score: torch.Tensor, state: torch.Tensor, entries: Entries, ratio: int) -> torch.Tensor:
    """float32 [n, w, width]: the rows of each entry's read window, w = 8 or 128, oldest first."""
    window = READ_WINDOW[ratio]
    place = torch.arange(window, device=kv_score.device)
    page = torch.where(place < window - ratio, entries.read_page_0[:, None], entries.read_page_1[:, None])
    stored = _rows_or_zero(state, page * ratio + place % ratio)
    new = _rows_or_zero(kv_score, entries.row[:, None] - (window - 1) + place)
    return torch.where((place < entries.buffer_len[:, None])[..., None], stored, new)


def _rows_or_zero(source: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Rows of `source`; zero for those that it does not have, which only a plan of other tables asks for."""
    inside = (row >= 0) & (row < len(source))
    return source[row.where(inside, 0)].where(inside[..., None], 0.0)


def pool_windows(windows: torch.Tensor, entries: Entries, bias: torch.Tensor, ratio: int) -> torch.Tensor:
    """float32 [n, head_dim]: for each channel, the values of a window weighted by the softmax of its scores."""
    if ratio == 4:
        # Channels: values and scores for the next group, read as the previous one, then those for the own group.
        previous_value, own_value, previous_score, own_score = windows.chunk(4, dim=-1)
        value = torch.cat((previous_value[:, :4], own_value[:, 4:]), dim=1)
        score = torch.cat((previous_score[:, :4], own_score[:, 4:]), dim=1)
        score = score + rearrange(bias, "token (half channel) -> (half token) channel", half=2)
        # The first group has nothing before it; what lies there may be anything.
        absent = (entries.seq_len <= 4)[:, None] & (torch.arange(8, device=value.device) < 4)
        score = score.masked_fill(absent[..., None], -torch.inf)
        value = value.masked_fill(absent[..., None], 0.0)
    else:
        value, score = windows.chunk(2, dim=-1)
        score = score + bias
    return reduce(score.softmax(dim=1) * value, "n token channel -> n channel", "sum")


def write_state(kv_score: torch.Tensor, state: torch.Tensor, plans: PrefillPlan | DecodePlans, ratio: int) -> None:
    """Copies the rows that a plan keeps to their place in the rings."""
    plan = plans.ratio(ratio)
    assert plan is not None
    if isinstance(plan, DecodePlan):
        loc = plan.words[:, 1].long()
        row = torch.arange(len(loc), device=loc.device)
    else:
        row, loc = plan.write_words.long().unbind(dim=1)
    kept = (row >= 0) & (row < len(kv_score)) & (loc >= 0) & (loc < len(state))
    state[loc[kept]] = kv_score[row[kept]]
