"""Sparse attention of a step, beside FlashMLA and FlashInfer on the same entries and indices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from dsv4_backend.attention import sparse_attention
from dsv4_backend.compressor import store_entries
from dsv4_backend.layouts import EntryLayout, EntryPool
from dsv4_bench.report import Row
from dsv4_bench.timing import measure

HEAD_DIM, ROPE_DIM = 512, 64
WINDOW, SELECTED = 128, 512
WINDOW_PAGE, COMPRESSED_PAGE = 128, 64
TOLERANCE = 1e-2
"""Largest difference from the reference, and of a peer from us, relative to the norm: roundings of bfloat16."""
CHECKED_ROWS = 4


@dataclass(frozen=True)
class Case:
    """`rows` queries that read `window` and `selected` random entries each."""

    rows: int
    heads: int
    format: str
    window: int = WINDOW
    selected: int = SELECTED
    pages: int = 1024
    """Of either pool."""

    @property
    def id(self) -> str:
        return f"attention {self.format}, {self.heads} heads, N={self.rows}"


def cases() -> list[Case]:
    found = [
        Case(rows, heads, format) for format in ("fp8", "bf16") for heads in (64, 128) for rows in (1, 32, 128, 512)
    ]
    return [*found, *(Case(4096, heads, "bf16") for heads in (64, 128))]


class Inputs:
    """Pools full of random entries, random indices, queries and a sink. In bf16 both pools are parts of `rows`."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        generator = torch.Generator(device=device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        layouts = [EntryLayout(case.format, HEAD_DIM, ROPE_DIM, page) for page in (WINDOW_PAGE, COMPRESSED_PAGE)]
        sizes = [case.pages * layout.page_entries for layout in layouts]
        self.rows: torch.Tensor | None = None
        if case.format == "fp8":
            self.window, self.compressed = (EntryPool.empty(layout, case.pages, device) for layout in layouts)
        else:
            self.rows = torch.zeros((sum(sizes), HEAD_DIM), dtype=layouts[0].dtype, device=device)
            self.window = EntryPool(layouts[0], self.rows[: sizes[0]])
            self.compressed = EntryPool(layouts[1], self.rows[sizes[0] :])
        for pool in (self.window, self.compressed):
            slots = torch.arange(1, pool.num_slots, device=device)
            store_entries(random(len(slots), HEAD_DIM), slots, pool)

        def indices(pool: EntryPool, count: int) -> torch.Tensor:
            shape = (case.rows, count)
            return torch.randint(1, pool.num_slots, shape, generator=generator, device=device, dtype=torch.int32)

        self.window_indices = indices(self.window, case.window)
        self.selected = indices(self.compressed, case.selected)
        self.window_lengths, self.selected_lengths = (
            torch.full((case.rows,), count, dtype=torch.int32, device=device) for count in (case.window, case.selected)
        )
        self.query = random(case.rows, case.heads, HEAD_DIM).bfloat16()
        self.sink = random(case.heads)
        self.out = torch.empty_like(self.query)

    def run(self, impl: str, rows: int | None = None) -> torch.Tensor:
        """All rows into `out`, or the first `rows`."""
        part = slice(rows)
        return sparse_attention(
            self.query[part],
            self.window,
            self.window_indices[part],
            self.window_lengths[part],
            self.compressed,
            self.selected[part],
            self.selected_lengths[part],
            sink=self.sink,
            out=self.out if rows is None else None,
            impl=impl,
        )


class AttentionPeer(Protocol):
    """Another implementation of the same work."""

    name: str

    def serves(self, case: Case) -> bool: ...

    def prepare(self, inputs: Inputs) -> Callable[[], torch.Tensor]:
        """A call, fit for a CUDA graph, that gives [rows, heads, head_dim]."""
        ...


def run_case(case: Case, device: torch.device, impl: str, peers: list[AttentionPeer]) -> Row:
    """Checks, then times a case, and the fastest peer that serves it.

    Raises:
        RuntimeError: results differ from the reference, or a peer's from ours.
    """
    inputs = Inputs(case, device)
    few = min(case.rows, CHECKED_ROWS)
    expect_close(f"{case.id}: result", inputs.run(impl)[:few], inputs.run("torch", few))
    timing = measure(lambda: inputs.run(impl), device)
    row: Row = {
        "case": case.id,
        "rows": case.rows,
        "gpu us": timing.gpu_us,
        "p10": timing.gpu_p10_us,
        "p90": timing.gpu_p90_us,
        "host us": timing.host_us,
        "TFLOP/s": _tflops(case, timing.gpu_us),
        "peer": None,
        "peer gpu us": None,
        "ratio": None,
    }
    for peer in peers:
        if not peer.serves(case):
            continue
        call = peer.prepare(inputs)
        expect_close(f"{case.id}: result of {peer.name}", call()[:few], inputs.run("torch", few))
        theirs = measure(call, device).gpu_us
        if theirs is not None and (row["peer gpu us"] is None or theirs < row["peer gpu us"]):
            row |= {"peer": peer.name, "peer gpu us": theirs, "ratio": theirs / timing.gpu_us}  # type: ignore[operator]
    return row


def expect_close(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    if not error < TOLERANCE:
        raise RuntimeError(f"{what} differs from the reference by {error:.1e} of its norm")


def _tflops(case: Case, microseconds: float | None) -> float | None:
    if microseconds is None:
        return None
    return 4 * case.rows * case.heads * (case.window + case.selected) * HEAD_DIM / microseconds / 1e6
