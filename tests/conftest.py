"""Marks that depend on the machine, and how Hypothesis draws."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch
from hypothesis import settings
from packaging.version import Version

settings.register_profile("project", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("project")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {"gpu": why_no_gpu(), "interpreter": why_no_interpreter()}
    for item in items:
        for mark, reason in reasons.items():
            if reason and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


def why_no_gpu() -> str | None:
    return None if torch.cuda.is_available() else "no CUDA GPU"


def why_no_interpreter() -> str | None:
    """Triton 3.6's interpreter turns arrays of one element into scalars, which NumPy 2.4 refuses."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "no Triton"
    numpy = metadata.version("numpy")
    if Version(triton) < Version("3.7") and Version(numpy) >= Version("2.4"):
        return f"the interpreter of Triton {triton} fails with NumPy {numpy}"
    return None
