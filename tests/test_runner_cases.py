"""Faults of draft graph runners that people met in production, under the ids of the collection of public reports."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from draft_oracle import HashOracle
from dsv4_bench.draft_models import WindowMetadata
from dsv4_bench.draft_world import output_difference
from dsv4_graph_runner import BucketPolicy, DraftOutput, EagleDraftGraphRunner, split_draft_out_cache_loc, swapped
from runners import SpyModel, each_executor, make_batch, make_world, snapshot, spy_runner

NINE = list(range(100, 109))


def test_reference_failure_reaches_the_steps_by_step() -> None:
    """3 requests in a bucket of 4, 3 steps: 9 slots padded to 12."""
    padded = torch.tensor([10, 11, 12, 20, 21, 22, 30, 31, 32, 0, 0, 0])
    assert split_draft_out_cache_loc(padded, 4, 1, 3).tolist() == [[10, 20, 30, 0], [11, 21, 31, 0], [12, 22, 32, 0]]
    model = SpyModel()
    runner, _ = spy_runner(make_world(), model)
    runner.replay(make_batch([7, 8, 9], slots=padded[:9].tolist()))
    assert model.values("slots") == [[10, 20, 30, 0], [11, 21, 31, 0]]


def test_b44_the_provider_is_shown_the_padded_batch() -> None:
    model = SpyModel()
    runner, spy = spy_runner(make_world(), model)
    runner.replay(make_batch([7, 8, 9], slots=NINE))
    (seen,) = spy.seen
    assert (seen["batch_size"], seen["raw_batch_size"], len(seen["out_cache_loc"])) == (4, 3, 12)
    assert split_draft_out_cache_loc(torch.tensor(seen["out_cache_loc"]), 4, 1, 3).tolist() == [
        [100, 103, 106, 0],
        [101, 104, 107, 0],
        [102, 105, 108, 0],
    ]
    assert (seen["seq_lens"], seen["seq_lens_cpu"]) == ([7, 8, 9, 1], [7, 8, 9, 1])
    assert (seen["req_pool_indices"], seen["positions"]) == ([1, 2, 3, 0], [7, 8, 9, 0])
    assert model.values("positions") == [[7, 8, 9, 0], [8, 9, 10, 1]]


@each_executor
def test_b44_only_the_right_slots_are_written(executor: str, device: str) -> None:
    world = make_world(device=device, executor=executor, sizes=(1, 2, 4, 8))
    batch = world.batches().draw(3)
    (cache,) = world.pool.tensors()
    cache.fill_(-1)
    world.runner.replay(batch)
    written = {slot for slot in range(world.pool.num_slots) if int(cache[world.pool.row_of_slot[slot]]) != -1}
    slots = batch.out_cache_loc.view(3, 3)
    assert written == {0, *slots[:, :2].flatten().tolist()}  # the last step only samples


@each_executor
@pytest.mark.parametrize("size", [3, 5])
def test_b45_the_same_slices_without_graphs(executor: str, device: str, size: int) -> None:
    """5 is beyond the largest bucket; every batch is drafted as by the definition, with a graph and without."""
    world = make_world(device=device, executor=executor, sizes=(1, 2, 4))
    batch = world.batches().draw(size)
    expected = HashOracle(world.table, world.model.vocab_size).drafts(batch, 3)
    out = world.runner.replay(batch)
    assert out.draft_tokens.tolist() == expected
    assert (out.fallback_reason is None) == (size <= 4)


def test_b45_slices_beyond_the_largest_bucket() -> None:
    model = SpyModel()
    runner, _ = spy_runner(make_world(), model, sizes=(1, 2, 4))
    out = runner.replay(make_batch([7, 8, 9, 10, 11]))
    assert model.values("slots") == [[100, 103, 106, 109, 112], [101, 104, 107, 110, 113]]
    assert out.fallback_reason == "batch size 5: expected at most 4, the largest bucket"


@pytest.mark.parametrize("place", ["prepare_draft", "record_draft", "forward"])
def test_b46_sum_of_lengths_and_nothing_left_changed(place: str) -> None:
    model = SpyModel()
    runner, spy = spy_runner(make_world(), model, sizes=(4,))
    batch = make_batch([10, 11])
    before = snapshot(batch)
    runner.replay(batch)
    assert (spy.seen[0]["seq_lens"], spy.seen[0]["seq_lens_sum"]) == ([10, 11, 1, 1], 23)
    spy.fail_in, model.fail_at = place, len(model.calls) if place == "forward" else None
    with pytest.raises(RuntimeError, match=f"injected in {place}"):
        runner.replay(batch)
    spy.fail_in = model.fail_at = None
    for name, (value, content) in before.items():
        assert getattr(batch, name) is value
        assert content is None or getattr(batch, name).tolist() == content
    without = make_batch([10, 11], seq_lens_cpu=None)
    runner.replay(without)
    assert spy.seen[-1]["seq_lens_sum"] is None
    assert without.seq_lens_cpu is None
    assert runner.replay(batch).draft_tokens.tolist() == [[5, 15, 15], [6, 15, 15]]


@pytest.mark.parametrize("fails", [False, True])
def test_b46_an_engine_object_is_restored_whatever_happens(fails: bool) -> None:
    """A provider may only know an engine's own batch: it is swapped, and every field is the same object again."""
    engine = types.SimpleNamespace(batch_size=2, seq_lens=torch.tensor([10, 11]), seq_lens_sum=21, spec_info=object())
    before = dict(vars(engine))
    try:
        with swapped(engine, batch_size=4, seq_lens=torch.tensor([10, 11, 1, 1]), seq_lens_sum=23, padding=2):
            assert (engine.batch_size, engine.seq_lens_sum, engine.padding) == (4, 23, 2)
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert vars(engine).keys() == before.keys()
    assert all(vars(engine)[name] is value for name, value in before.items())


