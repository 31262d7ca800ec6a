"""`dsv4 bench planner`: what planning both ratios of a batch costs, beside the released CUDA planner."""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.planner import plan_decode, plan_prefill
from dsv4_backend.plans import COMPRESS_FIELDS, INVALID, PACKED_COMPRESS, WRITE, DecodePlans, PrefillPlan
from dsv4_backend.tables import RequestTables
from dsv4_bench.report import Row
from dsv4_bench.timing import count_launches, graph_us, host_us, measure

# What the released planner is timed with, so that both plan the same batch.
GEOMETRY = CacheGeometry(swa_page_size=128, c4_ring=16, c128_ring=128)
PEER_MAX_BATCH, PEER_MAX_ROWS = 1024, 65_536


@dataclass(frozen=True)
class Case:
    """A batch: rows a request adds, tokens it had before, room for rows (0: just enough). `decode`: one row each."""

    id: str
    extends: tuple[int, ...]
    prefixes: tuple[int, ...]
    bucket: int = 0
    decode: bool = False

    @property
    def num_rows(self) -> int:
        return self.bucket or sum(self.extends)


def _case(
    name: str, extends: Sequence[int], prefixes: Sequence[int] | int = 0, bucket: int = 0, decode: bool = False
) -> Case:
    if isinstance(prefixes, int):
        prefixes = [prefixes] * len(extends)
    return Case(name, tuple(extends), tuple(prefixes), bucket, decode)


def _verify(batch_size: int, width: int = 4) -> Case:
    prefixes = (
        [4096 + 13 * i for i in range(batch_size)] if batch_size <= 1024 else [i % 1000 for i in range(batch_size)]
    )
    return _case(f"verify B={batch_size} E={width}", [width] * batch_size, prefixes)


def _stepped(count: int) -> list[int]:
    return [1000 + 7 * i for i in range(count)]


def cases() -> list[Case]:
    """The shapes of the design's table, then shapes chosen to be hard: for us, or easy for the released planner."""
    return [
        *(_verify(b) for b in (1, 8, 32, 96, 256, 1024)),
        _case("ragged 72x4+24x3", [4] * 72 + [3] * 24, _stepped(96)),
        _case("ragged 104x3+24x2", [3] * 104 + [2] * 24, _stepped(128)),
        _case("prefill 1x8192", [8192]),
        _case("prefill 4x4096 p=1000", [4096] * 4, 1000),
        _case("prefill 64x512", [512] * 64, [37 * i for i in range(64)]),
        _case("prefill 512 ragged ~64", [1 + (i * 7919) % 127 for i in range(512)], [11 * i for i in range(512)]),
        _case("prefill 1x65535", [65_535]),
        _case("one token", [1], 4096),
        _case("one token, completes 128", [1], 127),
        _case("verify B=1 E=1024", [1024], 3),
        _verify(2, 2),
        _verify(16, 8),
        _verify(64, 32),
        _verify(64, 33),
        _verify(128, 1),
        _verify(129, 4),
        _verify(512, 10),
        _verify(1024, 1),
        _verify(1024, 64),
        _case("one long, 127 single", [4096] + [1] * 127, _stepped(128)),
        _case("127 single, one long", [1] * 127 + [4096], _stepped(128)),
        _case("one long, 1023 single", [60_000] + [1] * 1023, 5),
        _case("half of 1024 empty", [0, 4] * 512, 777),
        _case("1023 empty, one row", [0] * 1023 + [1], 128),
        _case("ragged 1024 x 1..3", [1 + i % 3 for i in range(1024)], _stepped(1024)),
        _case("ragged 1024 ~64", [1 + (i * 7919) % 126 for i in range(1024)], [11 * i for i in range(1024)]),
        _case("2x32768", [32_768] * 2, [0, 129]),
        _case("mixed 3x4096 + 1", [1, 4096, 4096, 4096], [777, 0, 0, 0]),
        _case("33 x 1000, 128-aligned prefix", [1000] * 33, 128 * 7),
        _case("8 x 6 in a bucket of 2048", [6] * 8, bucket=2048),
        _case("3 x 33 in a bucket of 4096", [33] * 3, 100, bucket=4096),
        _case("ragged 8192 x 1..4 in a bucket of 2^20", [1 + i % 4 for i in range(8192)], 1000, bucket=2**20),
        _verify(2048),
        _verify(8192),
        _verify(32_768),
        _case("ragged 32768 x 1..4", [1 + i % 4 for i in range(32_768)], 1000),
        _case("prefill 1x262144", [262_144]),
        *(_case(f"decode B={b}", [1] * b, [4096 + 13 * i for i in range(b)], decode=True) for b in (1, 64, 256, 1024)),
    ]


@dataclass(frozen=True)
class Inputs:
    """Device tensors of a case: int64 lengths and ids, shuffled request rows, window slots equal to full slots."""

    seq_lens: torch.Tensor
    extend_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    tables: RequestTables

    @classmethod
    def build(cls, case: Case, device: torch.device) -> Inputs:
        extends = torch.tensor(case.extends, dtype=torch.int64)
        seq_lens = extends + torch.tensor(case.prefixes, dtype=torch.int64)
        batch_size, width = len(case.extends), int(seq_lens.max()) + 8
        generator = torch.Generator().manual_seed(0)
        ids = torch.randperm(batch_size, generator=generator) + 1
        slots = torch.arange((batch_size + 1) * width, dtype=torch.int32, device=device) + 256
        tables = RequestTables(
            slots.view(batch_size + 1, width), torch.arange(slots.numel() + 256, dtype=torch.int64, device=device)
        )
        return cls(seq_lens.to(device), extends.to(device), ids.to(device), tables)


