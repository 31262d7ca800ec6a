"""Chooses an implementation. An explicit choice never falls back."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from types import ModuleType

import torch

IMPLS = ("auto", "triton", "torch")


def resolve_impl(impl: str, device: torch.device) -> str:
    """The implementation that `impl` means on `device`; ValueError when it cannot run there."""
    if impl not in IMPLS:
        raise ValueError(f"impl: expected one of {IMPLS}, got {impl!r}")
    if impl == "auto":
        return "triton" if device.type == "cuda" and has_triton() else "torch"
    if impl == "triton":
        if not has_triton():
            raise ValueError("impl: expected Triton to be installed for 'triton', got none (it has wheels for Linux)")
        if device.type != "cuda" and not interpreter_on():
            raise ValueError(f"impl: expected a GPU, or TRITON_INTERPRET=1, for 'triton', got tensors on {device}")
    return impl


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreter_on() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def planner(impl: str, device: torch.device) -> ModuleType:
    """The module whose `plan_prefill` and `plan_decode` run `impl` on `device`."""
    if resolve_impl(impl, device) == "triton":
        from dsv4_triton_kernels import planner as kernels

        return kernels
    from dsv4_backend.reference import planner as reference

    return reference


def metadata(impl: str, device: torch.device) -> ModuleType:
    """The module whose `bind` gives what fills metadata buffers with `impl` on `device`."""
    if resolve_impl(impl, device) == "triton":
        from dsv4_triton_kernels import metadata as kernels

        return kernels
    from dsv4_backend.reference import metadata as reference

    return reference


def compressor(impl: str, device: torch.device) -> ModuleType:
    """The module whose `compress` runs `impl` on `device`."""
    if resolve_impl(impl, device) == "triton":
        from dsv4_triton_kernels import compressor as kernels

        return kernels
    from dsv4_backend.reference import compressor as reference

    return reference


def kv_store(impl: str, device: torch.device) -> ModuleType:
    """The module whose `store_window` and `store_entries` run `impl` on `device`."""
    if resolve_impl(impl, device) == "triton":
        from dsv4_triton_kernels import kv_store as kernels

        return kernels
    from dsv4_backend.reference import kv_store as reference

    return reference


def indexer(impl: str, device: torch.device) -> ModuleType:
    """The module whose `index_query`, `index_scores` and `select_topk` run `impl` on `device`."""
    if resolve_impl(impl, device) == "triton":
        from dsv4_triton_kernels import indexer as kernels

        return kernels
    from dsv4_backend.reference import indexer as reference

    return reference


def attention(impl: str, device: torch.device) -> ModuleType:
    """The module whose `sparse_attention` runs `impl` on `device`."""
    if resolve_impl(impl, device) == "triton":
        from dsv4_triton_kernels import attention as kernels

        return kernels
    from dsv4_backend.reference import attention as reference

    return reference
