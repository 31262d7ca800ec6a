"""The paged cache of a model: for each layer its window, compressed entries, indexer keys and compression state.

Pools hold bytes only. Which page belongs to whom is `page_pool.PagePool`'s business, and what fills them is
`dsv4_backend.compressor`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from dsv4_backend.config import DSV4Config
from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.layouts import FORMATS, STATE_DTYPE, EntryLayout, EntryPool, state_rows, state_width
from dsv4_backend.validation import expect_type


@dataclass(frozen=True)
class CacheSize:
    """How many pages and requests a cache has room for, the reserved page 0 and request 0 included.

    Args:
        num_pages: pages of the full pool (compressed entries lie on the pages of their tokens).
        num_window_pages: pages of the sliding-window pool.
        num_requests: rows of the request table.

    Raises:
        ValueError: a number is not an int of at least 1.
    """

    num_pages: int
    num_window_pages: int
    num_requests: int

    def __post_init__(self) -> None:
        for name in ("num_pages", "num_window_pages", "num_requests"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}: expected an int of at least 1, got {value!r}")

    @classmethod
    def for_requests(
        cls, cfg: DSV4Config, geom: CacheGeometry, *, num_requests: int, max_seq_len: int, chunk_size: int
    ) -> CacheSize:
        """Room for `num_requests` requests of `max_seq_len` tokens, with prompts in chunks of `chunk_size` tokens.

        Each request keeps the window pages that its last tokens lie on; those of a prompt's chunk come on top.
        """
        pages = -(-max_seq_len // geom.page_size)
        # A window, and one page more since neither end of it is aligned.
        window_pages = -(-cfg.window // geom.swa_page_size) + 1
        chunk_pages = -(-chunk_size // geom.swa_page_size) + 1
        return cls(num_requests * pages + 1, num_requests * window_pages + chunk_pages + 1, num_requests + 1)


@dataclass(frozen=True, eq=False)
class LayerCache:
    """The cache of one layer.

    Attributes:
        ratio: 0, 4 or 128.
        window: the sliding window's entries, by window slot.
        compressed: entries of the layer's ratio, by compressed slot (full slot divided by the ratio); None for ratio 0.
        index_keys: indexer keys, by the slots of `compressed`; None but for ratio 4.
        state: float32 rings of the core compressor (`layouts.state_width`); None for ratio 0.
        index_state: those of the indexer's compressor; None but for ratio 4.
        rows: formats bf16 and fp32: one tensor [rows, head_dim] that holds the window's entries, then the compressed
            ones, so that a kernel reaches both from one base pointer: window slot s is row s, compressed slot c row
            `first_compressed_row + c`. None for fp8, whose pages differ in size.
    """

    ratio: int
    window: EntryPool
    compressed: EntryPool | None
    index_keys: EntryPool | None
    state: torch.Tensor | None
    index_state: torch.Tensor | None
    rows: torch.Tensor | None

    @property
    def first_compressed_row(self) -> int:
        """Row of `rows` that compressed slot 0 is."""
        return self.window.num_slots

    @classmethod
    def empty(
        cls,
        cfg: DSV4Config,
        geom: CacheGeometry,
        size: CacheSize,
        ratio: int,
        *,
        format: str = "fp8",
        device: torch.device | str = "cpu",
    ) -> LayerCache:
        """The cache of a layer of `ratio`, full of zeros; arguments as for `DSV4Cache`."""
        layout = EntryLayout(format, cfg.head_dim, cfg.rope_dim, geom.swa_page_size)
        if not ratio:
            window = EntryPool.empty(layout, size.num_window_pages, device)
            return cls(0, window, None, None, None, None, None if format == "fp8" else window.data)
        per_page = geom.page_size // ratio
        compressed_layout = EntryLayout(format, cfg.head_dim, cfg.rope_dim, per_page)
        rows = None
        if format == "fp8":
            window = EntryPool.empty(layout, size.num_window_pages, device)
            compressed = EntryPool.empty(compressed_layout, size.num_pages, device)
        else:
            split = size.num_window_pages * geom.swa_page_size
            shape = (split + size.num_pages * per_page, cfg.head_dim)
            rows = torch.zeros(shape, dtype=layout.dtype, device=device)
            window, compressed = EntryPool(layout, rows[:split]), EntryPool(compressed_layout, rows[split:])

        def state(head_dim: int) -> torch.Tensor:
            ring_rows = state_rows(geom, ratio, num_window_pages=size.num_window_pages, num_requests=size.num_requests)
            return torch.zeros((ring_rows, state_width(ratio, head_dim)), dtype=STATE_DTYPE, device=device)

        index_keys = index_state = None
        if ratio == 4:
            index_layout = EntryLayout(format, cfg.index_head_dim, cfg.rope_dim, per_page, indexer=True)
            index_keys = EntryPool.empty(index_layout, size.num_pages, device)
            index_state = state(cfg.index_head_dim)
        return cls(ratio, window, compressed, index_keys, state(cfg.head_dim), index_state, rows)

    def nbytes(self) -> dict[str, int]:
        """Bytes by kind: window, c4 or c128, index keys, state."""
        found: dict[str, int] = {"window": _bytes(self.window.data)}
        if self.compressed is not None:
            found[f"c{self.ratio}"] = _bytes(self.compressed.data)
        if self.index_keys is not None:
            found["index keys"] = _bytes(self.index_keys.data)
        states = [state for state in (self.state, self.index_state) if state is not None]
        if states:
            found["state"] = sum(map(_bytes, states))
        return found


class DSV4Cache:
    """The cache of all decoder layers of a model.

    Args:
        cfg: the model; its window must be that of `geom`.
        geom: cache geometry. State rings are as long as it says, whether drafts are rolled back or not.
        size: room for pages and requests.
        format: "fp8" (packed entries of 584 bytes and indexer keys of 132, as the released engine has them), "bf16", or
            "fp32" (for checks: nothing is rounded). See `layouts.EntryLayout`.
        device: where it lies.

    Page 0, slot 0 and request 0 are reserved for padding. Everything is full of zeros at first, but nothing depends on
    that: a reader never reads what was not written for it.

    Raises:
        ValueError: an argument is not as above, or the model's dimensions do not fit the format.
    """

    def __init__(
        self,
        cfg: DSV4Config,
        geom: CacheGeometry,
        size: CacheSize,
        *,
        format: str = "fp8",
        device: torch.device | str = "cpu",
    ) -> None:
        expect_type("cfg", cfg, DSV4Config)
        expect_type("geom", geom, CacheGeometry)
        expect_type("size", size, CacheSize)
        if format not in FORMATS:
            raise ValueError(f"format: expected one of {FORMATS}, got {format!r}")
        if cfg.window != geom.window:
            raise ValueError(f"geom: expected the model's window of {cfg.window} tokens, got {geom.window}")
        self.cfg, self.geom, self.size, self.format = cfg, geom, size, format
        self.layers = tuple(
            LayerCache.empty(cfg, geom, size, ratio, format=format, device=device) for ratio in cfg.compress_ratios
        )

    def nbytes(self) -> dict[str, int]:
        """Bytes by kind, over all layers: window, c4, c128, index keys, state."""
        found: Counter[str] = Counter()
        for layer in self.layers:
            found.update(layer.nbytes())
        return dict(found)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
