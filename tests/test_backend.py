"""The backend that an engine calls: steps of all kinds, padded buckets, addresses, refusals."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from backend_harness import Lane, World, close, each_executor, same_bits
from dsv4_backend import CacheGeometry, DSV4AttnBackend, ForwardMode, RawBatch, RequestTables
from dsv4_backend.layer import DSV4Attention
from dsv4_graph_runner import StepProvider, addresses
from layout import ROOT
from test_readme import blocks

DECODE, EXTEND, VERIFY = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY


@pytest.fixture
def restored_sync_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def padding(mode: ForwardMode, size: int, width: int, device: torch.device) -> RawBatch:
    def full(count: int, value: int) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.int64, device=device)

    drafts = 0 if mode is DECODE else width
    return RawBatch(mode, full(size, 0), full(size, 1), full(size * width, 0), num_draft_tokens=drafts)


@each_executor
@pytest.mark.parametrize("kv", ["fp32", "bf16"])
def test_steps_of_all_kinds_agree(impl: str, device: str, executor: str, kv: str) -> None:
    """Prompts in chunks, decode and verification in buckets, rejected drafts: as if each request had run at once."""
    world = World(impl, device, kv=kv)
    decode, verify = world.runner(executor), world.runner(executor, VERIFY, 3, sizes=(1, 2))
    a, b, c = (world.open() for _ in range(3))
    found: dict[Lane, list[torch.Tensor]] = {a: [], b: [], c: []}

    def keep(out: torch.Tensor, sizes: dict[Lane, int], accepts: dict[Lane, int]) -> None:
        for lane, rows in zip(sizes, out.split(list(sizes.values())), strict=True):
            found[lane].append(rows[: accepts[lane]].clone())

    def extend(sizes: dict[Lane, int]) -> None:
        keep(world.extend(sizes), sizes, sizes)

    def run(mode: ForwardMode, sizes: dict[Lane, int], accepts: dict[Lane, int]) -> None:
        out = (decode if mode is DECODE else verify).replay(*world.batch(mode, sizes, accepts))
        assert (out.fallback_reason is None) == (len(set(sizes.values())) == 1)
        assert out.tensors[1].tolist() == [lane.length + j for lane, size in sizes.items() for j in range(size)]
        keep(out.tensors[0], sizes, accepts)
        world.commit(accepts)

    extend({a: 125})
    extend({b: 120, a: 2})
    for lanes in ([a], [b, a], [b, a], [b], [a, b], [a]):
        run(DECODE, dict.fromkeys(lanes, 1), dict.fromkeys(lanes, 1))
    run(VERIFY, {a: 3, b: 3}, {a: 1, b: 3})
    extend({c: 9, a: 1})
    run(VERIFY, {c: 3}, {c: 2})
    run(VERIFY, {a: 2, c: 3}, {a: 2, c: 1})  # ragged, which no bucket serves
    run(DECODE, {a: 1, b: 1, c: 1}, {a: 1, b: 1, c: 1})
    world.backend.check()
    if kv == "fp32":
        assert all(close(torch.cat(parts), world.whole(lane)) for lane, parts in found.items())
    else:
        assert all(torch.cat(parts).isfinite().all() for parts in found.values())


@each_executor
@pytest.mark.parametrize("kv", ["fp32", "bf16", "fp8"])
def test_a_bucket_is_the_eager_step_of_its_size(impl: str, device: str, executor: str, kv: str) -> None:
    """Sizes that shrink and grow: live rows and the cache, bit by bit; padding is other tokens in the eager step."""
    world, twin = (World(impl, device, kv=kv) for _ in range(2))
    runner = world.runner(executor)
    lanes, twins = ([each.open() for _ in range(4)] for each in (world, twin))
    for each, mine in ((world, lanes), (twin, twins)):
        each.extend({lane: 121 + i for i, lane in enumerate(mine)})
    for size in (4, 1, 3, 2, 4, 3, 1, 2):
        out = runner.replay(*world.batch(DECODE, dict.fromkeys(lanes[:size], 1)))
        batch, ids = twin.batch(DECODE, dict.fromkeys(twins[:size], 1))
        expected = twin.eager(batch, ids, padded_rows=runner.buckets.bucket_for(size))[:size]
        assert out.fallback_reason is None
        assert out.tensors[0].shape == expected.shape
        if executor == "eager":  # under capture cuBLAS may choose another product
            assert torch.equal(out.tensors[0], expected)
            assert same_bits(world.snapshot(), twin.snapshot())
        elif kv == "fp32":
            assert close(out.tensors[0], expected)
        world.commit(dict.fromkeys(lanes[:size], 1))
        twin.commit(dict.fromkeys(twins[:size], 1))
    world.backend.check()


@each_executor
@pytest.mark.parametrize(("mode", "width"), [(DECODE, 1), (VERIFY, 3)], ids=["decode", "verify"])
def test_live_rows_do_not_depend_on_padding(
    impl: str, device: str, executor: str, mode: ForwardMode, width: int
) -> None:
    """In one bucket, bit by bit: alone with padding behind them, or with live requests, or between padding."""
    world = World(impl, device)
    runner = world.runner(executor, mode, width, sizes=(4,))
    lanes = [world.open() for _ in range(4)]
    world.extend({lane: 124 + i for i, lane in enumerate(lanes)})
    full, ids = world.batch(mode, dict.fromkeys(lanes, width))
    expected = runner.replay(full, ids).tensors[0].clone()
    cache = world.snapshot()
    for size in (3, 1, 2):
        part = dataclasses.replace(
            full,
            req_pool_indices=full.req_pool_indices[:size],
            seq_lens=full.seq_lens[:size],
            out_cache_loc=full.out_cache_loc[: size * width],
        )
        assert torch.equal(runner.replay(part, ids[: size * width]).tensors[0], expected[: size * width])
    hole = full.req_pool_indices.clone()
    hole[1] = 0
    found = runner.replay(dataclasses.replace(full, req_pool_indices=hole), ids).tensors[0]
    live = torch.tensor([row for row in range(4 * width) if row // width != 1], device=device)
    assert torch.equal(found[live], expected[live])
    assert same_bits(world.snapshot(), cache)  # the same tokens were stored again, padding nowhere
    world.backend.check()


@each_executor
@pytest.mark.parametrize(("mode", "width"), [(DECODE, 1), (VERIFY, 2)], ids=["decode", "verify"])
def test_idle_batches_change_nothing(impl: str, device: str, executor: str, mode: ForwardMode, width: int) -> None:
    world = World(impl, device)
    runner = world.runner(executor, mode, width)
    lane = world.open()
    world.extend({lane: 130})
    out = runner.replay(*world.batch(mode, {lane: width})).tensors[0]
    expected, cache = out.clone(), world.snapshot()
    empty = runner.replay(*world.batch(mode, {}))
    assert [each.shape[0] for each in empty.tensors] == [0, 0]
    assert empty.fallback_reason is None
    assert torch.equal(out, expected)  # nothing ran that would overwrite it
    idle = padding(mode, 3, width, world.device)
    padded = runner.replay(idle, torch.full((3 * width,), 5, device=world.device))
    assert padded.tensors[0].isfinite().all()
    assert not padded.tensors[1].any()
    assert same_bits(world.snapshot(), cache)
    meta = world.backend.prepare(dataclasses.replace(idle, mode=ForwardMode.IDLE), 4 * width)
    assert world.model(torch.zeros(4 * width, dtype=torch.int64, device=world.device), meta)[0].isfinite().all()
    assert same_bits(world.snapshot(), cache)
    world.backend.check()


@each_executor
def test_nothing_moves_between_replays(impl: str, device: str, executor: str) -> None:
    world = World(impl, device)
    runner = world.runner(executor)
    lanes = [world.open() for _ in range(3)]
    world.extend(dict.fromkeys(lanes, 20))
    inputs = {size: recorded.inputs for size, recorded in runner._recorded.items()}
    before = addresses("inputs", inputs), world.backend.builder.fingerprint()
    outputs = set()
    for size in (3, 1, 2, 3):
        outputs.add(runner.replay(*world.batch(DECODE, dict.fromkeys(lanes[:size], 1))).tensors[0].data_ptr())
        world.commit(dict.fromkeys(lanes[:size], 1))
    assert (addresses("inputs", inputs), world.backend.builder.fingerprint()) == before
    assert any("swa_page_indices" in path for path in before[0])
    assert len(outputs) == 1


@pytest.mark.gpu
@pytest.mark.usefixtures("restored_sync_mode")
@pytest.mark.parametrize(("mode", "width"), [(DECODE, 1), (VERIFY, 4)], ids=["decode", "verify"])
def test_a_replay_neither_waits_nor_allocates(mode: ForwardMode, width: int) -> None:
    world = World("triton", "cuda", kv="bf16")
    runner = world.runner("cuda_graph", mode, width)
    lanes = [world.open() for _ in range(3)]
    world.extend(dict.fromkeys(lanes, 140))
    batches = [world.batch(mode, dict.fromkeys(lanes[:size], width)) for size in (3, 0, 1, 2)]
    for batch in batches:
        runner.replay(*batch)
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    for batch in batches:
        runner.replay(*batch)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    world.backend.check()


@pytest.mark.gpu
@pytest.mark.usefixtures("restored_sync_mode")
def test_an_eager_step_does_not_wait() -> None:
    world = World("triton", "cuda", kv="bf16")
    lanes = [world.open() for _ in range(3)]
    world.extend(dict.fromkeys(lanes, 140))
    steps = [world.batch(mode, dict.fromkeys(lanes, width)) for mode, width in ((DECODE, 1), (VERIFY, 3), (EXTEND, 5))]
    for batch, ids in steps:
        world.eager(batch, ids)
    torch.cuda.set_sync_debug_mode("error")
    for batch, ids in steps:
        world.model(ids, world.backend.prepare(batch))
    torch.cuda.set_sync_debug_mode("default")
    world.backend.check()


@pytest.mark.gpu
def test_bad_values_on_a_gpu_are_flagged_and_spoil_their_own_lane_only() -> None:
    world = World("triton", "cuda")
    runner = world.runner("cuda_graph")
    lanes = [world.open() for _ in range(3)]
    world.extend(dict.fromkeys(lanes, 30))
    batch, ids = world.batch(DECODE, dict.fromkeys(lanes, 1))
    expected = runner.replay(batch, ids).tensors[0].clone()
    world.backend.check()
    lengths = batch.seq_lens.clone()
    lengths[1] = 10_000
    found = runner.replay(dataclasses.replace(batch, seq_lens=lengths), ids).tensors[0]
    assert torch.equal(found[::2], expected[::2])
    with pytest.raises(ValueError, match="length"):
        world.backend.check()
    assert torch.equal(runner.replay(batch, ids).tensors[0], expected)
    world.backend.check()


def test_a_backend_is_what_step_runners_ask_for() -> None:
    world = World("torch", "cpu")
    assert isinstance(world.backend, StepProvider)
    assert world.backend.builder.ratios == (4, 128)
    assert World("torch", "cpu", ratios=(0, 128)).backend.builder.ratios == (128,)
    assert World("torch", "cpu", ratios=(0,)).backend.builder.ratios == ()
    assert world.backend.device == torch.device("cpu")


def test_limits_follow_the_tables_unless_they_are_given() -> None:
    world = World("torch", "cpu")
    tables = world.mirror.tables
    lane = world.open()
    batch, _ = world.batch(EXTEND, {lane: 9})
    assert world.backend.prepare(batch, tables.num_slots).page_table.shape[1] == tables.max_seq_len // 128
    with pytest.raises(ValueError, match=f"expected at most max_rows = {tables.num_slots}"):
        world.backend.prepare(batch, tables.num_slots + 1)
    small = world.new_backend("torch", max_rows=16, max_seq_len=100)
    assert small.prepare(batch).page_table.shape[1] == 1
    with pytest.raises(ValueError, match="expected at most max_rows = 16, got 17"):
        small.prepare(batch, 17)


def test_no_request_is_longer_than_the_rope_table() -> None:
    """Tables may be wider than the model's longest sequence; lengths may not."""
    world = World("torch", "cpu", max_position=100)
    lane = world.open()
    world.extend({lane: 100})
    assert world.mirror.tables.max_seq_len > 100
    with pytest.raises(ValueError, match=r"seq_lens\[0\]: expected 1 to 100 in mode DECODE"):
        world.backend.prepare(world.batch(DECODE, {lane: 1})[0])


