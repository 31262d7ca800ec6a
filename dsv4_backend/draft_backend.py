"""The backend of a draft model whose layers see the sliding window only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from dsv4_backend.backend import DSV4AttnBackend
from dsv4_backend.cache import DSV4Cache
from dsv4_backend.config import DSV4Config
from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.metadata import AttnMetadata
from dsv4_backend.metadata_builder import MetadataBuilder
from dsv4_backend.tables import RequestTables

if TYPE_CHECKING:
    from dsv4_graph_runner import DraftInputs


class _Frozen(NamedTuple):
    """Steps of a frozen window, with positions of their own."""

    metas: list[AttnMetadata]
    offsets: torch.Tensor  # int64 [steps, 1]
    positions: torch.Tensor  # int32 [steps, B]


class DSV4DraftBackend(DSV4AttnBackend):
    """`DSV4AttnBackend` for drafts, and the `MetadataProvider` of `dsv4_graph_runner.EagleDraftGraphRunner`.

    It builds window metadata alone, thus serves layers of ratio 0 only. They may be those of a cache of the draft's
    own, or of the target's cache where the draft has layers of the target: what it stores there for drafts, a verify
    step stores again.

    Args:
        cfg, geom, cache, tables, impl, max_rows, max_seq_len: as for `DSV4AttnBackend`. The tables are those of the
            target: a token has the same slot in both.
        draft_window: what draft step i, for the token at position seq_lens + i, sees. "growing": the last `cfg.window`
            tokens up to its own, earlier drafts among them; "frozen": the last committed ones, neither drafts nor its
            own token. RoPE and the window entry that it stores have the token's own position in both.

    Raises:
        ValueError: an argument is not as above.

    Source: docs/backend.md, "Drafts".
    """

    def __init__(
        self,
        cfg: DSV4Config,
        geom: CacheGeometry,
        cache: DSV4Cache,
        tables: RequestTables,
        impl: str = "auto",
        *,
        max_rows: int | None = None,
        max_seq_len: int | None = None,
        draft_window: str = "growing",
    ) -> None:
        self.draft_window = draft_window
        super().__init__(cfg, geom, cache, tables, impl, max_rows=max_rows, max_seq_len=max_seq_len)
        self._frozen: dict[tuple[int, int], _Frozen] = {}

    def bind_draft(self, inputs: DraftInputs) -> list[AttnMetadata]:
        """The metadata of a bucket's draft steps, built once from `inputs`, so that a graph can record the build."""
        metas = self.builder.bind_draft(inputs)
        if self.draft_window == "growing":
            return metas
        key = inputs.batch_size, inputs.num_steps
        if key not in self._frozen:
            self._frozen[key] = self._own_positions(metas)
        self._move(self._frozen[key], inputs)
        return list(self._frozen[key].metas)

    def record_draft(self, inputs: DraftInputs) -> None:
        """Builds what `bind_draft` returned for these inputs again, in one launch, or two if frozen; to be recorded."""
        self.builder.record_draft(inputs)
        if self.draft_window == "frozen":
            self._move(self._frozen[inputs.batch_size, inputs.num_steps], inputs)

    def prepare_draft(self, inputs: DraftInputs, raw_batch_size: int) -> None:
        """Nothing: a recorded build reads all that it needs on the device."""

    def build_draft(self, inputs: DraftInputs) -> list[AttnMetadata]:
        """The metadata of draft steps that run without a graph."""
        metas = self.builder.build_draft(inputs)
        if self.draft_window == "growing":
            return metas
        frozen = self._own_positions(metas)
        self._move(frozen, inputs)
        return frozen.metas

    def draft_fingerprint(self) -> tuple[object, ...]:
        """Addresses that a recorded build uses beside those of its inputs and of what `bind_draft` returned.

        Those of frozen windows are not among them: each bucket's are kept as long as the backend, and never replaced.
        """
        return self.builder.draft_fingerprint()

    def _new_builder(self, max_rows: int, max_seq_len: int, impl: str) -> MetadataBuilder:
        return MetadataBuilder(
            self.cfg,
            self.geom,
            self.tables,
            max_rows=max_rows,
            max_seq_len=max_seq_len,
            ratios=(),
            impl=impl,
            draft_window=self.draft_window,
        )

    @torch.inference_mode(False)
    def _own_positions(self, metas: Sequence[AttnMetadata]) -> _Frozen:
        """The steps with positions to be filled in, since those of a frozen window are not the token's own."""
        steps, rows = len(metas), metas[0].num_rows if metas else 0
        positions = torch.zeros((steps, rows), dtype=torch.int32, device=self.device)
        offsets = torch.arange(steps, device=self.device)[:, None]
        return _Frozen([replace(meta, positions=positions[i]) for i, meta in enumerate(metas)], offsets, positions)

    @staticmethod
    def _move(frozen: _Frozen, inputs: DraftInputs) -> None:
        """Token i of each lane is i behind its first draft token; lanes of padding are at positions 0 and up."""
        torch.add(inputs.positions, frozen.offsets, out=frozen.positions)
