"""A prefix cache over the page pool: which prompt blocks are still there, and which to give up first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dsv4_backend.page_pool import PagePool


@dataclass
class _Block:
    parent: int
    pages: list[int]
    resident: bool = False
    children: set[int] = field(default_factory=set)


class PrefixCache:
    """Keeps the pages of full prompt blocks, keyed by chain (`trace.prefix_chains`), until room is needed.

    A chain of blocks can be reused only where the window before its end is still resident, so each block also holds
    the window pages of its last `window` tokens. Both holds are given up under pressure, apart from each other: a
    block without its window is of use only inside a longer chain.

    Args:
        pool: where the pages are.
        block_tokens: tokens of a block; a multiple of the page size.
        window: tokens before the end of a chain that must be resident.

    Raises:
        ValueError: blocks do not hold whole pages, or the window is longer than a block.
    """

    def __init__(self, pool: PagePool, block_tokens: int, window: int) -> None:
        if block_tokens % pool.page_size:
            raise ValueError(f"page_size: expected a divisor of the block of {block_tokens}, got {pool.page_size}")
        if window > block_tokens:
            raise ValueError(f"window: expected at most a block of {block_tokens} tokens, got {window}")
        self._pool, self.block_pages = pool, block_tokens // pool.page_size
        # Window pages that reach into the last `window` tokens, as (page of the block, part of that page).
        first = (block_tokens - window) // pool.window_page_size
        self._tail = [divmod(index, pool.parts) for index in range(first, block_tokens // pool.window_page_size)]
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._windows: OrderedDict[int, None] = OrderedDict()
        self._cached = np.zeros(pool.num_pages + 1, bool)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def idle_pages(self) -> int:
        """Full pages that only the cache holds: what `evict` can free at most."""
        return int(np.count_nonzero(self._cached & (self._pool.refs == 1)))

    def match(self, chain: Sequence[int], limit: int) -> list[int]:
        """Full pages of the longest usable prefix of `chain`, at most `limit` blocks."""
        usable, pages = 0, []
        for depth, name in enumerate(chain[:limit], start=1):
            block = self._blocks.get(name)
            if block is None:
                break
            pages += block.pages
            if block.resident:
                usable = depth
        self._touch(chain[:usable])
        return pages[: usable * self.block_pages]

    def insert(self, chain: Sequence[int], index: int, pages: Sequence[int]) -> None:
        """Offers block `index` of `chain`, computed in `pages`, whose window pages are resident.

        Takes it if the blocks before it are there. A block that is there already but has lost its window takes the
        new pages instead of its own, unless these are in use.
        """
        name = chain[index]
        parent = chain[index - 1] if index else -1
        block = self._blocks.get(name)
        if block is None:
            if index and parent not in self._blocks:
                return
            block = self._blocks[name] = _Block(parent, list(pages))
            if index:
                self._blocks[parent].children.add(name)
        elif block.resident or any(self._pool.refs[page] > 1 for page in block.pages):
            return
        else:
            self._drop_pages(block)
            block.pages = list(pages)
        for page in block.pages:
            self._pool.hold(page)
            self._cached[page] = True
        for page, part in self._tail:
            self._pool.hold_window(block.pages[page], part)
        block.resident = True
        self._windows[name] = None
        self._touch(chain[: index + 1])

    def evict(self, pages: int, window_pages: int) -> None:
        """Gives up what was used longest ago until so many more pages are free, or nothing more can be freed."""
        window_goal = self._pool.free_window_pages + window_pages
        if window_pages > 0:
            for name in list(self._windows):
                if self._pool.free_window_pages >= window_goal:
                    break
                if self._window_is_idle(self._blocks[name]):
                    self._drop_window(name)
        goal = self._pool.free_pages + pages
        for name in list(self._blocks):
            if self._pool.free_pages >= goal:
                break
            block = self._blocks.get(name)
            if block is not None and all(self._pool.refs[page] == 1 for page in block.pages):
                self._remove(name)

    def _remove(self, name: int) -> None:
        """Drops a block and what hangs on it; pages that requests still use stay theirs."""
        parent = self._blocks.get(self._blocks[name].parent)
        if parent is not None:
            parent.children.discard(name)
        pending = [name]
        while pending:
            name = pending.pop()
            block = self._blocks[name]
            pending += block.children
            if block.resident:
                self._drop_window(name)
            self._drop_pages(block)
            del self._blocks[name]

    def _window_is_idle(self, block: _Block) -> bool:
        return all(self._pool.window_refs[block.pages[page], part] == 1 for page, part in self._tail)

    def _drop_window(self, name: int) -> None:
        block = self._blocks[name]
        for page, part in self._tail:
            self._pool.drop_window(block.pages[page], part)
        block.resident = False
        del self._windows[name]

    def _drop_pages(self, block: _Block) -> None:
        for page in block.pages:
            self._cached[page] = False
            self._pool.drop(page)

    def _touch(self, chain: Sequence[int]) -> None:
        # Start last: the end of a chain is of no use without its start, so it must go first.
        for name in reversed(chain):
            if name in self._blocks:
                self._blocks.move_to_end(name)
            if name in self._windows:
                self._windows.move_to_end(name)
