"""What is installed beside this package."""

from __future__ import annotations

import importlib.util
from importlib import metadata


def version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def has_plotting() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_plotting() -> None:
    """Raises ValueError when the plotting library is not installed."""
    if not has_plotting():
        raise ValueError("--plot: expected matplotlib, got none; install it with: pip install matplotlib")
