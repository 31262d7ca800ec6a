"""Calls the planner for a step."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.planner import plan_decode, plan_prefill
from dsv4_backend.plans import DecodePlans, PrefillPlan
from dsv4_backend.replay.image import (
    RATIOS,
    UNUSED,
    PlanImage,
    RatioImage,
    compress_records,
    decode_records,
    write_records,
)
from dsv4_backend.replay.step import Step, StepMode
from dsv4_backend.tables import RequestTables


@dataclass(frozen=True)
class PlannedStep:
    """A plan on the host, and what it cost.

    Args:
        image: the plan.
        microseconds: host time of the planner call; on a GPU up to its end there, a synchronisation included.
        compress_rows: by ratio, rows that complete a group.
    """

    image: PlanImage
    microseconds: float
    compress_rows: dict[int, int]


class StepPlanner:
    """Plans steps with the planner under test.

    Args:
        geom: cache geometry.
        impl: the planner's implementation.
        device: where plans are made. On a GPU the lengths lie there, too, as in a captured graph.
    """

    def __init__(self, geom: CacheGeometry, impl: str, device: torch.device) -> None:
        self._geom, self._impl, self._device = geom, impl, device

    def plan(self, step: Step, tables: RequestTables) -> PlannedStep:
        """Plans one step."""
        after = torch.from_numpy(step.after).to(self._device)
        req = torch.from_numpy(step.req_pool_indices).to(self._device)
        if step.mode is StepMode.DECODE:
            start = self._clock()
            decode = plan_decode(after, req, tables, self._geom, impl=self._impl)
            cost = self._clock() - start
            closed = {ratio: int(np.count_nonzero(step.after % ratio == 0)) for ratio in RATIOS}
            return PlannedStep(_decode_image(decode), cost * 1e6, closed)
        extend = torch.from_numpy(step.extend_lens).to(self._device)
        exact = self._device.type == "cpu" and step.num_rows == step.total_rows
        num_rows = None if exact else step.num_rows
        start = self._clock()
        plan = plan_prefill(after, extend, req, tables, self._geom, num_rows=num_rows, impl=self._impl)
        cost = self._clock() - start
        image = _prefill_image(plan)
        closed = {ratio: int(np.count_nonzero(image.lists[ratio].compress["seq_len"] != UNUSED)) for ratio in RATIOS}
        return PlannedStep(image, cost * 1e6, closed)

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _prefill_image(plan: PrefillPlan) -> PlanImage:
    lists = {}
    for ratio in RATIOS:
        part = plan.ratio(ratio)
        assert part is not None
        lists[ratio] = RatioImage(compress_records(part.compress), write_records(part.write))
    return PlanImage(plan.header.cpu().numpy().copy(), lists, {}, int(plan.error))


def _decode_image(plan: DecodePlans) -> PlanImage:
    rows = {}
    for ratio in RATIOS:
        part = plan.ratio(ratio)
        assert part is not None
        rows[ratio] = decode_records(part.rows)
    return PlanImage(None, {}, rows, int(plan.error))
