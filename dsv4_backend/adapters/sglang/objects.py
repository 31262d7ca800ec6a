"""Our metadata in the objects and dtypes of SGLang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from dsv4_backend.adapters.sglang.releases import Release
from dsv4_backend.metadata import AttnMetadata
from dsv4_backend.plans import PACKED_MAX_ROWS, DecodePlans, PrefillPlan

COLUMN_GROUP = 64
"""Columns of a row of entries come in whole groups of this many."""


@dataclass(frozen=True)
class EngineTypes:
    """The classes to build, as the installed release has them.

    Attributes:
        core, metadata: DSV4AttnMetadata and DSV4Metadata.
        decode_plan, prefill_plan: CompressorDecodePlan and CompressorPrefillPlan.
        new_schedule: makes an empty FlashMLA schedule, or None where the chip has no FlashMLA.
        release: which release that is.
    """

    core: type
    metadata: type
    decode_plan: Callable[..., Any]
    prefill_plan: Callable[..., Any]
    new_schedule: Callable[[], Any]
    release: Release


class Clamped:
    """Lengths of at least 1: SGLang's attention reads one entry, -1, where nothing is closed.

    `fixed`: the tensors belong to the metadata's buffers and are written again, in two launches.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], list[torch.Tensor]] = {}

    @torch.inference_mode(False)  # plain tensors: they may be written again outside of inference mode
    def lengths(self, meta: AttnMetadata, fixed: bool) -> list[torch.Tensor | None]:
        """c4_lengths, c4_sparse_lengths and c128_lengths; None for a ratio that is left out."""
        names = ("c4_lengths", "c4_sparse_lengths", "c128_lengths")
        exact = {name: getattr(meta, name) for name in names if getattr(meta, name) is not None}
        if not exact:
            return [None] * 3
        key = (meta.seq_lens_causal.data_ptr(), meta.num_rows)
        values = self._of.get(key) if fixed else None
        if values is None:
            values = [torch.empty_like(value) for value in exact.values()]
            if fixed:
                self._of[key] = values
        if meta.num_rows:
            torch._foreach_copy_(values, list(exact.values()))
            torch._foreach_clamp_min_(values, 1)
        found = dict(zip(exact, values, strict=True))
        return [found.get(name) for name in names]


def core_metadata(
    types: EngineTypes,
    meta: AttnMetadata,
    clamped: list[torch.Tensor | None],
    *,
    is_prefill: bool = False,
    max_seq_len: int | None = None,
) -> Any:
    """A DSV4AttnMetadata whose tensors are ours.

    Args:
        clamped: see `Clamped`.
        is_prefill: of a prompt step, whose indexer also wants the positions that it selects.
        max_seq_len: tables as wide as the pages of this length, in memory of their own; None: ours as they are.
    """
    release, ratios = types.release, _ratios(meta)
    page_table, c128_pages = _tables(meta, max_seq_len)
    c4_clamped, c4_sparse_clamped, c128_clamped = clamped
    named: dict[str, Any] = {release.topk_field: meta.index_topk}
    if release.names_ratios:
        named["present_ratios"] = ratios
    core = types.core(
        page_size=meta.page_size,
        page_table=page_table,
        raw_out_loc=meta.raw_out_cache_loc,
        cuda_int32_kwargs={"device": meta.positions.device, "dtype": torch.int32},
        seq_lens_casual=meta.seq_lens_causal,
        positions_casual=meta.positions,
        swa_page_indices=meta.swa_page_indices,
        swa_topk_lengths=meta.swa_lengths,
        swa_out_cache_loc=meta.swa_out_cache_loc,
        c4_out_loc=meta.c4_out_loc,
        c4_topk_lengths_raw=meta.c4_lengths,
        c4_topk_lengths_clamp1=c4_clamped,
        c128_out_loc=meta.c128_out_loc,
        c128_page_indices=c128_pages,
        c128_topk_lengths_clamp1=c128_clamped,
        **named,
    )
    core.c4_sparse_topk_lengths = c4_sparse_clamped
    core.c4_sparse_page_indices = meta.c4_sparse_page_indices
    selected = meta.c4_sparse_page_indices if is_prefill else None
    core.c4_sparse_raw_indices = None if selected is None else torch.empty_like(selected)
    for name, wanted in (
        (release.window_schedule, True),
        ("c4_flashmla_metadata", 4 in ratios),
        ("c128_flashmla_metadata", 128 in ratios),
    ):
        setattr(core, name, types.new_schedule() if wanted else None)
    return core


def compress_plans(
    types: EngineTypes, plans: PrefillPlan | DecodePlans | None, counts: dict[int, tuple[int, int]] | None = None
) -> dict[int, Any]:
    """SGLang's plan of each ratio that is planned.

    Args:
        plans: ours.
        counts: rows of the compress and of the write list by ratio, where the host knows them: the lists are cut to
            what is in use. None: invalid markers behind it, as in a graph.

    Raises:
        ValueError: more rows than SGLang's layout can number.
    """
    found: dict[int, Any] = {}
    if isinstance(plans, DecodePlans):
        return {rows.ratio: types.decode_plan(rows.ratio, rows.rows) for rows in plans.lists()}
    if plans is not None:
        if plans.num_rows is not None and plans.num_rows > PACKED_MAX_ROWS:
            raise ValueError(f"rows: expected at most {PACKED_MAX_ROWS} in SGLang's plans, got {plans.num_rows}")
        for lists in plans.lists():
            compress, write = lists.compress, lists.write
            if counts is not None:
                num_compress, num_write = counts[lists.ratio]
                compress, write = compress[:num_compress], write[:num_write]
            found[lists.ratio] = types.prefill_plan(lists.ratio, compress, write, None)
    return found


def with_own_memory(meta: AttnMetadata) -> AttnMetadata:
    """The same metadata in memory that no later build writes."""
    own: dict[str, Any] = {}
    for field in fields(meta):
        value = getattr(meta, field.name)
        if isinstance(value, torch.Tensor):
            own[field.name] = value.clone()
    plans: Any = meta.plans
    if plans is not None:
        lists: dict[str, Any] = {}
        for each in plans.lists():
            names = ("rows",) if isinstance(plans, DecodePlans) else ("compress", "write")
            lists[f"c{each.ratio}"] = replace(each, **{name: getattr(each, name).clone() for name in names})
        if isinstance(plans, PrefillPlan):
            lists["header"] = plans.header.clone()
        own["plans"] = replace(plans, **lists)
    return replace(meta, **own)


def _ratios(meta: AttnMetadata) -> tuple[int, ...]:
    return tuple(ratio for ratio in (4, 128) if getattr(meta, f"c{ratio}_lengths") is not None)


def _tables(meta: AttnMetadata, max_seq_len: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    pages, entries = meta.page_table, meta.c128_page_indices
    if max_seq_len is not None:
        num_pages = -(-max_seq_len // meta.page_size)
        columns = num_pages * (meta.page_size // 128)
        pages = pages[:, :num_pages]
        entries = None if entries is None else entries[:, : -(-columns // COLUMN_GROUP) * COLUMN_GROUP]
    if meta.table_rows is not None:  # once a request: give each row its own, closed entries only
        rows = meta.table_rows.long()
        pages = pages[rows]
        if entries is not None:
            assert meta.c128_lengths is not None
            column = torch.arange(entries.shape[1], device=entries.device)
            entries = entries[rows].where(column < meta.c128_lengths[:, None], -1)
    return pages.contiguous(), None if entries is None else entries.contiguous()
