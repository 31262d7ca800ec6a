"""Batches of every mode, and request tables, at fixed addresses: what a captured build of metadata reads."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from dsv4_backend.batch import ForwardMode, RawBatch
from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.tables import RequestTables

DRAFTS = 4
STEPS = 4
GEOMETRY = CacheGeometry.for_drafts(DRAFTS)
PAGE = GEOMETRY.page_size


@dataclass(frozen=True)
class Mode:
    """How the batches of a bucket are drawn.

    Attributes:
        mode: of the batch.
        slots: write slots that a bucket has for each request.
        most: most rows of a request, where each has a number of its own; 0: all have `slots` rows.
        draft_window: of the draft steps.
    """

    mode: ForwardMode
    slots: int = 1
    most: int = 0
    draft_window: str = ""


MODES = {
    "decode": Mode(ForwardMode.DECODE),
    "extend": Mode(ForwardMode.EXTEND, 24, most=300),
    "verify": Mode(ForwardMode.TARGET_VERIFY, DRAFTS),
    "ragged-verify": Mode(ForwardMode.TARGET_VERIFY, DRAFTS - 1, most=DRAFTS),
    "draft-extend": Mode(ForwardMode.DRAFT_EXTEND, DRAFTS),
    "ragged-draft-extend": Mode(ForwardMode.DRAFT_EXTEND, DRAFTS - 1, most=DRAFTS),
    "idle": Mode(ForwardMode.IDLE, 2),
    "drafts-growing": Mode(ForwardMode.DRAFT_DECODE, STEPS, draft_window="growing"),
    "drafts-frozen": Mode(ForwardMode.DRAFT_DECODE, STEPS, draft_window="frozen"),
}


class StaticTables:
    """Request tables whose contents change in place: pages in shuffled order, some unknown, some out of the window.

    Args:
        num_requests: without the reserved request 0.
        columns: tokens a request.
        device: where.
    """

    def __init__(self, num_requests: int, columns: int, device: torch.device) -> None:
        self._pages = -(-columns // PAGE)
        self._num_pages = num_requests * self._pages + 1
        self.tables = RequestTables(
            torch.zeros(num_requests + 1, columns, dtype=torch.int32, device=device),
            torch.full((self._num_pages * PAGE + 1,), -1, dtype=torch.int64, device=device),
        )

    def shuffle(self, rng: random.Random) -> None:
        """New pages for all requests, and new window pages for all pages."""
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        requests, columns = self.tables.req_to_token.shape
        pages = torch.randperm(self._num_pages - 1, generator=generator) + 1
        unknown = torch.rand(len(pages), generator=generator) < 0.05
        slots = self._spread(pages).where(~unknown.to(self.tables.device)[:, None], -1)
        self.tables.req_to_token[1:] = slots.view(requests - 1, -1)[:, :columns]
        pages = torch.randperm(self._num_pages - 1, generator=generator) + 1
        evicted = torch.rand(len(pages), generator=generator) < 0.1
        slots = self._spread(pages).where(~evicted.to(self.tables.device)[:, None], 0)
        self.tables.full_to_swa[:PAGE] = 0
        self.tables.full_to_swa[PAGE:-1] = slots.flatten()

    def _spread(self, pages: torch.Tensor) -> torch.Tensor:
        """[len(pages), PAGE]: the slots of each page."""
        device = self.tables.device
        return pages.to(device)[:, None] * PAGE + torch.arange(PAGE, device=device)


class StaticBatch:
    """A batch of `size` requests in fixed tensors; those that are not live are padding, with a request id of 0.

    Args:
        mode: how it is drawn.
        size: requests.
        tables: of the requests.
        device: where.
        rng: decides the dtypes.
    """

    def __init__(self, mode: Mode, size: int, tables: StaticTables, device: torch.device, rng: random.Random) -> None:
        self._mode, self._size, self._tables = mode, size, tables.tables
        self._on_cpu = device.type == "cpu"

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=rng.choice((torch.int32, torch.int64)), device=device)

        drafts = mode.mode is ForwardMode.DRAFT_DECODE
        self.raw = RawBatch(
            mode.mode,
            ints(size),
            ints(size),
            ints(size * mode.slots),
            extend_lens=ints(size) if mode.most else None,
            num_draft_tokens=DRAFTS,
            num_steps=STEPS if drafts else 0,
        )
        self.step_rows = self.raw.num_rows

    def draw(self, live: int, rng: random.Random) -> None:
        """A new batch with `live` requests, in front or anywhere."""
        size, idle = self._size, self._mode.mode is ForwardMode.IDLE
        places = set(rng.sample(range(size), live) if rng.random() < 0.5 else range(live))
        ids, extends = rng.sample(range(1, size + 1), live), self._extends(places, rng)
        req, seq = [], []
        nobody = (-1, 1, 10**6) if idle else (0,)
        for b in range(size):
            alive = b in places and not idle
            req.append(ids.pop() if alive else rng.choice(nobody))
            seq.append(self._length(extends[b], rng) if alive else rng.choice((1, 0, -3, 10**6)))
        owned = sum(extends) if self._mode.most else size * self._mode.slots
        slots = [rng.randrange(PAGE, self._tables.num_slots - 1) for _ in range(owned)]
        # What lies behind the rows of the last request is nobody's.
        slots += [0] * (self.raw.out_cache_loc.shape[0] - owned)
        for target, values in (
            (self.raw.req_pool_indices, req),
            (self.raw.seq_lens, seq),
            (self.raw.out_cache_loc, slots),
            (self.raw.extend_lens, extends),
        ):
            if target is not None:
                target.copy_(torch.tensor(values))

    def _extends(self, places: set[int], rng: random.Random) -> list[int]:
        """Rows of each request, padding requests too: all of the bucket's, or, as only a GPU build takes it, fewer."""
        mode, size = self._mode, self._size
        extends = [mode.slots] * size
        if not mode.most:
            return extends
        for _ in range(4 * size):
            giver, taker = rng.randrange(size), rng.randrange(size)
            # Down to one row, as decodes among prefills have, sometimes to none.
            given = min(extends[giver] - rng.choice((1, 1, 1, 0)), mode.most - extends[taker])
            if giver != taker and given > 0:
                given = rng.choice((given, rng.randint(1, given)))
                extends[giver] -= given
                extends[taker] += given
        if self._on_cpu or rng.random() < 0.3:
            return extends
        return [rows if b in places and rng.random() < 0.8 else 0 for b, rows in enumerate(extends)]

    def _length(self, rows: int, rng: random.Random) -> int:
        """`seq_lens` of a live request: short, around a border, or anything."""
        mode = self._mode.mode
        longest = self._tables.max_seq_len - max(rows, STEPS)
        border = rng.choice((127, 128, 255, 256, longest - 2))
        prefix = rng.choice((rng.randint(0, 9), border + rng.randint(-2, 2), rng.randint(0, longest)))
        if mode is ForwardMode.TARGET_VERIFY or self._mode.draft_window == "growing":
            return prefix
        return prefix + (1 if mode in (ForwardMode.DECODE, ForwardMode.DRAFT_DECODE) else rows)
