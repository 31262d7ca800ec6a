"""The runner's suite of `dsv4 capture-test`: every bucket and padding against an eager twin, poison, and races."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch

from dsv4_bench.capture_case import CaptureCase, CaptureOptions, Difference
from dsv4_bench.draft_world import MODELS, DraftWorld, memory_difference, output_difference
from dsv4_graph_runner import BucketPolicy, check_lane_poison

LARGEST = 12
STEPS = (1, 2, 3, 5)
POOLS = ("shared", "dedicated")
MAX_LEN = 100_000


def cases(options: CaptureOptions) -> list[CaptureCase]:
    found: list[CaptureCase] = []

    def add(name: str, check: Callable[[int], int]) -> None:
        found.append(CaptureCase(name, check))

    for model in MODELS:
        for num_steps in STEPS:
            for pool in POOLS:
                add(f"walk-{model}-steps{num_steps}-{pool}", partial(_walk, options, model, num_steps, pool))
            add(f"poison-{model}-steps{num_steps}", partial(_poison, options, model, num_steps))
        add(f"recapture-{model}", partial(_recapture, options, model))
        for pool in POOLS:
            add(f"back-to-back-{model}-{pool}", partial(_back_to_back, options, model, pool))
    return found


def _world(options: CaptureOptions, model: str, num_steps: int, pool: str = "shared", twin: bool = False) -> DraftWorld:
    """A captured world, or the twin that it is compared with, which runs the same batches without graphs."""
    world = DraftWorld.make(
        model,
        options.device,
        BucketPolicy(max_batch_size=LARGEST),
        num_steps=num_steps,
        pool=pool,
        max_len=MAX_LEN,
        executor="eager" if twin else options.executor,
        guard="off" if twin else "replay",
    )
    world.runner.capture()
    return world


def _walk(options: CaptureOptions, model: str, num_steps: int, pool: str, seed: int) -> int:
    """Every batch size twice, some above the largest bucket, in random order."""
    world = _world(options, model, num_steps, pool)
    twin = _world(options, model, num_steps, twin=True)
    sizes = [*range(LARGEST + 1), *range(LARGEST + 3)]
    random.Random(seed).shuffle(sizes)
    make = world.batches(seed)
    for i, size in enumerate(sizes):
        batch = make.draw(size)
        _expect_none(
            output_difference(world.runner.replay(batch), twin.runner.replay(batch)),
            f"replay {i} of a walk, batch size {size}",
        )
    _expect_none(memory_difference(world.pool, twin.pool), "the cache after a walk")
    world.pool.check()
    return len(sizes)


def _poison(options: CaptureOptions, model: str, num_steps: int, seed: int) -> int:
    """Every bucket, full and with padding."""
    world = _world(options, model, num_steps)
    make = world.batches(seed)
    sizes = sorted({size - less for size in world.runner.buckets.buckets for less in (0, 1)})
    for size in sizes:
        check_lane_poison(world.runner, make.draw(size), world.pool, world.pool.page_size)
    return 2 * len(sizes)


def _recapture(options: CaptureOptions, model: str, seed: int) -> int:
    """A second capture, between replays and beside another runner in the same pool, changes nothing."""
    worlds = [_world(options, model, num_steps) for num_steps in (3, 2)]
    twins = [_world(options, model, num_steps, twin=True) for num_steps in (3, 2)]
    makers = [world.batches(seed) for world in worlds]
    for again in (None, worlds[0], worlds[1], worlds[0]):
        if again is not None:
            again.runner.capture()
        for world, twin, make in zip(worlds, twins, makers, strict=True):
            batch = make.draw(5)
            _expect_none(
                output_difference(world.runner.replay(batch), twin.runner.replay(batch)), "a replay after a new capture"
            )
    return 8


def _back_to_back(options: CaptureOptions, model: str, pool: str, seed: int) -> int:
    """Two runners and all buckets in turn without waiting in between: what a race on shared memory would break."""
    worlds = [_world(options, model, 3, pool), _world(options, model, 5, pool)]
    twins = [_world(options, model, num_steps, twin=True) for num_steps in (3, 5)]
    rng = random.Random(seed)
    makers = [world.batches(seed) for world in worlds]
    batches = [[make.draw(rng.randint(0, LARGEST)) for make in makers] for _ in range(20)]
    if options.device.type == "cuda":
        torch.cuda.synchronize()
    drafts = [
        [world.runner.replay(batch, clone=True) for world, batch in zip(worlds, pair, strict=True)] for pair in batches
    ]
    for i, pair in enumerate(batches):
        for j, batch in enumerate(pair):
            _expect_none(
                output_difference(drafts[i][j], twins[j].runner.replay(batch)),
                f"replay {i} of runner {j}, back to back",
            )
    for world, twin in zip(worlds, twins, strict=True):
        _expect_none(memory_difference(world.pool, twin.pool), "the cache after replays back to back")
    return 2 * len(batches)


def _expect_none(difference: str | None, where: str) -> None:
    if difference is not None:
        raise Difference(f"{where}: {difference}")
