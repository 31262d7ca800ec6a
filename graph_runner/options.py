"""Checks of what a runner is constructed with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dsv4_graph_runner.buckets import BucketPolicy
from dsv4_graph_runner.capture import POOLS
from dsv4_graph_runner.device import normal_device
from dsv4_graph_runner.protocols import DraftModel

EXECUTORS = ("auto", "cuda_graph", "eager")
GUARDS = ("off", "capture", "replay")


def check_options(
    num_steps: int,
    topk: int,
    hidden_size: int,
    hidden_dtype: torch.dtype,
    buckets: object,
    device: torch.device | str,
    pool: str,
    guard: str,
) -> torch.device:
    """Raises ValueError for the first that is wrong; returns the device, with its index on CUDA."""
    for name, value in (("num_steps", num_steps), ("topk", topk), ("hidden_size", hidden_size)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}: expected an int of at least 1, got {value!r}")
    if topk != 1:
        raise ValueError(
            f"topk: expected 1, got {topk}; drafts are chains here, since the branches of a request do not lie next to "
            "each other in the request table"
        )
    if not isinstance(hidden_dtype, torch.dtype) or not hidden_dtype.is_floating_point:
        raise ValueError(f"hidden_dtype: expected a floating-point torch.dtype, got {hidden_dtype!r}")
    if not isinstance(buckets, BucketPolicy):
        raise ValueError(f"buckets: expected a BucketPolicy, got {type(buckets).__name__}")
    for name, choice, choices in (("pool", pool, POOLS), ("guard", guard, GUARDS)):
        if choice not in choices:
            raise ValueError(f"{name}: expected one of {choices}, got {choice!r}")
    return normal_device(device)


def check_variants(draft_model: object) -> dict[str, DraftModel]:
    """The draft models by variant; ValueError where one has no `forward`, or there is none."""
    models = dict(draft_model) if isinstance(draft_model, Mapping) else {"": draft_model}
    if not models:
        raise ValueError("draft_model: expected at least one variant, got none")
    checked: dict[str, DraftModel] = {}
    for name, model in models.items():
        if not isinstance(name, str):
            raise ValueError(f"draft_model: expected names of variants to be str, got {name!r}")
        if not isinstance(model, DraftModel):
            raise ValueError(f"draft_model: expected the method of DraftModel, got {type(model).__name__}")
        checked[name] = model
    return checked


def resolve_executor(executor: str, device: torch.device) -> str:
    """ "cuda_graph" or "eager"; an explicit choice never falls back."""
    if executor not in EXECUTORS:
        raise ValueError(f"executor: expected one of {EXECUTORS}, got {executor!r}")
    if executor == "auto":
        return "cuda_graph" if device.type == "cuda" else "eager"
    if executor == "cuda_graph" and device.type != "cuda":
        raise ValueError(f"executor: expected a CUDA device for 'cuda_graph', got {device}")
    return executor
