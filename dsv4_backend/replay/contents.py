"""What lies in the cache: the token in each window slot, and the token that closed each ratio-128 entry.

Writes land where the metadata of a step says, and reads go where it says. A row must find its own tokens there, whoever
wrote them, in whatever step.
"""

from __future__ import annotations

import copy

import numpy as np

from dsv4_backend.replay.batch_rows import TAIL, BatchRows, CacheSizes, block_tags, describe_tag
from dsv4_backend.replay.metadata_image import MetadataImage
from dsv4_backend.replay.trace import BLOCK_TOKENS
from dsv4_backend.replay.violation import Findings

SAVED = ("window", "entries", "closers")
_ENTRY = 128


class CacheContents:
    """Tags (`batch_rows`) of what was written to the pools.

    Args:
        table_shape: rows and columns of the request table.
        num_slots: slots of the full pool.
        num_window_pages: window pages, the reserved page 0 not counted.
        sizes: of the cache.

    Attributes:
        window: int64 [window slots].
        entries: int64 [num_slots // 128], the ratio-128 pool.
        closers: int64 [R, C // 128]: by request row, the tokens that closed its entries and stayed.
    """

    def __init__(self, table_shape: tuple[int, int], num_slots: int, num_window_pages: int, sizes: CacheSizes) -> None:
        self._page = sizes.window_page_size
        self.window = np.zeros((num_window_pages + 1) * self._page, np.int64)
        self.entries = np.zeros(num_slots // _ENTRY, np.int64)
        self.closers = np.zeros((table_shape[0], table_shape[1] // _ENTRY), np.int64)

    def forget(self, window_pages: np.ndarray) -> None:
        """Empties window pages that have a new owner."""
        self.window[(window_pages[:, None] * self._page + np.arange(self._page)).ravel()] = 0

    def admit(self, row: int, chain: np.ndarray, hit: int) -> None:
        """A request takes `row`; its first `hit` tokens, those of the blocks in `chain`, are in the cache."""
        position = np.arange(hit // _ENTRY) * _ENTRY + _ENTRY - 1
        self.closers[row] = 0
        self.closers[row, : len(position)] = block_tags(chain[position // BLOCK_TOKENS], position)

    def write(self, rows: BatchRows, image: MetadataImage) -> None:
        """Stores the batch's tokens where the metadata says."""
        count = len(rows.owner)
        slot = image.fields["swa_out_cache_loc"][:count]
        real = (slot > 0) & (slot < len(self.window))
        self.window[slot[real]] = rows.tag[real]
        slot = image.fields["c128_out_loc"][:count]
        real = (slot > 0) & (slot < len(self.entries))
        self.entries[slot[real]] = rows.tag[real]

    def check(self, rows: BatchRows, image: MetadataImage, found: Findings) -> None:
        """Checks that rows of the batch find the tokens that they attend to."""
        last = rows.starts + rows.step.extend_lens - 1
        self._check_windows(rows, image, np.union1d(last, np.flatnonzero(rows.offset % TAIL == TAIL - 1)), found)
        self._check_entries(rows, image, last, found)

    def commit(self, rows: BatchRows, stays: np.ndarray) -> None:
        """Takes note of the entries that rows closed for good; `stays` is bool [T]."""
        closed = stays & ((rows.position + 1) % _ENTRY == 0)
        request = rows.step.req_pool_indices[rows.owner[closed]]
        self.closers[request, rows.position[closed] // _ENTRY] = rows.tag[closed]

    def copy(self) -> CacheContents:
        """A copy of the pools, to be written to; `closers`, which only `commit` and `admit` change, is shared."""
        other = copy.copy(self)
        other.window, other.entries = self.window.copy(), self.entries.copy()
        return other

    def _check_windows(self, rows: BatchRows, image: MetadataImage, chosen: np.ndarray, found: Findings) -> None:
        """Windows of the chosen rows, which together hold every token that the batch attends to."""
        slots = image.fields["swa_page_indices"][chosen]
        position = rows.position[chosen][:, None] - np.arange(slots.shape[1])
        row, column = np.nonzero((position >= 0) & (np.arange(slots.shape[1]) < TAIL))
        owner, position, slot = rows.owner[chosen[row]], position[row, column], slots[row, column]
        want = rows.token_at(owner, position)
        self._compare("window_read", 0, self.window, slot, want, rows.request(owner), position, image, found)

    def _check_entries(self, rows: BatchRows, image: MetadataImage, last: np.ndarray, found: Findings) -> None:
        """All entries that the last row of each request attends to."""
        table = image.fields.get("table_rows")
        slots = image.fields["c128_page_indices"][last if table is None else table[last]]
        entry = np.arange(slots.shape[1])
        owner, entry = np.nonzero(entry < ((rows.position[last] + 1) // _ENTRY)[:, None])
        position = entry * _ENTRY + _ENTRY - 1
        in_batch = position >= rows.step.before[owner]
        row = np.where(in_batch, rows.starts[owner] + position - rows.step.before[owner], 0)
        want = np.where(in_batch, rows.tag[row], self.closers[rows.step.req_pool_indices[owner], entry])
        slot = slots[owner, entry]
        self._compare("entry_read", 128, self.entries, slot, want, rows.request(owner), position, image, found)

    @staticmethod
    def _compare(
        kind: str,
        ratio: int,
        pool: np.ndarray,
        slot: np.ndarray,
        want: np.ndarray,
        request: np.ndarray,
        position: np.ndarray,
        image: MetadataImage,
        found: Findings,
    ) -> None:
        outside = (slot < 0) | (slot >= len(pool))
        have = pool[np.where(outside, 0, slot)]
        found.add(
            kind,
            ratio,
            outside | (have != want),
            request=request,
            position=position,
            expected=lambda i: describe_tag(want[i]),
            got=lambda i: f"{'no slot' if outside[i] else describe_tag(have[i])} (slot {slot[i]} in {image.label})",
        )
