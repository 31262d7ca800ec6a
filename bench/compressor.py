"""`dsv4 bench compressor`: what it costs to fill the cache, beside the released compressor on the same plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4_backend.compressor import compress, store_window
from dsv4_backend.config import DSV4Config
from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.layouts import EntryLayout, EntryPool, bias_shape, state_rows, state_width
from dsv4_backend.planner import plan_decode, plan_prefill
from dsv4_backend.plans import DecodePlans, PrefillPlan
from dsv4_backend.rope import rope_table
from dsv4_backend.tables import RequestTables
from dsv4_bench.compressor_peer import Peer, beyond_rounding
from dsv4_bench.report import Row
from dsv4_bench.timing import count_launches, measure

EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """A step of one layer. `ratio` 0: window entries. `extends`: rows of each request; empty: one new token each."""

    id: str
    ratio: int
    lengths: tuple[int, ...]
    extends: tuple[int, ...] = ()
    head_dim: int = 512
    format: str = "fp8"

    @property
    def num_rows(self) -> int:
        return sum(self.extends) or len(self.lengths)

    @property
    def layout(self) -> EntryLayout:
        indexer = self.head_dim == 128
        return EntryLayout(self.format, self.head_dim, 64, 256 // max(1, self.ratio), indexer)


def cases() -> list[Case]:
    """The design's rows, then decode steps in which no, some and every request completes an entry, and others."""
    kinds = (("c4 core", 4, 512), ("c4 indexer", 4, 128), ("c128 core", 128, 512))
    found = []
    for name, ratio, dim in kinds:
        for tokens in (8192, 65_536):
            found.append(Case(f"{name}, prefill 1x{tokens}", ratio, (tokens,), (tokens,), dim))
    for name, ratio, dim in kinds:
        for size in (1, 128, 256):
            mixed = tuple(5001 + 13 * i for i in range(size))
            found.append(Case(f"{name}, decode B={size}", ratio, mixed, (), dim))
            found.append(Case(f"{name}, decode B={size}, all complete", ratio, (5120,) * size, (), dim))
    for name, ratio, dim in kinds:
        found.append(Case(f"{name}, verify 64x4", ratio, tuple(5004 + 2 * i for i in range(64)), (4,) * 64, dim))
        found.append(Case(f"{name}, prefill 64x100 p=1000", ratio, (1100,) * 64, (100,) * 64, dim))
    found.append(Case("c4 core, prefill 1x8192, bf16", 4, (8192,), (8192,), format="bf16"))
    for tokens in (256, 8192, 65_536):
        found.append(Case(f"window, {tokens} rows", 0, (tokens,), (tokens,)))
    return found


class Inputs:
    """What a case works on: shuffled pages, window slots equal to full slots, random rows and state."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.geom = case, CacheGeometry()
        size, columns = len(case.lengths), -(-max(case.lengths) // 256) * 256
        pages = columns // 256
        generator = torch.Generator().manual_seed(0)
        page = (torch.randperm(size * pages, generator=generator) + 1).view(size, pages, 1)
        table = torch.zeros((size + 1, columns), dtype=torch.int32)
        table[1:] = (page * 256 + torch.arange(256)).view(size, columns)
        full_to_swa = torch.arange((size * pages + 1) * 256 + 1)
        full_to_swa[-1] = -1
        self.tables = RequestTables(table.to(device), full_to_swa.to(device))
        lengths = torch.tensor(case.lengths)
        extends = torch.tensor(case.extends or (1,) * size)
        requests = torch.arange(1, size + 1)
        owner = torch.repeat_interleave(torch.arange(size), extends)
        j = torch.arange(len(owner)) - (extends.cumsum(0) - extends)[owner]
        self.positions = ((lengths - extends)[owner] + j).to(device)
        self.slots = self.tables.req_to_token[requests[owner].to(device), self.positions].long()
        self.plans: PrefillPlan | DecodePlans | None = None
        self.num_pages = size * pages + 1
        self.pool = EntryPool.empty(case.layout, self.num_pages, device)
        self.rope = rope_table(DSV4Config.v4_flash(), case.ratio, columns, device)
        torch.manual_seed(0)
        dim = case.head_dim
        self.norm_weight = torch.rand(dim, device=device) + 0.5
        if not case.ratio:
            self.kv = torch.randn((case.num_rows, dim), device=device).bfloat16()
            return
        if case.extends:
            self.plans = plan_prefill(lengths, extends, requests.to(device), self.tables, self.geom)
        else:
            self.plans = plan_decode(lengths.to(device), requests.to(device), self.tables, self.geom)
        ends = (self.positions + 1) % case.ratio == 0
        self.out_loc = torch.where(ends, self.slots // case.ratio, 0)
        width = state_width(case.ratio, dim)
        rows = state_rows(self.geom, case.ratio, num_window_pages=self.num_pages, num_requests=size + 1)
        self.kv = torch.randn((case.num_rows, width), device=device)
        self.state = torch.randn((rows, width), device=device)
        self.bias = torch.randn(bias_shape(case.ratio, dim), device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are read."""
        return self.kv.numel() * self.kv.element_size()

    def run(self, impl: str, pool: EntryPool | None = None, state: torch.Tensor | None = None) -> None:
        pool = self.pool if pool is None else pool
        if self.plans is None:
            store_window(
                self.kv,
                self.slots,
                self.positions,
                pool,
                norm_weight=self.norm_weight,
                rope=self.rope,
                eps=EPS,
                impl=impl,
            )
            return
        compress(
            self.kv,
            self.state if state is None else state,
            self.plans,
            self.case.ratio,
            pool,
            out_loc=self.out_loc,
            bias=self.bias,
            norm_weight=self.norm_weight,
            rope=self.rope,
            eps=EPS,
            impl=impl,
        )


