"""Which metadata a step asks for: its own, that of drafts around a verify step, now and then that of an idle step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from dsv4_backend.replay.step import Step, StepMode

IDLE_EVERY, IDLE_ROWS = 16, 8
"""An idle step every so many steps, with so many rows."""

DRAFT_BUCKET = 4
"""Requests of a draft step are padded to a multiple."""


class BuildMode(str, Enum):
    """Kind of a build; the names are those of the forward modes."""

    EXTEND = "EXTEND"
    DECODE = "DECODE"
    TARGET_VERIFY = "TARGET_VERIFY"
    DRAFT_DECODE = "DRAFT_DECODE"
    DRAFT_EXTEND = "DRAFT_EXTEND"
    IDLE = "IDLE"

    @property
    def drafts(self) -> bool:
        """Whether it serves the draft model, whose layers have a window only."""
        return self in (BuildMode.DRAFT_DECODE, BuildMode.DRAFT_EXTEND)


@dataclass(frozen=True)
class Build:
    """One call of a builder.

    Args:
        mode: kind.
        num_rows: rows of each of its steps, padding included.
        padded: the bucket is named, as for a graph; else it is as large as the batch.
        padding_requests: requests with id 0 at the end of the batch, which take up the padding rows of the bucket; else
            these are left to the builder.
        ragged: each request has a number of rows of its own.
        chain: DRAFT_DECODE: slots of a request, one more than steps that run a forward.
        frozen: DRAFT_DECODE: all steps see the committed tokens only.
    """

    mode: BuildMode
    num_rows: int
    padded: bool
    padding_requests: int = 0
    ragged: bool = False
    chain: int = 0
    frozen: bool = False

    @property
    def steps(self) -> int:
        """Steps whose metadata it gives."""
        return self.chain - 1 if self.mode is BuildMode.DRAFT_DECODE else 1

    def label(self, place: int) -> str:
        """Name of step `place`, for people."""
        if self.mode is not BuildMode.DRAFT_DECODE:
            return self.mode.value
        return f"DRAFT_DECODE ({'frozen' if self.frozen else 'growing'}) step {place} of {self.steps}"


def builds_of(step: Step) -> list[Build]:
    """What is built for a step, its own metadata first. Depends on the step alone, its number included."""
    padded, index = step.num_rows > step.total_rows, step.index
    if step.mode is StepMode.TARGET_VERIFY:
        width = step.num_draft_tokens
        # Now and then a uniform batch comes with its lengths, too.
        uniform = bool((step.extend_lens == width).all()) and index % 4 != 3
        requests = (step.num_rows - step.total_rows) // width if uniform and index % 4 == 1 else 0
        builds = [
            Build(BuildMode(mode), step.num_rows, padded, requests, ragged=not uniform)
            for mode in ("TARGET_VERIFY", "DRAFT_EXTEND")
        ]
        chain = width - index % 2
        if chain:
            lanes = -(-len(step.before) // DRAFT_BUCKET) * DRAFT_BUCKET
            frozen = index // 2 % 2 == 1
            builds.append(Build(BuildMode.DRAFT_DECODE, lanes, lanes > len(step.before), chain=chain, frozen=frozen))
    else:
        extend, rows = step.mode is StepMode.EXTEND, step.num_rows - step.total_rows
        requests = (min(rows, 1) if extend else rows) if index % 4 == 1 else 0
        builds = [Build(BuildMode(step.mode.value), step.num_rows, padded, requests, ragged=extend)]
    if index % IDLE_EVERY == IDLE_EVERY - 1:
        builds.append(Build(BuildMode.IDLE, IDLE_ROWS, padded=True))
    return builds


def drafting(step: Step, chain: int) -> np.ndarray:
    """bool [B]: the requests that draft. Those with fewer slots than a chain has are near their end: padding."""
    return step.extend_lens >= chain
