"""Where goldens are: a selection in this repository, and the full set beside the checkout, where there is one."""

from __future__ import annotations

from pathlib import Path

from layout import ROOT


def golden_folders(kind: str) -> list[Path]:
    """The folders of goldens of `kind`, such as "plans": the selection, then the full set if it is there."""
    full = ROOT.parent / "shared" / "goldens" / kind
    return [ROOT / "tests" / "goldens" / kind, *([full] if full.is_dir() else [])]


def goldens_dir(kind: str) -> Path:
    """The folder with most goldens of `kind`."""
    return golden_folders(kind)[-1]
