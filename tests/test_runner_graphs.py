"""What only shows with graphs, or after many replays: syncs, memory, pools, and how long a capture takes."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator

import pytest
import torch

from draft_oracle import HashOracle
from dsv4_bench.draft_world import DraftWorld, output_difference
from dsv4_graph_runner import BucketPolicy
from runners import each_executor, make_world

SIXTEEN = BucketPolicy(sizes=[1, 2, 4, *range(8, 105, 8)])


@pytest.fixture
def restored_sync_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.usefixtures("restored_sync_mode")
@pytest.mark.parametrize("size", [0, 1, 3, 8])
def test_a_replay_never_waits(size: int) -> None:
    world = make_world(device="cuda", executor="cuda_graph")
    batch = world.batches().draw(size)
    world.runner.replay(batch, group_batch_size=8)
    torch.cuda.set_sync_debug_mode("error")
    out = world.runner.replay(batch, group_batch_size=8)
    cloned = world.runner.replay(batch, group_batch_size=8, clone=True)
    torch.cuda.set_sync_debug_mode("default")
    assert output_difference(out, cloned) is None


@each_executor
def test_ten_thousand_replays_in_flat_memory(executor: str, device: str) -> None:
    # Without a GPU to run them on, forwards would only take time: memory is the runner's own.
    world = make_world(device=device, executor=executor, sizes=8, num_steps=3 if device == "cuda" else 1, hidden_size=8)
    make, rng = world.batches(), random.Random(0)
    batches = [make.draw(size) for size in range(9)]
    used = []
    for i in range(10_000):
        if i in (1_000, 9_999):
            gc.collect()
            used.append((len(gc.get_objects()), torch.cuda.memory_allocated() if device == "cuda" else 0))
        world.runner.replay(batches[rng.randint(0, 8)], clone=i % 7 == 0)
    (objects, allocated), (objects_later, allocated_later) = used
    assert abs(objects_later - objects) < 50
    assert allocated_later == allocated


@each_executor
@pytest.mark.parametrize("pools", [("shared", "shared"), ("dedicated", "dedicated"), ("shared", "dedicated")])
def test_two_runners_in_one_pool_and_in_two(executor: str, device: str, pools: tuple[str, str]) -> None:
    worlds = [
        make_world(device=device, executor=executor, sizes=sizes, num_steps=num_steps, pool=pool)
        for pool, sizes, num_steps in zip(pools, (4, 8), (3, 5), strict=True)
    ]
    oracles = [HashOracle(world.table, world.model.vocab_size) for world in worlds]
    makers = [world.batches() for world in worlds]

    def both() -> None:
        for size in (3, 1, 4, 2):
            batches = [make.draw(size) for make in makers]
            outs = [world.runner.replay(batch) for world, batch in zip(worlds, batches, strict=True)]
            # Compared after both ran: outputs of one are not overwritten by the other's replay.
            for out, oracle, batch, world in zip(outs, oracles, batches, worlds, strict=True):
                assert out.draft_tokens.tolist() == oracle.drafts(batch, world.runner.num_steps)

    both()
    for world in worlds:
        world.runner.capture()
        both()
    worlds[0].runner.release()
    worlds[0].runner.capture()
    both()


@pytest.mark.gpu
@pytest.mark.parametrize("pool", ["shared", "dedicated"])
def test_memory_of_sixteen_buckets_is_that_of_the_largest(pool: str) -> None:
    def capture(policy: BucketPolicy) -> tuple[int, float]:
        world = DraftWorld.make("transformer", "cuda", policy, pool=pool, hidden_size=512, window=128)
        begin = time.perf_counter()
        report = world.runner.capture()
        seconds = time.perf_counter() - begin
        assert report.pool_bytes == sum(grown for grown, _ in report.buckets.values())
        return report.pool_bytes, seconds

    assert len(SIXTEEN.buckets) == 16
    alone, _ = capture(BucketPolicy(sizes=[SIXTEEN.largest]))
    every, seconds = capture(SIXTEEN)
    assert alone > 0
    assert every <= 1.1 * alone
    assert seconds < 10


@pytest.mark.gpu
@pytest.mark.parametrize("pool", ["shared", "dedicated"])
def test_a_second_capture_replaces_the_first(pool: str) -> None:
    world = make_world("transformer", "cuda", executor="cuda_graph", pool=pool)
    batch = world.batches().draw(5)
    expected = world.runner.replay(batch, clone=True)
    reserved = []
    for _ in range(4):
        world.runner.capture()
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
        assert output_difference(world.runner.replay(batch), expected) is None
    assert reserved[-1] == reserved[0]
    with_graphs = reserved[-1]
    world.runner.release()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < with_graphs
