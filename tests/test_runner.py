"""The runner: graph and eager drafts by the definition, what it leaves alone, and what happens after an exception."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch

from draft_oracle import HashOracle
from dsv4_bench.draft_world import MODELS, DraftWorld, memory_difference, output_difference
from dsv4_graph_runner import BucketPolicy, DraftBatch, EagleDraftGraphRunner, GraphKey, TextBar
from runners import SpyModel, each_executor, make_batch, make_world, snapshot, spy_runner

STEPS = pytest.mark.parametrize("num_steps", [1, 2, 3, 6])


@each_executor
@STEPS
def test_drafts_by_the_definition(executor: str, device: str, num_steps: int) -> None:
    world = make_world(device=device, executor=executor, sizes=8, num_steps=num_steps)
    oracle = HashOracle(world.table, world.model.vocab_size)
    make = world.batches(seed=num_steps)
    for size in (8, 3, 1, 5, 0, 8, 7, 2, 4, 6):
        batch = make.draw(size)
        out = world.runner.replay(batch)
        assert out.draft_tokens.tolist() == oracle.drafts(batch, num_steps)
        assert out.parents.tolist() == [list(range(-1, num_steps - 1))] * size
    world.pool.check()


def walk(device: str, executor: str, model: str, replays: int, max_len: int, largest: int) -> None:
    """A runner and its eager twin over one walk of batch sizes: bit for bit the same drafts, and the same cache."""
    options: dict[str, Any] = dict(max_len=max_len, num_requests=largest, sizes=largest)
    world = make_world(model, device, executor=executor, **options)
    twin = make_world(model, device, executor="eager", **options)
    make, rng = world.batches(seed=3), random.Random(3)
    for i in range(replays):
        batch = make.draw(rng.randint(0, largest))
        difference = output_difference(world.runner.replay(batch), twin.runner.replay(batch))
        assert difference is None, f"replay {i}, batch size {batch.batch_size}: {difference}"
    assert memory_difference(world.pool, twin.pool) is None
    world.pool.check()


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_a_thousand_replays_equal_eager(model: str) -> None:
    walk("cuda", "cuda_graph", model, 1000, 1_000_000, 20)


@pytest.mark.parametrize("model", MODELS)
def test_a_walk_on_the_cpu(model: str) -> None:
    walk("cpu", "eager", model, 40, 1_000_000, 4)


@pytest.mark.parametrize("model", MODELS)
def test_padding_does_not_show_in_live_lanes(model: str) -> None:
    """Against a run of the exact size: exactly for integers; the transformer's products may round differently."""
    world = make_world(model, sizes=(8,))
    exact = make_world(model, sizes=(1, 2, 3, 4, 5, 6, 7, 8))
    make = world.batches()
    for size in (8, 5, 3, 1):
        batch = make.draw(size)
        padded, own = world.runner.replay(batch), exact.runner.replay(batch)
        assert torch.equal(padded.draft_tokens, own.draft_tokens)
        torch.testing.assert_close(padded.scores, own.scores, rtol=1e-5, atol=1e-7)


@each_executor
def test_scores_are_products_of_probabilities(executor: str, device: str) -> None:
    world = make_world(device=device, executor=executor)
    batch = world.batches().draw(5)
    out = world.runner.replay(batch)
    sure = float(torch.softmax(torch.tensor([4.0] + [0.0] * (world.model.vocab_size - 1)), 0)[0])
    first = batch.topk_p.cpu()
    expected = torch.cat((first, first * sure, first * sure * sure), dim=1)
    torch.testing.assert_close(out.scores.cpu(), expected, rtol=1e-5, atol=0)