@each_executor
def test_b47_every_padded_input_is_reset_on_every_replay(executor: str, device: str) -> None:
    world = make_world(device=device, executor=executor, sizes=(1, 2, 4, 8))
    runner, spy = spy_runner(world)
    make = world.batches()
    for size, bucket in ((8, 8), (5, 8), (3, 4), (1, 1), (6, 8), (2, 2)):
        batch = make.draw(size)
        world.pool.clear()
        expected = HashOracle(world.table, world.model.vocab_size).drafts(batch, 3)
        runner.poison_padding()
        assert runner.replay(batch).draft_tokens.tolist() == expected
        seen = spy.seen[-1]
        assert seen["batch_size"] == bucket
        for name, lanes, pad in (
            ("req_pool_indices", 1, 0),
            ("seq_lens", 1, 1),
            ("seq_lens_cpu", 1, 1),
            ("positions", 1, 0),
            ("out_cache_loc", 3, 0),
            ("topk_index", 1, [0]),
            ("topk_p", 1, [0.0]),
            ("hidden_states", 1, [0.0] * 128),
        ):
            assert seen[name][size * lanes :] == [pad] * ((bucket - size) * lanes), name


def test_b50_branches_in_the_slot_list_and_their_refusal() -> None:
    slots = torch.arange(100, 112)
    assert split_draft_out_cache_loc(slots, 2, 2, 3).tolist() == [
        [100, 103, 106, 109],
        [101, 104, 107, 110],
        [102, 105, 108, 111],
    ]
    world = make_world()
    with pytest.raises(ValueError, match="topk: expected 1, got 2; drafts are chains here, since the branches"):
        EagleDraftGraphRunner(
            world.model,
            world.metadata,
            num_steps=3,
            topk=2,
            hidden_size=128,
            hidden_dtype=torch.float32,
            buckets=BucketPolicy(max_batch_size=4),
            device="cpu",
        )


@each_executor
def test_b51_a_shrinking_batch_over_graphs_and_without(executor: str, device: str) -> None:
    """Window slots are far fewer than positions; 32 and 16 have no bucket. The pool is small: a wrong slot raises."""
    world = make_world(device=device, executor=executor, sizes=(1, 2, 4, 8), num_requests=40, max_len=5000)
    oracle = HashOracle(world.table, world.model.vocab_size)
    assert world.pool.num_slots < world.table.max_len
    make = world.batches()
    for size in (32, 16, 8, 7, 6, 5, 4, 3, 2, 1, 16, 8):
        batch = make.draw(size)
        out = world.runner.replay(batch)
        assert out.draft_tokens.tolist() == oracle.drafts(batch, 3), f"batch size {size}"
        assert (out.fallback_reason is None) == (size <= 8)
    world.pool.check()


@pytest.mark.parametrize(("largest", "runs", "not_any_more"), [(12, (9, 12), 13), (20, (13, 20), 21)])
def test_b53_the_largest_batch_has_a_graph(largest: int, runs: tuple[int, ...], not_any_more: int) -> None:
    world = make_world(sizes=largest)
    buckets = world.runner.buckets.buckets
    assert largest in buckets
    assert list(buckets) == sorted(set(buckets))
    assert buckets[0] > 0
    make = world.batches()
    for size in runs:
        assert world.runner.can_run(make.draw(size)) == (True, "")
    ok, reason = world.runner.can_run(make.draw(not_any_more))
    assert not ok
    assert f"batch size {not_any_more}: expected at most {largest}" in reason
    out = world.runner.replay(make.draw(not_any_more))
    assert out.fallback_reason == reason
    assert out.draft_tokens.shape == (not_any_more, 3)


def test_b56_rows_of_the_output_belong_to_live_lanes_only() -> None:
    """Accept lengths are no input of a draft loop; the nearest thing here: nobody's row is read for an idle lane."""
    world = make_world()
    batch = world.batches().draw(3)
    out = world.runner.replay(batch)
    assert out.draft_tokens.shape == out.parents.shape == out.scores.shape == (3, 3)
    assert out.parents.tolist() == [[-1, 0, 1]] * 3
    idle = world.runner.replay(world.batches().draw(0))
    assert idle.draft_tokens.shape == (0, 3)


class WindowOnly(WindowMetadata):
    """Raises for anything but window metadata, and for a step that runs no forward."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("c4", "c128")):
            pytest.fail(f"asked for {name}")
        raise AttributeError(name)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_b58_nothing_is_prepared_for_the_last_step(num_steps: int) -> None:
    world = make_world(num_steps=num_steps)
    model = SpyModel()
    provider = WindowOnly(world.table, 8, num_steps)
    world_of_spy = make_world(num_steps=num_steps)
    object.__setattr__(world_of_spy, "metadata", provider)
    runner, spy = spy_runner(world_of_spy, model)
    out = runner.replay(make_batch([4, 5, 6], num_steps=num_steps))
    assert len(model.calls) == num_steps - 1
    assert len({id(call["metadata"]) for call in model.calls}) == num_steps - 1
    assert len(spy.seen) == (num_steps > 1)
    assert isinstance(out, DraftOutput)
    without = runner.replay(make_batch([4] * 9, num_steps=num_steps))
    assert without.fallback_reason
    assert output_difference(out.clone(), out) is None
    assert len(model.calls) == 2 * (num_steps - 1)
