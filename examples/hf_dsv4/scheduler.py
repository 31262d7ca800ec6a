"""Which requests run in a step, with how many rows, and where their tokens lie."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dsv4_backend import ForwardMode
from dsv4_backend.page_pool import PagePool
from dsv4_backend.replay.prefix_cache import PrefixCache


@dataclass(eq=False)
class Request:
    """A request, and what has become of it.

    Attributes:
        tokens: its prompt, and what was generated behind it.
        prompt_length: tokens of the prompt.
        max_new_tokens: tokens to generate.
        row: of the request table; 0 while it waits, and when it is finished.
        length: tokens that are in the cache. Those behind them are to be computed: the last one alone once the rest is
            there, and then each step gives the next.
        chain: names of its full blocks of tokens, for the prefix cache; each name depends on all tokens before.
        offered: blocks that the prefix cache was offered.
        put_back: how often it lost its pages to an older request and had to begin again.
    """

    tokens: list[int]
    prompt_length: int
    max_new_tokens: int
    row: int = 0
    length: int = 0
    chain: list[int] = field(default_factory=list)
    offered: int = 0
    put_back: int = 0

    @property
    def output(self) -> list[int]:
        """The tokens that were generated."""
        return self.tokens[self.prompt_length :]

    @property
    def pending(self) -> int:
        """Tokens that are not in the cache; 1 for a request that decodes."""
        return len(self.tokens) - self.length

    @property
    def remaining(self) -> int:
        """Tokens that are still to be generated."""
        return self.prompt_length + self.max_new_tokens - len(self.tokens)


@dataclass(frozen=True, eq=False)
class Step:
    """One step of B requests with T rows, request-major.

    Attributes:
        mode: EXTEND (any number of rows each), DECODE (one row each) or TARGET_VERIFY (one row, and drafts behind it).
        requests: B of them, in the order of their rows.
        before: B lengths: tokens that are in the cache.
        rows: B numbers of rows.
        slots: int32 [T]: slots of the full pool.
    """

    mode: ForwardMode
    requests: Sequence[Request]
    before: Sequence[int]
    rows: Sequence[int]
    slots: np.ndarray

    @property
    def last_rows(self) -> np.ndarray:
        """int64 [B]: each request's last row."""
        return np.cumsum(self.rows, dtype=np.int64) - 1


