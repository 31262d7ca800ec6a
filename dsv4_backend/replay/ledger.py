"""Bookkeeping that judges plans and metadata: what was computed, and which token lies where in cache and state rings.

It shares no code with planner, builder, geometry or reference, so that an error has to be made twice to go unseen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsv4_backend.replay.batch_rows import TAIL, BatchRows, CacheSizes, block_tags
from dsv4_backend.replay.contents import SAVED as CONTENTS
from dsv4_backend.replay.contents import CacheContents
from dsv4_backend.replay.image import RATIOS, PlanImage
from dsv4_backend.replay.metadata_checks import check_builds, check_metadata
from dsv4_backend.replay.metadata_image import MetadataImage
from dsv4_backend.replay.plan_checks import check_decode, check_header, check_lists, check_state
from dsv4_backend.replay.step import Admission, Step
from dsv4_backend.replay.trace import BLOCK_TOKENS
from dsv4_backend.replay.violation import Findings

SAVED = ("state4", "state128", "recent", "chains", "length", "closed", *CONTENTS)


class Ledger:
    """Follows requests through their steps and checks every plan and all metadata.

    `begin(step)`, `check(step, plan, ...)`, `commit()`, in this order. `check` leaves the ledger as it is.

    Args:
        req_to_token: int32 [R, C], and full_to_swa: int64 [S]: the slot tables, read anew at each step.
        sizes: of the cache and the state pools.
        num_window_pages: window pages, the reserved page 0 not counted.
    """

    def __init__(
        self, req_to_token: np.ndarray, full_to_swa: np.ndarray, sizes: CacheSizes, num_window_pages: int
    ) -> None:
        rows, columns = req_to_token.shape
        self._tables, self._sizes = (req_to_token, full_to_swa), sizes
        self._state = {
            4: np.zeros((num_window_pages + 1) * sizes.c4_ring, np.int64),
            128: np.zeros(rows * sizes.c128_ring, np.int64),
        }
        self._recent = np.zeros((rows, TAIL), np.int64)
        self._chains = np.full((rows, columns // BLOCK_TOKENS + 1), -1, np.int64)
        self._length = np.zeros(rows, np.int64)
        self._closed = np.zeros((rows, len(RATIOS)), np.int64)
        self._contents = CacheContents(req_to_token.shape, len(full_to_swa), num_window_pages, sizes)
        self._pending: tuple[BatchRows, np.ndarray, dict[int, np.ndarray], np.ndarray, CacheContents] | None = None

    def begin(self, step: Step) -> None:
        """Takes note of who joined and which window pages are new: state that a former owner left does not count."""
        fresh = step.fresh_window_pages[:, None] * self._sizes.c4_ring + np.arange(self._sizes.c4_ring)
        self._state[4][fresh] = 0
        self._contents.forget(step.fresh_window_pages)
        for admission in step.admitted:
            self._admit(admission)

    def check(
        self, step: Step, plan: PlanImage, accepts: np.ndarray, metadata: Sequence[MetadataImage] = ()
    ) -> Findings:
        """Checks the plan of a step, and its metadata.

        Args:
            step: the step, begun.
            plan: its plan.
            accepts: int64 [B], rows of each request that will stay. State is checked for every other number, too.
            metadata: all that was built for it; nothing: the plan alone is checked, and the cache stays as it is.

        Returns:
            What is wrong.
        """
        rows = BatchRows(step, self._recent, self._chains, *self._tables, self._sizes)
        found = Findings(step.index)
        self._check_requests(rows, found)
        found.add("error_flag", 0, np.array([plan.error != 0]), expected="0", got=str(plan.error))
        state = {ratio: self._state[ratio].copy() for ratio in RATIOS}
        closed = self._closed.copy()
        if plan.header is not None:
            padding_requests = metadata[0].build.padding_requests if metadata else 0
            check_header(rows, plan.header, plan.lists, padding_requests, found)
        for place, ratio in enumerate(RATIOS):
            if plan.header is not None:
                ids = check_lists(rows, ratio, plan.lists[ratio], state[ratio], found)
            else:
                ids = check_decode(rows, ratio, plan.decode[ratio], state[ratio], found)
            check_state(rows, ratio, state[ratio], found)
            self._count_groups(rows, place, ids, accepts, closed, found)
        cache = self._check_metadata(rows, metadata, found) if metadata else self._contents
        self._pending = rows, accepts, state, closed, cache
        return found

    def commit(self) -> None:
        """Ends the step that was checked last."""
        if self._pending is None:
            raise ValueError("commit: expected a step that was checked, got none")
        rows, accepts, self._state, self._closed, self._contents = self._pending
        self._pending = None
        after = rows.step.before + accepts
        self._length[rows.step.req_pool_indices] = after
        end = after[rows.owner]
        self._contents.commit(rows, rows.position < end)
        kept = (rows.position < end) & (rows.position >= end - TAIL)
        self._recent[rows.step.req_pool_indices[rows.owner[kept]], rows.position[kept] % TAIL] = rows.tag[kept]

    def save(self) -> dict[str, np.ndarray]:
        """The ledger before the step that is under way, by the names in `SAVED`."""
        return {
            "state4": self._state[4],
            "state128": self._state[128],
            "recent": self._recent,
            "chains": self._chains,
            "length": self._length,
            "closed": self._closed,
            **{name: getattr(self._contents, name) for name in CONTENTS},
        }

    def load(self, saved: dict[str, np.ndarray]) -> None:
        """Takes over what `save` returned; ValueError if the arrays do not fit this ledger's tables and sizes."""
        for name, own in self.save().items():
            if saved[name].shape != own.shape or saved[name].dtype != own.dtype:
                raise ValueError(
                    f"{name}: expected {own.dtype} {list(own.shape)}, got {saved[name].dtype} {list(saved[name].shape)}"
                )
            own[...] = saved[name]

    def _admit(self, admission: Admission) -> None:
        row, hit = admission.row, admission.hit
        self._chains[row] = -1
        self._chains[row, : len(admission.chain)] = admission.chain
        self._length[row] = hit
        self._closed[row] = [hit // ratio for ratio in RATIOS]
        ring = self._sizes.c128_ring
        self._state[128][row * ring : (row + 1) * ring] = 0
        position = np.arange(max(0, hit - TAIL), hit)
        self._recent[row] = 0
        self._recent[row, position % TAIL] = block_tags(self._chains[row, position // BLOCK_TOKENS], position)
        self._contents.admit(row, self._chains[row], hit)

    def _check_metadata(self, rows: BatchRows, metadata: Sequence[MetadataImage], found: Findings) -> CacheContents:
        """Checks everything that was built for a step; returns the cache as the step leaves it."""
        check_builds(rows, metadata, found)
        readable = [check_metadata(rows, image, self._sizes, found) for image in metadata]
        cache = self._contents.copy()
        own = metadata[0]
        if readable[0] and own.build.mode.value == rows.step.mode.value:
            cache.write(rows, own)
            cache.check(rows, own, found)
        return cache

    def _check_requests(self, rows: BatchRows, found: Findings) -> None:
        """Checks that requests go on where they ended, and that their new rows have slots of their own."""
        step = rows.step
        length = self._length[step.req_pool_indices]
        wrong = step.before != length
        found.add("continuity", 0, wrong, request=step.requests, expected=length, got=step.before)
        req_to_token, full_to_swa = self._tables
        slot = step.out_cache_loc
        where = {"request": rows.request(rows.owner), "position": rows.position}
        want = req_to_token[step.req_pool_indices[rows.owner], rows.position]
        found.add("slot", 0, (slot != want) | (slot <= 0), expected=want, got=slot, **where)
        window_slot = full_to_swa[want]
        found.add("slot", 0, window_slot <= 0, expected="a window slot", got=window_slot, **where)
        _, inverse, times = np.unique(slot, return_inverse=True, return_counts=True)
        found.add("slot", 0, times[inverse] > 1, expected="a slot of its own", got=slot, **where)

    def _count_groups(
        self, rows: BatchRows, place: int, ids: np.ndarray, accepts: np.ndarray, closed: np.ndarray, found: Findings
    ) -> None:
        """Checks that every group that is closed for good was planned once over the request's life."""
        step, ratio = rows.step, RATIOS[place]
        after = step.before + accepts
        stays = ids[rows.position[ids] < after[rows.owner[ids]]]
        closed[step.req_pool_indices, place] += np.bincount(rows.owner[stays], minlength=len(after))
        planned = closed[step.req_pool_indices, place]
        wrong = planned != after // ratio
        found.add("group_count", ratio, wrong, request=step.requests, expected=after // ratio, got=planned)
