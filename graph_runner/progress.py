"""A progress bar on a terminal, of plain text."""

from __future__ import annotations

import sys
from typing import TextIO


class TextBar:
    """Shows how far a capture is: `runner.capture(progress=TextBar())`. Silent unless its stream is a terminal."""

    def __init__(self, stream: TextIO | None = None, width: int = 30) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._width = width

    def __call__(self, done: int, total: int, what: str) -> None:
        if not self._stream.isatty():
            return
        filled = self._width * done // max(total, 1)
        bar = "#" * filled + "." * (self._width - filled)
        end = "\n" if done == total else ""
        self._stream.write(f"\r\x1b[Kcapture [{bar}] {done}/{total} {what}{end}")
        self._stream.flush()
