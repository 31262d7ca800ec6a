"""What happens where something is not as we need it: SGLang's own path and one warning, or no start at all."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import Any

from dsv4_backend.adapters.sglang import releases

SWITCHES = {"DSV4_BACKEND": ("metadata", "off"), "DSV4_BACKEND_STRICT": ("0", "1")}
"""Variables that are read, and what each may say; the first is the default."""

logger = logging.getLogger("dsv4_backend.sglang")


def switch(name: str) -> str:
    """What a variable says; the default where it is not set, or empty."""
    return os.environ.get(name) or SWITCHES[name][0]


def expect_switches() -> None:
    """Raises ValueError where a variable says something that means nothing."""
    for name, values in SWITCHES.items():
        if switch(name) not in values:
            raise ValueError(f"{name}: expected one of {values}, got {switch(name)!r}")


def is_strict() -> bool:
    """Whether SGLang's own path is not good enough. A misspelt wish for that counts as one."""
    return switch("DSV4_BACKEND_STRICT") != "0"


def give_up(error: Exception) -> None:
    """One warning and the stock path, or an exception where that was asked for."""
    if is_strict():
        raise ValueError(f"dsv4-backend: {error}") from error
    logger.warning("dsv4-backend: SGLang's own path is used: %s: %s", type(error).__name__, error)


def refuse_to_start(error: Exception) -> None:
    """SGLang swallows what a plugin raises: so the backend itself raises, too, or the process ends."""
    reason = f"dsv4-backend: {error}"

    def create(model_runner: Any) -> Any:
        raise ValueError(reason)

    try:
        import_module(releases.REGISTRY).ATTENTION_BACKENDS[releases.NAME] = create
    except Exception:
        raise SystemExit(reason) from error