def test_refusals_at_construction() -> None:
    world = World("torch", "cpu")
    tables = world.mirror.tables
    other_geom = dataclasses.replace(world.geom, c4_ring=8)
    rows, slots = tables.req_to_token, tables.full_to_swa
    for changed, message in (
        ({"cfg": None}, "cfg: expected a DSV4Config, got NoneType"),
        ({"cache": world.cache.layers}, "cache: expected a DSV4Cache, got tuple"),
        ({"cfg": dataclasses.replace(world.cfg, num_heads=8)}, "cache: expected one made for cfg"),
        ({"geom": other_geom}, "cache: expected one of CacheGeometry"),
        ({"tables": RequestTables(torch.cat((rows, rows)), slots)}, "tables: expected at most the 6 requests"),
        ({"tables": RequestTables(rows, torch.cat((slots, slots)))}, "tables: expected at most the cache's 2048 slots"),
        ({"max_rows": 0}, "max_rows: expected at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            world.new_backend("torch", **changed)
    with pytest.raises(ValueError, match="impl: expected one of"):
        world.new_backend("cuda")


def test_a_wrong_layer_is_refused_before_anything_is_written() -> None:
    world = World("torch", "cpu")
    lane = world.open()
    meta, cache = world.backend.prepare(world.batch(EXTEND, {lane: 4})[0]), world.snapshot()
    x = torch.zeros(4, world.cfg.hidden_size)
    for index in (-1, 3, True, "0"):
        with pytest.raises(ValueError, match="layer_index: expected 0 to 2, got"):
            world.backend.attend(index, world.layers[0], x, meta)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cache: expected that of a layer of ratio 4, got one of ratio 0"):
        world.backend.attend(0, world.layers[1], x, meta)
    assert same_bits(world.snapshot(), cache)


def test_bad_values_on_a_cpu_are_refused_before_anything_is_written() -> None:
    world = World("torch", "cpu")
    runner = world.runner("eager")
    lanes = [world.open() for _ in range(3)]
    world.extend(dict.fromkeys(lanes, 9))
    batch, ids = world.batch(DECODE, dict.fromkeys(lanes, 1))
    out = runner.replay(batch, ids).tensors[0]
    expected, cache = out.clone(), world.snapshot()
    lengths = batch.seq_lens.clone()
    lengths[1] = 10_000
    with pytest.raises(ValueError, match=r"seq_lens\[1\]: expected 1 to 384 in mode DECODE"):
        runner.replay(dataclasses.replace(batch, seq_lens=lengths), ids)
    assert torch.equal(out, expected)
    assert same_bits(world.snapshot(), cache)
    assert torch.equal(runner.replay(batch, ids).tensors[0], expected)


def test_made_in_inference_mode_and_used_outside_of_it() -> None:
    world = World("torch", "cpu")
    with torch.inference_mode():
        runner = world.runner("eager")
    lane = world.open()
    world.extend({lane: 9})
    expected = world.eager(*world.batch(DECODE, {lane: 1}))
    assert torch.equal(runner.replay(*world.batch(DECODE, {lane: 1})).tensors[0], expected)


def test_the_name_and_order_that_are_fixed() -> None:
    world = World("torch", "cpu")
    backend = DSV4AttnBackend(world.cfg, world.geom, world.cache, world.mirror.tables, "torch")
    assert isinstance(world.layers[1], DSV4Attention)
    assert isinstance(backend.geom, CacheGeometry)
    lane = world.open()
    meta = backend.prepare(world.batch(EXTEND, {lane: 5})[0])
    x = torch.ones(5, world.cfg.hidden_size)
    assert torch.equal(backend.attend(1, world.layers[1], x, meta), world.layers[1](x, meta, world.cache.layers[1]))


@pytest.mark.parametrize("source", blocks(ROOT / "docs" / "backend.md", "python"), ids=["example"])
def test_the_page_about_it_runs(source: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("decoded up to [")
