"""All faults by name, and how one gets into what was made for a step."""

from __future__ import annotations

from dsv4_backend.replay.metadata_faults import METADATA_FAULTS
from dsv4_backend.replay.metadata_image import StepImages
from dsv4_backend.replay.plan_faults import PLAN_FAULTS
from dsv4_backend.replay.step import Step

FAULTS = (*PLAN_FAULTS, *METADATA_FAULTS)
"""Names: those of plans, then those of metadata."""


def check_fault(name: str) -> None:
    """Raises ValueError unless `name` is a fault."""
    if name not in FAULTS:
        raise ValueError(f"fault: expected one of {', '.join(sorted(FAULTS))}; got {name!r}")


def inject(name: str, images: StepImages, step: Step) -> bool:
    """Changes `images` as the fault `name` would; False, and no change, where it has no effect on this step.

    Raises:
        ValueError: there is no such fault.
    """
    check_fault(name)
    if name in PLAN_FAULTS:
        return PLAN_FAULTS[name](images.plan, step)
    return METADATA_FAULTS[name](images.metadata, step)
