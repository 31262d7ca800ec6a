"""Builds a step and lets the ledger judge it: in a replay, and for a step file."""

from __future__ import annotations

import numpy as np

from dsv4_backend.replay.building import BuiltStep, StepBuilder
from dsv4_backend.replay.faults import inject
from dsv4_backend.replay.ledger import Ledger
from dsv4_backend.replay.step import Step
from dsv4_backend.replay.violation import Findings


def judge(
    step: Step, builder: StepBuilder, ledger: Ledger, accepts: np.ndarray, fault: str | None
) -> tuple[Findings, BuiltStep | None, bool]:
    """Builds and checks a step that has begun in `ledger`.

    Args:
        step: the step.
        builder: builds it.
        ledger: checks it.
        accepts: int64 [B], rows that stay.
        fault: name of a fault to inject; None for none.

    Returns:
        What is wrong; what was built, None where that was refused; and whether the fault changed it.
    """
    found = Findings(step.index)
    try:
        built = builder.build(step)
    except ValueError as error:
        found.add("refused", 0, np.ones(1, bool), expected="metadata", got=str(error))
        return found, None, False
    injected = fault is not None and inject(fault, built.images, step)
    found = ledger.check(step, built.images.plan, accepts, built.images.metadata)
    wrong = np.array([built.plan_differs is not None])
    found.add("other_plan", 0, wrong, expected="the planner's plan", got=f"a difference: {built.plan_differs}")
    return found, built, injected
