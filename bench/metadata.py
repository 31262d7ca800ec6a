"""`dsv4 bench metadata`: what the metadata of a step costs, beside the released engine's kernels for the same step."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from dsv4_backend.batch import ForwardMode, RawBatch
from dsv4_backend.config import DSV4Config
from dsv4_backend.geometry import RATIOS, CacheGeometry
from dsv4_backend.metadata import AttnMetadata
from dsv4_backend.metadata_builder import MetadataBuilder
from dsv4_backend.tables import RequestTables
from dsv4_bench.report import Row
from dsv4_bench.timing import count_launches, measure

LIVE = 5000
"""Tokens of each request, most of the time."""

_POOL_PAGES = 60_000


@dataclass(frozen=True)
class Case:
    """A step. `capacity`: columns of the request table. `width`: rows a request, or `extends`: of each."""

    id: str
    mode: ForwardMode
    batch_size: int
    capacity: int
    live: int = LIVE
    width: int = 1
    num_steps: int = 0
    extends: tuple[int, ...] = ()
    ratios: tuple[int, ...] = RATIOS

    @property
    def geometry(self) -> CacheGeometry:
        return CacheGeometry.for_drafts(self.width if self.width > 1 else 0)


_K = 1024


def _decode(batch_size: int, capacity: int, live: int = LIVE) -> Case:
    name = f"decode B={batch_size} capacity={capacity // _K}K live={live}"
    return Case(name, ForwardMode.DECODE, batch_size, capacity, live)


def _verify(batch_size: int, capacity: int, extends: tuple[int, ...] = ()) -> Case:
    name = f"{'ragged ' if extends else ''}verify B={batch_size} D=4 capacity={capacity // _K}K"
    return Case(name, ForwardMode.TARGET_VERIFY, batch_size, capacity, width=4, extends=extends)


def _drafts(batch_size: int, num_steps: int, ratios: tuple[int, ...] = ()) -> Case:
    name = f"draft steps B={batch_size} S={num_steps}{' with ratios' if ratios else ''}"
    return Case(name, ForwardMode.DRAFT_DECODE, batch_size, 64 * _K, num_steps=num_steps, ratios=ratios)


def cases() -> list[Case]:
    """The design's rows, then others: lives as long as the capacity, ragged, prefill, drafts with compression."""
    small, large = 64 * _K, 1024 * _K
    return [
        *(_decode(b, small) for b in (1, 32, 128, 256)),
        *(_decode(b, large) for b in (1, 128, 256)),
        _decode(1, large, large),
        _decode(64, small, small),
        *(_verify(b, small) for b in (1, 32, 128)),
        _verify(32, large),
        _verify(96, small, (4,) * 72 + (3,) * 24),
        *(_drafts(64, s) for s in (3, 5)),
        _drafts(64, 5, RATIOS),
        Case("draft extend B=64 D=4", ForwardMode.DRAFT_EXTEND, 64, small, width=4, ratios=()),
        Case("extend 1 x 8192", ForwardMode.EXTEND, 1, small, live=8192, extends=(8192,)),
        Case("extend 1 x 8192 capacity=1024K", ForwardMode.EXTEND, 1, large, live=8192, extends=(8192,)),
        Case("extend 4 x 2000 + 60 x 1", ForwardMode.EXTEND, 64, small, extends=(2000,) * 4 + (1,) * 60),
    ]


def _tables(case: Case, device: torch.device) -> RequestTables:
    """Shuffled pages of a pool of 60,000, window slots equal to full slots; as the peer's script has them."""
    rows, pages = case.batch_size + 1, case.capacity // 256
    generator = torch.Generator().manual_seed(0)
    page = (torch.randperm(rows * pages, generator=generator) % _POOL_PAGES + 1).to(device, torch.int32)
    slots = page.view(rows, pages, 1) * 256 + torch.arange(256, device=device, dtype=torch.int32)
    slots[0] = 0
    full_to_swa = torch.arange((_POOL_PAGES + 2) * 256 + 1, device=device, dtype=torch.int64)
    full_to_swa[-1] = -1
    return RequestTables(slots.view(rows, case.capacity), full_to_swa)


