"""The guard: each of its checks trips on what it is for, says where, and lets the rest pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsv4_graph_runner import GraphPool, GuardError, addresses, capture_graph, expect_unchanged, inspect_region
from runners import each_executor, make_world

READS = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "truth": lambda x: bool(x.any()),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 1),
    "mask": lambda x: x[x > 1],
    "masked_select": lambda x: torch.masked_select(x, x > 1),
    "write by mask": lambda x: x.clone().index_put_((x > 1,), torch.zeros_like(x[0])),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
}
"""What waits for the device, as a function of an int64 tensor of several values."""

ON_A_GPU = READS | {
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "copy to the host": lambda x: torch.zeros(len(x), dtype=x.dtype).copy_(x),
    "repeat_interleave": lambda x: x.repeat_interleave(x),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
    "device": lambda x: torch.cuda.synchronize(),
    "event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
}
HOST_COPIES = {
    "pageable": lambda x: torch.ones(len(x), dtype=x.dtype).to(x.device, non_blocking=True),
    "pageable, into": lambda x: x.clone().copy_(torch.ones(len(x), dtype=x.dtype), non_blocking=True),
    "pinned for the call": lambda x: torch.ones(len(x), dtype=x.dtype).pin_memory().to(x.device, non_blocking=True),
}


def expect_trip(trigger: Callable[[torch.Tensor], object], x: torch.Tensor, kind: str, device: str) -> GuardError:
    with pytest.raises(GuardError) as caught:
        inspect_region(lambda: trigger(x), device)
    assert caught.value.kind == kind
    assert __file__ in caught.value.where
    assert str(caught.value).startswith(f"{kind}: ")
    return caught.value


@pytest.mark.parametrize("trigger", READS.values(), ids=READS)
def test_reading_back_trips_on_a_cpu(trigger: Callable[[torch.Tensor], object]) -> None:
    expect_trip(trigger, torch.arange(4), "sync", "cpu")


def test_where_is_the_line_of_the_caller() -> None:
    def reads(x: torch.Tensor) -> float:
        return x.sum().item()

    with pytest.raises(GuardError) as caught:
        inspect_region(lambda: reads(torch.ones(3)), "cpu")
    assert caught.value.where.endswith("in reads: return x.sum().item()")


def test_explicit_waiting_trips_on_a_cpu_and_is_allowed_again_afterwards() -> None:
    before = torch.cuda.synchronize
    expect_trip(lambda x: torch.cuda.synchronize(), torch.ones(1), "sync", "cpu")
    assert torch.cuda.synchronize is before


def test_a_copy_from_pageable_memory_trips() -> None:
    """To a device without data, so that it can be seen without a GPU."""
    x = torch.zeros(3, device="meta")
    expect_trip(lambda x: torch.ones(3).to("meta"), x, "host copy", "meta")
    expect_trip(lambda x: x.copy_(torch.ones(3)), x, "host copy", "meta")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_work_that_can_be_captured_passes(device: str) -> None:
    x = torch.arange(16, device=device)
    index = torch.tensor([3, 1], device=device)

    def region() -> torch.Tensor:
        y = torch.where(x > 3, x, 0).cumsum(0)
        y[index] = y[index] + 1
        return torch.cat((y, y.float().softmax(0).to(y.dtype), torch.zeros(3, device=device, dtype=y.dtype)))

    assert inspect_region(region, device).shape == (35,)


def test_other_errors_pass_through() -> None:
    def region() -> None:
        raise RuntimeError("of the model")

    with pytest.raises(RuntimeError, match="of the model"):
        inspect_region(region, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*ON_A_GPU, *HOST_COPIES])
def test_capture_fails_before_it_begins_and_the_next_one_works(name: str) -> None:
    kind = "sync" if name in ON_A_GPU else "host copy"
    trigger = (ON_A_GPU | HOST_COPIES)[name]
    x, out = torch.arange(4, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
    mode = torch.cuda.get_sync_debug_mode()
    expect_trip(trigger, x, kind, "cuda")
    with pytest.raises(GuardError):
        capture_graph(lambda: trigger(x), "cuda")
    assert torch.cuda.get_sync_debug_mode() == mode
    graph = capture_graph(lambda: torch.add(x, 1, out=out), "cuda")
    x.add_(10)
    graph.replay()
    assert out.tolist() == [11, 12, 13, 14]


@pytest.mark.gpu
def test_a_tensor_made_from_python_numbers_trips() -> None:
    with pytest.raises(GuardError):
        capture_graph(lambda: torch.tensor([1, 2], device="cuda"), "cuda")


@pytest.mark.gpu
def test_pinned_memory_that_stays_may_be_copied_from() -> None:
    source, out = torch.ones(4).pin_memory(), torch.zeros(4, device="cuda")
    graph = capture_graph(lambda: out.copy_(source, non_blocking=True), "cuda")
    source.fill_(5)
    graph.replay()
    assert out.tolist() == [5.0] * 4


@pytest.mark.gpu
def test_work_on_a_stream_that_is_not_captured_trips() -> None:
    side, out = torch.cuda.Stream(), torch.zeros(4, device="cuda")
    with torch.cuda.stream(side):
        kept = torch.empty(4, device="cuda")  # its segment has room for what follows, so that nothing calls cudaMalloc

    def region() -> None:
        with torch.cuda.stream(side):
            torch.empty(4, device="cuda")
        out.add_(1)

    before = torch.cuda.current_stream()
    with pytest.raises(GuardError, match="runs on a stream that is not being captured") as caught:
        capture_graph(region, "cuda")
    assert caught.value.kind == "outside pool"
    assert __file__ in caught.value.where
    assert torch.cuda.current_stream() == before
    out.zero_()
    capture_graph(lambda: out.add_(1), "cuda").replay()
    assert out.tolist() == [3.0 + 1.0] * 4  # two warm-ups, the inspection, the replay
    del kept


@pytest.mark.gpu
def test_a_joined_stream_passes() -> None:
    side, out = torch.cuda.Stream(), torch.zeros(4, device="cuda")

    def region() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            doubled = out * 2
        torch.cuda.current_stream().wait_stream(side)
        torch.add(doubled, 1, out=out)

    graph = capture_graph(region, "cuda")
    out.zero_()
    graph.replay()
    graph.replay()
    assert out.tolist() == [3.0] * 4


@pytest.mark.gpu
def test_memory_that_no_operation_shows_trips() -> None:
    side, taken = torch.cuda.Stream(), []
    out = torch.zeros(4, device="cuda")
    with torch.cuda.stream(side):
        kept = torch.empty(4, device="cuda")

    def region() -> None:
        taken.append(torch.cuda.caching_allocator_alloc(512, torch.cuda.current_device(), side))
        out.add_(1)

    with pytest.raises(GuardError, match="keeps 512 bytes that it did not take from the graph's pool"):
        capture_graph(region, "cuda")
    for pointer in taken:
        torch.cuda.caching_allocator_delete(pointer)
    del kept


@pytest.mark.gpu
def test_an_exception_in_a_capture_is_the_one_that_is_raised() -> None:
    out = torch.zeros(4, device="cuda")
    calls: list[int] = []

    def region() -> None:
        calls.append(1)
        out.add_(1)
        if len(calls) == 4:  # two warm-ups and the inspection come first
            raise KeyError("of the model")

    with pytest.raises(KeyError, match="of the model"):
        capture_graph(region, "cuda")
    out.zero_()
    capture_graph(lambda: out.add_(1), "cuda", pool=GraphPool(torch.device("cuda"))).replay()
    assert out.tolist() == [4.0] * 4


def test_the_runner_refuses_a_model_that_reads_back() -> None:
    world = make_world()
    forward = world.model.forward

    def reads(*args: Any) -> Any:
        logits, hidden = forward(*args)
        logits.max().item()
        return logits, hidden

    world.model.forward = reads
    with pytest.raises(
        GuardError, match=r"sync: aten\._local_scalar_dense\.default reads a value on the host"
    ) as caught:
        world.runner.capture()
    assert caught.value.where.endswith("in reads: logits.max().item()")
    assert not world.runner.can_run(world.batches().draw(2))[0]
    unguarded = make_world(guard="off")
    unguarded.model.forward = reads
    unguarded.runner.capture()


def test_addresses_of_everything_reachable() -> None:
    linear = torch.nn.Linear(2, 3)
    linear.cache = [torch.zeros(4)]
    found = addresses("x", {"model": linear, "rows": (torch.zeros(2), {"a": torch.zeros(1)})})
    assert set(found) == {
        "x['model'].weight",
        "x['model'].bias",
        "x['model'].cache[0]",
        "x['rows'][0]",
        "x['rows'][1]['a']",
    }
    loop: list[Any] = [torch.zeros(1)]
    loop.append(loop)
    assert list(addresses("y", loop)) == ["y[0]"]


def test_a_changed_address_is_named() -> None:
    tensor = torch.zeros(4)
    before = addresses("x", [tensor, tensor[1:]])
    expect_unchanged(before, addresses("x", [tensor, tensor[1:]]))
    with pytest.raises(GuardError, match=r"address: x\[1\] is not what was captured: expected \(\d+, \(3,\)"):
        expect_unchanged(before, addresses("x", [tensor, tensor[2:]]))
    with pytest.raises(GuardError, match=r"x\[1\] is not what was captured: .* got None"):
        expect_unchanged(before, addresses("x", [tensor]))


@each_executor
@pytest.mark.parametrize("what", ["weight", "cache", "table", "step"])
def test_a_replay_with_a_moved_tensor_is_refused(executor: str, device: str, what: str) -> None:
    world = make_world("transformer", device, executor=executor, guard="replay", sizes=(4,))
    batch = world.batches().draw(3)
    world.runner.replay(batch)
    if what == "weight":
        world.model.head = torch.nn.Parameter(world.model.head.clone(), requires_grad=False)
        message = "draft_model.head is not what was captured"
    elif what == "cache":
        world.pool._tensors[1] = world.pool._tensors[1].clone()
        world.model.extra = world.pool._tensors[1]
        message = "draft_model.extra is not what was captured"
    elif what == "table":
        world.table.table = world.table.table.clone()
        message = r"metadata.draft_fingerprint\(\) is not what was captured"
    else:
        (recorded,) = world.runner._recorded.values()
        object.__setattr__(recorded.steps[1], "slots", recorded.steps[1].slots.clone())
        message = r"metadata.steps\[1\].slots is not what was captured"
    with pytest.raises(GuardError, match=message):
        world.runner.replay(batch)
    world.runner.capture()
    world.runner.replay(batch)