def run(device: torch.device, impl: str, peer_dir: Path | None, progress: Callable[[str], None]) -> list[Row]:
    """Checks, then times every case; a row each.

    Raises:
        ValueError: the peer's folder is not usable.
        RuntimeError: a plan differs from the reference, or from the peer's.
    """
    peer = Peer(peer_dir) if peer_dir else None
    rows = []
    for case in cases():
        progress(case.id)
        rows.append(_run_case(case, Inputs.build(case, device), device, impl, peer))
    if device.type == "cuda":
        for case, row in zip(cases(), rows, strict=True):
            progress(f"{case.id}: launches")
            row["launches"] = count_launches(_plan_function(case, Inputs.build(case, device), impl))
    return rows


def _run_case(case: Case, inputs: Inputs, device: torch.device, impl: str, peer: Peer | None) -> Row:
    plan = _plan_function(case, inputs, impl)
    _expect_equal(case, plan(), _plan_function(case, inputs, "torch")(), "the reference")
    row: Row = {"case": case.id, "rows": case.num_rows}
    timing = measure(plan, device)
    row |= {
        "gpu us": timing.gpu_us,
        "p10": timing.gpu_p10_us,
        "p90": timing.gpu_p90_us,
        "host us": timing.host_us,
        "launches": None,
    }
    if peer is not None:
        row |= {"peer gpu us": None, "peer host us": None, "ratio": None}
        if peer.serves(case):
            peer.check(case, inputs, plan())
            both = peer.function(inputs, case.num_rows)
            row["peer gpu us"] = statistics.median(graph_us(both))
            row["peer host us"] = host_us(both, device)
            row["ratio"] = row["peer gpu us"] / row["gpu us"]
    return row


def _plan_function(case: Case, inputs: Inputs, impl: str) -> Callable[[], PrefillPlan | DecodePlans]:
    device = inputs.tables.device
    if case.decode:
        decode_out = DecodePlans.empty(case.num_rows, device=device)
        return lambda: plan_decode(
            inputs.seq_lens, inputs.req_pool_indices, inputs.tables, GEOMETRY, impl=impl, out=decode_out
        )
    out = PrefillPlan.empty(case.num_rows, device=device)
    return lambda: plan_prefill(
        inputs.seq_lens,
        inputs.extend_lens,
        inputs.req_pool_indices,
        inputs.tables,
        GEOMETRY,
        num_rows=case.num_rows,
        impl=impl,
        out=out,
    )


def _expect_equal(case: Case, ours: PrefillPlan | DecodePlans, theirs: PrefillPlan | DecodePlans, whose: str) -> None:
    ours.check()
    for (name, a), (_, b) in zip(ours.tensors(), theirs.tensors(), strict=True):
        if not torch.equal(a, b):
            at = (a != b).nonzero()[0].tolist()
            raise RuntimeError(f"{case.id}: {name} differs from {whose}, first at {at}")


class Peer:
    """The released CUDA planner, through its script folder (`planner_peer.py` and what it builds)."""

    def __init__(self, directory: Path) -> None:
        if not (directory / "planner_peer.py").is_file():
            raise ValueError(f"--peer: expected a folder with planner_peer.py, got {directory}")
        sys.path.insert(0, str(directory))
        self._script: ModuleType = importlib.import_module("planner_peer")
        self._module = self._script.load("s23", str(directory.resolve() / "s23"))

    def serves(self, case: Case) -> bool:
        """Whether the case lies within the limits of its prefill planner, which needs a row a request."""
        size = len(case.extends)
        return not case.decode and size <= PEER_MAX_BATCH and size <= case.num_rows <= PEER_MAX_ROWS

    def function(self, inputs: Inputs, num_rows: int) -> Callable[[], list[tuple[torch.Tensor, torch.Tensor]]]:
        """A call that plans both ratios, one after the other."""
        x = {
            "rid": inputs.req_pool_indices,
            "r2t": inputs.tables.req_to_token,
            "f2s": inputs.tables.full_to_swa,
            "seq": inputs.seq_lens,
            "ext": inputs.extend_lens,
            "n": num_rows,
        }
        page = GEOMETRY.swa_page_size
        return lambda: [
            self._script.call(self._module, "s23", x, ratio, page, GEOMETRY.ring(ratio)) for ratio in (4, 128)
        ]

    def check(self, case: Case, inputs: Inputs, ours: PrefillPlan | DecodePlans) -> None:
        """Its rows come in no fixed order, and pages of rows that read no state are not meaningful."""
        assert isinstance(ours, PrefillPlan)
        for ratio, (compress, write) in zip((4, 128), self.function(inputs, case.num_rows)(), strict=True):
            lists = ours.ratio(ratio)
            assert lists is not None
            theirs = _sorted_rows(compress, PACKED_COMPRESS, "seq_len")
            mine = lists.compress_records()
            same = len(theirs) == len(mine)
            if same:
                reads = mine["buffer_len"] > 0
                for field in COMPRESS_FIELDS:
                    where = reads if field.startswith("read_page") else np.ones_like(reads)
                    same &= bool((theirs[field] == mine[field])[where].all())
            theirs = _sorted_rows(write, WRITE, "ragged_id")
            if not same or not np.array_equal(theirs, lists.write_records()):
                raise RuntimeError(f"{case.id}: ratio {ratio} differs from the released planner")


def _sorted_rows(rows: torch.Tensor, dtype: np.dtype, key: str) -> np.ndarray:
    records = rows.cpu().contiguous().numpy().view(dtype).reshape(-1)
    records = records[records[key] != INVALID]
    return records[np.argsort(records["ragged_id"])]
