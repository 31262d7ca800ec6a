"""Shows an engine's object with other values for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def swapped(target: Any, **fields: Any) -> Iterator[Any]:
    """`target` with `fields` set as attributes, until the block ends, however it ends.

    For a provider that can only read an engine's own batch object. Afterwards each attribute is the very object that it
    was, not an equal one, and one that was not there is gone again.
    """
    before = {name: getattr(target, name, _ABSENT) for name in fields}
    try:
        for name, value in fields.items():
            setattr(target, name, value)
        yield target
    finally:
        for name, value in before.items():
            if value is not _ABSENT:
                setattr(target, name, value)
            elif hasattr(target, name):
                delattr(target, name)
