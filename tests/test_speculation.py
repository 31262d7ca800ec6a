"""Speculation changes no token: with drafts of the target's first layers, and with drafts that are right or wrong at
will, while all that rejected drafts left in the cache is poisoned."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="no transformers with DeepSeek-V4")

from dsv4_backend import CacheSize
from dsv4_examples.hf_dsv4.scheduler import Step
from dsv4_examples.hf_dsv4.speculation import Speculator
from layout import ROOT
from speculation_harness import LENGTHS, LONGEST, Forced, Poisoned, Watched, World, entries, truth_of
from test_readme import blocks

DEVICES = [
    pytest.param(("torch", "cpu"), id="torch-cpu"),
    pytest.param(("triton", "cuda"), id="triton-cuda", marks=pytest.mark.gpu),
]
MANY = [LONGEST - 4 - index % 5 for index in range(len(LENGTHS))]
"""Tokens to generate: requests end in different steps, and at different places of them."""
FEW = range(6, 12)
"""Prompts of the smaller runs."""


def rarest(most: int, chosen: Counter[int]) -> int:
    """Whatever was chosen least often; at random where that is several."""
    return min(range(most + 1), key=lambda right: (chosen[right], random.Random(f"{right} {chosen}").random()))


@pytest.fixture(scope="module", params=DEVICES)
def world(request: pytest.FixtureRequest) -> World:
    """A layer of each ratio; the first one is the draft."""
    return World(*request.param, ratios=(0, 4, 128), draft_layers=1)


@pytest.fixture(scope="module", params=DEVICES)
def deep(request: pytest.FixtureRequest) -> World:
    """A draft of two layers, as V4-Flash could have one."""
    return World(*request.param, ratios=(0, 0, 4), draft_layers=2, lengths=[LENGTHS[index] for index in FEW])


@pytest.fixture(scope="module", params=DEVICES)
def flat(request: pytest.FixtureRequest) -> World:
    """All layers have a sliding window only, and all of them are the draft."""
    return World(*request.param, ratios=(0, 0), draft_layers=2, lengths=[LENGTHS[index] for index in FEW])


def test_plain_greedy_is_hugging_face(world: World) -> None:
    """Each token is the likeliest after those before it, which by induction are its own."""
    for prompt, tokens in zip(world.prompts, world.plain, strict=True):
        ids = torch.tensor([prompt + tokens], device=world.device)
        with torch.no_grad():
            best = world.hf(ids).logits[0, len(prompt) - 1 : -1].argmax(dim=1)
        assert best.tolist() == tokens


@pytest.mark.parametrize(
    ("drafts", "window", "ragged"),
    [(1, "growing", True), (2, "frozen", False), (3, "growing", False), (4, "growing", True), (4, "frozen", True)],
    ids=["1 growing ragged", "2 frozen uniform", "3 growing uniform", "4 growing ragged", "4 frozen ragged"],
)
def test_tokens_are_those_of_plain_greedy(
    world: World, drafts: int, window: str, ragged: bool, record_property: pytest.RecordProperty
) -> None:
    engine = world.engine(drafts, window=window, ragged=ragged)
    watched = Watched(engine)
    others = slice(None, None, 2)
    assert world.serve(engine, world.prompts[others], MANY[others]) == world.known(MANY)[others]
    engine.backend.check()
    found = engine.statistics
    record_property("acceptance_length", found.acceptance_length)
    assert found.acceptance_length > 1.25
    assert found.accepted[1 + drafts] > 0
    kinds = {len(set(rows)) > 1 for rows in watched.steps}
    assert kinds == ({True, False} if ragged else {False})


@pytest.mark.parametrize(
    ("drafts", "ragged"),
    [(1, True), (2, False), (3, True), (4, False), (4, True)],
    ids=lambda value: {True: "ragged", False: "uniform"}[value] if isinstance(value, bool) else str(value),
)
def test_every_accept_length(world: World, drafts: int, ragged: bool) -> None:
    """Each number of accepted drafts occurs at least 20 times, beside every border."""
    counts = [*MANY]
    counts[2:6] = [1, 2, 3, 5]  # at their end before they have all drafts
    engine = world.engine(drafts, ragged=ragged)
    forced = Forced(engine, truth_of(world), rarest)
    assert world.serve(engine, world.prompts, counts) == world.known(counts)
    assert engine.statistics.accepted == Counter({right + 1: times for right, times in forced.chosen.items()})
    assert min(forced.chosen[right] for right in range(drafts + 1)) >= 20, forced.chosen
    assert (max(map(len, map(set, forced.steps))) > 1) == ragged


@pytest.mark.parametrize("right", range(5))
def test_the_same_accept_length_in_every_step(world: World, right: int) -> None:
    """Requests that start at all places of a group of 4, beside the end of a group of 128 and of a page."""
    few = slice(10, 16)
    counts = [12 + right] * 6
    engine = world.engine(4, max_requests=6)
    forced = Forced(engine, truth_of(world), lambda most, _: min(most, right))
    assert world.serve(engine, world.prompts[few], counts) == [tokens[: 12 + right] for tokens in world.plain[few]]
    assert set(forced.chosen) == {right}


def test_as_many_drafts_as_the_rings_hold(world: World) -> None:
    """9 drafts and the last token are 10 rows. The draft's are not poisoned: its rows reach round the ring."""
    counts = [20] * len(LENGTHS)
    engine = world.engine(9)
    assert engine.backend.geom.draft_capacity == 10
    forced = Forced(engine, truth_of(world), rarest)
    forced.poison = lambda step: None  # type: ignore[method-assign]
    assert world.serve(engine, world.prompts, counts) == world.known(counts)
    assert set(forced.chosen) == set(range(10))
    with pytest.raises(ValueError, match="num_draft_tokens: expected at most 10, got 11"):
        world.engine(10)


