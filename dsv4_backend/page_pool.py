"""A paged cache's bookkeeping: pages of the full and of the window pool, request rows, and the two slot tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class PagePool:
    """Hands out pages and keeps `req_to_token` and `full_to_swa` in step with who owns what.

    A request owns a row and a list of full pages, position p in page p // page_size at offset p % page_size. Each full
    page carries `page_size // window_page_size` window pages, which are only mapped while somebody holds them: the
    requests whose window reaches into them, or a prefix cache. Pages are counted by their holders, so that several
    requests and the cache can share a full page and its window pages. Row 0 and page 0 of both pools are reserved.

    Args:
        page_size: tokens of a full page.
        window_page_size: tokens of a window page; divides `page_size`.
        num_pages, num_window_pages: pages of either pool, the reserved page 0 not counted.
        max_requests: request rows, the reserved row 0 not counted.
        max_len: longest request in tokens; rounded up to whole pages.
        seed: order in which pages and rows are handed out.

    Attributes:
        req_to_token: int32 [max_requests + 1, columns]: slot of a position; 0 where there is none.
        full_to_swa: int64 [(num_pages + 1) * page_size + 1]: window slot of a slot; 0 where there is none, last -1.

    Raises:
        ValueError: a size that is not positive, or window pages that do not divide full pages.
    """

    def __init__(
        self,
        *,
        page_size: int,
        window_page_size: int,
        num_pages: int,
        num_window_pages: int,
        max_requests: int,
        max_len: int,
        seed: int = 0,
    ) -> None:
        sizes = {
            "page_size": page_size,
            "window_page_size": window_page_size,
            "num_pages": num_pages,
            "num_window_pages": num_window_pages,
            "max_requests": max_requests,
            "max_len": max_len,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if page_size % window_page_size:
            raise ValueError(f"window_page_size: expected a divisor of page_size {page_size}, got {window_page_size}")
        self.page_size, self.window_page_size = page_size, window_page_size
        self.num_pages, self.num_window_pages = num_pages, num_window_pages
        self.parts = page_size // window_page_size

        rng = np.random.default_rng(seed)
        self._free: list[int] = (rng.permutation(num_pages) + 1).tolist()
        self._free_window: list[int] = (rng.permutation(num_window_pages) + 1).tolist()
        self._free_rows: list[int] = (rng.permutation(max_requests) + 1).tolist()
        columns = -(-max_len // page_size) * page_size
        self.req_to_token = np.zeros((max_requests + 1, columns), np.int32)
        self.full_to_swa = np.zeros((num_pages + 1) * page_size + 1, np.int64)
        self.full_to_swa[-1] = -1
        self.refs = np.zeros(num_pages + 1, np.int32)
        self.window_of = np.zeros((num_pages + 1, self.parts), np.int64)
        self.window_refs = np.zeros((num_pages + 1, self.parts), np.int32)
        self._pages: dict[int, list[int]] = {}
        self._window: dict[int, tuple[int, int]] = {}
        self._fresh_window: list[int] | None = None
        self._changes: tuple[list[tuple[int, int, int]], list[tuple[int, int]]] | None = None

    @property
    def free_pages(self) -> int:
        """Full pages that nobody holds."""
        return len(self._free)

    @property
    def free_window_pages(self) -> int:
        """Window pages that nobody holds."""
        return len(self._free_window)

    @property
    def free_rows(self) -> int:
        """Request rows that nobody holds."""
        return len(self._free_rows)

    def pages(self, row: int) -> Sequence[int]:
        """Full pages of the request in `row`, in the order of its positions."""
        return self._pages[row]

    def window_pages(self, row: int) -> range:
        """Which window pages the request in `row` holds, counted from its position 0."""
        return range(*self._window[row])

    def open(self, shared: Sequence[int] = (), window: int = 0) -> int:
        """Gives a request a row, on top of full pages that somebody else filled.

        Args:
            shared: full pages of its first tokens.
            window: how many of the last shared tokens must stay resident; their window pages are held.

        Raises:
            ValueError: no row is free, or a window page that must be resident is not.
        """
        if not self._free_rows:
            most = len(self.req_to_token) - 1
            raise ValueError(f"rows: expected a free request row, got none (max_requests is {most}: close one first)")
        tokens = len(shared) * self.page_size
        first, last = max(0, tokens - window) // self.window_page_size, tokens // self.window_page_size
        homes = [self._home(shared, index) for index in range(first, last)]
        for page, part in homes:
            if not self.window_of[page, part]:
                raise ValueError(f"shared: expected page {page} to be resident in the window pool, got an evicted one")
        row = self._free_rows.pop()
        self._pages[row], self._window[row] = [], (first, last)
        for page, part in homes:
            self.window_refs[page, part] += 1
        for page in shared:
            self.refs[page] += 1
        self._append_pages(row, shared)
        return row

    def missing(self, row: int, length: int) -> tuple[int, int]:
        """Full and window pages that `grow(row, length)` would take; compare them with what is free."""
        full = -(-length // self.page_size) - len(self._pages[row])
        window = -(-length // self.window_page_size) - self._window[row][1]
        return max(0, full), max(0, window)

    def reach(self, row: int) -> int:
        """The longest length that the request in `row` can grow to with the pages that are free now."""
        full = (len(self._pages[row]) + len(self._free)) * self.page_size
        window = (self._window[row][1] + len(self._free_window)) * self.window_page_size
        return min(full, window)

    def grow(self, row: int, length: int) -> None:
        """Gives the first `length` positions of the request in `row` a slot. To ask first: `reach(row) >= length`.

        Raises:
            ValueError: before anything is changed: no such request, pages are short, or more positions than the table
                has columns.
        """
        if row not in self._pages:
            raise ValueError(f"row: expected a request that is open, got {row}")
        columns = self.req_to_token.shape[1]
        if length > columns:
            raise ValueError(f"length: expected at most {columns} for request {row}, got {length}")
        full, window = self.missing(row, length)
        if full > self.free_pages or window > self.free_window_pages:
            raise ValueError(
                f"pages: expected {full} full and {window} window pages free for request {row} to grow to {length} "
                f"tokens, got {self.free_pages} and {self.free_window_pages} (it can reach {self.reach(row)})"
            )
        taken = [self._free.pop() for _ in range(full)]
        self.refs[taken] = 1
        self._append_pages(row, taken)
        first, last = self._window[row]
        for index in range(last, last + window):
            self._map_window(*self._home(self._pages[row], index))
        self._window[row] = (first, last + window)

    def slots(self, row: int, start: int, stop: int) -> np.ndarray:
        """int32 [stop - start]: slots of positions start .. stop - 1; a view."""
        return self.req_to_token[row, start:stop]

    def trim_window(self, row: int, keep_from: int) -> None:
        """Lets go of the window pages whose positions all lie before `keep_from`."""
        first, last = self._window[row]
        stop = min(last, max(first, keep_from // self.window_page_size))
        for index in range(first, stop):
            self.drop_window(*self._home(self._pages[row], index))
        self._window[row] = (stop, last)

    def close(self, row: int) -> None:
        """Lets go of everything that the request in `row` holds, and of the row."""
        pages = self._pages[row]
        for index in self.window_pages(row):
            self.drop_window(*self._home(pages, index))
        self.req_to_token[row, : len(pages) * self.page_size] = 0
        self._log_row(row, 0, len(pages) * self.page_size)
        for page in pages:
            self.drop(page)
        del self._pages[row], self._window[row]
        self._free_rows.append(row)

    def hold(self, page: int) -> None:
        """Counts one more holder of a full page that is in use."""
        self.refs[page] += 1

    def drop(self, page: int) -> None:
        """Counts one holder less; the last one frees the page."""
        self.refs[page] -= 1
        if self.refs[page] == 0:
            self._free.append(page)

    def hold_window(self, page: int, part: int) -> None:
        """Counts one more holder of a resident window page: the `part`-th of full page `page`."""
        self.window_refs[page, part] += 1

    def drop_window(self, page: int, part: int) -> None:
        """Counts one holder less; the last one frees the window page and unmaps its slots."""
        self.window_refs[page, part] -= 1
        if self.window_refs[page, part] == 0:
            self._free_window.append(int(self.window_of[page, part]))
            self.window_of[page, part] = 0
            self._map_slots(page, part, 0)

    def take_fresh_window_pages(self) -> np.ndarray:
        """int64 [n]: the window pages handed out since the last call. The first call starts the record."""
        fresh = np.asarray(self._fresh_window or (), np.int64)
        self._fresh_window = []
        return fresh

    def take_changes(self) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
        """What changed in the tables since the last call: (row, start, stop) and (start, stop) of slots.

        The first call starts the record and reports both tables as a whole.
        """
        rows, slots = self._changes or (
            [(row, 0, self.req_to_token.shape[1]) for row in range(len(self.req_to_token))],
            [(0, len(self.full_to_swa))],
        )
        self._changes = ([], [])
        return rows, slots

    def forget_changes(self) -> None:
        """Lets the next `take_changes` report both tables as a whole, for a reader that lost what it was told."""
        self._changes = None

    def _home(self, pages: Sequence[int], index: int) -> tuple[int, int]:
        return pages[index // self.parts], index % self.parts

    def _append_pages(self, row: int, pages: Sequence[int]) -> None:
        if not len(pages):
            return
        start = len(self._pages[row]) * self.page_size
        stop = start + len(pages) * self.page_size
        first_slots = np.asarray(pages, np.int32)[:, None] * self.page_size
        self.req_to_token[row, start:stop] = (first_slots + np.arange(self.page_size, dtype=np.int32)).ravel()
        self._pages[row].extend(pages)
        self._log_row(row, start, stop)

    def _map_window(self, page: int, part: int) -> None:
        window_page = self._free_window.pop()
        self.window_of[page, part], self.window_refs[page, part] = window_page, 1
        if self._fresh_window is not None:
            self._fresh_window.append(window_page)
        self._map_slots(page, part, window_page)

    def _map_slots(self, page: int, part: int, window_page: int) -> None:
        size = self.window_page_size
        start = page * self.page_size + part * size
        if window_page:
            self.full_to_swa[start : start + size] = np.arange(window_page * size, (window_page + 1) * size)
        else:
            self.full_to_swa[start : start + size] = 0
        if self._changes is not None:
            self._changes[1].append((start, start + size))

    def _log_row(self, row: int, start: int, stop: int) -> None:
        if self._changes is not None:
            self._changes[0].append((row, start, stop))
