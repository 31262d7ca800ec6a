"""Where goldens are: the full set beside the checkout, where there is one, else the selection in this repository."""

from __future__ import annotations

from pathlib import Path

from layout import ROOT


def goldens_dir(kind: str) -> Path:
    """The folder of goldens of `kind`, such as "plans"."""
    full = ROOT.parent / "shared" / "goldens" / kind
    return full if full.is_dir() else ROOT / "tests" / "goldens" / kind
