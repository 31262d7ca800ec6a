"""`dsv4 doctor`: what this machine can run, and why not."""

from __future__ import annotations

import platform

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dsv4_backend.dispatch import has_triton, interpreter_on
from dsv4_backend.installed import has_plotting, version

PACKAGES = ("torch", "triton", "numpy", "einops", "rich", "typer", "matplotlib", "flashinfer-python")


def doctor() -> None:
    """Say what this machine can run, and why not."""
    console = Console(soft_wrap=True)
    versions = Table("package", "version", box=None)
    for name in ("dsv4-backend", *PACKAGES):
        versions.add_row(name, version(name) or "-")
    console.print(versions)
    console.print(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    console.print(escape(_gpu()))

    features = Table("feature", "runs here", "why, or how to get it", box=None)
    for feature, runs, why in _features():
        features.add_row(feature, "[green]yes[/]" if runs else "[red]no[/]", escape(why))
    console.print(features)


def _features() -> list[tuple[str, bool, str]]:
    plot = has_plotting()
    gpu = torch.cuda.is_available()
    if not has_triton():
        triton = False, "Triton is missing (it has wheels for Linux): pip install triton"
    elif gpu:
        triton = True, "compiled for this GPU"
    elif interpreter_on():
        triton = True, "in Triton's interpreter (TRITON_INTERPRET=1), slowly"
    else:
        triton = False, "no GPU; TRITON_INTERPRET=1 runs it in Triton's interpreter"
    return [
        ('planner, impl="torch"', True, "runs on any device that torch has"),
        ('planner, impl="triton"', *triton),
        ("dsv4 replay, dsv4 verify plans", True, "on the CPU, and on a CUDA GPU where there is one"),
        ("dsv4 bench planner", True, "GPU and host time" if gpu else "host time only: no GPU"),
        ("draft graph runner, dsv4 capture-test", True, "CUDA graphs" if gpu else "without graphs: no GPU"),
        ("--plot", plot, "matplotlib is here" if plot else "pip install matplotlib"),
    ]


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "GPU: none that torch can use; --device cuda will be refused"
    names = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        names.append(
            f"{p.name} (sm_{p.major}{p.minor}, {p.multi_processor_count} SMs, {p.total_memory / 2**30:.0f} GiB)"
        )
    return f"GPU: {', '.join(names)}; CUDA {torch.version.cuda}"
