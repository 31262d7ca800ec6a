"""`dsv4 doctor`: what this machine can run, and why not."""

from __future__ import annotations

import platform
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dsv4_backend.batch import ForwardMode
from dsv4_backend.cache import CacheSize, DSV4Cache
from dsv4_backend.commands.common import clean_errors
from dsv4_backend.config import DSV4Config
from dsv4_backend.dispatch import has_triton, interpreter_on
from dsv4_backend.geometry import RATIOS, CacheGeometry
from dsv4_backend.installed import has_plotting, has_transformers, version
from dsv4_backend.metadata_buffers import BucketBuffers, MetadataShape, bucket_key

PACKAGES = ("torch", "triton", "numpy", "einops", "rich", "typer", "matplotlib", "transformers", "flashinfer-python")


MEMORY_CAPACITIES = (65_536, 1_048_576)
MEMORY_REQUESTS = (1, 8, 64)
MEMORY_CHUNK = 8192
MEMORY_WIDTH = 1000
"""Room that cuts no column of numbers, which a narrow terminal wraps instead."""
MEMORY_ROWS = {
    ForwardMode.DECODE: (1, 64, 256),
    ForwardMode.TARGET_VERIFY: (4, 256, 1024),
    ForwardMode.EXTEND: (2048, 8192),
}

MemoryOption = Annotated[bool, typer.Option("--memory", help="Print the bytes of metadata buffers and caches instead.")]

RequestsOption = Annotated[
    int | None, typer.Option(metavar="N", help="With --memory: the cache of N requests, instead of 1, 8 and 64.")
]


def doctor(memory: MemoryOption = False, requests: RequestsOption = None) -> None:
    """Say what this machine can run, and why not."""
    console = Console(soft_wrap=True)
    if requests is not None:
        with clean_errors():
            if not memory:
                raise ValueError("--requests: expected --memory with it, got none")
            if requests < 1:
                raise ValueError(f"--requests: expected at least 1, got {requests}")
    if memory:
        console.width = MEMORY_WIDTH
        console.print(_metadata_table())
        console.print()
        console.print(_cache_table(MEMORY_REQUESTS if requests is None else (requests,)))
        return
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


def _metadata_table() -> Table:
    """Bytes of the buffers of a mode and bucket, plans included."""
    table = Table("mode", "rows", box=None, title="metadata buffers, bytes a bucket", title_justify="left")
    models = {"V4-Flash": DSV4Config.v4_flash(), "V4-Pro": DSV4Config.v4_pro()}
    geom = CacheGeometry.for_drafts(4)
    shapes = []
    for capacity in MEMORY_CAPACITIES:
        for name, cfg in models.items():
            table.add_column(f"{name}, {capacity // 1024}K tokens", justify="right")
            shapes.append(MetadataShape(geom.page_size, cfg.window, cfg.index_topk, capacity, RATIOS))
    table.add_column("page tables")
    for mode, buckets in MEMORY_ROWS.items():
        for rows in buckets:
            keys = [bucket_key(shape, mode, rows, num_requests=256) for shape in shapes]
            sizes = [
                BucketBuffers(key, shape, torch.device("meta")).nbytes for key, shape in zip(keys, shapes, strict=True)
            ]
            shared = [f"{c // 1024}K" for c, key in zip(MEMORY_CAPACITIES, keys[::2], strict=True) if key.num_requests]
            where = f"one a request (of 256) at {', '.join(shared)}" if shared else "one a row"
            table.add_row(mode.value, f"{rows:,}", *(f"{size:,}" for size in sizes), where)
    return table


def _cache_table(requests: tuple[int, ...]) -> Table:
    """Bytes of a cache of all decoder layers, with room for N requests of a million tokens."""
    kinds = ("window", "c4", "c128", "index keys", "state")
    context = MEMORY_CAPACITIES[-1]
    title = f"cache of all layers, {context:,} tokens a request, prompt chunks of {MEMORY_CHUNK:,}, GiB"
    table = Table("model", "format", "requests", box=None, title=title, title_justify="left")
    for name in (*kinds, "total", "rings (ratio 4 / ratio 128)"):
        table.add_column(name, justify="right")
    device = torch.device("meta")
    for name, cfg in {"V4-Flash": DSV4Config.v4_flash(), "V4-Pro": DSV4Config.v4_pro()}.items():
        for form in ("fp8", "bf16"):
            for count in requests:
                for drafts in (0, 4):
                    geom = CacheGeometry.for_drafts(drafts)
                    size = CacheSize.for_requests(
                        cfg, geom, num_requests=count, max_seq_len=context, chunk_size=MEMORY_CHUNK
                    )
                    found = DSV4Cache(cfg, geom, size, format=form, device=device).nbytes()
                    cells = [f"{found[kind] / 2**30:,.2f}" for kind in kinds]
                    total = f"{sum(found.values()) / 2**30:,.2f}"
                    table.add_row(name, form, str(count), *cells, total, f"{geom.c4_ring}/{geom.c128_ring}")
    return table


def _features() -> list[tuple[str, bool, str]]:
    plot, hf = has_plotting(), has_transformers()
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
        ('planner, metadata, cache and attention, impl="torch"', True, "runs on any device that torch has"),
        ('planner, metadata, cache and attention, impl="triton"', *triton),
        ("dsv4 replay, dsv4 verify", True, "on the CPU, and on a CUDA GPU where there is one"),
        ("draft graph runner, dsv4 capture-test", True, "CUDA graphs" if gpu else "without graphs: no GPU"),
        ("dsv4 bench", True, "GPU and host time" if gpu else "host time only: no GPU"),
        ("dsv4 generate", hf, "on the CPU, and on a CUDA GPU" if hf else "pip install 'transformers>=5.17'"),
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
