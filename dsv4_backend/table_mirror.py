"""Slot tables on a device that follow those of a page pool."""

from __future__ import annotations

import numpy as np
import torch

from dsv4_backend.page_pool import PagePool
from dsv4_backend.tables import RequestTables
from dsv4_backend.transfer import send


class TableMirror:
    """Slot tables on a device that follow a pool's. On a CPU they share its memory.

    Args:
        pool: the pool.
        device: where plans and metadata are made.
    """

    def __init__(self, pool: PagePool, device: torch.device) -> None:
        self._pool, self._shared = pool, device.type == "cpu"
        req_to_token, full_to_swa = torch.from_numpy(pool.req_to_token), torch.from_numpy(pool.full_to_swa)
        if not self._shared:
            pool.take_changes()
        self.tables = RequestTables(req_to_token.to(device), full_to_swa.to(device))

    def refresh(self) -> RequestTables:
        """Copies what changed since the last call to the device and returns the tables."""
        if not self._shared:
            rows, slots = self._pool.take_changes()
            columns = self._pool.req_to_token.shape[1]
            ranges = [(row * columns + start, row * columns + stop) for row, start, stop in rows]
            try:
                _copy_ranges(self._pool.req_to_token, self.tables.req_to_token, ranges)
                _copy_ranges(self._pool.full_to_swa, self.tables.full_to_swa, slots)
            except BaseException:
                self._pool.forget_changes()  # the next call copies all
                raise
        return self.tables


def _copy_ranges(source: np.ndarray, target: torch.Tensor, ranges: list[tuple[int, int]]) -> None:
    if not ranges:
        return
    places = np.concatenate([np.arange(start, stop) for start, stop in ranges])
    values = torch.from_numpy(source.reshape(-1)[places])
    target.view(-1)[send(torch.from_numpy(places), target.device)] = send(values, target.device)