@each_executor
def test_other_dtypes_and_strides_are_converted(executor: str, device: str) -> None:
    world = make_world(device=device, executor=executor)
    batch = world.batches().draw(5)
    expected = world.runner.replay(batch, clone=True)
    narrow = {
        name: getattr(batch, name).to(torch.int32)
        for name in ("req_pool_indices", "seq_lens", "positions", "out_cache_loc", "topk_index", "seq_lens_cpu")
    }
    fields = dict(vars(batch)) | narrow
    assert output_difference(world.runner.replay(DraftBatch(**fields)), expected) is None
    strided = {
        name: torch.stack((value, value + 1), dim=1)[:, 0]
        if value.ndim == 1
        else value.repeat(1, 2)[:, : value.shape[1]]
        for name, value in vars(batch).items()
        if isinstance(value, torch.Tensor)
    }
    assert not strided["seq_lens"].is_contiguous()
    assert output_difference(world.runner.replay(DraftBatch(**strided)), expected) is None
    half = DraftBatch(**(vars(batch) | {"topk_p": batch.topk_p.to(torch.bfloat16)}))
    rounded = batch.topk_p.to(torch.bfloat16).float()
    assert torch.equal(world.runner.replay(half).scores[:, :1], rounded)


@each_executor
def test_the_batch_is_never_changed(executor: str, device: str) -> None:
    world = make_world(device=device, executor=executor, sizes=(1, 2, 4))
    for size in (4, 3, 6):
        batch = world.batches().draw(size)
        before = snapshot(batch)
        world.runner.replay(batch)
        for name, (value, content) in before.items():
            assert getattr(batch, name) is value
            assert content is None or value.tolist() == content


@each_executor
def test_capturing_leaves_all_but_slot_zero(executor: str, device: str) -> None:
    for model in MODELS:
        world = make_world(model, device, executor=executor)
        for tensor in world.pool.tensors():
            tensor[:] = torch.arange(tensor.numel(), device=device).view(tensor.shape)
        before = [tensor.clone() for tensor in world.pool.tensors()]
        world.runner.capture()
        world.runner.capture()
        zero = int(world.pool.row_of_slot[0])
        for tensor, original in zip(world.pool.tensors(), before, strict=True):
            changed = (tensor != original).any(1).nonzero().flatten().tolist()
            assert changed in ([], [zero])


@each_executor
def test_outputs_last_until_the_next_replay_or_longer(executor: str, device: str) -> None:
    world = make_world(device=device, executor=executor)
    make = world.batches()
    view, kept = world.runner.replay(make.draw(4)), world.runner.replay(make.draw(4), clone=True)
    content = kept.draft_tokens.tolist()
    last = world.runner.replay(make.draw(4))
    assert last.draft_tokens.data_ptr() == view.draft_tokens.data_ptr() != kept.draft_tokens.data_ptr()
    assert kept.draft_tokens.tolist() == content != last.draft_tokens.tolist()