class Scheduler:
    """Continuous batching on a page pool, first come, first served.

    A step takes prompts first, in chunks that share `chunk_size` rows, and all requests that decode join it with a row
    each. Where there is no prompt left to compute, all decode, with their drafts if there are any. A request is
    admitted once a row is free and pages for all of its tokens; when one that decodes needs a page and none is left,
    the youngest is put back to the front of the queue, and computes its tokens again later. Pages of whole blocks of
    tokens stay in a prefix cache until their room is needed.

    Args:
        pool: where the tokens lie.
        window: tokens that a query sees, itself included. Window pages behind it are let go.
        chunk_size: prompt rows of a step.
        num_drafts: drafts of a request in a verify step; 0: none.
        uniform: each request verifies all drafts, also where fewer tokens are left to generate; its surplus is cut off.
            Graphs need that. Else it has as many rows as tokens are left, at most.
    """

    def __init__(
        self, pool: PagePool, *, window: int, chunk_size: int, num_drafts: int = 0, uniform: bool = False
    ) -> None:
        self._pool, self._window, self._chunk_size = pool, window, chunk_size
        self._num_drafts, self._uniform = num_drafts, uniform
        self._prefixes = PrefixCache(pool, pool.page_size * -(-window // pool.page_size), window)
        self._block = self._prefixes.block_pages * pool.page_size
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # the oldest first
        self.hit_tokens = 0
        self.put_back = 0

    @property
    def waiting(self) -> Sequence[Request]:
        return tuple(self._waiting)

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold a row, the oldest first."""
        return tuple(self._running)

    def add(self, prompt: Sequence[int], max_new_tokens: int) -> Request:
        """Queues a request.

        Raises:
            ValueError: the prompt is empty, nothing is to be generated, or it would not fit even alone.
        """
        if not len(prompt):
            raise ValueError("prompt: expected at least one token, got none")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
        pool, longest = self._pool, len(prompt) + max_new_tokens + self._num_drafts
        room = min(pool.req_to_token.shape[1], pool.num_pages * pool.page_size)
        if longest > room:
            raise ValueError(f"prompt: expected room for {longest} tokens with all that follows, got {room}")
        # The window, whose ends are not aligned, with the rows of a decode step; and what the prefix cache has of it.
        window_page = pool.window_page_size
        pages = 2 + (self._window + self._num_drafts) // window_page + -(-self._window // window_page)
        if pool.num_window_pages < min(pages, -(-longest // window_page)):
            raise ValueError(f"prompt: expected at least {pages} window pages, got {pool.num_window_pages}")
        request = Request(list(prompt), len(prompt), max_new_tokens)
        self._waiting.append(request)
        return request

    def next_step(self) -> Step | None:
        """The next step, with slots for its rows; None when nothing is left to do. `commit` must follow."""
        while self._running or self._waiting:
            if batch := self._prompts():
                return self._step(ForwardMode.EXTEND, batch)
            if batch := self._decodes():
                mode = ForwardMode.TARGET_VERIFY if self._num_drafts else ForwardMode.DECODE
                return self._step(mode, batch)
            self._put_back_youngest()
        return None

    def commit(self, step: Step, tokens: Sequence[Sequence[int]]) -> list[Request]:
        """Ends a step.

        Args:
            step: what `next_step` returned.
            tokens: for each request the tokens that it goes on with: several where drafts were accepted. Ignored where
                the step did not reach the end of a request's tokens.

        Returns:
            The requests that are finished by it; they hold nothing any more.
        """
        finished = []
        for request, before, rows, new in zip(step.requests, step.before, step.rows, tokens, strict=True):
            request.length = before + (len(new) if step.mode is ForwardMode.TARGET_VERIFY else rows)
            if request.length >= len(request.tokens):
                request.tokens += new[: request.remaining]
                request.length = min(request.length, len(request.tokens) - 1)
            self._offer_blocks(request)
            if request.remaining:
                self._pool.trim_window(request.row, request.length - self._window)
            else:
                self._leave(request)
                finished.append(request)
        return finished

    def abandon(self, step: Step) -> None:
        """Ends a step that may have run in part: its requests, put back, compute all of their tokens again.

        A row that was stored may have taken the place, in a ring, of one that the step would read again.
        """
        for request in [each for each in reversed(self._running) if each in step.requests]:
            if request.remaining:
                self._put_back(request)
            else:  # it has all of its tokens
                self._leave(request)

    def _prompts(self) -> list[tuple[Request, int]]:
        batch: list[tuple[Request, int]] = []
        budget = self._chunk_size
        prefilling = [request for request in self._running if request.pending > 1]
        while budget:
            request = prefilling.pop(0) if prefilling else self._admit()
            if request is None:
                break
            want = min(budget, request.pending)
            rows = self._grow(request, want)
            if rows:
                batch.append((request, rows))
                budget -= rows
            if rows < want:  # short of pages: who comes later must not take those that this one waits for
                break
        if not batch:
            return []
        chosen = {request for request, _ in batch}
        joining = [r for r in self._running if r not in chosen and r.pending == 1]
        return batch + [(request, 1) for request in joining if self._grow(request, 1)]

    def _decodes(self) -> list[tuple[Request, int]]:
        """Called when no prompt can go on."""
        batch: list[tuple[Request, int]] = []
        width = 1 + self._num_drafts
        for request in [r for r in self._running if r.pending == 1]:
            # Only a younger one, which is not in the batch yet, ever gives its pages up.
            while request in self._running and self._grow(request, width) < width:
                self._put_back_youngest()
            if request in self._running:
                batch.append((request, width if self._uniform else min(width, request.remaining)))
        return batch

    def _admit(self) -> Request | None:
        """Gives the first that waits a row, if pages for its tokens are there."""
        if not self._waiting or not self._pool.free_rows:
            return None
        request, pool = self._waiting[0], self._pool
        self._close(request)  # it has a row if something interrupted the lines below
        self._name_blocks(request)
        # At least one token is left to compute: its row gives the next token.
        shared = self._prefixes.match(request.chain, (len(request.tokens) - 1) // self._block)
        idle = self._prefixes.idle_pages - sum(pool.refs[page] == 1 for page in shared)
        if -(-len(request.tokens) // pool.page_size) - len(shared) > pool.free_pages + idle:
            return None
        request.row, request.length = pool.open(shared, self._window), len(shared) * pool.page_size
        request.offered = request.length // self._block
        self.hit_tokens += request.length
        self._running.append(self._waiting.popleft())
        return request

    def _grow(self, request: Request, rows: int) -> int:
        """Makes room for up to `rows` rows more, and returns for how many."""
        full, window = self._pool.missing(request.row, request.length + rows)
        self._prefixes.evict(max(0, full - self._pool.free_pages), max(0, window - self._pool.free_window_pages))
        rows = max(0, min(rows, self._pool.reach(request.row) - request.length))
        if rows:
            self._pool.grow(request.row, request.length + rows)
        return rows

    def _put_back_youngest(self) -> None:
        if len(self._running) < 2:
            raise RuntimeError("the only request left cannot get its pages, which `add` should have seen")
        self._put_back(self._running[-1])

    def _put_back(self, request: Request) -> None:
        """Gives all up that a request holds, which goes to the front of the queue."""
        self._leave(request)
        request.put_back += 1
        self.put_back += 1
        self._waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        self._close(request)
        self._running.remove(request)

    def _close(self, request: Request) -> None:
        if request.row:
            self._pool.close(request.row)
        request.row = request.length = 0

    def _offer_blocks(self, request: Request) -> None:
        self._name_blocks(request)
        pages, size = self._pool.pages(request.row), self._prefixes.block_pages
        for index in range(request.offered, request.length // self._block):
            self._prefixes.insert(request.chain, index, pages[index * size : (index + 1) * size])
            request.offered = index + 1

    def _name_blocks(self, request: Request) -> None:
        for index in range(len(request.chain), len(request.tokens) // self._block):
            tokens = np.array(request.tokens[index * self._block : (index + 1) * self._block], np.int64)
            before = (request.chain[-1] if index else 0).to_bytes(16, "little")
            name = hashlib.blake2b(before + tokens.tobytes(), digest_size=16).digest()
            request.chain.append(int.from_bytes(name, "little"))

    def _step(self, mode: ForwardMode, batch: list[tuple[Request, int]]) -> Step:
        slots = [self._pool.slots(each.row, each.length, each.length + rows) for each, rows in batch]
        return Step(
            mode=mode,
            requests=[request for request, _ in batch],
            before=[request.length for request, _ in batch],
            rows=[rows for _, rows in batch],
            slots=np.concatenate(slots),
        )
