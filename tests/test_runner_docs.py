"""The page about the runner: its Python runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from layout import ROOT
from test_readme import blocks


@pytest.mark.parametrize("source", blocks(ROOT / "docs" / "graph_runner.md", "python"))
def test_python_runs(source: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "[[-1, 0, 1], [-1, 0, 1], [-1, 0, 1]]" in done.stdout
