"""`dsv4 bench`: measures this machine. The benchmarks are in the package dsv4_bench."""

from __future__ import annotations

from importlib import import_module
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
    _measure("planner", "plan both ratios", impl, device, peer, csv, json, plot)


@app.command()
def metadata(
    impl: ImplOption = "auto",
    device: DeviceOption = "auto",
    peer: PeerOption = None,
    csv: CsvOption = None,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Time the metadata of whole steps, plans included, one line a step. On a CPU only the host's time is known."""
    _measure("metadata", "metadata of a step", impl, device, peer, csv, json, plot)


@app.command()
def compressor(
    impl: ImplOption = "auto",
    device: DeviceOption = "auto",
    peer: PeerOption = None,
    csv: CsvOption = None,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Time what fills the cache of a layer in a step, one line a step. On a CPU only the host's time is known."""
    _measure("compressor", "fill the cache", impl, device, peer, csv, json, plot)


def _measure(
    name: str,
    title: str,
    impl: str,
    device: str,
    peer: Path | None,
    csv: Path | None,
    json: Path | None,
    plot: Path | None,
) -> None:
    """Runs `dsv4_bench.<name>` and writes its table, once everything that can be refused has been."""
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

    bench = import_module(f"dsv4_bench.{name}")
    from dsv4_bench import report

    status = Console(stderr=True).status(name)
    with clean_errors(), status:
        rows = bench.run(where, chosen, peer, lambda case: status.update(case))
    with clean_errors():
        env = report.environment(where)
        report.print_table(f"{title}, impl {chosen}", rows, env)
        if csv is not None:
            report.write_csv(csv, rows)
        if json is not None:
            report.write_json(json, rows, env)
        if plot is not None:
            report.plot_bars(plot, f"{title}, {env['chip']}, {env['date']}", rows, ("gpu us", "peer gpu us"))
