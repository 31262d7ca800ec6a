"""What is installed beside this package."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata

TRANSFORMERS = (5, 17)
"""Oldest version of transformers that `dsv4 generate` works with; that of the extra `hf`."""


def version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def has_transformers() -> bool:
    """Whether transformers is installed, and new enough to have DeepSeek-V4."""
    found = re.match(r"(\d+)\.(\d+)", version("transformers") or "")
    return found is not None and tuple(map(int, found.groups())) >= TRANSFORMERS


def check_transformers() -> None:
    """Raises ValueError where transformers is missing or too old."""
    if not has_transformers():
        wanted = ".".join(map(str, TRANSFORMERS))
        raise ValueError(
            f"transformers: expected version {wanted} or newer, got {version('transformers') or 'none'}; install it "
            f"with: pip install 'transformers>={wanted}'"
        )


def has_plotting() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_plotting() -> None:
    """Raises ValueError when the plotting library is not installed."""
    if not has_plotting():
        raise ValueError("--plot: expected matplotlib, got none; install it with: pip install matplotlib")
