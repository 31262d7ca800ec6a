"""The replay loop: schedule a step, build its plan and metadata, check both, go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dsv4_backend.page_pool import PagePool
from dsv4_backend.replay.building import BuildCost, BuiltStep, StepBuilder, cache_sizes
from dsv4_backend.replay.judging import judge
from dsv4_backend.replay.ledger import Ledger
from dsv4_backend.replay.options import ReplayOptions
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
        modes, rows: one entry a step: its mode, and its rows without padding.
        plan_us: one entry a step: host time of the planner without metadata, in microseconds.
        build_us: one entry a step: host time of the builder for the step's own metadata, plan included.
        builds: what each build cost, those for drafts and idle steps too; all that they gave was checked.
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
    build_us: list[float] = field(default_factory=list)
    builds: list[BuildCost] = field(default_factory=list)
    compress_rows: dict[int, int] = field(default_factory=lambda: {4: 0, 128: 0})
    committed: int = 0
    violation_count: int = 0
    violations: list[Violation] = field(default_factory=list)
    violating_step: SavedStep | None = None
    fault_step: int | None = None
    wall_s: float = 0.0

    def record(self, step: Step, built: BuiltStep) -> None:
        """Adds a step to the counts."""
        self.modes.append(step.mode)
        self.rows.append(step.total_rows)
        self.plan_us.append(built.plan_us)
        self.build_us.append(built.costs[0].microseconds)
        self.builds += built.costs
        for ratio, rows in built.compress_rows.items():
            self.compress_rows[ratio] += rows


def replay_trace(
    requests: Sequence[TraceRequest], options: ReplayOptions, progress: Progress | None = None
) -> ReplayResult:
    """Runs a trace through scheduler steps, builds each with the builder and checks all that it made with the ledger.

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
    ledger = Ledger(pool.req_to_token, pool.full_to_swa, cache_sizes(geom), options.num_window_pages)
    mirror = TableMirror(pool, options.device)
    builder = StepBuilder(geom, options.impl, mirror.tables, options.max_rows(requests))

    result = ReplayResult(len(requests))
    start = time.perf_counter()
    while (step := scheduler.next_step()) is not None:
        ledger.begin(step)
        mirror.refresh()
        accepts = scheduler.draw_accepts(step)
        fault = options.fault if result.fault_step is None else None
        found, built, injected = judge(step, builder, ledger, accepts, fault)
        if built is not None:
            result.record(step, built)
        if injected:
            result.fault_step = step.index
        if found.count:
            tables = pool.req_to_token, pool.full_to_swa
            result.violation_count, result.violations = found.count, found.kept
            result.violating_step = SavedStep(step, accepts, geom, *tables, ledger.save(), fault if injected else None)
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
