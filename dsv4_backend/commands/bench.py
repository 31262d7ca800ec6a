"""`dsv4 bench`: measures this machine. The benchmarks are in the package dsv4_bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dsv4_backend.commands.common import DeviceOption, ImplOption, clean_errors, pick_device
from dsv4_backend.dispatch import resolve_impl
from dsv4_backend.files import check_writable
from dsv4_backend.installed import check_plotting

app = typer.Typer(help="Measure this machine: equality first, then time.", no_args_is_help=True)

PeerOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder with the released peer's script.")]
CsvOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table as CSV.")]
JsonOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table and the machine as JSON.")]
PlotOption = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the table (extra 'bench').")]


@app.callback()
def _group() -> None:
    """Keeps `bench` a group, however many commands it has."""


@app.command()
def planner(
    impl: ImplOption = "auto",
    device: DeviceOption = "auto",
    peer: PeerOption = None,
    csv: CsvOption = None,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Time compression plans of both ratios, one line a batch. On a CPU only the host's time is known."""
    with clean_errors():
        where = pick_device(device)
        chosen = resolve_impl(impl, where)
        for path in (csv, json, plot):
            if path is not None:
                check_writable(path)
        if plot is not None:
            check_plotting()
        if peer is not None and where.type != "cuda":
            raise ValueError(f"--peer: expected a CUDA GPU to run it on, got {where}")

    from dsv4_bench import planner as bench
    from dsv4_bench import report

    status = Console(stderr=True).status("planner")
    with clean_errors(), status:
        rows = bench.run(where, chosen, peer, lambda case: status.update(case))
    with clean_errors():
        env = report.environment(where)
        report.print_table(f"plan both ratios, impl {chosen}", rows, env)
        if csv is not None:
            report.write_csv(csv, rows)
        if json is not None:
            report.write_json(json, rows, env)
        if plot is not None:
            report.plot_bars(plot, f"plan both ratios, {env['chip']}, {env['date']}", rows, ("gpu us", "peer gpu us"))


@app.command("graph-replay")
def graph_replay(
    device: DeviceOption = "auto",
    csv: CsvOption = None,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Time the draft graph runner by bucket: copies, metadata, replay, outputs; beside a graph written by hand."""
    with clean_errors():
        where = pick_device(device)
        for path in (csv, json, plot):
            if path is not None:
                check_writable(path)
        if plot is not None:
            check_plotting()

    from dsv4_bench import graph_replay as bench
    from dsv4_bench import report

    status = Console(stderr=True).status("graph-replay")
    with clean_errors(), status:
        rows, about = bench.run(where, lambda bucket: status.update(bucket))
    with clean_errors():
        env = report.environment(where)
        report.print_table(about, rows, env)
        if csv is not None:
            report.write_csv(csv, rows)
        if json is not None:
            report.write_json(json, rows, env | {"capture": about})
        if plot is not None:
            columns = ("graph gpu", "hand gpu", "all host", "eager")
            report.plot_bars(plot, f"draft graph replay, {env['chip']}, {env['date']}", rows, columns)
