"""The metadata builder as the runner's provider: what the runner asks of it, and what a draft step then reads."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from backends import INTERPRET
from dsv4_backend import MetadataBuilder
from dsv4_bench.draft_models import WindowStep
from dsv4_bench.draft_world import MODELS, DraftWorld, memory_difference, output_difference
from dsv4_graph_runner import BucketPolicy, DraftBatch, EagleDraftGraphRunner, GuardError, MetadataProvider
from runners import SpyModel, each_executor, make_world, spy_runner

METHODS = sorted(name for name in vars(MetadataProvider) if name.endswith(("_draft", "_fingerprint")))


def test_a_builder_has_what_the_runner_asks_for() -> None:
    assert METHODS == ["bind_draft", "build_draft", "draft_fingerprint", "prepare_draft", "record_draft"]
    assert isinstance(make_world(provider="builder").metadata, MetadataBuilder)
    assert isinstance(make_world(provider="builder").metadata, MetadataProvider)


@pytest.mark.parametrize("method", METHODS)
def test_methods_take_what_the_runner_gives(method: str) -> None:
    asked, has = (inspect.signature(getattr(each, method)).parameters for each in (MetadataProvider, MetadataBuilder))
    assert [(p.name, p.kind, p.default) for p in has.values()] == [(p.name, p.kind, p.default) for p in asked.values()]


def windows(steps: list[Any], window: int) -> list[list[list[int]]]:
    """Slots of each step, lane by lane, the oldest first; 0 before position 0, as `WindowStep` has them."""
    return [
        step.slots.tolist()
        if isinstance(step, WindowStep)
        else step.swa_page_indices[:, :window].flip(1).clamp(min=0).tolist()
        for step in steps
    ]


@each_executor
@pytest.mark.parametrize("size", [3, 7])
def test_both_providers_give_the_same_windows(executor: str, device: str, size: int) -> None:
    """Of the live lanes of every step; 7 is beyond the largest bucket."""

    def seen(provider: str) -> list[list[list[int]]]:
        world = make_world(device=device, executor=executor, sizes=(4,), num_steps=5, provider=provider)
        runner, spy = spy_runner(world, sizes=(4,))
        runner.replay(world.batches().draw(size))
        assert len(spy.steps) == 4
        return [lanes[:size] for lanes in windows(spy.steps, world.table.window)]

    assert seen("builder") == seen("window")


def test_a_step_is_told_what_the_loop_does() -> None:
    """The slots and positions of each forward are those of its metadata; padding stays at slot 0 and position 0."""
    world = make_world(provider="builder", num_steps=4)
    model = SpyModel()
    runner, _ = spy_runner(world, model, num_steps=4)
    batch = world.batches().draw(3)
    runner.replay(batch)
    assert len(model.calls) == 3
    for i, call in enumerate(model.calls):
        meta = call["metadata"]
        slots = [*batch.out_cache_loc.view(3, 4)[:, i].tolist(), 0]
        assert call["slots"].tolist() == meta.raw_out_cache_loc.tolist() == meta.swa_out_cache_loc.tolist() == slots
        positions = [*(batch.seq_lens + i).tolist(), 0]
        assert call["positions"].tolist() == [*positions[:3], i]
        assert meta.positions.tolist() == positions
        assert meta.seq_lens_causal.tolist() == [p + 1 for p in positions]
        assert meta.req_pool_indices_per_row.tolist() == [*batch.req_pool_indices.tolist(), 0]
        assert meta.c4_lengths is meta.c128_page_indices is meta.plans is None


@each_executor
def test_a_bucket_keeps_its_buffers(executor: str, device: str) -> None:
    world = make_world(device=device, executor=executor, provider="builder", sizes=(1, 4))
    builder = world.metadata
    before = builder.fingerprint(), builder.draft_fingerprint()
    make = world.batches()
    for size in (4, 0, 3, 1, 2):
        world.runner.replay(make.draw(size), group_batch_size=max(size, 1))
    world.runner.capture()
    assert (builder.fingerprint(), builder.draft_fingerprint()) == before
    tables = builder._tables
    object.__setattr__(tables, "req_to_token", tables.req_to_token.clone())
    assert builder.draft_fingerprint() != before[1]


def test_a_builder_that_reads_values_is_refused() -> None:
    """On a CPU every build checks its values: the guard, when it is on, says so, with the line."""
    world = DraftWorld.make("hash", "cpu", BucketPolicy(sizes=[4]), provider="builder", guard="capture")
    assert world.guard == "off"
    guarded = EagleDraftGraphRunner(
        world.model,
        world.metadata,
        num_steps=3,
        hidden_size=128,
        hidden_dtype=torch.float32,
        buckets=BucketPolicy(sizes=[4]),
        device="cpu",
    )
    with pytest.raises(GuardError, match=r"sync: .* has an output whose size depends on values") as caught:
        guarded.capture()
    assert "dsv4_backend" in caught.value.where


def with_a_long_request(world: DraftWorld) -> tuple[DraftBatch, DraftBatch]:
    """A batch, and the same with a request, the second, that is longer than the table."""
    batch = world.batches().draw(3)
    lengths = batch.seq_lens.clone()
    lengths[1] = world.table.max_len
    return batch, DraftBatch(**(vars(batch) | {"seq_lens": lengths}))


def test_a_bad_length_is_refused_before_anything_runs() -> None:
    world = make_world(provider="builder", sizes=(4,))
    batch, bad = with_a_long_request(world)
    expected = world.runner.replay(batch, clone=True)
    cache = [tensor.clone() for tensor in world.pool.tensors()]
    with pytest.raises(ValueError, match=r"seq_lens\[1\]: expected 0 to 1998 in mode DRAFT_DECODE .* got 2000"):
        world.runner.replay(bad)
    assert all(torch.equal(a, b) for a, b in zip(world.pool.tensors(), cache, strict=True))
    assert output_difference(world.runner.replay(batch), expected) is None


@pytest.mark.gpu
def test_a_bad_length_is_flagged_and_spoils_its_own_lane_only() -> None:
    world = make_world(device="cuda", provider="builder", sizes=(4,))
    batch, bad = with_a_long_request(world)
    expected = world.runner.replay(batch, clone=True)
    world.check()
    world.pool.clear()
    found = world.runner.replay(bad, clone=True)
    assert found.draft_tokens[::2].tolist() == expected.draft_tokens[::2].tolist()
    with pytest.raises(ValueError, match="length"):
        world.check()
    world.pool.clear()
    assert output_difference(world.runner.replay(batch), expected) is None
    world.check()


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["table", "step"])
def test_a_replay_with_a_moved_tensor_is_refused(what: str) -> None:
    world = make_world(device="cuda", provider="builder", sizes=(4,), guard="replay")
    batch = world.batches().draw(3)
    world.runner.replay(batch)
    if what == "table":
        target, name, message = world.metadata._tables, "full_to_swa", r"metadata.draft_fingerprint\(\)"
    else:
        (recorded,) = world.runner._recorded.values()
        target, name, message = recorded.steps[1], "swa_lengths", r"metadata.steps\[1\].swa_lengths"
    object.__setattr__(target, name, getattr(target, name).clone())
    with pytest.raises(GuardError, match=f"{message} is not what was captured"):
        world.runner.replay(batch)


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRET, reason="runs under TRITON_INTERPRET=1")
@pytest.mark.parametrize("model", MODELS)
def test_the_kernel_drafts_the_same(model: str) -> None:
    world = make_world(model, provider="builder", impl="triton", sizes=(1, 4))
    twin = make_world(model, sizes=(1, 4))
    make = world.batches(seed=5)
    for size in (4, 3, 1, 0, 6, 2):
        batch = make.draw(size)
        assert output_difference(world.runner.replay(batch), twin.runner.replay(batch)) is None
    assert memory_difference(world.pool, twin.pool) is None
    world.check()


def test_buffers_made_in_inference_mode_are_written_outside_of_it() -> None:
    world = DraftWorld.make("hash", "cpu", BucketPolicy(max_batch_size=4), provider="builder")
    with torch.inference_mode():
        world.runner.capture()
    world.runner.replay(world.batches().draw(3))
    world.check()
