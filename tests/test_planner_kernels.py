"""What only the Triton planner has: compilation, launches, graphs, its decision, and sizes that need a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from backends import INTERPRET, poisoned_prefill
from dsv4_backend import CacheGeometry, PrefillPlan, RequestTables, plan_decode, plan_prefill, plans
from dsv4_backend.reference import planner as reference
from layout import ROOT

pytest.importorskip("triton")
from dsv4_triton_kernels import planner as kernels
from dsv4_triton_kernels import planner_rows

GEOM = CacheGeometry.for_drafts(4)
WIDE_WORDS = {"c4": 5, "c4 write": 2, "c128": 5, "c128 write": 2}
where_it_runs = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.interpreter)]
    if INTERPRET
    else [pytest.param("cuda", marks=pytest.mark.gpu)],
)


def make_tables(num_requests: int, width: int, device: str) -> RequestTables:
    """Requests own consecutive pages, in reverse, and every full slot has another window slot."""
    pages = -(-width // 256)
    slots = torch.arange(1, num_requests * pages + 1).flip(0).view(num_requests, pages)
    rows = (slots[:, :, None] * 256 + torch.arange(256)).view(num_requests, pages * 256)[:, :width]
    size = (num_requests * pages + 1) * 256
    full_to_swa = torch.arange(size + 1).roll(256)
    full_to_swa[-1] = -1
    return RequestTables(rows.int().to(device), full_to_swa.to(device))


def lengths(extends: list[int], prefixes: list[int], device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    extend = torch.tensor(extends)
    seq = extend + torch.tensor(prefixes)
    return seq.to(device), extend.to(device), torch.arange(len(extends)).flip(0).to(device)


def run(
    module: object, batch: tuple[torch.Tensor, ...], tables: RequestTables, num_rows: int, **more: object
) -> PrefillPlan:
    out = poisoned_prefill(num_rows, (4, 128), str(tables.device))
    seq, extend, req = batch
    module.plan_prefill(  # type: ignore[attr-defined]
        seq_lens=seq,
        extend_lens=extend,
        req_pool_indices=req,
        tables=tables,
        geom=GEOM,
        num_rows=num_rows,
        out=out,
        **more,
    )
    return out


def assert_equal(ours: PrefillPlan, theirs: PrefillPlan) -> None:
    for (name, a), (_, b) in zip(ours.tensors(), theirs.tensors(), strict=True):
        assert torch.equal(a, b), f"{name} differs first at {(a != b).nonzero()[0].tolist()}"


def test_constants_are_those_of_the_contract() -> None:
    assert planner_rows.ERROR_LENGTHS.value == plans.ERROR_LENGTHS
    assert planner_rows.ERROR_SLOT.value == plans.ERROR_SLOT
    assert kernels.PACKED_MAX_ROWS == plans.PACKED_MAX_ROWS


def test_every_kernel_compiles_for_every_chip() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = ROOT / "tests" / "compile_kernels.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["sm_90", "sm_100", "sm_103", "sm_120"]


@where_it_runs
@pytest.mark.parametrize("extends", [[4, 4, 3, 4], [0, 5, 5], [1, 40, 2, 2, 90]], ids=str)
def test_a_wrong_decision_is_seen(device: str, extends: list[int]) -> None:
    tables = make_tables(len(extends), 512, device)
    batch = lengths(extends, [100 + i for i in range(len(extends))], device)
    expected = run(reference, batch, tables, 512)
    assert_equal(run(kernels, batch, tables, 512), expected)
    assert_equal(run(kernels, batch, tables, 512, force_uniform=False), expected)
    wrong = run(kernels, batch, tables, 512, force_uniform=True)
    assert any(not torch.equal(a, b) for (_, a), (_, b) in zip(wrong.tensors(), expected.tensors(), strict=True))


@where_it_runs
def test_rows_past_the_table_are_not_looked_up(device: str) -> None:
    """A wrong decision puts rows behind the last column, as lengths would that change while the kernel reads them."""
    wide = make_tables(2, 768, device)
    tables = RequestTables(wide.req_to_token[:, :512], wide.full_to_swa)
    wide.req_to_token[:, 512:] = 2**31 - 1  # looked up, this would be flagged as a slot outside
    batch = lengths([8, 1], [100, 511], device)
    plan = run(kernels, batch, tables, 32, force_uniform=True)
    assert plan.header[2].item() == 16
    assert plan.error.item() == plans.ERROR_LENGTHS


@where_it_runs
def test_a_uniform_batch_may_be_planned_as_ragged(device: str) -> None:
    tables = make_tables(5, 512, device)
    batch = lengths([7] * 5, [0, 1, 127, 250, 300], device)
    assert_equal(run(kernels, batch, tables, 64, force_uniform=False), run(reference, batch, tables, 64))


@where_it_runs
@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_chunks_of_a_large_batch(
    device: str, uniform: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks and blocks small enough for a test: several of each a program, and every border between them."""
    monkeypatch.setattr(kernels, "PREFILL_TIERS", ())
    monkeypatch.setattr(kernels, "CHUNKED_TIERS", ((2**31, {"CHUNK": 32, "SEARCH": 32, "BLOCK": 64, "num_warps": 1}),))
    monkeypatch.setattr(kernels, "CHUNKED_PROGRAMS", 3)
    generator = torch.Generator().manual_seed(3)
    for batch_size in (1, 31, 32, 33, 96, 129):
        tables = make_tables(batch_size, 1024, device)
        extend = (
            torch.full((batch_size,), 3) if uniform else torch.randint(0, 5, (batch_size,), generator=generator) ** 2
        )
        prefix = torch.randint(0, 900, (batch_size,), generator=generator)
        batch = tuple(t.to(dtype) for t in lengths(extend.tolist(), prefix.tolist(), device))
        num_rows = int(extend.sum()) + 5
        assert_equal(run(kernels, batch, tables, num_rows), run(reference, batch, tables, num_rows))


