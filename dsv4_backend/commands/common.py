"""What the commands share: options, and one clear line for a bad input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
import typer

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
