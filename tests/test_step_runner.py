"""The runner of whole steps: buckets, what it returns, captures that fail, refusals."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from backend_harness import World, close, each_executor
from dsv4_backend import AttnMetadata, ForwardMode
from dsv4_graph_runner import BucketPolicy, GuardError, StepGraphRunner

DECODE, EXTEND, VERIFY = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY


def echo(ids: torch.Tensor, meta: AttnMetadata) -> tuple[torch.Tensor, ...]:
    """What each row was given."""
    return ids, meta.positions, meta.raw_out_cache_loc, meta.swa_page_indices[:, :16].clone()


class Counted:
    """Counts calls, and does what it is told to at one of them."""

    def __init__(self, inner: Any = echo) -> None:
        self.inner, self.sizes = inner, []

    def __call__(self, ids: torch.Tensor, meta: AttnMetadata) -> Any:
        self.sizes.append(len(ids))
        return self.inner(ids, meta)


def make(world: World, model: Any, executor: str = "eager", **changed: Any) -> StepGraphRunner:
    options = dict(mode=DECODE, buckets=BucketPolicy(sizes=[1, 4]), device=world.device, executor=executor)
    return StepGraphRunner(model, world.backend, **(options | changed))


@each_executor
@pytest.mark.parametrize(("mode", "width"), [(DECODE, 1), (VERIFY, 3)], ids=["decode", "verify"])
def test_rows_get_what_is_theirs(impl: str, device: str, executor: str, mode: ForwardMode, width: int) -> None:
    world = World(impl, device, ratios=(0,), lanes=7)
    runner = make(world, echo, executor, mode=mode, width=width)
    runner.capture()
    lanes = [world.open() for _ in range(7)]
    world.extend({lane: 5 + i for i, lane in enumerate(lanes)})
    for size in (3, 1, 4, 0, 7, 2):
        batch, ids = world.batch(mode, dict.fromkeys(lanes[:size], width))
        ok, reason = runner.can_run(batch)
        assert ok == (size <= 4)
        out = runner.replay(batch, ids)
        assert (out.fallback_reason or "") == reason
        expected = echo(ids, world.backend.prepare(batch))
        assert len(out.tensors) == 4
        for got, wanted in zip(out.tensors, expected, strict=True):
            assert got.dtype == wanted.dtype
            assert torch.equal(got, wanted)


@each_executor
def test_what_no_bucket_serves_runs_without(impl: str, device: str, executor: str) -> None:
    world = World(impl, device, ratios=(0,))
    runner = make(world, echo, executor, mode=VERIFY, width=2, buckets=BucketPolicy(sizes=[2]))
    lanes = [world.open() for _ in range(3)]
    world.extend(dict.fromkeys(lanes, 9))
    a, b, c = lanes
    before, ids = world.batch(VERIFY, {a: 2})
    assert runner.can_run(before) == (False, "no graph: expected capture() to have run")
    assert runner.replay(before, ids).fallback_reason == "no graph: expected capture() to have run"
    runner.capture()
    for mode, sizes, reason in (
        (VERIFY, {a: 2, b: 2, c: 2}, "batch size 3: expected at most 2, the largest bucket"),
        (VERIFY, {a: 2, b: 1}, "3 rows for 2 requests: expected 2 each"),
        (VERIFY, {a: 3, b: 3}, "6 rows for 2 requests: expected 2 each"),
        (DECODE, {a: 1, b: 1}, "mode DECODE: expected TARGET_VERIFY"),
        (EXTEND, {a: 2, b: 2}, "mode EXTEND: expected TARGET_VERIFY"),
    ):
        batch, ids = world.batch(mode, sizes)
        assert runner.can_run(batch) == (False, reason)
        out = runner.replay(batch, ids.int())
        assert out.fallback_reason == reason
        assert torch.equal(out.tensors[0], ids)
        assert torch.equal(out.tensors[2], batch.out_cache_loc)
    world.backend.check()


def test_the_largest_bucket_comes_first_and_progress_is_told() -> None:
    world, told = World("torch", "cpu", ratios=(0,)), []
    model = Counted()
    runner = make(world, model, buckets=BucketPolicy(sizes=[1, 2, 4]))
    report = runner.capture(progress=lambda *args: told.append(args))
    assert list(report.buckets) == [4, 2, 1]
    assert report.executor == "eager"
    assert report.pool_bytes == 0
    assert report.seconds >= sum(seconds for _, seconds in report.buckets.values())
    assert told == [(i, 3, f"DECODE batch size {size}") for i, size in enumerate((4, 2, 1))] + [(3, 3, "")]
    assert model.sizes == [4, 4, 2, 2, 1, 1]


@each_executor
def test_a_second_capture_replaces_the_first(impl: str, device: str, executor: str) -> None:
    world = World(impl, device)
    runner = world.runner(executor)
    lane = world.open()
    world.extend({lane: 30})
    batch, ids = world.batch(DECODE, {lane: 1})
    expected = runner.replay(batch, ids).tensors[0].clone()
    reserved = []
    for _ in range(3):
        runner.capture()
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            reserved.append(torch.cuda.memory_reserved())
        assert close(runner.replay(batch, ids).tensors[0], expected)
    assert len(set(reserved)) <= 1
    runner.release()
    assert runner.replay(batch, ids).fallback_reason == "no graph: expected capture() to have run"


@each_executor
def test_a_failed_capture_leaves_no_graph(impl: str, device: str, executor: str) -> None:
    world = World(impl, device, ratios=(0,))
    lane = world.open()
    world.extend({lane: 9})
    batch, ids = world.batch(DECODE, {lane: 1})

    def fails(ids: torch.Tensor, meta: AttnMetadata) -> tuple[torch.Tensor, ...]:
        if len(ids) == 1 and broken:
            raise RuntimeError("injected")
        return echo(ids, meta)

    runner, broken = make(world, fails, executor), [1]
    with pytest.raises(RuntimeError, match="injected"):
        runner.capture()
    broken.clear()
    assert runner.replay(batch, ids).fallback_reason == "no graph: expected capture() to have run"
    runner.capture()
    out = runner.replay(batch, ids)
    assert out.fallback_reason is None
    assert torch.equal(out.tensors[0], ids)


@pytest.mark.gpu
def test_a_model_that_waits_is_refused_with_its_line() -> None:
    world = World("triton", "cuda", ratios=(0,))

    def waits(ids: torch.Tensor, meta: AttnMetadata) -> tuple[torch.Tensor, ...]:
        return (ids + int(meta.positions[0]),)  # this line

    runner = make(world, waits, "cuda_graph")
    with pytest.raises(GuardError, match=r"sync: .*# this line"):
        runner.capture()
    lane = world.open()
    world.extend({lane: 9})
    assert runner.replay(*world.batch(DECODE, {lane: 1})).fallback_reason is not None


@pytest.mark.gpu
def test_many_buckets_take_the_memory_of_the_largest() -> None:
    def bytes_of(sizes: list[int]) -> int:
        world = World("triton", "cuda", lanes=2)
        runner = make(world, world.model, "cuda_graph", buckets=BucketPolicy(sizes=sizes))
        return runner.capture().pool_bytes

    alone = bytes_of([256])
    assert alone > 0
    assert bytes_of([1, 2, 4, 8, 16, 64, 128, 256]) <= 1.1 * alone


def test_models_that_return_something_else_are_refused() -> None:
    world = World("torch", "cpu", ratios=(0,))
    for model, message in (
        (lambda ids, meta: ids, "model: expected it to return a tuple of tensors, got Tensor"),
        (lambda ids, meta: (ids, None), "model: expected it to return a tuple of tensors, got tuple"),
        (lambda ids, meta: (ids, ids[1:]), r"model: expected 4 rows in tensor 1, got shape \[3\]"),
        (lambda ids, meta: (ids, ids[0]), r"model: expected 4 rows in tensor 1, got shape \[\]"),
        (
            lambda ids, meta: (ids.view(-1, 1).expand(-1, len(ids)),),
            "model: expected tensors like those of the largest",
        ),
        (lambda ids, meta: (ids,) * len(ids), "model: expected tensors like those of the largest"),
    ):
        runner = make(world, model)
        with pytest.raises(ValueError, match=message):
            runner.capture()


def test_refusals() -> None:
    world = World("torch", "cpu", ratios=(0,))
    for changed, message in (
        ({"model": None}, "model: expected something to call, got NoneType"),
        ({"width": 0}, "width: expected an int of at least 1, got 0"),
        ({"buckets": [1, 2]}, "buckets: expected a BucketPolicy, got list"),
        ({"executor": "graphs"}, "executor: expected one of"),
        ({"executor": "cuda_graph"}, "executor: expected a CUDA device for 'cuda_graph', got cpu"),
    ):
        options = dict(model=echo) | changed
        with pytest.raises(ValueError, match=message):
            make(world, **options)
    with pytest.raises(ValueError, match="provider: expected the methods of StepProvider, got list"):
        StepGraphRunner(echo, [], mode=DECODE, buckets=BucketPolicy(sizes=[1]), device="cpu")  # type: ignore[arg-type]
    model = Counted()
    runner = make(world, model)
    runner.capture()
    lanes = [world.open() for _ in range(5)]
    world.extend(dict.fromkeys(lanes, 9))
    model.sizes.clear()
    for size in (2, 5):  # in a bucket, and without one
        batch, ids = world.batch(DECODE, dict.fromkeys(lanes[:size], 1))
        for wrong in (ids[1:], ids[:, None], ids.float(), ids > 0, ids.tolist(), None):
            with pytest.raises(ValueError, match="ids: expected"):
                runner.replay(batch, wrong)
    assert model.sizes == []
