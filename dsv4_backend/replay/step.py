"""What one scheduler step is: the record that planning, metadata and checks all get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np


class StepMode(str, Enum):
    """Kind of a step; the names are those of the forward modes."""

    EXTEND = "EXTEND"
    DECODE = "DECODE"
    TARGET_VERIFY = "TARGET_VERIFY"


@dataclass(frozen=True)
class Admission:
    """A request that got a row of the request table since the step before.

    Args:
        row: its row.
        request: its number in the trace.
        chain: names of its full prompt blocks, see `trace.prefix_chains`.
        hit: tokens that the prefix cache supplies.
    """

    row: int
    request: int
    chain: Sequence[int]
    hit: int


@dataclass(frozen=True)
class Step:
    """One batch. B requests with T rows in all, request-major.

    Args:
        index: number of the step, from 0.
        mode: EXTEND (prompt chunks, with one row of each running request in mixed batches), DECODE or TARGET_VERIFY.
        requests: int64 [B], numbers in the trace.
        req_pool_indices: int64 [B], rows of the request table.
        before: int64 [B], committed tokens before the step.
        extend_lens: int64 [B], rows of each request, at least 1.
        out_cache_loc: int64 [T], full-pool slots of the rows.
        num_rows: rows that the plan has room for, at least T.
        num_draft_tokens: verify width; 0 without drafts.
        admitted: requests that joined since the step before.
        fresh_window_pages: int64 [n], window pages handed out since the step before.
    """

    index: int
    mode: StepMode
    requests: np.ndarray
    req_pool_indices: np.ndarray
    before: np.ndarray
    extend_lens: np.ndarray
    out_cache_loc: np.ndarray
    num_rows: int
    num_draft_tokens: int = 0
    admitted: tuple[Admission, ...] = ()
    fresh_window_pages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def total_rows(self) -> int:
        """T."""
        return len(self.out_cache_loc)

    @property
    def after(self) -> np.ndarray:
        """int64 [B]: lengths that count all rows of the step."""
        return self.before + self.extend_lens

    @property
    def seq_lens(self) -> np.ndarray:
        """int64 [B]: lengths as the mode defines them: before the draft tokens for TARGET_VERIFY, else with all rows.

        Source: docs/plans.md, "Lengths".
        """
        return self.before if self.mode is StepMode.TARGET_VERIFY else self.after
