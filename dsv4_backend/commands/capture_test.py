"""`dsv4 capture-test`: what to run on a new chip or driver before anything is replayed there in earnest."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from dsv4_backend.commands.common import DeviceOption, clean_errors, pick_device, show_progress
from dsv4_backend.files import atomic_file, check_writable


def capture_test(
    seconds: Annotated[float, typer.Option(help="Time to spend; at least one whole round, minutes on a CPU.")] = 30.0,
    suite: Annotated[list[str] | None, typer.Option(help="Only this suite; may be repeated.", metavar="NAME")] = None,
    case: Annotated[str | None, typer.Option(help="Only this case.", metavar="ID")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first round; each round adds one.")] = 0,
    executor: Annotated[str, typer.Option(help="auto, cuda_graph, or eager (no graphs, on a CPU too).")] = "auto",
    device: DeviceOption = "auto",
    json: Annotated[Path | None, typer.Option(help="Write counts and the first difference.", metavar="FILE")] = None,
) -> None:
    """Capture and replay planner, metadata and draft runner in every bucket, mode and padding, against eager runs.

    The guard is on. Exit code 1: a difference, with the command that repeats it. 2: bad input.
    """
    from dsv4_bench import capture_test as bench
    from dsv4_bench.capture_case import CaptureOptions
    from dsv4_graph_runner.options import resolve_executor

    with clean_errors():
        where = pick_device(device)
        options = CaptureOptions(where, resolve_executor(executor, where))
        if seconds < 0:
            raise ValueError(f"--seconds: expected at least 0, got {seconds}")
        if json is not None:
            check_writable(json)
        chosen = bench.select(options, suite or [], case)
    console = Console(highlight=False, soft_wrap=True)
    env = _environment(where)
    console.print(" | ".join(f"{name} {value}" for name, value in env.items()), markup=False)
    with show_progress("capture-test", every=10.0) as progress:
        outcome = bench.run(
            chosen,
            seconds,
            seed,
            lambda what, replays, spent: progress(f"{what}: {replays:,} replays, {_spent(spent, seconds)}"),
        )
    for name in outcome.cases:
        console.print(f"{name}: {outcome.cases[name]:,} cases, {outcome.replays[name]:,} replays")
    rounds = f"{outcome.rounds:,} whole round{'s' * (outcome.rounds != 1)}"
    console.print(f"{rounds} in {outcome.seconds:.1f} s, executor {options.executor} on {where}")
    found = outcome.found
    repeat = None
    if found is not None:
        repeat = (
            f"dsv4 capture-test --suite {found.suite} --case {found.case} --seed {found.seed} --seconds 0 "
            f"--executor {options.executor} --device {where.type}"
        )
        typer.echo(f"DIFF {found.suite} {found.case}: {found.what}\nrepeat it: {repeat}", err=True)
    else:
        console.print("no difference")
    if json is not None:
        with clean_errors():
            _write(json, env, vars(outcome) | {"found": None if found is None else vars(found), "repeat": repeat})
    raise typer.Exit(0 if found is None else 1)


def _spent(spent: float, seconds: float) -> str:
    if spent <= seconds:
        return f"{spent:.0f} of {seconds:.0f} s"
    return f"{spent:.0f} s, until the first round is whole"


def _environment(device: torch.device) -> dict[str, str]:
    from dsv4_bench.report import environment

    env = environment(device)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        env["sm"] = f"{major}{minor}"
        env["driver's CUDA"] = _driver_version()
    env["system"] = sys.platform
    return env


def _driver_version() -> str:
    """The newest CUDA that the driver runs, as torch knows it."""
    version = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    return f"{version // 1000}.{version % 1000 // 10}" if version else "unknown"


def _write(path: Path, env: dict[str, str], outcome: dict[str, Any]) -> None:
    with atomic_file(path) as file:
        jsonlib.dump({"environment": env} | outcome, file, indent=1)
        file.write("\n")