@each_executor
@pytest.mark.parametrize("place", ["prepare_draft", "forward", "replay", "build_draft", "after"])
def test_the_next_replay_is_right_after_an_exception(
    executor: str, device: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(device=device, executor=executor, sizes=(1, 2, 4))
    runner, spy = spy_runner(world, sizes=(1, 2, 4))
    make = world.batches()
    fallback = place in ("build_draft", "forward")  # in a graph, a forward can only raise where there is none
    batch = make.draw(6 if fallback else 3)
    before = snapshot(batch)

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError(f"injected in {place}")

    with monkeypatch.context() as patch:
        if place == "forward":
            patch.setattr(world.model, "forward", broken)
        elif place == "replay":
            for key, recorded in runner._recorded.items():
                patch.setitem(runner._recorded, key, type(recorded)(recorded.inputs, recorded.steps, broken, None))
        elif place == "after":
            patch.setattr(runner._buffers, "output", broken)
        else:
            spy.fail_in = place
        with pytest.raises(RuntimeError, match=f"injected in {place}"):
            runner.replay(batch)
    spy.fail_in = None
    assert all(getattr(batch, name) is value for name, (value, _) in before.items())
    world.pool.clear()
    oracle = HashOracle(world.table, world.model.vocab_size)
    for size in (3, 6, 2, 4):
        batch = make.draw(size)
        assert runner.replay(batch).draft_tokens.tolist() == oracle.drafts(batch, 3)


@each_executor
@pytest.mark.parametrize("place", ["bind_draft", "record_draft", "forward"])
def test_a_failed_capture_leaves_nothing_and_can_be_repeated(executor: str, device: str, place: str) -> None:
    world = make_world(device=device, executor=executor, sizes=(2, 4))
    runner, spy = spy_runner(world, sizes=(2, 4))
    batch = world.batches().draw(3)
    expected = runner.replay(batch, clone=True)
    model, forward = world.model, world.model.forward
    if place == "forward":
        model.forward = lambda *args: pytest.fail("never called") if len(args) != 5 else _raise(place)
    else:
        spy.fail_in = place
    with pytest.raises(RuntimeError, match=f"injected in {place}"):
        runner.capture()
    model.forward, spy.fail_in = forward, None
    assert runner.can_run(batch) == (False, "no graph: expected capture() to have run")
    world.pool.clear()
    assert runner.replay(batch, clone=True).fallback_reason == "no graph: expected capture() to have run"
    runner.capture()
    world.pool.clear()
    assert output_difference(runner.replay(batch), expected) is None


def _raise(place: str) -> None:
    raise RuntimeError(f"injected in {place}")


def test_buckets_are_captured_largest_first_and_reported() -> None:
    world = make_world(sizes=12)
    seen: list[tuple[int, int, str]] = []
    report = world.runner.capture(progress=lambda *what: seen.append(what))
    assert [key.batch_size for key in report.buckets] == [12, 8, 4, 2, 1]
    assert next(iter(report.buckets)) == GraphKey(12, 1, 3, "")
    assert seen[0] == (0, 5, "batch size 12")
    assert seen[-1] == (5, 5, "")
    assert report.executor == "eager"
    assert report.seconds >= sum(seconds for _, seconds in report.buckets.values())


def test_text_bar_writes_to_terminals_only() -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        bar = TextBar(stream, width=4)
        bar(1, 2, "batch size 4")
        bar(2, 2, "")
    assert file.getvalue() == ""
    assert "[##..] 1/2 batch size 4" in terminal.getvalue()
    assert terminal.getvalue().endswith("[####] 2/2 \n")


def test_variants_have_graphs_of_their_own() -> None:
    world = make_world()
    one, two = SpyModel(vocab_size=16), SpyModel(vocab_size=32)
    runner, _ = spy_runner(world, {"one": one, "two": two}, sizes=(4,))
    assert [key.variant for key in runner.capture().buckets] == ["one", "two"]
    for name, last in (("one", 15), ("two", 31), ("one", 15)):
        batch = make_batch([3, 4, 5], variant=name)
        assert runner.replay(batch).draft_tokens[:, 1:].tolist() == [[last, last]] * 3
    ok, reason = runner.can_run(make_batch([3]))
    assert (ok, reason) == (False, "variant: expected one of ['one', 'two'], got ''")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (object(), "batch: expected a DraftBatch, got object"),
        (make_batch([3, 4], num_steps=2), "out_cache_loc: expected slots for 3 steps, got slots for 2"),
        (make_batch([3, 4], hidden_size=64), r"hidden_states: expected torch.float32 \[B, 128\], got .*\[2, 64\]"),
        (
            make_batch([3, 4], hidden_states=torch.zeros(2, 128, dtype=torch.bfloat16)),
            "expected torch.float32 .*, got torch.bfloat16",
        ),
        (
            make_batch(
                [3, 4],
                num_steps=6,
                topk_p=torch.zeros(2, 2),
                topk_index=torch.zeros(2, 2).long(),
                positions=torch.arange(4),
            ),
            "topk_p: expected 1 column, got 2",
        ),
        (make_batch([3, 4], positions=torch.zeros(2, device="meta").long()), "positions: expected a tensor on cpu"),
    ],
    ids=["type", "steps", "hidden size", "hidden dtype", "topk", "device"],
)
def test_a_batch_of_another_kind_is_refused(batch: Any, message: str) -> None:
    world = make_world()
    with pytest.raises(ValueError, match=message):
        world.runner.replay(batch)
    ok, reason = world.runner.can_run(batch)
    assert not ok
    assert reason


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_steps": 0}, "num_steps: expected an int of at least 1, got 0"),
        ({"hidden_size": 0}, "hidden_size: expected an int of at least 1, got 0"),
        ({"hidden_dtype": torch.int64}, "hidden_dtype: expected a floating-point torch.dtype"),
        ({"buckets": [1, 2]}, "buckets: expected a BucketPolicy, got list"),
        ({"pool": "private"}, "pool: expected one of .*, got 'private'"),
        ({"guard": True}, "guard: expected one of .*, got True"),
        ({"executor": "graph"}, "executor: expected one of .*, got 'graph'"),
        ({"executor": "cuda_graph"}, "executor: expected a CUDA device for 'cuda_graph', got cpu"),
        ({"draft_model": object()}, "draft_model: expected the method of DraftModel, got object"),
        ({"draft_model": {}}, "draft_model: expected at least one variant, got none"),
        ({"metadata": object()}, "metadata: expected the methods of MetadataProvider, got object"),
    ],
)
def test_construction_refuses(changed: dict[str, Any], message: str) -> None:
    world = DraftWorld.make("hash", "cpu", BucketPolicy(max_batch_size=2))
    arguments: dict[str, Any] = dict(
        draft_model=world.model,
        metadata=world.metadata,
        num_steps=3,
        hidden_size=128,
        hidden_dtype=torch.float32,
        buckets=BucketPolicy(max_batch_size=2),
        device="cpu",
    )
    with pytest.raises(ValueError, match=message):
        EagleDraftGraphRunner(**(arguments | changed))


