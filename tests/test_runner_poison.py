"""The lane-poison check: clean runs pass and leave no trace; each kind of stray access trips it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsv4_bench.draft_world import MODELS, DraftWorld, output_difference
from dsv4_graph_runner import GuardError, check_lane_poison
from runners import each_executor, make_world


@each_executor
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size", [0, 1, 3, 4, 7])
def test_clean_runs_pass(executor: str, device: str, model: str, size: int) -> None:
    world = make_world(model, device, executor=executor, sizes=(1, 2, 4))
    batch = world.batches().draw(size)
    for tensor in world.pool.tensors():
        tensor[world.pool.row_of_slot] = 3
    before = [tensor.clone() for tensor in world.pool.tensors()]
    drafts = check_lane_poison(world.runner, batch, world.pool, world.pool.page_size)
    assert all(torch.equal(a, b) for a, b in zip(world.pool.tensors(), before, strict=True))
    assert output_difference(world.runner.replay(batch), drafts) is None


def padding_writes_slot_one(world: DraftWorld, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(ids: Any, hidden: Any, positions: Any, slots: torch.Tensor, step: Any) -> Any:
        return forward(ids, hidden, positions, torch.where(slots == 0, 1, slots), step)

    return run


def reads_slot_one(world: DraftWorld, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        logits, hidden = forward(*args)
        (cache,) = world.pool.tensors()
        stale = cache[world.pool.row_of_slot[1:2]] != 0
        return logits.roll(1, dims=1) * stale + logits * ~stale, hidden

    return run


def writes_a_live_slot(world: DraftWorld, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        (cache,) = world.pool.tensors()
        cache[-2] += 1
        return forward(*args)

    return run


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (padding_writes_slot_one, "memory 0, without poison, row 3"),
        (reads_slot_one, "draft_tokens, row 0"),
        (writes_a_live_slot, "memory 0, without poison, row"),
    ],
)
def test_stray_accesses_trip(fault: Callable[..., Any], message: str) -> None:
    world = make_world(sizes=(4,))
    world.model.forward = fault(world, world.model.forward)
    world.runner.capture()
    world.pool.clear()
    before = [tensor.clone() for tensor in world.pool.tensors()]
    with pytest.raises(GuardError, match=message) as caught:
        check_lane_poison(world.runner, world.batches().draw(3), world.pool, world.pool.page_size)
    assert caught.value.kind == "poison"
    assert all(torch.equal(a, b) for a, b in zip(world.pool.tensors(), before, strict=True))


def test_a_padding_lane_that_is_not_reset_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the pad values left out of the copy, padding lanes keep the poison: a slot that there is not."""
    world = make_world(sizes=(4,))
    make_plan = type(world.runner._buffers)._make_plan

    def without_pads(self: Any, bucket: int, raw: int) -> Any:
        return dataclasses.replace(make_plan(self, bucket, raw), pad_to=(), pad_from=())

    world.runner._buffers._plans.clear()
    monkeypatch.setattr(type(world.runner._buffers), "_make_plan", without_pads)
    with pytest.raises((GuardError, IndexError)):
        check_lane_poison(world.runner, world.batches().draw(3), world.pool, world.pool.page_size)


@pytest.mark.parametrize("tensor", [torch.zeros(6), torch.zeros(6, dtype=torch.int64), torch.zeros(6, 2, 3)])
def test_memory_of_any_shape_is_compared(tensor: torch.Tensor) -> None:
    """A row of a tensor of one dimension is one number."""

    class Memory:
        def tensors(self) -> list[torch.Tensor]:
            return [tensor]

        def rows(self, slots: torch.Tensor) -> torch.Tensor:
            return slots.clamp(max=5)

    world = make_world(sizes=(4,))
    forward = world.model.forward

    def run(*args: Any) -> Any:
        tensor[3] += 1
        return forward(*args)

    world.model.forward = run
    world.runner.capture()
    with pytest.raises(GuardError, match="memory 0, without poison, row 3"):
        check_lane_poison(world.runner, world.batches().draw(2), Memory(), 2)
