"""`dsv4 replay`: a serving trace through scheduler steps, with every plan and all metadata checked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dsv4_backend.commands.common import DeviceOption, ImplOption, clean_errors, pick_device
from dsv4_backend.dispatch import resolve_impl
from dsv4_backend.files import check_writable
from dsv4_backend.installed import check_plotting
from dsv4_backend.replay.faults import FAULTS
from dsv4_backend.replay.options import ReplayOptions
from dsv4_backend.replay.report import summary_table, write_json, write_plot
from dsv4_backend.replay.runner import ReplayResult, replay_trace
from dsv4_backend.replay.stepfile import load_step
from dsv4_backend.replay.trace import TraceRequest, load_trace, synthetic_trace
from dsv4_backend.replay.violation import Violation

_SHOWN = 5


def replay(
    trace: Annotated[
        Path | None,
        typer.Option(help="Trace, one JSON request a line, see README; left out: a made-up one.", metavar="FILE"),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Only the first N requests; of a made-up trace, how many (100).", metavar="N")
    ] = None,
    drafts: Annotated[int, typer.Option(help="Rows of each request in a verify step; 0: plain decode.")] = 0,
    chunk_size: Annotated[int, typer.Option(help="Prompt tokens of a step.")] = 8192,
    max_running: Annotated[int, typer.Option(help="Requests that run at a time.")] = 64,
    seed: Annotated[int, typer.Option(help="Made-up trace, page order and accept lengths.")] = 0,
    impl: ImplOption = "auto",
    device: DeviceOption = "auto",
    mixed: Annotated[bool, typer.Option(help="Running requests join prompt steps; not with drafts.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Picture of plan times and rows.", metavar="FILE.png")] = None,
    json: Annotated[Path | None, typer.Option(help="All numbers.", metavar="FILE")] = None,
    step: Annotated[
        Path | None, typer.Option(help="Replay the one step in this file, left by a violation.", metavar="FILE")
    ] = None,
    inject: Annotated[
        str | None, typer.Option(help=f"Break a plan or metadata on purpose: {', '.join(FAULTS)}.", metavar="FAULT")
    ] = None,
) -> None:
    """Run a serving trace through scheduler steps; build the plan and metadata of every step, and check both.

    Exit code 1: a violation; a step file is left beside --json, or here. 2: bad input, found before anything runs.
    """
    with clean_errors():
        where = pick_device(device)
        chosen = resolve_impl(impl, where)
    if step is not None:
        _replay_step(step, chosen, where)
        return
    with clean_errors():
        options = ReplayOptions(
            drafts=drafts,
            chunk_size=chunk_size,
            max_running=max_running,
            seed=seed,
            impl=chosen,
            device=where,
            mixed=mixed,
            fault=inject,
        )
        if requests is not None and requests < 1:
            raise ValueError(f"--requests: expected at least 1, got {requests}")
        if plot is not None:
            check_plotting()
        for path in (plot, json):
            if path is not None:
                check_writable(path)
        work = synthetic_trace(requests or 100, seed) if trace is None else load_trace(trace, requests)
        options.check_trace(work)
    with _one_thread():
        result = _run(work, options)
    Console(highlight=False).print(summary_table(result, where))
    with clean_errors():
        name = "made-up trace" if trace is None else trace.name
        if json is not None:
            write_json(json, result, options, name)
        if plot is not None:
            write_plot(plot, result, f"{name}, {len(work):,} requests, {drafts} drafts, impl {chosen} on {where}")
    _finish(result, options, json)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Builds on a CPU are small: on a busy machine, threads that wait for each other take far longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run(work: list[TraceRequest], options: ReplayOptions) -> ReplayResult:
    columns = (
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, {task.fields[steps]:,} steps"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("replay", total=len(work), steps=0)
        return replay_trace(
            work, options, lambda done, total, steps: bar.update(task, completed=done, total=total, steps=steps)
        )


def _finish(result: ReplayResult, options: ReplayOptions, json: Path | None) -> None:
    """Says what was wrong and leaves with the exit code."""
    if result.violating_step is not None:
        _print_violations(result.violations, result.violation_count)
        index = result.violating_step.step.index
        file = (json.parent if json is not None else Path()) / f"dsv4-violation-step{index}.npz"
        try:
            result.violating_step.save(file)
            typer.echo(f"replay this step alone: dsv4 replay --step {file}", err=True)
        except OSError as error:
            typer.echo(f"the step file could not be written: {error}", err=True)
        raise typer.Exit(1)
    if options.fault is not None:
        with clean_errors():
            if result.fault_step is None:
                raise ValueError(f"--inject {options.fault}: expected a step on which it has an effect, got none")
        typer.echo(f"error: the fault {options.fault} in step {result.fault_step} went unnoticed", err=True)
        raise typer.Exit(1)


def _replay_step(path: Path, impl: str, device: torch.device) -> None:
    with clean_errors():
        saved = load_step(path)
        with _one_thread():
            found = saved.replay(impl, device)
    fault = f" with the fault {saved.fault}" if saved.fault else ""
    typer.echo(f"step {saved.step.index}, {saved.step.mode.value}, {saved.step.total_rows} rows{fault}, impl {impl}")
    if found.count:
        _print_violations(found.kept, found.count)
        raise typer.Exit(1)
    typer.echo("no violation")


def _print_violations(violations: list[Violation], count: int) -> None:
    for violation in violations[:_SHOWN]:
        typer.echo(violation.message, err=True)
    if count > _SHOWN:
        typer.echo(f"... {count:,} violations in this step", err=True)
