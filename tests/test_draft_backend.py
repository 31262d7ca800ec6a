"""The backend of window-only drafts: what the graph runner asks of it, and what a draft step then sees and stores."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from backend_harness import Lane, World, close, each_executor, same_bits
from dsv4_backend import AttnMetadata, DSV4DraftBackend, ForwardMode
from dsv4_backend.reference.kv_store import load_entries
from dsv4_graph_runner import BucketPolicy, DraftBatch, DraftOutput, EagleDraftGraphRunner, MetadataProvider

DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
STEPS = 4
METHODS = ("bind_draft", "build_draft", "draft_fingerprint", "prepare_draft", "record_draft")
each_window = pytest.mark.parametrize("draft_window", ["growing", "frozen"])


class Draft:
    """The first layers of a world's model, with its embedding as the head; keeps the metadata of its last steps."""

    def __init__(self, world: World, backend: DSV4DraftBackend, layers: int) -> None:
        self.world, self.backend, self.layers = world, backend, layers
        self.metas: list[AttnMetadata] = []

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        out_cache_loc: torch.Tensor,
        metadata: AttnMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.metas = [*self.metas[-(STEPS - 2) :], metadata]
        x = self.world.embedding[input_ids]
        for index in range(self.layers):
            x = x + self.backend.attend(index, self.world.layers[index], x, metadata)
        return x @ self.world.embedding.T, x


class Drafting:
    """A world whose model drafts for itself."""

    def __init__(
        self,
        impl: str,
        device: str,
        executor: str,
        draft_window: str,
        *,
        ratios: tuple[int, ...] = (0, 0),
        layers: int = 2,
        sizes: tuple[int, ...] = (1, 2, 4),
    ) -> None:
        self.world = World(impl, device, ratios=ratios)
        self.backend = self.world.new_draft_backend(impl, draft_window=draft_window)
        self.draft = Draft(self.world, self.backend, layers)
        self.runner = EagleDraftGraphRunner(
            self.draft,
            self.backend,
            num_steps=STEPS,
            hidden_size=self.world.cfg.hidden_size,
            hidden_dtype=torch.float32,
            buckets=BucketPolicy(sizes=sizes),
            device=self.world.device,
            executor=executor,
            guard="capture" if executor == "cuda_graph" else "off",
        )
        self.runner.capture()

    def batch(self, lanes: list[Lane]) -> DraftBatch:
        """The first draft token is the request's own next one."""
        slots = []
        for lane in lanes:
            self.world.pool.grow(lane.row, lane.length + STEPS)
            slots.append(torch.from_numpy(self.world.pool.slots(lane.row, lane.length, lane.length + STEPS).copy()))
        self.world.mirror.refresh()
        device, size = self.world.device, len(lanes)
        lengths = torch.tensor([lane.length for lane in lanes]).to(device)
        return DraftBatch(
            req_pool_indices=torch.tensor([lane.row for lane in lanes]).to(device),
            seq_lens=lengths,
            positions=lengths.clone(),
            out_cache_loc=torch.cat(slots).long().to(device),
            topk_p=torch.ones((size, 1), device=device),
            topk_index=torch.stack([lane.tokens[lane.length] for lane in lanes])[:, None].to(device),
            hidden_states=torch.zeros((size, self.world.cfg.hidden_size), device=device),
        )

    def lanes(self, lengths: list[int]) -> list[Lane]:
        lanes = [self.world.open() for _ in lengths]
        self.world.extend(dict(zip(lanes, lengths, strict=True)))
        return lanes


@pytest.fixture
def restored_sync_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@each_executor
def test_a_model_that_drafts_for_itself_is_right(impl: str, device: str, executor: str) -> None:
    """With a growing window a draft step is a decode step: the chain is what decoding token by token gives."""
    it, twin = Drafting(impl, device, executor, "growing"), World(impl, device, ratios=(0, 0))
    lanes = it.lanes([5, 63, 130])
    twins = [twin.open() for _ in lanes]
    twin.extend({mine: lane.length for mine, lane in zip(twins, lanes, strict=True)})
    drafted = it.runner.replay(it.batch(lanes))
    assert drafted.fallback_reason is None
    tokens = [[int(lane.tokens[lane.length])] for lane in lanes]
    for _ in range(STEPS - 1):
        for lane, chain in zip(twins, tokens, strict=True):
            lane.tokens[lane.length] = chain[-1]
        hidden = twin.eager(*twin.batch(DECODE, dict.fromkeys(twins, 1)))
        twin.commit(dict.fromkeys(twins, 1))
        for chain, token in zip(tokens, (hidden @ twin.embedding.T).argmax(dim=1).tolist(), strict=True):
            chain.append(token)
    assert drafted.draft_tokens.tolist() == tokens
    it.backend.check()


