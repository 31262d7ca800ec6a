"""How cache entries and compression state lie in memory.

An *entry* is one vector of a pool: a window token, a compressed group, or an indexer key. A pool is a run of pages of
`page_entries` entries; slot s is entry s % page_entries of page s // page_entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.validation import expect_aligned, expect_tensor, expect_type

FORMATS = ("fp32", "bf16", "fp8")
QUANT_BLOCK = 64
"""Channels that share a power-of-two scale in a packed entry."""
SCALE_BYTES = 8
"""Bytes of scales beside a packed entry, whatever of them is used."""
STATE_DTYPE = torch.float32

_ITEMSIZE = {"fp32": 4, "bf16": 2, "fp8": 1}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.uint8}


@dataclass(frozen=True)
class EntryLayout:
    """Layout of a pool's entries.

    | format | a core entry (window, compressed) | an indexer key |
    |---|---|---|
    | fp32 | head_dim float32, for checks | head_dim float32, without Hadamard transform |
    | bf16 | head_dim bfloat16 | head_dim bfloat16, transformed |
    | fp8 | packed: all channels but the rotating ones float8 e4m3 with a power-of-two scale for each 64 of them, the rotating ones bfloat16 | head_dim float8 e4m3 with one float32 scale, transformed |

    Bytes of an fp8 page, with row = (head_dim - rope_dim) + 2 * rope_dim, 576 for DeepSeek-V4: entry i's data at
    i * row (float8 values, then bfloat16), its scale bytes (exponent + 127) at page_entries * row + 8 * i; a page takes
    page_entries * (row + 8) bytes, rounded up to a multiple of row. Of an indexer page: values of key i at
    i * head_dim, its scale at page_entries * head_dim + 4 * i.

    Args:
        format: "fp32", "bf16" or "fp8".
        head_dim: channels; a power of two.
        rope_dim: channels that rotate, the last ones; even, at most `head_dim`.
        page_entries: entries of a page.
        indexer: a pool of indexer keys.

    Raises:
        ValueError: one of these is not as stated; or a packed entry's other channels are no whole blocks of 64, or
            more than the 8 scale bytes have room for.

    Source: spec/sglang_contract.md, sections 4.2 and 4.3.
    """  # noqa: E501 - a table

    format: str
    head_dim: int
    rope_dim: int
    page_entries: int
    indexer: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format: expected one of {FORMATS}, got {self.format!r}")
        for name in ("head_dim", "rope_dim", "page_entries"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}: expected an int of at least 1, got {value!r}")
        if self.head_dim & (self.head_dim - 1):
            raise ValueError(f"head_dim: expected a power of two, got {self.head_dim}")
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise ValueError(f"rope_dim: expected an even number up to {self.head_dim}, got {self.rope_dim}")
        if self.format == "fp8" and not self.indexer:
            blocks, rest = divmod(self.head_dim - self.rope_dim, QUANT_BLOCK)
            if rest or not 0 < blocks <= SCALE_BYTES:
                raise ValueError(
                    f"head_dim: expected 1 to {SCALE_BYTES} blocks of {QUANT_BLOCK} channels that do not rotate for "
                    f"format fp8, got {self.head_dim - self.rope_dim} channels"
                )

    @property
    def dtype(self) -> torch.dtype:
        """Of the pool's tensor; uint8 for fp8."""
        return _DTYPES[self.format]

    @property
    def hadamard(self) -> bool:
        """Whether entries are Hadamard-transformed before they are stored."""
        return self.indexer and self.format != "fp32"

    @property
    def row_bytes(self) -> int:
        """Bytes from the data of one entry to the next of its page, scales not counted."""
        if self.format == "fp8" and not self.indexer:
            return self.head_dim + self.rope_dim
        return self.head_dim * _ITEMSIZE[self.format]

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry, scales included: 584, and 132 for an indexer key, in format fp8."""
        if self.format != "fp8":
            return self.row_bytes
        return self.row_bytes + (4 if self.indexer else SCALE_BYTES)

    @property
    def page_bytes(self) -> int:
        """Bytes from one page to the next."""
        size = self.page_entries * self.entry_bytes
        if self.format == "fp8" and not self.indexer:
            return -(-size // self.row_bytes) * self.row_bytes
        return size

    def shape(self, num_pages: int) -> tuple[int, int]:
        """Shape of a pool's tensor: [pages, page_bytes] for fp8, else [slots, head_dim]."""
        if self.format == "fp8":
            return num_pages, self.page_bytes
        return num_pages * self.page_entries, self.head_dim


@dataclass(frozen=True, eq=False)
class EntryPool:
    """A pool: a layout and the tensor that holds its pages.

    Args:
        layout: how its entries lie.
        data: `layout.dtype`, of shape `layout.shape(pages)`, contiguous, on a 16-byte boundary.

    Slot 0, and with it page 0, is reserved: entries for slot 0, for negative slots and for slots beyond the pool are
    not stored.

    Raises:
        ValueError: the tensor is not as above.
    """

    layout: EntryLayout
    data: torch.Tensor

    def __post_init__(self) -> None:
        expect_type("layout", self.layout, EntryLayout)
        data = expect_tensor("data", self.data, dtypes=(self.layout.dtype,), ndim=2)
        pages = data.shape[0] if self.layout.format == "fp8" else data.shape[0] // self.layout.page_entries
        if tuple(data.shape) != self.layout.shape(pages) or not data.is_contiguous():
            raise ValueError(
                f"data: expected a contiguous tensor of whole pages, {list(self.layout.shape(pages))}, got shape "
                f"{list(data.shape)}, strides {list(data.stride())}"
            )
        expect_aligned("data", data)

    @classmethod
    def empty(cls, layout: EntryLayout, num_pages: int, device: torch.device | str = "cpu") -> EntryPool:
        """A pool of `num_pages` pages, the reserved one included, full of zeros."""
        return cls(layout, torch.zeros(layout.shape(num_pages), dtype=layout.dtype, device=device))

    @cached_property
    def num_slots(self) -> int:
        """Entries that there is room for, the reserved page included."""
        rows = self.data.shape[0]
        return rows * self.layout.page_entries if self.layout.format == "fp8" else rows

    @property
    def device(self) -> torch.device:
        return self.data.device

    # The same bytes as other types, for kernels.

    @cached_property
    def halves(self) -> torch.Tensor:
        """int16 view: bfloat16 values by their bits."""
        return self.data.view(torch.int16)

    @cached_property
    def words(self) -> torch.Tensor:
        """float32 view: the scales of indexer keys."""
        return self.data.view(torch.float32)


def state_width(ratio: int, head_dim: int) -> int:
    """Channels of a state row, and of a row of `kv_score`.

    Ratio 4: head_dim values for the next group, head_dim for the own group, then the scores of both. Ratio 128:
    values, then scores. All float32, scores without their position bias.

    Source: spec/sglang_contract.md, section 4.4.
    """
    return {4: 4, 128: 2}[ratio] * head_dim


def state_rows(geom: CacheGeometry, ratio: int, *, num_window_pages: int, num_requests: int) -> int:
    """Rows of a state pool: a ring for each window page (ratio 4) or request (ratio 128), the reserved one included."""
    return {4: num_window_pages, 128: num_requests}[ratio] * geom.ring(ratio)


def bias_shape(ratio: int, head_dim: int) -> tuple[int, int]:
    """Shape of a position bias, as checkpoints have it: a row for each token of a group.

    Ratio 4: [4, 2 * head_dim], the half for the next group, then that for the own one. Ratio 128: [128, head_dim].
    """
    return {4: (4, 2 * head_dim), 128: (128, head_dim)}[ratio]
