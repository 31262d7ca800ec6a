"""`dsv4 verify`: compares what we compute with a folder of goldens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import torch
import typer
from rich.console import Console
from rich.markup import escape

from dsv4_backend import chunks as chunking
from dsv4_backend.attention_goldens import load_attention_goldens
from dsv4_backend.attention_verify import verify_attention
from dsv4_backend.commands.common import DeviceOption, ImplOption, clean_errors, pick_device
from dsv4_backend.dispatch import resolve_impl
from dsv4_backend.goldens import load_plan_goldens
from dsv4_backend.layouts import FORMATS
from dsv4_backend.metadata_goldens import load_metadata_goldens
from dsv4_backend.metadata_verify import verify_metadata
from dsv4_backend.verify import verify_plan

app = typer.Typer(help="Compare what this machine computes with a folder of goldens.", no_args_is_help=True)


class Golden(Protocol):
    @property
    def name(self) -> str: ...


AnyGolden = TypeVar("AnyGolden", bound=Golden)


@app.command()
def plans(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with plan goldens (*.npz).")],
    impl: ImplOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Check compression plans. Exit code 1: a difference. 2: nothing to check, or a file that cannot be read."""
    _verify(directory, load_plan_goldens, verify_plan, impl, device)


@app.command()
def metadata(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder with metadata goldens (manifest.json and what it lists).")
    ],
    impl: ImplOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Check the metadata of steps. Exit code 1: a difference. 2: nothing to check, or a file that cannot be read."""
    _verify(directory, load_metadata_goldens, verify_metadata, impl, device)


@app.command()
def attention(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with attention goldens and manifest.json.")],
    impl: ImplOption = "auto",
    device: DeviceOption = "auto",
    chunks: Annotated[
        str, typer.Option(help="How a sequence is cut: sizes and then rest, or token, or random:SEED.")
    ] = "7,1,2,rest",
    kv: Annotated[str, typer.Option(help=f"Format of the cache: {', '.join(FORMATS)}.")] = "fp32",
) -> None:
    """Check attention layers. Exit code 1: a difference. 2: nothing to check, or an unreadable file."""
    with clean_errors():
        where = pick_device(device)
        chosen = resolve_impl(impl, where)
        chunking.check(chunks)
        if kv not in FORMATS:
            raise ValueError(f"--kv: expected one of {', '.join(FORMATS)}, got {kv!r}")
        goldens = load_attention_goldens(directory)
    console = Console(highlight=False, soft_wrap=True)
    counts: dict[bool | None, int] = {True: 0, False: 0, None: 0}
    for golden in goldens:
        verdict = verify_attention(golden, chosen, where, chunks=chunks, kv=kv)
        counts[verdict.ok] += 1
        label = {True: "[green]ok[/]  ", False: "[red]DIFF[/]", None: "skip"}[verdict.ok]
        console.print(f"{label} {escape(golden.name)}: {escape(verdict.text)}")
    console.print(
        f"{counts[True] + counts[False]} checked, {counts[True]} equal, {counts[False]} different, "
        f"{counts[None]} skipped (impl {chosen}, {where}, chunks {chunks}, kv {kv})"
    )
    if not counts[True] + counts[False]:
        raise typer.Exit(2)
    raise typer.Exit(1 if counts[False] else 0)


def _verify(
    directory: Path,
    load: Callable[[Path], list[AnyGolden]],
    difference: Callable[[AnyGolden, str, torch.device], str | None],
    impl: str,
    device: str,
) -> None:
    """Prints a line a golden and one with the counts; ends the command with its exit code."""
    with clean_errors():
        where = pick_device(device)
        chosen = resolve_impl(impl, where)
        goldens = load(directory)
    console = Console(highlight=False, soft_wrap=True)
    failed = 0
    for golden in goldens:
        found = difference(golden, chosen, where)
        failed += found is not None
        verdict = "[green]ok[/]  " if found is None else "[red]DIFF[/]"
        console.print(f"{verdict} {escape(golden.name)}{'' if found is None else ': ' + escape(found)}")
    console.print(f"{len(goldens)} checked, {len(goldens) - failed} equal, {failed} different (impl {chosen}, {where})")
    raise typer.Exit(1 if failed else 0)
