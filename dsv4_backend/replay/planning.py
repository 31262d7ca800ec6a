"""Plans a step by the planner alone."""

from __future__ import annotations

import time

import numpy as np
import torch

from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.planner import plan_decode, plan_prefill
from dsv4_backend.plans import DecodePlan, DecodePlans, PrefillPlan
from dsv4_backend.replay.image import (
    RATIOS,
    PlanImage,
    RatioImage,
    compress_records,
    decode_records,
    write_records,
)
from dsv4_backend.replay.step import Step, StepMode
from dsv4_backend.tables import RequestTables


class StepPlanner:
    """Plans steps with the planner, without metadata.

    Args:
        geom: cache geometry.
        impl: the planner's implementation.
        tables: where the tokens are, and where plans are made. On a GPU the lengths lie there, too, as in a captured
            graph.
    """

    def __init__(self, geom: CacheGeometry, impl: str, tables: RequestTables) -> None:
        self._geom, self._impl, self._tables = geom, impl, tables

    def plan(self, step: Step, padding_requests: int = 0) -> tuple[PrefillPlan | DecodePlans, float]:
        """The plan of one step, and the host time of the call in microseconds; on a GPU up to its end there.

        A plan with several rows a request also sees `padding_requests` requests without rows; a decode plan does not.
        """
        device, decodes = self._tables.device, step.mode is StepMode.DECODE

        def tensor(values: np.ndarray) -> torch.Tensor:
            padded = values if decodes else np.append(values, np.zeros(padding_requests, np.int64))
            return torch.from_numpy(padded).to(device)

        after, req = tensor(step.after), tensor(step.req_pool_indices)
        if decodes:
            start = clock(device)
            decode = plan_decode(after, req, self._tables, self._geom, impl=self._impl)
            return decode, (clock(device) - start) * 1e6
        extend = tensor(step.extend_lens)
        exact = device.type == "cpu" and step.num_rows == step.total_rows
        num_rows = None if exact else step.num_rows
        start = clock(device)
        plan = plan_prefill(after, extend, req, self._tables, self._geom, num_rows=num_rows, impl=self._impl)
        return plan, (clock(device) - start) * 1e6


def clock(device: torch.device) -> float:
    """Seconds, once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def plan_image(plan: PrefillPlan | DecodePlans) -> PlanImage:
    """A plan of both ratios on the host."""
    lists, decode = {}, {}
    for ratio in RATIOS:
        part = plan.ratio(ratio)
        assert part is not None
        if isinstance(part, DecodePlan):
            decode[ratio] = decode_records(part.rows)
        else:
            lists[ratio] = RatioImage(compress_records(part.compress), write_records(part.write))
    header = plan.header.cpu().numpy().copy() if isinstance(plan, PrefillPlan) else None
    return PlanImage(header, lists, decode, int(plan.error))