def _batch(case: Case, device: torch.device) -> RawBatch:
    size = case.batch_size
    rows = sum(case.extends) or size * (case.num_steps or case.width)
    before = case.mode is ForwardMode.TARGET_VERIFY
    draft_room = case.num_steps if case.mode is ForwardMode.DRAFT_DECODE else 0
    return RawBatch(
        case.mode,
        torch.arange(1, size + 1, device=device),
        torch.full((size,), case.live - before * case.width - draft_room, device=device),
        torch.arange(256, 256 + rows, device=device),
        extend_lens=torch.tensor(case.extends, device=device) if case.extends else None,
        num_draft_tokens=case.width if case.mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND) else 0,
        num_steps=case.num_steps,
    )


def _build_function(
    case: Case, tables: RequestTables, impl: str
) -> tuple[MetadataBuilder, Callable[[], list[AttnMetadata]]]:
    builder = MetadataBuilder(
        DSV4Config.v4_flash(),
        case.geometry,
        tables,
        max_rows=max(1, sum(case.extends), case.batch_size * case.width),
        max_seq_len=case.capacity,
        ratios=case.ratios,
        impl=impl,
    )
    batch = _batch(case, tables.device)
    if case.mode is ForwardMode.DRAFT_DECODE:
        return builder, lambda: builder.build_draft_steps(batch)
    rows = batch.num_rows
    return builder, lambda: [builder.build(batch, padded_rows=rows)]


def run(device: torch.device, impl: str, peer_dir: Path | None, progress: Callable[[str], None]) -> list[Row]:
    """Checks, then times every case; a row each.

    Raises:
        ValueError: the peer's folder is not usable.
        RuntimeError: the metadata differs from the reference.
    """
    peer = Peer(peer_dir) if peer_dir else None
    rows = []
    for case in cases():
        progress(case.id)
        rows.append(_run_case(case, device, impl, peer))
    if device.type == "cuda":
        for case, row in zip(cases(), rows, strict=True):
            progress(f"{case.id}: launches")
            build = _build_function(case, _tables(case, device), impl)[1]
            build()  # allocates its buffers
            row["launches"] = count_launches(build)
    return rows


def _run_case(case: Case, device: torch.device, impl: str, peer: Peer | None) -> Row:
    tables = _tables(case, device)
    builder, build = _build_function(case, tables, impl)
    reference_builder, reference = _build_function(case, tables, "torch")
    for step, (ours, theirs) in enumerate(zip(build(), reference(), strict=True)):
        found = ours.difference(theirs)
        if found:
            raise RuntimeError(f"{case.id}: step {step} differs from the reference: {found}")
    for each in (builder, reference_builder):
        each.check()
    timing = measure(build, device)
    row: Row = {
        "case": case.id,
        "rows": sum(meta.num_rows for meta in build()),
        "gpu us": timing.gpu_us,
        "p10": timing.gpu_p10_us,
        "p90": timing.gpu_p90_us,
        "host us": timing.host_us,
        "launches": None,
        "KiB": builder.nbytes / 1024,
    }
    if peer is not None:
        del tables, reference_builder, reference
        row |= {"peer gpu us": peer.microseconds(case), "ratio": None}
        if row["peer gpu us"] is not None:
            row["ratio"] = row["peer gpu us"] / row["gpu us"]
    return row


class Peer:
    """The released engine's metadata kernels of a step, through the peer's script (`metadata_peer.py`)."""

    def __init__(self, directory: Path) -> None:
        if not (directory / "metadata_peer.py").is_file():
            raise ValueError(f"--peer: expected a folder with metadata_peer.py, got {directory}")
        sys.path.insert(0, str(directory))
        self._script: ModuleType = importlib.import_module("metadata_peer")

    def microseconds(self, case: Case) -> float | None:
        """GPU time of the same step; None for what the script does not run."""
        if case.mode is ForwardMode.DECODE:
            return self._script.decode(case.batch_size, case.capacity, case.live)
        if case.mode is ForwardMode.TARGET_VERIFY and not case.extends:
            return self._script.verify(case.batch_size, case.width, case.capacity, case.live - case.width)
        return None
