"""Result files: refused before the work begins when they cannot be written, and never left half-written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def check_writable(path: Path) -> None:
    """Raises ValueError when no file can be put at `path`, which is tried."""
    if path.is_dir():
        raise ValueError(f"{path}: expected a file name, got a folder")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected a regular file or a new one, got a device, pipe or socket")
    if not path.resolve().parent.is_dir():
        raise ValueError(f"{path}: expected its folder to exist, got no folder {path.parent}")
    try:
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise ValueError(f"{path}: expected a folder that can be written, got {error.strerror}") from error


@contextmanager
def atomic_file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Opens a file that appears at `path`, whole, once the block ends; an exception leaves what was there before.

    A link is followed. Raises ValueError where `check_writable` does.
    """
    check_writable(path)
    target = path.resolve()
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, mode, newline="" if "b" not in mode else None) as file:
            yield file
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
