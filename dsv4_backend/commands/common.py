"""What the commands share: options, one clear line for a bad input, and what they say while they work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
import typer
from rich.console import Console

ImplOption = Annotated[str, typer.Option(help="Implementation: auto, triton or torch.")]
DeviceOption = Annotated[str, typer.Option(help="Where to run: auto (the GPU if there is one), cpu or cuda.")]


@contextmanager
def clean_errors() -> Iterator[None]:
    """Turns a bad input (ValueError, OSError) into one line on stderr and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error


def pick_device(name: str) -> torch.device:
    """The device that `--device` names; ValueError when this machine has none of it."""
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_cuda else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not has_cuda:
        raise ValueError("--device: expected a CUDA GPU for cuda, got a machine or a torch build without one")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


@contextmanager
def show_progress(what: str, every: float) -> Iterator[Callable[[str], None]]:
    """Gives a call that says on stderr how far a command is: a status line on a terminal, `plain_lines` elsewhere.

    Args:
        what: the work, which begins a plain line.
        every: least seconds between two plain lines.
    """
    if not sys.stderr.isatty():
        yield plain_lines(what, every)
        return
    with Console(stderr=True).status(what) as status:
        yield status.update


def plain_lines(what: str, every: float) -> Callable[[str], None]:
    """A call that prints `what` and a text on stderr, unless its last line is younger than `every` seconds."""
    last: float | None = None

    def say(text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if last is None or now - last >= every:
            last = now
            typer.echo(f"{what}: {text}", err=True)

    return say
