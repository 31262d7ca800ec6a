"""The replay loop: schedule a step, plan it, check the plan, go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dsv4_backend.page_pool import PagePool
from dsv4_backend.replay.batch_rows import StateSizes
from dsv4_backend.replay.faults import inject
from dsv4_backend.replay.ledger import Ledger
from dsv4_backend.replay.options import ReplayOptions
from dsv4_backend.replay.planning import PlannedStep, StepPlanner
from dsv4_backend.replay.prefix_cache import PrefixCache
from dsv4_backend.replay.scheduler import Scheduler
from dsv4_backend.replay.step import Step, StepMode
from dsv4_backend.replay.stepfile import SavedStep
from dsv4_backend.replay.trace import BLOCK_TOKENS, TraceRequest
from dsv4_backend.replay.violation import Violation
from dsv4_backend.table_mirror import TableMirror

Progress = Callable[[int, int, int], None]
"""Called after each step with (requests finished, requests in all, steps so far)."""


@dataclass
class ReplayResult:
    """What a replay did and found.

    Attributes:
        requests: requests of the trace; finished: those that ended.
        retracted: times that a request was put back into the queue for want of pages.
        hit_tokens: prompt tokens that the prefix cache supplied.
        modes, rows, plan_us: one entry a step: its mode, its rows, host time of the planner call in microseconds.
        compress_rows: by ratio, rows that completed a group.
        committed: tokens that stayed.
        violation_count, violations: all that the last step broke, and the first few of them. The run ends there.
        violating_step: that step, to be written to a file and replayed alone.
        fault_step: the step into which the fault was injected.
        wall_s: seconds of the loop.
    """

    requests: int
    finished: int = 0
    retracted: int = 0
    hit_tokens: int = 0
    modes: list[StepMode] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    plan_us: list[float] = field(default_factory=list)
    compress_rows: dict[int, int] = field(default_factory=lambda: {4: 0, 128: 0})
    committed: int = 0
    violation_count: int = 0
    violations: list[Violation] = field(default_factory=list)
    violating_step: SavedStep | None = None
    fault_step: int | None = None
    wall_s: float = 0.0

    def record(self, step: Step, planned: PlannedStep) -> None:
        """Adds a step to the counts."""
        self.modes.append(step.mode)
        self.rows.append(step.total_rows)
        self.plan_us.append(planned.microseconds)
        for ratio, rows in planned.compress_rows.items():
            self.compress_rows[ratio] += rows


def replay_trace(
    requests: Sequence[TraceRequest], options: ReplayOptions, progress: Progress | None = None
) -> ReplayResult:
    """Runs a trace through scheduler steps, plans each with the planner and checks each plan with the ledger.

    Args:
        requests: the trace, in order of arrival.
        options: settings.
        progress: told after each step.

    Returns:
        Counts, times and what was wrong. The run ends at the first step with a violation.

    Raises:
        ValueError: before anything runs: no requests, or one that can never fit; or an `impl` that cannot run here.
    """
    options.check_trace(requests)
    geom = options.geometry()
    pool = PagePool(
        page_size=geom.page_size,
        window_page_size=geom.swa_page_size,
        num_pages=options.num_pages,
        num_window_pages=options.num_window_pages,
        max_requests=min(options.max_running, len(requests)),
        max_len=max(request.cached_tokens for request in requests),
        seed=options.seed,
    )
    scheduler = Scheduler(
        requests,
        pool,
        PrefixCache(pool, BLOCK_TOKENS, geom.window),
        window=geom.window,
        chunk_size=options.chunk_size,
        width=options.drafts,
        mixed=options.mixed,
        rng=np.random.default_rng(options.seed),
    )
    sizes = StateSizes(geom.swa_page_size, geom.c4_ring, geom.c128_ring)
    ledger = Ledger(pool.req_to_token, pool.full_to_swa, sizes, options.num_window_pages)
    planner, mirror = StepPlanner(geom, options.impl, options.device), TableMirror(pool, options.device)

    result = ReplayResult(len(requests))
    start = time.perf_counter()
    while (step := scheduler.next_step()) is not None:
        ledger.begin(step)
        planned = planner.plan(step, mirror.refresh())
        result.record(step, planned)
        if options.fault is not None and result.fault_step is None and inject(options.fault, planned.image, step):
            result.fault_step = step.index
        accepts = scheduler.draw_accepts(step)
        found = ledger.check(step, planned.image, accepts)
        if found.count:
            fault = options.fault if result.fault_step == step.index else None
            tables = pool.req_to_token, pool.full_to_swa
            result.violation_count, result.violations = found.count, found.kept
            result.violating_step = SavedStep(step, accepts, geom, *tables, ledger.save(), fault)
            break
        ledger.commit()
        scheduler.commit(accepts)
        result.committed += int(accepts.sum())
        if progress is not None:
            progress(scheduler.finished, len(requests), step.index + 1)
    result.wall_s = time.perf_counter() - start
    result.finished, result.retracted = scheduler.finished, scheduler.retracted
    result.hit_tokens = scheduler.hit_tokens
    return result
