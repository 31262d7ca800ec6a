"""Built metadata as plain arrays on the host."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dsv4_backend.replay.builds import Build
from dsv4_backend.replay.image import PlanImage

# The contract, written down a second time: a check that borrowed the builder's description would share its errors.
WINDOW_FIELDS = {
    "seq_lens_causal": np.int32,
    "positions": np.int32,
    "req_pool_indices_per_row": np.int64,
    "raw_out_cache_loc": np.int64,
    "swa_out_cache_loc": np.int32,
    "page_table": np.int32,
    "swa_lengths": np.int32,
    "swa_page_indices": np.int32,
}
COMPRESSED_FIELDS = {
    "c4_lengths": np.int32,
    "c4_sparse_lengths": np.int32,
    "c4_sparse_page_indices": np.int32,
    "c4_out_loc": np.int64,
    "c128_lengths": np.int32,
    "c128_page_indices": np.int32,
    "c128_out_loc": np.int64,
}
TABLES = ("page_table", "c128_page_indices")
"""Fields that may be kept once a request; `table_rows` then says which of their rows serves a row."""


@dataclass
class MetadataImage:
    """The metadata of one step of a build.

    Attributes:
        build: what was asked for.
        place: which of its steps; 0 but for draft steps.
        fields: by name, with a row for each row of the step; "table_rows" only where tables are kept once a request.
        moved: names of tensors that lie elsewhere than in the last build of the same bucket.
    """

    build: Build
    place: int
    fields: dict[str, np.ndarray]
    moved: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Its name, for people."""
        return self.build.label(self.place)

    def edit(self, name: str) -> np.ndarray:
        """The field `name` as an array that may be changed: what was built stays as it is."""
        self.fields[name] = self.fields[name].copy()
        return self.fields[name]


@dataclass
class StepImages:
    """All that was made for a step: its plan, and every step of every build, those of its own mode first."""

    plan: PlanImage
    metadata: list[MetadataImage] = field(default_factory=list)