def test_short_of_pages(world: World) -> None:
    """Shared prefixes, evicted windows, requests that are put back and begin again, all with rejected drafts."""
    order = [17, 16, 17, 9, 16, 17, 14, 13]
    prompts = [world.prompts[index] for index in order]
    counts = [18 + index for index in range(len(order))]
    size = CacheSize(num_pages=8, num_window_pages=26, num_requests=5)
    engine = world.engine(4, ragged=True, max_requests=4, size=size, chunk_size=90)
    forced = Forced(engine, truth_of(world), rarest)
    found = world.serve(engine, prompts, counts)
    assert found == [world.plain[index][:count] for index, count in zip(order, counts, strict=True)]
    assert engine.scheduler.put_back > 0
    assert engine.scheduler.hit_tokens > 0
    assert len(forced.steps) > 10


def test_a_draft_that_is_the_target_is_always_right(flat: World, record_property: pytest.RecordProperty) -> None:
    """Positions, slots and windows of every draft step are those of the target; a frozen window is not."""
    counts = [LONGEST] * len(FEW)
    engine = flat.engine(4, ragged=True)
    watched = Watched(engine)
    assert flat.serve(engine, flat.prompts, counts) == flat.known(counts)
    assert engine.statistics.accepted == Counter(count for rows in watched.steps for count in rows)
    frozen = flat.engine(4, window="frozen", ragged=True)
    assert flat.serve(frozen, flat.prompts, counts) == flat.known(counts)
    record_property("frozen_acceptance_length", frozen.statistics.acceptance_length)
    assert 1 < frozen.statistics.acceptance_length < engine.statistics.acceptance_length


class Compared(Watched):
    """Keeps the draft's window entries of each step, and compares them with what the target then stored."""

    layers = (0, 1)
    accepted = 0
    worst = 0.0
    last: tuple[Step, torch.Tensor, list[torch.Tensor]] | None = None

    def change(self, step: Step, drafts: torch.Tensor) -> torch.Tensor:
        if self.last is not None:
            before, slots, stored = self.last
            first = 0
            for request, start, rows in zip(before.requests, before.before, before.rows, strict=True):
                # The draft stores all rows but the last; those below the length are committed.
                stay = slice(first, first + min(rows - 1, max(0, request.length - start)))
                first += rows
                if not request.row or stay.start == stay.stop:
                    continue
                self.accepted += stay.stop - stay.start
                for layer in self.layers:
                    ours, theirs = stored[layer][stay], entries(self.engine, layer, slots[stay])
                    self.worst = max(self.worst, ((ours - theirs).norm() / theirs.norm()).item())
        slots = self.window_slots(step)
        self.last = step, slots, [entries(self.engine, layer, slots) for layer in self.layers]
        return drafts


@pytest.mark.parametrize(("kv", "most"), [("fp32", 1e-5), ("bf16", 2**-8), ("fp8", 2**-4)], ids=["fp32", "bf16", "fp8"])
def test_draft_and_target_share_their_entries(deep: World, kv: str, most: float) -> None:
    """Both store the same for the same tokens, up to rounding; and the target reads nothing of the draft's."""
    counts = [18] * len(FEW)
    engine = deep.engine(3, kv=kv, max_requests=len(FEW))
    compared = Compared(engine)
    outputs = deep.serve(engine, deep.prompts, counts)
    assert compared.accepted > 20
    assert compared.worst < most
    poisoned = deep.engine(3, kv=kv, max_requests=len(FEW))
    Poisoned(poisoned)
    assert deep.serve(poisoned, deep.prompts, counts) == outputs
    if kv == "fp32":
        assert outputs == deep.known(counts)


@pytest.mark.parametrize("window", ["growing", "frozen"])
def test_padding_of_a_bucket_changes_no_draft(deep: World, window: str) -> None:
    """Batches of 6 requests down to one, in buckets and without."""
    counts = [3, 6, 9, 12, 15, 18]
    drafts = []
    for captured in (True, False):
        engine = deep.engine(3, window=window, max_requests=len(FEW), captured=captured)
        watched = Watched(engine)
        assert deep.serve(engine, deep.prompts, counts) == deep.known(counts)
        drafts.append(watched.drafts)
    assert drafts[0] == drafts[1]
    assert len({len(step) for step in drafts[0]}) > 4


def test_the_page_about_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for source in blocks(ROOT / "docs" / "speculation.md", "python"):
        exec(source, {})
    tokens, mean = capsys.readouterr().out.rsplit(" ", 1)
    assert tokens.count(",") == 39
    assert 1 < float(mean) <= 4


def test_what_speculation_refuses(world: World) -> None:
    plain, engine = world.engine(0, captured=False), world.engine(1, captured=False)
    with pytest.raises(ValueError, match="num_drafts: expected an int of at least 1, got 0"):
        Speculator.of_first_layers(plain, 1)
    with pytest.raises(ValueError, match=r"layers with a sliding window only \(ratio 0\), got 2, of which layer 1 has"):
        Speculator.of_first_layers(engine, 2)
    for layers in (0, 4):
        with pytest.raises(ValueError, match=f"count: expected 1 to 3 layers, got {layers}"):
            Speculator.of_first_layers(engine, layers)
    with pytest.raises(ValueError, match="draft_window: expected one of"):
        Speculator.of_first_layers(engine, 1, draft_window="shrinking")
