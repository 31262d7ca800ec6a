"""What the suites of `dsv4 capture-test` share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsv4_graph_runner import capture_graph


class Difference(AssertionError):
    """A replay that is not what an eager run gives."""


@dataclass(frozen=True)
class CaptureOptions:
    """Where to run.

    Args:
        device: the device.
        executor: "cuda_graph", or "eager", which replays by calling.
    """

    device: torch.device
    executor: str

    def record(self, region: Callable[[], object]) -> Callable[[], object]:
        """Captures `region`, guarded, and returns its replay; without graphs, the region itself."""
        if self.executor == "eager":
            return region
        return capture_graph(region, self.device).replay


@dataclass(frozen=True)
class CaptureCase:
    """One thing to try.

    Attributes:
        id: unique in its suite.
        check: makes up inputs from a seed, captures, replays and compares; returns how many replays it compared.
            Raises `Difference`, or whatever goes wrong.
    """

    id: str
    check: Callable[[int], int]