@each_executor
@each_window
def test_what_a_step_is_told(impl: str, device: str, executor: str, draft_window: str) -> None:
    """Positions are the token's own in both windows; frozen, all else is that of the committed tokens."""
    it = Drafting(impl, device, executor, draft_window, sizes=(4,))
    lanes = it.lanes([3, 130, 16])
    batch = it.batch(lanes)
    it.runner.replay(batch)
    assert len(it.draft.metas) == STEPS - 1
    tables, window = it.world.mirror.tables, it.world.geom.window
    for i, meta in enumerate(it.draft.metas):
        assert meta.positions[:3].tolist() == [lane.length + i for lane in lanes]
        slots = batch.out_cache_loc.view(3, STEPS)[:, i]
        assert meta.raw_out_cache_loc.tolist() == [*slots.tolist(), 0]
        assert meta.swa_out_cache_loc.tolist() == [*tables.full_to_swa[slots].tolist(), 0]
        for row, lane in enumerate(lanes):
            seen = lane.length + (i + 1 if draft_window == "growing" else 0)
            places = torch.arange(seen - 1, max(-1, seen - 1 - window), -1, device=device)
            expected = tables.full_to_swa[tables.req_to_token[lane.row, places].long()].tolist()
            assert int(meta.seq_lens_causal[row]) == seen
            assert meta.swa_page_indices[row, : len(expected)].tolist() == expected
            assert (meta.swa_page_indices[row, len(expected) :] == -1).all()
        assert meta.plans is meta.c4_lengths is meta.c128_lengths is None
        assert meta.swa_lengths.tolist()[3] == 1


@each_executor
@each_window
def test_what_a_step_stores(impl: str, device: str, executor: str, draft_window: str) -> None:
    """The first layer's window entries of the drafted tokens, which depend on token and position alone."""
    it = Drafting(impl, device, executor, draft_window)
    lanes = it.lanes([9, 62])
    batch = it.batch(lanes)
    drafted = it.runner.replay(batch, clone=True).draft_tokens
    pool, tables = it.world.cache.layers[0].window, it.world.mirror.tables
    places = tables.full_to_swa[batch.out_cache_loc.view(2, STEPS)[:, : STEPS - 1].flatten()]
    found = load_entries(pool, places)
    for lane, chain in zip(lanes, drafted.tolist(), strict=True):
        lane.tokens[lane.length : lane.length + STEPS - 1] = torch.tensor(chain[:-1])
    it.world.extend(dict.fromkeys(lanes, STEPS - 1))
    assert close(found, load_entries(pool, places))
    assert not pool.data[: it.world.geom.swa_page_size].any()  # reserved


