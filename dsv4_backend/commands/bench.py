"""`dsv4 bench`: measures this machine. The benchmarks are in the package dsv4_bench."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
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


class _Files(NamedTuple):
    """Where a table goes beside the terminal."""

    csv: Path | None
    json: Path | None
    plot: Path | None

    def check(self) -> None:
        """Raises ValueError or OSError for what could not be written, before anything is measured."""
        for path in self:
            if path is not None:
                check_writable(path)
        if self.plot is not None:
            check_plotting()

    def write(self, where: torch.device, title: str, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
        """Prints the table and writes it; `columns` are those that a plot shows."""
        from dsv4_bench import report

        env = report.environment(where)
        report.print_table(title, rows, env)
        if self.csv is not None:
            report.write_csv(self.csv, rows)
        if self.json is not None:
            report.write_json(self.json, rows, env | {"title": title})
        if self.plot is not None:
            report.plot_bars(self.plot, f"{title}, {env['chip']}, {env['date']}", rows, columns)


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
    _beside_peer("planner", "plan both ratios", impl, device, peer, _Files(csv, json, plot))


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
    _beside_peer("metadata", "metadata of a step", impl, device, peer, _Files(csv, json, plot))


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
    _beside_peer("compressor", "fill the cache", impl, device, peer, _Files(csv, json, plot))


@app.command()
def kernels(
    impl: ImplOption = "auto",
    device: DeviceOption = "auto",
    peer: PeerOption = None,
    csv: CsvOption = None,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Time attention, indexer and compressor, one line a case, beside FlashMLA, FlashInfer and SGLang where given."""
    _beside_peer("kernels", "kernels of a layer", impl, device, peer, _Files(csv, json, plot))


@app.command("graph-replay")
def graph_replay(
    device: DeviceOption = "auto",
    csv: CsvOption = None,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Time the draft graph runner by bucket: copies, metadata, replay, outputs; beside a graph written by hand."""
    files = _Files(csv, json, plot)
    with clean_errors():
        where = pick_device(device)
        files.check()

    from dsv4_bench import graph_replay as bench

    status = Console(stderr=True).status("graph-replay")
    with clean_errors(), status:
        rows, about = bench.run(where, lambda bucket: status.update(bucket))
    with clean_errors():
        files.write(where, about, rows, ("graph gpu", "hand gpu", "all host", "eager"))


def _beside_peer(name: str, title: str, impl: str, device: str, peer: Path | None, files: _Files) -> None:
    """Runs `dsv4_bench.<name>` and writes its table, once everything that can be refused has been."""
    with clean_errors():
        where = pick_device(device)
        chosen = resolve_impl(impl, where)
        files.check()
        if peer is not None and where.type != "cuda":
            raise ValueError(f"--peer: expected a CUDA GPU to run it on, got {where}")

    bench = import_module(f"dsv4_bench.{name}")
    status = Console(stderr=True).status(name)
    with clean_errors(), status:
        rows = bench.run(where, chosen, peer, lambda case: status.update(case))
    with clean_errors():
        files.write(where, f"{title}, impl {chosen}", rows, ("gpu us", "peer gpu us"))
