"""Result files: refused before the work begins when they cannot be written, and never left half-written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def check_writable(path: Path) -> None:
    """Raises ValueError when no file can be created at `path`."""
    if path.is_dir():
        raise ValueError(f"{path}: expected a file name, got a folder")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: expected its folder to exist, got no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path}: expected a folder that can be written, got no permission for {path.parent}")


@contextmanager
def atomic_file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Opens a file that appears at `path`, whole, once the block ends; an exception leaves what was there before."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, mode, newline="" if "b" not in mode else None) as file:
            yield file
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