class Forgetful(Draft):
    """Keeps nothing of a step, which a guard would take for an address that has changed."""

    def forward(self, *step: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = super().forward(*step, **more)
        self.metas = []
        return out


@each_executor
@each_window
def test_other_buckets_change_no_address(impl: str, device: str, executor: str, draft_window: str) -> None:
    """So a guard that looks before each replay lets all buckets replay, of this runner and of another one."""
    it = Drafting(impl, device, executor, draft_window, sizes=(1,))
    places = it.backend.draft_fingerprint()
    runners = [
        EagleDraftGraphRunner(
            Forgetful(it.world, it.backend, 2),
            it.backend,
            num_steps=steps,
            hidden_size=it.world.cfg.hidden_size,
            hidden_dtype=torch.float32,
            buckets=BucketPolicy(sizes=(1, 2, 4)),
            device=it.world.device,
            executor=executor,
            guard="replay" if executor == "cuda_graph" else "off",
        )
        for steps in (STEPS, STEPS - 1)
    ]
    for runner in runners:
        runner.capture()
        assert it.backend.draft_fingerprint() == places
    lanes = it.lanes([3, 17, 64])
    for size in (1, 2, 3):
        assert runners[0].replay(it.batch(lanes[:size])).fallback_reason is None


def difference(got: DraftOutput, expected: DraftOutput) -> bool:
    return got.draft_tokens.tolist() != expected.draft_tokens.tolist() or not close(got.scores, expected.scores)


@each_executor
@each_window
def test_sizes_shrink_and_grow(impl: str, device: str, executor: str, draft_window: str) -> None:
    """In every bucket the drafts of a request are those it has alone, and the committed cache stays as it is."""
    it = Drafting(impl, device, executor, draft_window)
    lanes = it.lanes([3, 17, 64, 129, 40])
    places = it.backend.draft_fingerprint()
    alone = [it.runner.replay(it.batch([lane]), clone=True) for lane in lanes]
    for size in (4, 1, 3, 5, 2, 4):
        out = it.runner.replay(it.batch(lanes[:size]))
        assert (out.fallback_reason is None) == (size <= 4)
        for b in range(size):
            one = DraftOutput(out.draft_tokens[b : b + 1], out.parents[b : b + 1], out.scores[b : b + 1])
            assert not difference(one, alone[b])
    idle = DraftBatch.idle(it.world.cfg.hidden_size, torch.float32, it.world.device)
    assert it.runner.replay(idle, group_batch_size=2).draft_tokens.shape == (0, STEPS)
    assert it.backend.draft_fingerprint() == places
    it.backend.check()


@each_executor
@each_window
def test_drafts_in_the_targets_cache_leave_the_target_alone(
    impl: str, device: str, executor: str, draft_window: str
) -> None:
    """The draft has the target's first layer, and writes where verification then writes again."""
    it = Drafting(impl, device, executor, draft_window, ratios=(0, 4, 128), layers=1)
    twin = World(impl, device)
    lanes, twins = it.lanes([7, 126, 61]), [twin.open() for _ in range(3)]
    twin.extend({mine: lane.length for mine, lane in zip(twins, lanes, strict=True)})
    before = it.world.snapshot()
    drafts = it.runner.replay(it.batch(lanes)).draft_tokens.tolist()
    changed = {name for name, data in it.world.snapshot().items() if not torch.equal(data, before[name])}
    assert changed == {"0.window"}
    for lane, other, chain in zip(lanes, twins, drafts, strict=True):
        for each in (lane, other):
            each.tokens[each.length : each.length + STEPS] = torch.tensor(chain)
    outs = [
        world.eager(*world.batch(VERIFY, dict.fromkeys(mine, STEPS)))
        for world, mine in ((it.world, lanes), (twin, twins))
    ]
    assert torch.equal(*outs)
    assert same_bits(it.world.snapshot(), twin.snapshot())


@each_window
def test_draft_extend_fills_a_cache_of_its_own(draft_window: str) -> None:
    """A draft with its own cache: `prepare` serves the steps that store what the target has accepted."""
    world = World("torch", "cpu", ratios=(0,))
    backend = world.new_draft_backend("torch", draft_window=draft_window)
    lane = world.open()
    world.extend({lane: 20})
    batch, ids = world.batch(ForwardMode.DRAFT_EXTEND, {lane: 3})
    meta = backend.prepare(batch)
    assert meta.positions.tolist() == [20, 21, 22]
    found = backend.attend(0, world.layers[0], world.embedding[ids], meta)
    expected = world.eager(*world.batch(ForwardMode.EXTEND, {lane: 3})) - world.embedding[ids]
    assert close(found, expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("restored_sync_mode")
@each_window
def test_a_replay_never_waits(draft_window: str) -> None:
    it = Drafting("triton", "cuda", "cuda_graph", draft_window)
    batch = it.batch(it.lanes([5, 40, 130]))
    expected = it.runner.replay(batch, clone=True)
    torch.cuda.set_sync_debug_mode("error")
    out = it.runner.replay(batch)
    torch.cuda.set_sync_debug_mode("default")
    assert out.draft_tokens.tolist() == expected.draft_tokens.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_methods_take_what_the_runner_gives(method: str) -> None:
    asked, has = (inspect.signature(getattr(each, method)).parameters for each in (MetadataProvider, DSV4DraftBackend))
    assert [(p.name, p.kind, p.default) for p in has.values()] == [(p.name, p.kind, p.default) for p in asked.values()]


def test_it_is_a_provider_and_builds_window_metadata_alone() -> None:
    world = World("torch", "cpu")
    backend = world.new_draft_backend("torch")
    assert isinstance(backend, MetadataProvider)
    assert not isinstance(world.backend, MetadataProvider)
    assert backend.draft_window == "growing"
    assert backend.builder.ratios == ()
    lane = world.open()
    meta = backend.prepare(world.batch(DECODE, {lane: 1})[0])
    x = torch.zeros(1, world.cfg.hidden_size)
    for index in (1, 2):
        with pytest.raises(ValueError, match="meta: expected metadata with plans of ratio"):
            backend.attend(index, world.layers[index], x, meta)


def test_refusals() -> None:
    world = World("torch", "cpu")
    with pytest.raises(ValueError, match=r"draft_window: expected one of .* got 'moving'"):
        world.new_draft_backend("torch", draft_window="moving")
    with pytest.raises(ValueError, match="cache: expected a DSV4Cache, got NoneType"):
        DSV4DraftBackend(world.cfg, world.geom, None, world.mirror.tables)  # type: ignore[arg-type]
