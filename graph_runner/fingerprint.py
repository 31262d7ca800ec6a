"""Which addresses a graph was captured with. A replay reads and writes those, whatever the objects point to by then."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dsv4_graph_runner.guard import GuardError

_MAX_DEPTH = 8


def addresses(name: str, value: Any) -> dict[str, tuple[object, ...]]:
    """Address, shape, strides, dtype and device of every tensor reachable from `value`, by its path.

    Followed are modules (parameters and buffers), dataclasses, mappings, sequences and the attributes of plain objects.
    """
    found: dict[str, tuple[object, ...]] = {}
    _collect(name, value, found, set(), 0)
    return found


def expect_unchanged(before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raises GuardError, naming the first path whose address, shape or dtype is not as it was."""
    for path in sorted(before.keys() | now.keys()):
        if before.get(path) != now.get(path):
            raise GuardError(
                "address", f"{path} is not what was captured: expected {before.get(path)}, got {now.get(path)}"
            )


def _collect(path: str, value: Any, found: dict[str, tuple[object, ...]], seen: set[int], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        found[path] = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, str(value.device))
        return
    if depth > _MAX_DEPTH or id(value) in seen:
        return
    seen.add(id(value))
    for name, child in _children(value):
        _collect(f"{path}{name}", child, found, seen, depth + 1)


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        tensors = [*value.named_parameters(), *value.named_buffers()]
        return [(f".{name}", tensor) for name, tensor in tensors] + _attributes(value)
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [(f"[{i}]", child) for i, child in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{each.name}", getattr(value, each.name, None)) for each in dataclasses.fields(value)]
    if isinstance(value, type) or callable(value):
        return []
    return _attributes(value)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Attributes of a plain object; of a module those that it keeps outside its parameters and buffers."""
    return [(f".{name}", child) for name, child in getattr(value, "__dict__", {}).items() if not name.startswith("_")]
