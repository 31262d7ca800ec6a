"""What attention needs to know about each row of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import torch

from dsv4_backend.plans import DecodePlans, PrefillPlan


class Field(NamedTuple):
    """One tensor of the metadata.

    Attributes:
        dtype: its dtype.
        columns: "" for one value a row, else what its columns are: "pages", "window", "topk" or "entries".
        ratio: the compression ratio that it belongs to; 0: needed by every layer.
        meaning: what it says. Where `n` occurs it is the row's causal length.
        read: how far a consumer may read, and what it finds there.
    """

    dtype: torch.dtype
    columns: str
    ratio: int
    meaning: str
    read: str


FIELDS = {
    "seq_lens_causal": Field(
        torch.int32, "", 0, "n = position + 1: the tokens that the row may attend", "all rows; 1 for padding"
    ),
    "positions": Field(torch.int32, "", 0, "n - 1", "all rows; 0 for padding"),
    "req_pool_indices_per_row": Field(
        torch.int64, "", 0, "the row's request, a row of req_to_token", "all rows; 0 for padding"
    ),
    "raw_out_cache_loc": Field(
        torch.int64, "", 0, "full-pool slot that the row is written to", "all rows; 0 for padding"
    ),
    "swa_out_cache_loc": Field(
        torch.int32,
        "",
        0,
        "the same slot in the window pool: full_to_swa[raw_out_cache_loc]",
        "all rows; 0 for padding and where the slot lies beyond full_to_swa",
    ),
    "page_table": Field(
        torch.int32,
        "pages",
        0,
        "full-pool page of each page of the request's tokens",
        "the live pages: the first ceil(n / page_size) columns",
    ),
    "swa_lengths": Field(torch.int32, "", 0, "min(n, window)", "all rows"),
    "swa_page_indices": Field(
        torch.int32,
        "window",
        0,
        "column k: window slot of position n - 1 - k, the newest first",
        "all columns; -1 from min(n, window) on, and where the table says -1",
    ),
    "c4_lengths": Field(torch.int32, "", 4, "n // 4: closed groups of 4", "all rows; exact, 0 when nothing is closed"),
    "c4_sparse_lengths": Field(torch.int32, "", 4, "min(n // 4, index_topk)", "all rows; exact"),
    "c4_sparse_page_indices": Field(
        torch.int32,
        "topk",
        4,
        "slots of the entries that the indexer selects, in the ratio-4 pool",
        "all columns; -1 until an indexer fills them in",
    ),
    "c4_out_loc": Field(
        torch.int64,
        "",
        4,
        "raw_out_cache_loc // 4 where n is a multiple of 4",
        "all rows; 0, the reserved slot, where no group closes",
    ),
    "c128_lengths": Field(
        torch.int32, "", 128, "n // 128: closed groups of 128", "all rows; exact, 0 when nothing is closed"
    ),
    "c128_page_indices": Field(
        torch.int32,
        "entries",
        128,
        "column j: slot of entry j in the ratio-128 pool: page_table[j // e] * e + j % e, e = page_size // 128",
        "the first n // 128 columns; column 0 is -1 when that is 0",
    ),
    "c128_out_loc": Field(
        torch.int64,
        "",
        128,
        "raw_out_cache_loc // 128 where n is a multiple of 128",
        "all rows; 0, the reserved slot, where no group closes",
    ),
}
"""Every tensor of the metadata by name. docs/metadata.md shows this table; a test compares the two."""

TABLE_FIELDS = ("page_table", "c128_page_indices")
"""Fields that EXTEND may keep once a request instead of once a row; see `AttnMetadata.table_rows`."""


@dataclass(frozen=True, eq=False)
class AttnMetadata:
    """Views of T rows into a builder's buffers; the next build of the same mode and bucket writes them again.

    `FIELDS` says what each tensor holds and how far it may be read; docs/metadata.md has it as a table. Fields of a
    ratio that the builder leaves out are None. Lengths are exact. Padding rows have length 1, position 0, request 0
    and slot 0, and no compressed entry.

    Attributes:
        page_size: tokens of a page; the ratio-4 pool has page_size // 4 entries a page, on the page of the same number.
        index_topk: columns of `c4_sparse_page_indices`.
        table_rows: None: row t of `page_table` and `c128_page_indices` belongs to row t. Else int32 [T]: the row of
            these two that serves row t. They are then kept once a request, written up to the request's own length:
            a row reads no further than its own length, and must not clamp a length of 0 to 1.
        plans: PrefillPlan (several rows a request) or DecodePlans (one row each); None where there are none.
    """

    page_size: int
    index_topk: int
    seq_lens_causal: torch.Tensor
    positions: torch.Tensor
    req_pool_indices_per_row: torch.Tensor
    raw_out_cache_loc: torch.Tensor
    swa_out_cache_loc: torch.Tensor
    page_table: torch.Tensor
    swa_lengths: torch.Tensor
    swa_page_indices: torch.Tensor
    c4_lengths: torch.Tensor | None
    c4_sparse_lengths: torch.Tensor | None
    c4_sparse_page_indices: torch.Tensor | None
    c4_out_loc: torch.Tensor | None
    c128_lengths: torch.Tensor | None
    c128_page_indices: torch.Tensor | None
    c128_out_loc: torch.Tensor | None
    table_rows: torch.Tensor | None = None
    plans: PrefillPlan | DecodePlans | None = None

    @property
    def num_rows(self) -> int:
        """T, padding included."""
        return self.positions.shape[0]

    @property
    def c4_page_size(self) -> int:
        """Entries of a page of the ratio-4 pools, for the indexer."""
        return self.page_size // 4

    @property
    def max_c4_length(self) -> int:
        """Ratio-4 entries that `page_table` has room for."""
        return self.page_table.shape[1] * self.c4_page_size

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors, plans included."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors of everything a build writes, but for the error flag."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                yield field.name, value
        if self.plans is not None:
            for name, tensor in self.plans.tensors():
                yield f"plans.{name}", tensor

    def readable(self, name: str) -> torch.Tensor:
        """The field `name` with a row for each of the T rows, and -2 wherever a consumer may not read."""
        value: torch.Tensor = getattr(self, name)
        field = FIELDS[name]
        if self.table_rows is not None and name in TABLE_FIELDS:
            value = value[self.table_rows.long()]
        if field.columns not in ("pages", "entries"):
            return value
        length = self.seq_lens_causal
        limit = -(-length // self.page_size) if field.columns == "pages" else length // 128
        column = torch.arange(value.shape[1], device=value.device)
        found = value.where(column < limit[:, None], -2)
        if field.columns == "entries":
            first = value[:, 0] if self.table_rows is None else torch.full_like(limit, -1)
            found[:, 0] = found[:, 0].where(limit > 0, first)
        return found

    def difference(self, other: AttnMetadata) -> str | None:
        """The first place where a consumer could tell the two apart, as one line; None when there is none.

        `other` is on any device, and what it keeps once a request may be kept once a row here.
        """
        if self.num_rows != other.num_rows:
            return f"rows: expected {other.num_rows}, got {self.num_rows}"
        for name in FIELDS:
            ours, theirs = getattr(self, name), getattr(other, name)
            if (ours is None) != (theirs is None):
                return f"{name}: expected {'none' if theirs is None else 'a tensor'}, got the opposite"
            if ours is None:
                continue
            if ours.dtype != theirs.dtype:
                return f"{name}: expected {theirs.dtype}, got {ours.dtype}"
            found = _first_difference(name, *_same_width(self.readable(name).cpu(), other.readable(name).cpu(), name))
            if found:
                return found
        return self._plan_difference(other)

    def _plan_difference(self, other: AttnMetadata) -> str | None:
        if self.plans is None or other.plans is None:
            return None if self.plans is other.plans else "plans: expected both or none"
        ours, theirs = dict(self.plans.tensors()), dict(other.plans.tensors())
        if ours.keys() != theirs.keys():
            return f"plans: expected {', '.join(theirs)}, got {', '.join(ours)}"
        for name, tensor in ours.items():
            found = _first_difference(f"plans.{name}", tensor.cpu(), theirs[name].cpu())
            if found:
                return found
        return None


def _same_width(ours: torch.Tensor, theirs: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Both cut to the narrower one; beyond it nothing is ever readable."""
    if ours.ndim == 1 or FIELDS[name].columns not in ("pages", "entries"):
        return ours, theirs
    width = min(ours.shape[1], theirs.shape[1])
    return ours[:, :width], theirs[:, :width]


def _first_difference(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
    if ours.shape != theirs.shape:
        return f"{name}: expected shape {list(theirs.shape)}, got {list(ours.shape)}"
    unequal = ours != theirs
    if not unequal.any():
        return None
    place = unequal.nonzero()[0].tolist()
    return f"{name}{place}: expected {theirs[tuple(place)].item()}, got {ours[tuple(place)].item()}"
