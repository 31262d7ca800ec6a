"""Several ranks: one bucket for all, an idle rank among busy ones, and a refusal that none of them waits for."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from draft_oracle import HashOracle
from dsv4_bench.draft_models import HashDraft
from dsv4_bench.draft_world import DraftWorld
from dsv4_graph_runner import BucketPolicy, EagleDraftGraphRunner
from runners import SpyMetadata, make_batch

RANKS = 2
STEPS = 3


class RankedDraft:
    """A draft model that adds up lane counts over all ranks at every forward: unequal shapes or counts would show."""

    def __init__(self, inner: HashDraft, group: Any) -> None:
        self._inner, self._group = inner, group
        self.lanes: list[torch.Tensor] = []

    def forward(self, ids: Any, hidden: Any, positions: Any, slots: Any, step: Any) -> Any:
        total = torch.ones_like(ids)  # a collective of the bucket's size
        dist.all_reduce(total, group=self._group)
        logits, hidden = self._inner.forward(ids, hidden, positions, slots, step)
        self.lanes.append(total)
        return logits * (total == RANKS)[:, None], hidden


def run_rank(rank: int, backend: str, device_type: str, port: int, results: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=rank, world_size=RANKS)
    try:
        check_rank(rank, device)
        Path(results, f"rank{rank}").write_text("done")
    finally:
        dist.destroy_process_group()


def check_rank(rank: int, device: torch.device) -> None:
    group = dist.group.WORLD
    policy = BucketPolicy(max_batch_size=7, multiple=2)
    assert policy.buckets == (2, 4, 8)
    world = DraftWorld.make("hash", device, policy, num_requests=20)
    spy = SpyMetadata(world.metadata)
    model = RankedDraft(world.model, group)

    def make_runner(**changed: Any) -> EagleDraftGraphRunner:
        arguments = dict(
            num_steps=STEPS, hidden_size=128, hidden_dtype=torch.float32, buckets=policy, device=device, group=group
        )
        return EagleDraftGraphRunner(model, spy, **(arguments | changed))

    runner = make_runner()
    runner.capture()
    spy.seen.clear()
    oracle = HashOracle(world.table, world.model.vocab_size)
    make = world.batches(seed=rank)
    # Sizes of both ranks, and the bucket: idle ranks, the largest, one above it, and both idle.
    for sizes, bucket in (((3, 1), 4), ((0, 2), 2), ((5, 0), 8), ((2, 2), 2), ((9, 1), None), ((0, 0), 0), ((1, 8), 8)):
        batch = make.draw(sizes[rank])
        before = len(spy.seen)
        out = runner.replay(batch)
        assert out.draft_tokens.tolist() == oracle.drafts(batch, STEPS)
        assert (out.fallback_reason is None) == (bucket is not None)
        if bucket:
            assert (spy.seen[-1]["batch_size"], spy.seen[-1]["raw_batch_size"]) == (bucket, sizes[rank])
        else:
            assert len(spy.seen) == before
        if bucket is None and device.type == "cpu":
            assert model.lanes[-1].shape == (10,)  # padded to what all agreed on, aligned
    assert runner.can_run(make.draw((3, 0)[rank])) == (True, "")
    # The engine may know the size already.
    out = runner.replay(make.draw((1, 2)[rank]), group_batch_size=3)
    assert spy.seen[-1]["batch_size"] == 4
    # What one rank refuses, no rank starts.
    bad = make_batch([3], num_steps=2, device=str(device))
    with pytest.raises(ValueError, match=("slots for 3 steps, got slots for 2", "another rank refused")[rank]):
        runner.replay(bad if rank == 0 else make.draw(1))
    ok, reason = runner.can_run(bad if rank == 0 else make.draw(1))
    assert not ok
    assert "refused" in reason or "slots for 2" in reason
    different = make_runner(buckets=BucketPolicy(sizes=[(2, 4), (2, 6)][rank]))
    with pytest.raises(ValueError, match="buckets, num_steps: expected the same on every rank, got"):
        different.capture()
    fewer = make_runner(buckets=BucketPolicy(sizes=[(2, 4), (2,)][rank]))
    with pytest.raises(ValueError, match="buckets, num_steps: expected the same on every rank, got"):
        fewer.capture()
    batch = make.draw((2, 1)[rank])
    assert runner.replay(batch).draft_tokens.shape == (batch.batch_size, STEPS)
    runner.release()


def spawn(backend: str, device_type: str, results: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run_rank, args=(backend, device_type, port, str(results)), nprocs=RANKS)
    assert {path.name for path in results.iterdir()} == {f"rank{rank}" for rank in range(RANKS)}


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
def test_two_gloo_ranks_on_a_cpu(tmp_path: Path) -> None:
    spawn("gloo", "cpu", tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="fewer than two GPUs")
def test_two_nccl_ranks(tmp_path: Path) -> None:
    spawn("nccl", "cuda", tmp_path)
