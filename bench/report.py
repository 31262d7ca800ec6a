"""Prints, writes and plots what a benchmark measured."""

from __future__ import annotations

import csv
import datetime
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dsv4_backend.files import atomic_file
from dsv4_backend.installed import version

Row = dict[str, Any]
_WIDTH = 1000
"""Room that cuts no column: Rich would cut names and numbers to fit a terminal, which can wrap a line instead."""


def environment(device: torch.device) -> dict[str, str]:
    """What a number needs beside it: chip, versions, date and the command that repeats it."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "chip": chip,
        "torch": torch.__version__,
        "triton": version("triton") or "none",
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
        "dsv4-backend": version("dsv4-backend") or "none",
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["dsv4", *sys.argv[1:]]),
    }


def print_table(title: str, rows: Sequence[Row], env: dict[str, str]) -> None:
    """One line a case, however long; columns are the keys of the first row."""
    console = Console(highlight=False, soft_wrap=True, width=_WIDTH)
    console.print(" | ".join(f"{key} {value}" for key, value in env.items()))
    table = Table(title=title, box=None, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console.print(table)


def write_json(path: Path, rows: Sequence[Row], env: dict[str, str]) -> None:
    with atomic_file(path) as file:
        json.dump({"environment": env, "rows": list(rows)}, file, indent=1)
        file.write("\n")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    with atomic_file(path) as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def plot_bars(path: Path, title: str, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Horizontal bars, a group a case, on a log axis; a column that no row has is left out."""
    from matplotlib.figure import Figure

    shown = [c for c in columns if any(row.get(c) is not None for row in rows)] or ["host us"]
    figure = Figure(figsize=(9, 1.5 + 0.28 * len(rows) * len(shown)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(shown)
    for k, column in enumerate(shown):
        at = [i + k * height for i, row in enumerate(rows) if row.get(column) is not None]
        bars = axes.barh(at, [row[column] for row in rows if row.get(column) is not None], height, label=column)
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=7)
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(rows))], [str(row["case"]) for row in rows], fontsize=8)
    axes.set_ylim(len(rows), -0.5)
    axes.set_xscale("log")
    axes.set_xlabel("us")
    axes.set_title(title)
    axes.legend()
    with atomic_file(path, "wb") as file:
        figure.savefig(file, format="png", dpi=130)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