def run(device: torch.device, impl: str, peer_dir: Path | None, progress: Callable[[str], None]) -> list[Row]:
    """Checks, then times every case; a row each.

    Raises:
        ValueError: the peer's folder is not usable.
        RuntimeError: entries or state differ from the reference, or from the peer's.
    """
    peer = Peer(peer_dir) if peer_dir else None
    rows = []
    for case in cases():
        progress(case.id)
        rows.append(run_case(case, device, impl, peer))
    if device.type == "cuda":
        for case, row in zip(cases(), rows, strict=True):
            progress(f"{case.id}: launches")
            inputs = Inputs(case, device)
            inputs.run(impl)
            row["launches"] = count_launches(lambda inputs=inputs: inputs.run(impl))  # type: ignore[misc]
    return rows


def run_case(case: Case, device: torch.device, impl: str, peer: Peer | None) -> Row:
    inputs = Inputs(case, device)
    check(inputs, impl)
    timing = measure(lambda: inputs.run(impl), device)
    row: Row = {
        "case": case.id,
        "rows": case.num_rows,
        "gpu us": timing.gpu_us,
        "p10": timing.gpu_p10_us,
        "p90": timing.gpu_p90_us,
        "host us": timing.host_us,
        "launches": None,
        "GB/s": None if timing.gpu_us is None else inputs.nbytes / timing.gpu_us / 1e3,
    }
    if peer is not None:
        row |= {"peer gpu us": None, "peer compress": None, "peer store": None, "ratio": None}
        if peer.serves(inputs):
            peer.check(inputs, impl)
            row["peer compress"], row["peer store"] = peer.microseconds(inputs)
            row["peer gpu us"] = row["peer compress"] + row["peer store"]
            row["ratio"] = row["peer gpu us"] / row["gpu us"]
    return row


def check(inputs: Inputs, impl: str) -> None:
    """Raises RuntimeError unless state and float32 entries are the reference's, and stored ones are these, rounded."""
    case, layout = inputs.case, inputs.case.layout
    exact = EntryLayout("fp32", case.head_dim, 64, layout.page_entries, layout.indexer)
    found = []
    for name, stored in ((impl, exact), ("torch", exact), (impl, layout)):
        pool = EntryPool.empty(stored, inputs.num_pages, inputs.pool.device)
        state = inputs.state.clone() if case.ratio else None
        inputs.run(name, pool, state)
        found.append((pool, state))
    (ours, our_state), (theirs, their_state), (rounded, _) = found
    if our_state is not None and not torch.equal(our_state, their_state):  # type: ignore[arg-type]
        raise RuntimeError(f"{case.id}: state differs from the reference")
    error = float((ours.data - theirs.data).norm() / theirs.data.norm().clamp(min=1e-30))
    if not error < 1e-5:
        raise RuntimeError(f"{case.id}: entries differ from the reference by {error:.1e} of their norm")
    slots = inputs.out_loc[inputs.out_loc > 0] if case.ratio else inputs.slots
    far = beyond_rounding(rounded, slots, theirs.data[slots])
    if far:
        raise RuntimeError(f"{case.id}: {far} values of {case.format} entries are not the float32 ones, rounded")