@where_it_runs
@pytest.mark.parametrize("where", [0, 40, 69])
@pytest.mark.parametrize(("seq", "extend"), [(-1, 4), (10, 11), (2**33, 4), (2**31, 1), (4, -(2**32)), (2000, 1)])
def test_bad_lengths_in_chunks(device: str, where: int, seq: int, extend: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PREFILL_TIERS", ())
    monkeypatch.setattr(kernels, "CHUNKED_TIERS", ((2**31, {"CHUNK": 32, "SEARCH": 32, "BLOCK": 64, "num_warps": 1}),))
    tables = make_tables(70, 1024, device)
    batch = lengths([3] * 70, [10 * i for i in range(70)], device)
    batch[0][where], batch[1][where] = seq, extend
    ours, theirs = run(kernels, batch, tables, 256), run(reference, batch, tables, 256)
    assert_equal(ours, theirs)
    assert ours.error.item() == theirs.error.item() == plans.ERROR_LENGTHS


@where_it_runs
@pytest.mark.parametrize("chunked", [False, True])
def test_wide_rows(device: str, chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of more than 65,536 rows, made to serve a few: the same fields as the packed one, each in a word."""
    monkeypatch.setattr(kernels, "PACKED_MAX_ROWS", 0)
    if chunked:
        monkeypatch.setattr(kernels, "PREFILL_TIERS", ())
        monkeypatch.setattr(
            kernels, "CHUNKED_TIERS", ((2**31, {"CHUNK": 32, "SEARCH": 32, "BLOCK": 64, "num_warps": 1}),)
        )
    tables = make_tables(4, 1024, device)
    batch = lengths([5, 0, 133, 7], [3, 9, 600, 250], device)
    packed = run(reference, batch, tables, 160)
    words = {name: torch.full((160, size), 0xAB, dtype=torch.int32, device=device) for name, size in WIDE_WORDS.items()}
    wide = SimpleNamespace(
        device=packed.device,
        header=torch.empty_like(packed.header),
        error=packed.error,
        c4=SimpleNamespace(compress_words=words["c4"], write_words=words["c4 write"]),
        c128=SimpleNamespace(compress_words=words["c128"], write_words=words["c128 write"]),
    )
    seq, extend, req = batch
    kernels.plan_prefill(
        seq_lens=seq, extend_lens=extend, req_pool_indices=req, tables=tables, geom=GEOM, num_rows=160, out=wide
    )
    assert torch.equal(wide.header, packed.header)
    for lists, got in ((packed.c4, wide.c4), (packed.c128, wide.c128)):
        ids = lists.compress_words[:, 1]
        expected = torch.stack((ids & 0xFFFF, ids >> 16), dim=1)
        assert torch.equal(got.compress_words[:, 1:3], expected)
        assert torch.equal(got.compress_words[:, [0, 3, 4]], lists.compress_words[:, [0, 2, 3]])
        assert torch.equal(got.write_words, lists.write_words)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("extends", "prefixes"),
    [
        ([4] * 72 + [3] * 24, [1000 + i for i in range(96)]),
        ([3] * 104 + [2] * 24, [1000 + i for i in range(128)]),
        ([4] * 96, [1000 + i for i in range(96)]),
    ],
    ids=["72x4+24x3", "104x3+24x2", "96x4"],
)
def test_b01_ten_thousand_plans_are_one(extends: list[int], prefixes: list[int]) -> None:
    """Three shapes: 30,000 calls, each compared on the device."""
    tables = make_tables(len(extends), 1280, "cuda")
    batch = lengths(extends, prefixes, "cuda")
    first = run(kernels, batch, tables, 4096)
    assert_equal(first, run(reference, batch, tables, 4096))
    out = poisoned_prefill(4096, (4, 128), "cuda")
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10_000):
        plan_prefill(*batch, tables, GEOM, num_rows=4096, out=out)
        for (_, a), (_, b) in zip(out.tensors(), first.tensors(), strict=True):
            differences += (a != b).any()
    assert differences.item() == 0


@pytest.mark.gpu
def test_a_graph_replays_what_an_eager_call_plans() -> None:
    tables = make_tables(40, 1024, "cuda")
    seq, extend, req = lengths([4] * 40, list(range(40)), "cuda")
    out = PrefillPlan.empty(512, device="cuda")
    decode_out = plans.DecodePlans.empty(40, device="cuda")
    plan_prefill(seq, extend, req, tables, GEOM, num_rows=512, out=out)
    plan_decode(seq, req, tables, GEOM, out=decode_out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan_prefill(seq, extend, req, tables, GEOM, num_rows=512, out=out)
        plan_decode(seq, req, tables, GEOM, out=decode_out)
    generator = torch.Generator().manual_seed(0)
    for uniform in (False, True, False):
        new = torch.full((40,), 7) if uniform else torch.randint(0, 13, (40,), generator=generator)
        extend.copy_(new)
        seq.copy_(new + torch.randint(1, 900, (40,), generator=generator))
        req.copy_(torch.randperm(40, generator=generator))
        tables.full_to_swa.copy_(tables.full_to_swa.roll(256))
        for tensor in (*out.tensors(), *decode_out.tensors()):
            tensor[1].fill_(0xAB if tensor[1].dtype == torch.uint8 else -1)
        graph.replay()
        assert_equal(out, plan_prefill(seq, extend, req, tables, GEOM, num_rows=512))
        expected = plan_decode(seq, req, tables, GEOM, impl="torch")
        for (name, a), (_, b) in zip(decode_out.tensors(), expected.tensors(), strict=True):
            assert torch.equal(a, b), name
    out.check()


@pytest.mark.gpu
def test_one_launch_no_sync_no_allocation() -> None:
    tables = make_tables(64, 1024, "cuda")
    batch = lengths([4, 3] * 32, list(range(64)), "cuda")
    out, decode_out = PrefillPlan.empty(256, device="cuda"), plans.DecodePlans.empty(64, device="cuda")

    def both() -> None:
        plan_prefill(*batch, tables, GEOM, num_rows=256, out=out)
        plan_decode(batch[0], batch[2], tables, GEOM, out=decode_out)

    both()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert names == ["_plan_prefill_kernel", "_plan_decode_kernel"]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2**30, 2**31 + 64], ids=["offset beyond 2^31", "row stride beyond 2^31"])
def test_tables_beyond_two_to_the_31_elements(width: int) -> None:
    if torch.cuda.mem_get_info()[0] < 16 * width:
        pytest.skip(f"needs {16 * width >> 30} GiB of GPU memory")
    memory = torch.zeros(3 * width + 1024, dtype=torch.int32, device="cuda")
    req_to_token = memory.as_strided((4, 1024), (width, 1))
    small = make_tables(4, 1024, "cuda")
    req_to_token.copy_(small.req_to_token)
    tables = RequestTables(req_to_token, small.full_to_swa)
    batch = lengths([9, 4, 130, 1], [1000 - 130, 3, 640, 255], "cuda")
    assert_equal(run(kernels, batch, tables, 160), run(reference, batch, small, 160))
    ours = plan_decode(batch[0], batch[2], tables, GEOM)
    theirs = plan_decode(batch[0], batch[2], small, GEOM, impl="torch")
    assert torch.equal(ours.c4.rows, theirs.c4.rows)


SANITIZED = """
import torch, dsv4_backend as d4
geom = d4.CacheGeometry.for_drafts(4)
rows = torch.arange(64 * 1024, dtype=torch.int32, device="cuda").view(64, 1024)
tables = d4.RequestTables(rows, torch.arange(64 * 1024, device="cuda"))
for extends in ([4] * 64, [0, 1, 5, 130] * 16, [3] * 64):
    extend = torch.tensor(extends, device="cuda")
    seq = extend + torch.arange(64, device="cuda") * 13
    req = torch.arange(64, device="cuda")
    seq[5], req[7] = -7, 64
    for batch in (1, 33, 64):
        d4.plan_prefill(seq[:batch], extend[:batch], req[:batch], tables, geom, num_rows=2304)
        d4.plan_decode(seq[:batch], req[:batch], tables, geom)
many = torch.ones(3000, dtype=torch.int64, device="cuda")
d4.plan_prefill(many * 9, many, many, tables, geom, num_rows=3001)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_is_clean(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer on this machine")
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", SANITIZED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
