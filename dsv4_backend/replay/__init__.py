"""Serving traces through scheduler steps: all that is built for a step is checked with bookkeeping of its own.

`replay_trace` is the entry point; `PagePool` and `PrefixCache` also serve on their own.
"""

from dsv4_backend.page_pool import PagePool
from dsv4_backend.replay.faults import FAULTS
from dsv4_backend.replay.options import ReplayOptions
from dsv4_backend.replay.prefix_cache import PrefixCache
from dsv4_backend.replay.runner import ReplayResult, replay_trace
from dsv4_backend.replay.step import Step, StepMode
from dsv4_backend.replay.stepfile import SavedStep, load_step
from dsv4_backend.replay.trace import TraceRequest, load_trace, synthetic_trace
from dsv4_backend.replay.violation import Violation

__all__ = [
    "FAULTS",
    "PagePool",
    "PrefixCache",
    "ReplayOptions",
    "ReplayResult",
    "SavedStep",
    "Step",
    "StepMode",
    "TraceRequest",
    "Violation",
    "load_step",
    "load_trace",
    "replay_trace",
    "synthetic_trace",
]
