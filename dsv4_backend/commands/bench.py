"""`dsv4 bench`: measures this machine. The benchmarks are in the package dsv4_bench."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import torch
import typer

from dsv4_backend.commands.common import DeviceOption, ImplOption, clean_errors, pick_device, show_progress
from dsv4_backend.dispatch import resolve_impl
from dsv4_backend.files import check_writable
from dsv4_backend.installed import check_plotting

app = typer.Typer(help="Measure this machine: equality first, then time.", no_args_is_help=True)

_EVERY = 1.0
"""Least seconds between two lines about progress where stderr is no terminal."""


def _peer_option(files: str) -> Any:
    text = f"Folder with what runs the released peer: {files}. It is not distributed with this project."
    return typer.Option(metavar="DIR", help=text)


PlannerPeerOption = Annotated[Path | None, _peer_option("planner_peer.py and its folder s23")]
MetadataPeerOption = Annotated[Path | None, _peer_option("metadata_peer.py")]
CompressorPeerOption = Annotated[Path | None, _peer_option("compressor_peer.py")]
KernelsPeerOption = Annotated[Path | None, _peer_option("flashmla_peer.py and compressor_peer.py")]
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
    peer: PlannerPeerOption = None,
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
    peer: MetadataPeerOption = None,
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
    peer: CompressorPeerOption = None,
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
    peer: KernelsPeerOption = None,
    csv: CsvOption = None,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Time attention, indexer and compressor, one line a case, beside FlashMLA, FlashInfer and SGLang where given.

    On a CPU only the host's time is known, and cases that take too long there are left out.
    """
    files = _Files(csv, json, plot)
    _beside_peer("kernels", "kernels of a layer", impl, device, peer, files, lambda bench, where: bench.left_out(where))


@app.command("graph-replay")
def graph_replay(
    device: DeviceOption = "auto",
    csv: CsvOption = None,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Time the draft graph runner by bucket: copies, metadata, replay, outputs; beside a graph written by hand.

    Columns, in microseconds on the GPU or on the host:

    copy: inputs into the runner's buffers

    meta: metadata of all draft steps

    graph: the runner's graph, metadata included

    hand: a graph of the draft model alone, written by hand

    extra: what the runner adds to the graph written by hand

    prep, out, all: preparing metadata, slicing outputs, a whole replay

    eager: the same drafts without graphs, from call to result
    """
    files = _Files(csv, json, plot)
    with clean_errors():
        where = pick_device(device)
        files.check()

    from dsv4_bench import graph_replay as bench

    with clean_errors(), show_progress("graph-replay", _EVERY) as progress:
        rows, about = bench.run(where, progress)
    with clean_errors():
        files.write(where, about, rows, ("graph gpu", "hand gpu", "all host", "eager"))


def _beside_peer(
    name: str,
    title: str,
    impl: str,
    device: str,
    peer: Path | None,
    files: _Files,
    note: Callable[[ModuleType, torch.device], str] = lambda bench, where: "",
) -> None:
    """Runs `dsv4_bench.<name>` and writes its table, once everything that can be refused has been.

    `note` gives the end of the table's title.
    """
    with clean_errors():
        where = pick_device(device)
        chosen = resolve_impl(impl, where)
        files.check()
        if peer is not None and where.type != "cuda":
            raise ValueError(f"--peer: expected a CUDA GPU to run it on, got {where}")

    bench = import_module(f"dsv4_bench.{name}")
    with clean_errors(), show_progress(name, _EVERY) as progress:
        rows = bench.run(where, chosen, peer, progress)
    with clean_errors():
        files.write(where, f"{title}, impl {chosen}{note(bench, where)}", rows, ("gpu us", "peer gpu us"))
