"""What a replay leaves behind: a table for people, JSON for programs, a picture."""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

import dsv4_backend
from dsv4_backend.files import atomic_file
from dsv4_backend.replay.builds import BuildMode
from dsv4_backend.replay.options import ReplayOptions
from dsv4_backend.replay.runner import ReplayResult
from dsv4_backend.replay.step import StepMode

_COLORS = {StepMode.EXTEND: "#1b6ca8", StepMode.DECODE: "#2a9d5c", StepMode.TARGET_VERIFY: "#d1722b"}


def summary(result: ReplayResult) -> dict[str, Any]:
    """The closing numbers by name; times in microseconds or seconds."""
    steps = Counter(mode.value for mode in result.modes)
    by_mode = {mode: [cost for cost in result.builds if cost.mode is mode] for mode in BuildMode}
    by_mode = {mode: costs for mode, costs in by_mode.items() if costs}
    return {
        "requests": result.requests,
        "finished": result.finished,
        "retracted": result.retracted,
        "steps": {mode.value: steps.get(mode.value, 0) for mode in StepMode},
        "rows": sum(result.rows),
        "committed_tokens": result.committed,
        "prefix_hit_tokens": result.hit_tokens,
        "compress_rows": {f"c{ratio}": rows for ratio, rows in result.compress_rows.items()},
        "plan_us": _percentiles(result.plan_us),
        "plan_us_by_mode": {
            mode.value: _percentiles([us for us, m in zip(result.plan_us, result.modes, strict=True) if m is mode])
            for mode in StepMode
            if steps.get(mode.value)
        },
        "build_us_by_mode": {
            mode.value: _percentiles([cost.microseconds for cost in builds]) for mode, builds in by_mode.items()
        },
        "metadata_builds": {mode.value: len(builds) for mode, builds in by_mode.items()},
        "metadata_rows": {mode.value: sum(cost.rows for cost in builds) for mode, builds in by_mode.items()},
        "violations": result.violation_count,
        "wall_s": result.wall_s,
    }


def summary_table(result: ReplayResult, device: torch.device) -> Table:
    """The closing table."""
    numbers = summary(result)
    table = Table(title="replay", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    retracted = f" ({numbers['retracted']} times one was put back)" if numbers["retracted"] else ""
    table.add_row("requests finished", f"{numbers['finished']:,} of {numbers['requests']:,}{retracted}")
    for mode, count in numbers["steps"].items():
        if count:
            table.add_row(f"steps {mode}", f"{count:,}")
    table.add_row("rows", f"{numbers['rows']:,}")
    for name, rows in numbers["compress_rows"].items():
        table.add_row(f"compress rows {name}", f"{rows:,}")
    table.add_row("prefix-hit tokens", f"{numbers['prefix_hit_tokens']:,}")
    what = "host call and synchronisation" if device.type == "cuda" else "host call"
    plan = numbers["plan_us"]
    table.add_row(f"plan, p50 / p99 ({what})", f"{plan['p50']:,.0f} / {plan['p99']:,.0f} us")
    for mode, cost in numbers["build_us_by_mode"].items():
        rows = numbers["metadata_rows"][mode]
        table.add_row(f"metadata {mode}: rows checked", f"{rows:,}")
        table.add_row(f"build {mode}, p50 / p99", f"{cost['p50']:,.0f} / {cost['p99']:,.0f} us")
    color = "red" if numbers["violations"] else "green"
    table.add_row("violations", f"[{color}]{numbers['violations']:,}[/]")
    table.add_row("wall time", f"{numbers['wall_s']:,.1f} s")
    return table


def write_json(path: Path, result: ReplayResult, options: ReplayOptions, trace: str) -> None:
    """Writes all numbers, and what they were measured with; OSError if that is not possible."""
    settings = asdict(options) | {"device": str(options.device), "trace": trace}
    content = {
        "command": sys.argv,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "dsv4_backend": dsv4_backend.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "machine": torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else platform.machine(),
        "options": settings,
        "summary": summary(result),
        "violations": [asdict(violation) | {"message": violation.message} for violation in result.violations],
        "per_step": {
            "mode": [mode.value for mode in result.modes],
            "rows": result.rows,
            "plan_us": [round(us, 2) for us in result.plan_us],
            "build_us": [round(us, 2) for us in result.build_us],
        },
    }
    with atomic_file(path) as file:
        file.write(json.dumps(content, indent=1) + "\n")


def write_plot(path: Path, result: ReplayResult, title: str) -> None:
    """Draws plan time and rows of every step, by kind of step; PNG. OSError if the file cannot be written."""
    # Not pyplot: it would keep the figure, and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    modes, rows, cost = np.array([m.value for m in result.modes]), np.array(result.rows), np.array(result.plan_us)
    for mode in StepMode:
        steps = np.flatnonzero(modes == mode.value)
        if len(steps):
            median = float(np.median(cost[steps]))
            label = f"{mode.value}: {len(steps):,} steps, median {median:,.0f} us"
            style = {"s": 7, "color": _COLORS[mode], "alpha": 0.6, "linewidths": 0}
            upper.scatter(steps, cost[steps], label=label, **style)
            lower.scatter(steps, rows[steps], **style)
    upper.set_ylabel("plan time (us)")
    lower.set_ylabel("rows")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(True, which="major", color="#e4e4e4")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    upper.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, markerscale=2.5, borderaxespad=0.2)
    figure.suptitle(title, x=0.01, ha="left")
    with atomic_file(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)


def _percentiles(values: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99]) if values else (float("nan"), float("nan"))
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2)}
