"""A standalone runner that captures an EAGLE draft loop in CUDA graphs and replays padded batches."""

from dsv4_graph_runner.batch import DraftBatch, DraftInputs, DraftOutput, split_draft_out_cache_loc
from dsv4_graph_runner.buckets import BucketPolicy
from dsv4_graph_runner.capture import GraphPool, capture_graph
from dsv4_graph_runner.fingerprint import addresses, expect_unchanged
from dsv4_graph_runner.guard import GuardError, inspect_region, watch_capture
from dsv4_graph_runner.poison import SlotMemory, check_lane_poison
from dsv4_graph_runner.progress import TextBar
from dsv4_graph_runner.protocols import DraftModel, MetadataProvider, StepProvider
from dsv4_graph_runner.report import CaptureReport, GraphKey
from dsv4_graph_runner.runner import EagleDraftGraphRunner
from dsv4_graph_runner.step_runner import StepGraphRunner, StepOutput
from dsv4_graph_runner.swap import swapped

__all__ = [
    "BucketPolicy",
    "CaptureReport",
    "DraftBatch",
    "DraftInputs",
    "DraftModel",
    "DraftOutput",
    "EagleDraftGraphRunner",
    "GraphKey",
    "GraphPool",
    "GuardError",
    "MetadataProvider",
    "SlotMemory",
    "StepGraphRunner",
    "StepOutput",
    "StepProvider",
    "TextBar",
    "addresses",
    "capture_graph",
    "check_lane_poison",
    "expect_unchanged",
    "inspect_region",
    "split_draft_out_cache_loc",
    "swapped",
    "watch_capture",
]