def test_a_model_that_returns_the_wrong_shape_is_refused_at_capture() -> None:
    world = make_world()

    class Short(SpyModel):
        def forward(self, *args: Any) -> Any:
            logits, hidden = super().forward(*args)
            return logits[:1], hidden

    with pytest.raises(ValueError, match=r"draft_model: expected logits \[4, vocab\], got \[1, 16\]"):
        spy_runner(world, Short(), sizes=(4,))
    with pytest.raises(ValueError, match=r"draft_model: expected hidden states \[4, 128\], got \[4, 64\]"):
        spy_runner(world, SpyModel(hidden_size=64), sizes=(4,))


def test_a_provider_with_too_few_steps_is_refused_at_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world()
    monkeypatch.setattr(world.metadata, "bind_draft", lambda inputs: [object()])
    with pytest.raises(ValueError, match="metadata: expected 2 objects, one a step that runs a forward, got 1"):
        world.runner.capture()


@each_executor
def test_an_agreed_size_decides_the_bucket(executor: str, device: str) -> None:
    world = make_world(device=device, executor=executor, sizes=(2, 4, 8))
    runner, spy = spy_runner(world, sizes=(2, 4, 8))
    make = world.batches()
    for size, agreed, bucket in ((1, 5, 8), (0, 3, 4), (2, 2, 2), (0, 1, 2)):
        batch = make.draw(size)
        out = runner.replay(batch, group_batch_size=agreed)
        assert (spy.seen[-1]["batch_size"], spy.seen[-1]["raw_batch_size"]) == (bucket, size)
        assert out.draft_tokens.shape == (size, 3)
    idle = make.draw(0)
    launches = len(spy.seen)
    assert runner.replay(idle).draft_tokens.shape == (0, 3)
    assert len(spy.seen) == launches
    out = runner.replay(make.draw(1), group_batch_size=9)
    assert out.fallback_reason == "batch size 9: expected at most 8, the largest bucket"
    assert out.draft_tokens.shape == (1, 3)
    for wrong in (2, 4.0):
        with pytest.raises(ValueError, match=f"group_batch_size: expected an int, at least this rank's 3, got {wrong}"):
            runner.replay(make.draw(3), group_batch_size=wrong)


@each_executor
@pytest.mark.parametrize("inside", [(False, True), (True, False)], ids=["made outside", "made inside"])
def test_inference_mode_and_weights_that_want_gradients(executor: str, device: str, inside: tuple[bool, bool]) -> None:
    world = DraftWorld.make("transformer", device, BucketPolicy(max_batch_size=4), executor=executor)
    world.model.requires_grad_(True)
    batch = world.batches().draw(3)
    with torch.inference_mode(inside[0]):
        runner, _ = spy_runner(world, sizes=(4,))
    with torch.inference_mode(inside[1]):
        first = runner.replay(batch, clone=True)
    wants = DraftBatch(**(vars(batch) | {"topk_p": batch.topk_p.clone().requires_grad_(True)}))
    again = runner.replay(wants)
    assert not again.scores.requires_grad
    assert output_difference(again, first) is None


def test_a_runner_is_freed_with_its_last_reference() -> None:
    world = make_world()
    gone = weakref.ref(world.runner)
    del world
    gc.collect()
    assert gone() is None
