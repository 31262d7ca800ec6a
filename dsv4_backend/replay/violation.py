"""What a broken invariant looks like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

Side: TypeAlias = np.ndarray | str | Callable[[int], str]
"""One side of a comparison for n candidates: an array [n], one text for all, or a function of the candidate."""

_KEEP_PER_KIND = 5


@dataclass(frozen=True)
class Violation:
    """One broken invariant.

    Args:
        kind: short name of the invariant.
        step: number of the step.
        ratio: 4 or 128; 0 where the ratio does not matter.
        request: number of the request in the trace; -1 for the batch as a whole.
        position: token of the request; -1 where there is none.
        expected, got: both sides, for people.
    """

    kind: str
    step: int
    ratio: int
    request: int
    position: int
    expected: str
    got: str

    @property
    def message(self) -> str:
        """All of it, in one line."""
        where = [f"c{self.ratio}"] * bool(self.ratio)
        where += [f"request {self.request}"] * (self.request >= 0) + [f"position {self.position}"] * (
            self.position >= 0
        )
        place = ", ".join(where)
        return (
            f"step {self.step}: {self.kind}{f' ({place})' if place else ''}: expected {self.expected}, got {self.got}"
        )


class Findings:
    """Collects the violations of one step: all are counted, the first few of each kind are kept.

    Attributes:
        count: violations found.
        kept: the first few of each kind and ratio.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._per_kind: dict[tuple[str, int], int] = {}
        self.count = 0
        self.kept: list[Violation] = []

    def add(
        self,
        kind: str,
        ratio: int,
        bad: np.ndarray,
        *,
        request: np.ndarray | int = -1,
        position: np.ndarray | int = -1,
        expected: Side,
        got: Side,
    ) -> None:
        """Counts a violation for each True in `bad`, bool [n]. `request` and `position` are int64 [n], or -1."""
        if not bad.any():
            return
        places = np.flatnonzero(bad)
        self.count += len(places)
        seen = self._per_kind.get((kind, ratio), 0)
        self._per_kind[kind, ratio] = seen + len(places)
        for place in places[: max(0, _KEEP_PER_KIND - seen)]:
            who, where = (
                int(value[place]) if isinstance(value, np.ndarray) else value for value in (request, position)
            )
            want, have = _side(expected, place), _side(got, place)
            self.kept.append(Violation(kind, self._step, ratio, who, where, want, have))


def _side(side: Side, place: int) -> str:
    if callable(side):
        return side(place)
    return side if isinstance(side, str) else str(side[place])
