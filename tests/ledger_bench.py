"""A pool, a ledger and what it judges, driven step by step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from dsv4_backend import CacheGeometry, RequestTables
from dsv4_backend.replay import PagePool, Step, StepMode
from dsv4_backend.replay.building import BuiltStep, StepBuilder, cache_sizes
from dsv4_backend.replay.image import PlanImage
from dsv4_backend.replay.ledger import Ledger
from dsv4_backend.replay.metadata_image import StepImages
from dsv4_backend.replay.planning import StepPlanner, plan_image
from dsv4_backend.replay.step import Admission
from dsv4_backend.replay.violation import Findings

EXTEND, DECODE, VERIFY = StepMode.EXTEND, StepMode.DECODE, StepMode.TARGET_VERIFY


class Bench:
    """Request k has the lengths that the test gives it; `drafts` is the width of verify steps."""

    def __init__(self, drafts: int = 0, geom: CacheGeometry | None = None) -> None:
        self.geom = geom or CacheGeometry.for_drafts(drafts)
        self.pool = PagePool(
            page_size=256,
            window_page_size=self.geom.swa_page_size,
            num_pages=64,
            num_window_pages=64,
            max_requests=9,
            max_len=3000,
            seed=3,
        )
        self.pool.take_fresh_window_pages()
        self.ledger = Ledger(self.pool.req_to_token, self.pool.full_to_swa, cache_sizes(self.geom), 64)
        self.tables = RequestTables(torch.from_numpy(self.pool.req_to_token), torch.from_numpy(self.pool.full_to_swa))
        self.builder = StepBuilder(self.geom, "torch", self.tables, 4096)
        self.drafts = drafts
        self.rows: list[int] = []
        self.lengths: list[int] = []
        self.joined: list[Admission] = []
        self.steps = 0

    def join(self, chain: tuple[int, ...] = (), shared: tuple[int, ...] = ()) -> int:
        row = self.pool.open(shared, self.geom.window)
        self.joined.append(Admission(row, len(self.rows), chain, len(shared) * 256))
        self.rows.append(row)
        self.lengths.append(len(shared) * 256)
        return len(self.rows) - 1

    def step(self, mode: StepMode, extends: dict[int, int], num_rows: int | None = None) -> Step:
        """Makes a step, with request -> rows, and begins it."""
        who = list(extends)
        for k in who:
            self.pool.grow(self.rows[k], self.lengths[k] + extends[k])
        slots = [self.pool.slots(self.rows[k], self.lengths[k], self.lengths[k] + extends[k]) for k in who]
        step = Step(
            index=self.steps,
            mode=mode,
            requests=np.array(who),
            req_pool_indices=np.array([self.rows[k] for k in who]),
            before=np.array([self.lengths[k] for k in who]),
            extend_lens=np.array([extends[k] for k in who]),
            out_cache_loc=np.concatenate(slots).astype(np.int64),
            num_rows=num_rows or sum(extends.values()),
            num_draft_tokens=self.drafts if mode is StepMode.TARGET_VERIFY else 0,
            admitted=tuple(self.joined),
            fresh_window_pages=self.pool.take_fresh_window_pages(),
        )
        self.joined.clear()
        self.steps += 1
        self.last = step
        self.ledger.begin(step)
        return step

    def plan(self, step: Step) -> PlanImage:
        return plan_image(StepPlanner(self.geom, "torch", self.tables).plan(step)[0])

    def build(self, step: Step) -> BuiltStep:
        return self.builder.build(step)

    def check(self, step: Step, images: StepImages) -> Findings:
        """All rows stay."""
        return self.ledger.check(step, images.plan, step.extend_lens, images.metadata)

    def run(
        self,
        mode: StepMode,
        extends: dict[int, int],
        accepts: dict[int, int] | None = None,
        change: Callable[[PlanImage], None] | None = None,
        num_rows: int | None = None,
    ) -> Findings:
        """Plans and checks a step, without metadata; commits it, wrong or not."""
        step = self.step(mode, extends, num_rows)
        image = self.plan(step)
        if change is not None:
            change(image)
        stay = np.array([(accepts or extends)[k] for k in extends])
        found = self.ledger.check(step, image, stay)
        self._commit(extends, stay)
        return found

    def run_all(
        self,
        mode: StepMode,
        extends: dict[int, int],
        accepts: dict[int, int] | None = None,
        change: Callable[[StepImages], None] | None = None,
        num_rows: int | None = None,
    ) -> Findings:
        """As `run`, with all that is built for the step."""
        step = self.step(mode, extends, num_rows)
        images = self.build(step).images
        if change is not None:
            change(images)
        stay = np.array([(accepts or extends)[k] for k in extends])
        found = self.ledger.check(step, images.plan, stay, images.metadata)
        self._commit(extends, stay)
        return found

    def _commit(self, extends: dict[int, int], stay: np.ndarray) -> None:
        self.ledger.commit()
        for k, accepted in zip(extends, stay.tolist(), strict=True):
            self.lengths[k] += accepted


def kinds(found: Findings) -> set[str]:
    return {violation.kind for violation in found.kept}


def silent(found: Findings) -> None:
    assert found.count == 0, [violation.message for violation in found.kept]
