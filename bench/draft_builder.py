"""The metadata builder as the provider of a draft world, and the draft model that reads what it builds."""

from __future__ import annotations

from dataclasses import replace

import torch

from dsv4_backend.config import DSV4Config
from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.metadata import AttnMetadata
from dsv4_backend.metadata_builder import MetadataBuilder
from dsv4_backend.tables import RequestTables
from dsv4_bench.draft_models import HashDraft, TransformerDraft, WindowStep
from dsv4_bench.draft_pool import RedZonePool, SlotTable


def make_builder(table: SlotTable, max_rows: int, impl: str = "auto") -> MetadataBuilder:
    """A builder of window metadata over the slots of `table`; the window pool is the full one.

    Args:
        table: copied, so that what is written to it later does not show.
        max_rows: most requests of a batch, padding included.
        impl: of the builder.
    """
    device = table.table.device
    full_to_swa = torch.arange(table.num_slots + 1, device=device)
    full_to_swa[-1] = -1
    return MetadataBuilder(
        replace(DSV4Config.v4_flash(), window=table.window),
        CacheGeometry(window=table.window),
        RequestTables(table.table[:, table.window :].to(torch.int32), full_to_swa),
        max_rows=max_rows,
        max_seq_len=table.max_len,
        ratios=(),
        impl=impl,
    )


class BuilderDraft:
    """A draft model whose metadata is a builder's: the window newest first, -1 behind its end, in columns to spare.

    Args:
        inner: reads windows as `WindowStep` has them.
        window: positions that a step looks back.
    """

    def __init__(self, inner: HashDraft | TransformerDraft, window: int) -> None:
        self.inner, self._window = inner, window

    @property
    def pool(self) -> RedZonePool:
        return self.inner.pool

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        out_cache_loc: torch.Tensor,
        metadata: AttnMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slots = metadata.swa_page_indices[:, : self._window].flip(1).clamp(min=0).long()
        return self.inner.forward(input_ids, hidden_states, positions, out_cache_loc, WindowStep(slots))
