"""Continuous batching: which requests run in a step, and with how many rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dsv4_backend.page_pool import PagePool
from dsv4_backend.replay.prefix_cache import PrefixCache
from dsv4_backend.replay.step import Admission, Step, StepMode
from dsv4_backend.replay.trace import BLOCK_TOKENS, TraceRequest, prefix_chains

_BUCKET_REQUESTS = {StepMode.TARGET_VERIFY: 4, StepMode.DECODE: 8}


def bucket_rows(mode: StepMode, rows: int, width: int) -> int:
    """Rows of the bucket that holds a step of `rows` rows, `width` of each request in a verify step.

    Decode and verify: whole requests, as graphs have them. EXTEND: 64, 96, 128, 192 and so on, few enough for a set of
    buffers each.
    """
    if mode is StepMode.EXTEND:
        power = 1 << max(6, (rows - 1).bit_length())
        return power // 4 * 3 if power > 64 and rows <= power // 4 * 3 else power
    size = _BUCKET_REQUESTS[mode] * max(1, width)
    return -(-rows // size) * size


@dataclass(eq=False)
class _Lane:
    """A request that holds a row."""

    request: int
    row: int
    chain: list[int]
    length: int  # committed tokens
    prefill_until: int  # tokens to compute before it decodes: the prompt, and what it had generated if it was put back
    final: int  # committed tokens at its end
    offered: int  # blocks offered to the prefix cache

    @property
    def running(self) -> bool:
        return self.length >= self.prefill_until


class Scheduler:
    """Turns a trace into steps on a page pool.

    The loop is closed: requests wait in the order of their timestamps and one is admitted as soon as a row and the
    pages of its prompt are there; no clock runs. Prompts go first, in chunks that share `chunk_size` rows a step. A
    request that is short of pages waits; when nothing else helps, the youngest one is put back into the queue and
    computes its tokens again later. Rejected draft tokens keep their slots.

    Args:
        requests: the trace, in order of arrival.
        pool, cache: where the tokens are.
        window: tokens that a query sees.
        chunk_size: prompt rows of a step.
        width: rows that a verify step has for each request; 0 decodes without drafts.
        mixed: running requests join prompt steps with a row each; only without drafts.
        rng: draws accept lengths.
    """

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        pool: PagePool,
        cache: PrefixCache,
        *,
        window: int,
        chunk_size: int,
        width: int,
        mixed: bool,
        rng: np.random.Generator,
    ) -> None:
        self._requests, self._chains = requests, prefix_chains(requests)
        self._pool, self._cache, self._window = pool, cache, window
        self._chunk_size, self._width, self._mixed, self._rng = chunk_size, width, mixed, rng
        self._waiting = deque((index, request.input_length) for index, request in enumerate(requests))
        self._lanes: list[_Lane] = []
        self._batch: list[_Lane] = []
        self._admitted: list[Admission] = []
        self._steps = 0
        self.finished = 0
        self.retracted = 0
        self.hit_tokens = 0
        pool.take_fresh_window_pages()

    def next_step(self) -> Step | None:
        """The next batch, with its pages allocated; None at the end. `commit` must follow before the next call."""
        decode = StepMode.TARGET_VERIFY if self._width else StepMode.DECODE
        while self._lanes or self._waiting:
            retracted = self.retracted
            if batch := self._extend_batch():
                return self._make_step(StepMode.EXTEND, batch)
            if batch := self._decode_batch():
                return self._make_step(decode, batch)
            if self.retracted == retracted:
                self._retract()
        return None

    def draw_accepts(self, step: Step) -> np.ndarray:
        """int64 [B]: how many rows of each request stay: 1 .. rows at random for verify, else all."""
        if step.mode is StepMode.TARGET_VERIFY:
            return self._rng.integers(1, step.extend_lens + 1)
        return step.extend_lens

    def commit(self, accepts: np.ndarray) -> None:
        """Ends the step: requests advance by `accepts`, offer blocks, leave window pages behind, or finish."""
        for lane, accepted in zip(self._batch, accepts.tolist(), strict=True):
            lane.length += accepted
            self._offer_blocks(lane)
            if lane.running and lane.length >= lane.final:
                self._lanes.remove(lane)
                self._pool.close(lane.row)
                self.finished += 1
            else:
                self._pool.trim_window(lane.row, lane.length - self._window)
        self._batch = []

    def _extend_batch(self) -> list[tuple[_Lane, int]]:
        batch: list[tuple[_Lane, int]] = []
        budget = self._chunk_size
        for lane in self._prefilling():
            want = min(budget, lane.prefill_until - lane.length)
            rows = self._grow(lane, want)
            if rows:
                batch.append((lane, rows))
                budget -= rows
            # Short of pages: who comes later must not take those that this one waits for.
            if rows < want or not budget:
                break
        if batch and self._mixed:
            batch += [(lane, 1) for lane in self._lanes if lane.running and self._grow(lane, 1)]
            order = {lane.row: place for place, lane in enumerate(self._lanes)}
            batch.sort(key=lambda entry: order[entry[0].row])
        return batch

    def _prefilling(self) -> Iterator[_Lane]:
        """The requests with prompt tokens to compute: those that have a row, then those that get one now."""
        yield from [lane for lane in self._lanes if not lane.running]
        while (lane := self._admit()) is not None:
            yield lane

    def _decode_batch(self) -> list[tuple[_Lane, int]]:
        batch: list[tuple[_Lane, int]] = []
        for lane in list(self._lanes):
            if not lane.running or lane not in self._lanes:
                continue
            want = min(max(1, self._width), lane.final - lane.length)
            # Oldest first: only a younger one, not yet in the batch, ever gives its pages up.
            while lane in self._lanes and self._grow(lane, want, whole=True) < want:
                self._retract()
            if lane in self._lanes:
                batch.append((lane, want))
        return batch

    def _admit(self) -> _Lane | None:
        """Gives the first waiting request a row if all of its prompt will fit; prompts before it have their pages."""
        if not self._waiting or not self._pool.free_rows:
            return None
        index, until = self._waiting[0]
        chain = self._chains[index]
        shared = self._cache.match(chain, min(len(chain), (until - 1) // BLOCK_TOKENS))
        idle = self._cache.idle_pages - sum(self._pool.refs[page] == 1 for page in shared)
        if -(-until // self._pool.page_size) - len(shared) > self._pool.free_pages + idle:
            return None
        self._waiting.popleft()
        hit = len(shared) * self._pool.page_size
        row = self._pool.open(shared, self._window)
        lane = _Lane(index, row, chain, hit, until, self._requests[index].cached_tokens, hit // BLOCK_TOKENS)
        self._lanes.append(lane)
        self._admitted.append(Admission(row, index, chain, hit))
        self.hit_tokens += hit
        return lane

    def _grow(self, lane: _Lane, rows: int, whole: bool = False) -> int:
        """Allocates slots for up to `rows` rows more, all or none if `whole`, and returns for how many."""
        full, window = self._pool.missing(lane.row, lane.length + rows)
        self._cache.evict(max(0, full - self._pool.free_pages), max(0, window - self._pool.free_window_pages))
        fit = min(rows, self._pool.reach(lane.row) - lane.length)
        if fit <= 0 or (whole and fit < rows):
            return 0
        self._pool.grow(lane.row, lane.length + fit)
        return fit

    def _retract(self) -> None:
        """Puts the youngest request back into the queue."""
        if len(self._lanes) < 2:
            raise RuntimeError("the only request left cannot get its pages: the pool check before the run is wrong")
        lane = self._lanes.pop()
        self._pool.close(lane.row)
        self._waiting.appendleft((lane.request, max(lane.prefill_until, lane.length)))
        self.retracted += 1

    def _offer_blocks(self, lane: _Lane) -> None:
        pages, size = self._pool.pages(lane.row), self._cache.block_pages
        for index in range(lane.offered, min(len(lane.chain), lane.length // BLOCK_TOKENS)):
            self._cache.insert(lane.chain, index, pages[index * size : (index + 1) * size])
            lane.offered = index + 1

    def _make_step(self, mode: StepMode, batch: list[tuple[_Lane, int]]) -> Step:
        self._batch = [lane for lane, _ in batch]
        slots = [self._pool.slots(lane.row, lane.length, lane.length + rows) for lane, rows in batch]
        total = sum(rows for _, rows in batch)
        # Verify steps are padded, and every other step of another kind.
        padded = mode is StepMode.TARGET_VERIFY or self._steps % 2
        step = Step(
            index=self._steps,
            mode=mode,
            requests=np.array([lane.request for lane in self._batch], np.int64),
            req_pool_indices=np.array([lane.row for lane in self._batch], np.int64),
            before=np.array([lane.length for lane in self._batch], np.int64),
            extend_lens=np.array([rows for _, rows in batch], np.int64),
            out_cache_loc=np.concatenate(slots).astype(np.int64),
            num_rows=bucket_rows(mode, total, self._width) if padded else total,
            num_draft_tokens=self._width if mode is StepMode.TARGET_VERIFY else 0,
            admitted=tuple(self._admitted),
            fresh_window_pages=self._pool.take_fresh_window_pages(),
        )
        self._admitted.clear()
        self._steps += 1
        return step
