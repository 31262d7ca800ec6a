"""What a replay can be told, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.replay.batch_rows import MAX_POSITION, MAX_REQUESTS
from dsv4_backend.replay.faults import check_fault
from dsv4_backend.replay.scheduler import bucket_rows
from dsv4_backend.replay.step import StepMode
from dsv4_backend.replay.trace import BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True)
class ReplayOptions:
    """Settings of a replay.

    Args:
        drafts: rows of each request in a verify step; 0 decodes one token a step.
        chunk_size: prompt tokens of a step.
        max_running: requests that hold a row at a time.
        seed: page order, row order and accept lengths.
        impl: implementation of planner and metadata.
        device: where both are made.
        mixed: running requests join prompt steps with a row each; needs `drafts` 0.
        num_pages, num_window_pages: pages of the full and of the window pool.
        fault: name of a fault to inject once, at the first step where it has an effect; None for none.

    Raises:
        ValueError: a value that makes no sense, more drafts than the rings hold, or an unknown fault.
    """

    drafts: int = 0
    chunk_size: int = 8192
    max_running: int = 64
    seed: int = 0
    impl: str = "auto"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mixed: bool = False
    num_pages: int = 4096
    num_window_pages: int = 1024
    fault: str | None = None

    def __post_init__(self) -> None:
        for name in ("chunk_size", "max_running", "num_pages", "num_window_pages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed: expected at least 0, got {self.seed}")
        if self.mixed and self.drafts:
            raise ValueError(f"mixed: expected drafts 0, since verify rows do not join prompt steps; got {self.drafts}")
        if self.fault is not None:
            check_fault(self.fault)
        self.geometry()

    def geometry(self) -> CacheGeometry:
        """Cache geometry for these drafts; ValueError if no ring holds so many."""
        return CacheGeometry.for_drafts(self.drafts)

    def max_rows(self, requests: Sequence[TraceRequest]) -> int:
        """The most rows that a step of this trace can have, padding included."""
        running = min(self.max_running, len(requests))
        prompts = min(self.chunk_size, sum(request.cached_tokens for request in requests))
        return max(
            bucket_rows(StepMode.EXTEND, prompts + (running if self.mixed else 0), 1),
            bucket_rows(StepMode.TARGET_VERIFY, running * max(1, self.drafts), self.drafts),
            bucket_rows(StepMode.DECODE, running, 1),
        )

    def check_trace(self, requests: Sequence[TraceRequest]) -> None:
        """Raises ValueError if there is no request, or one that can never fit."""
        if not requests:
            raise ValueError("trace: expected at least one request, got none")
        if len(requests) > MAX_REQUESTS:
            raise ValueError(f"trace: expected at most {MAX_REQUESTS} requests, got {len(requests)}")
        geom = self.geometry()
        if BLOCK_TOKENS % geom.page_size:
            raise ValueError(f"page_size: expected a divisor of {BLOCK_TOKENS}, got {geom.page_size}")
        room = min(self.num_pages * geom.page_size, MAX_POSITION)
        for number, request in enumerate(requests):
            if request.cached_tokens > room:
                raise ValueError(
                    f"request {number}: expected at most {room} tokens, which is all that the pool holds, "
                    f"got {request.input_length} + {request.output_length} - 1"
                )
        # The window and the new rows of one request, wherever page borders fall.
        need = -(-(geom.window + max(1, self.drafts)) // geom.swa_page_size) + 1
        if self.num_window_pages < need:
            raise ValueError(f"num_window_pages: expected at least {need}, got {self.num_window_pages}")
