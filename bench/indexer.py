"""The indexer of a step: scores of all closed entries, and the selection of the best."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4_backend.compressor import store_entries
from dsv4_backend.indexer import IndexQuery, index_query, index_scores, select_topk
from dsv4_backend.layouts import EntryLayout, EntryPool
from dsv4_bench.report import Row
from dsv4_bench.timing import measure

HEADS, HEAD_DIM, ROPE_DIM, PAGE, TOPK = 64, 128, 64, 64, 512


@dataclass(frozen=True)
class Case:
    """`rows` queries of one request each, with `entries` closed entries."""

    rows: int
    entries: int
    format: str = "fp8"

    @property
    def id(self) -> str:
        return f"{self.format}, N={self.rows}, {self.entries} entries"


def cases() -> list[Case]:
    found = [Case(rows, entries) for entries in (1250, 16_384) for rows in (1, 32, 128)]
    return [*found, Case(1, 262_144)]


class Inputs:
    """Random keys on shuffled pages, which all rows share where a pool of their own would be too large."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        generator = torch.Generator(device=device).manual_seed(0)
        pages = -(-case.entries // PAGE)
        self.keys = EntryPool.empty(EntryLayout(case.format, HEAD_DIM, ROPE_DIM, PAGE, indexer=True), pages + 1, device)
        slots = torch.arange(1, self.keys.num_slots, device=device)
        store_entries(torch.randn((len(slots), HEAD_DIM), generator=generator, device=device), slots, self.keys)
        order = [torch.randperm(pages, generator=generator, device=device) + 1 for _ in range(case.rows)]
        self.page_table = torch.stack(order).int()
        self.lengths = torch.full((case.rows,), case.entries, dtype=torch.int32, device=device)
        query = torch.randn((case.rows, HEADS, HEAD_DIM), generator=generator, device=device)
        weights = torch.randn((case.rows, HEADS), generator=generator, device=device)
        rope = torch.tensor([1.0, 0.0], device=device).repeat(ROPE_DIM // 2)[None]
        positions = torch.zeros(case.rows, dtype=torch.int32, device=device)
        self.query: IndexQuery = index_query(query, weights, positions, rope, self.keys)
        self.scores = torch.empty((case.rows, case.entries), device=device)
        self.selected = torch.empty((case.rows, TOPK), dtype=torch.int32, device=device)

    def score(self, impl: str) -> None:
        index_scores(self.query, self.keys, self.page_table, self.lengths, out=self.scores, impl=impl)

    def select(self, impl: str) -> None:
        select_topk(self.scores, self.lengths, self.page_table, PAGE, out=self.selected, impl=impl)


def run_case(case: Case, device: torch.device, impl: str) -> list[Row]:
    """Checks, then times a case: a row for scores, and one for the selection.

    Raises:
        RuntimeError: scores or a selection differ from the reference.
    """
    inputs = Inputs(case, device)
    check(inputs, impl)
    rows: list[Row] = []
    for name, call in (("index scores", inputs.score), (f"select {TOPK}", inputs.select)):
        timing = measure(lambda call=call: call(impl), device)  # type: ignore[misc]
        row: Row = {"case": f"{name} {case.id}", "rows": case.rows, "gpu us": timing.gpu_us}
        rows.append(row | {"p10": timing.gpu_p10_us, "p90": timing.gpu_p90_us, "host us": timing.host_us})
    return rows


def check(inputs: Inputs, impl: str) -> None:
    """Raises RuntimeError unless scores are close to the reference's, and the best of equal scores are the same."""
    inputs.score(impl)
    ours = inputs.scores.clone()
    inputs.score("torch")
    error = float((ours - inputs.scores).norm() / inputs.scores.norm())
    if not error < 1e-4:
        raise RuntimeError(f"index scores {inputs.case.id}: differ from the reference by {error:.1e} of their norm")
    inputs.select(impl)
    selected = inputs.selected.clone()
    inputs.select("torch")
    if not torch.equal(selected, inputs.selected):
        raise RuntimeError(f"select {inputs.case.id}: differs from the reference")
