"""Chooses an implementation. An explicit choice never falls back."""

from __future__ import annotations

from types import ModuleType

import torch

IMPLS = ("auto", "torch")


def resolve_impl(impl: str, device: torch.device) -> str:
    """The implementation that `impl` means on `device`; ValueError when it cannot run there."""
    if impl not in IMPLS:
        raise ValueError(f"impl: expected one of {IMPLS}, got {impl!r}")
    return "torch"


def planner(impl: str, device: torch.device) -> ModuleType:
    """The module whose `plan_prefill` and `plan_decode` run `impl` on `device`."""
    resolve_impl(impl, device)
    from dsv4_backend.reference import planner as reference

    return reference
