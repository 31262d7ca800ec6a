"""The example's scheduler alone: whatever comes, slots are right, nothing is lost, and no page stays behind."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from dsv4_backend import ForwardMode
from dsv4_backend.page_pool import PagePool
from dsv4_examples.hf_dsv4.scheduler import Request, Scheduler, Step

WINDOW = 32


def make_pool(pages: int = 40, window_pages: int = 80, rows: int = 4, max_len: int = 1024) -> PagePool:
    return PagePool(
        page_size=128,
        window_page_size=32,
        num_pages=pages,
        num_window_pages=window_pages,
        max_requests=rows,
        max_len=max_len,
    )


def next_token(tokens: list[int]) -> int:
    """Stands for a model: a token that depends on all that came before, in order."""
    value = 0
    for token in tokens:
        value = (value * 31 + token + 7) % 1009
    return value


class Run:
    """A scheduler with a model that remembers which token was stored in which slot."""

    def __init__(self, pool: PagePool, *, seed: int = 0, **options: object) -> None:
        self.pool, self.rng = pool, np.random.default_rng(seed)
        self.scheduler = Scheduler(pool, window=WINDOW, **options)  # type: ignore[arg-type]
        self.num_drafts = int(options.get("num_drafts", 0))  # type: ignore[call-overload]
        self.stored: dict[int, tuple[int, ...]] = {}  # full slot: the tokens up to its own
        self.window: dict[int, tuple[int, ...]] = {}  # window slot: the same
        self.steps: list[Step] = []

    def step(self) -> list[Request] | None:
        step = self.scheduler.next_step()
        if step is None:
            return None
        self.steps.append(step)
        assert len(step.slots) == sum(step.rows) == step.last_rows[-1] + 1
        assert len(set(step.slots.tolist())) == len(step.slots)
        assert step.slots.min() >= self.pool.page_size
        new, first = [], 0
        for request, before, rows in zip(step.requests, step.before, step.rows, strict=True):
            new.append(self.compute(step, request, before, step.slots[first : first + rows].tolist()))
            first += rows
        return self.scheduler.commit(step, new)

    def compute(self, step: Step, request: Request, before: int, slots: list[int]) -> list[int]:
        """Stores the rows of a request, and reads what its last row would attend."""
        assert request.length == before
        wanted = before + len(slots)
        tokens = request.tokens[:wanted]
        accepted = 0
        if step.mode is ForwardMode.TARGET_VERIFY:
            assert before == len(request.tokens) - 1
            assert len(slots) <= 1 + self.num_drafts
            accepted = int(self.rng.integers(len(slots)))
            for number in range(len(slots) - 1):
                tokens.append(next_token(tokens) if number < accepted else 5000 + number)
        for place, slot in enumerate(slots):
            known = tuple(tokens[: before + place + 1])
            assert int(self.pool.req_to_token[request.row, before + place]) == slot
            self.stored[slot] = known
            self.window[int(self.pool.full_to_swa[slot])] = known
        self.read(request, tokens, wanted)
        if step.mode is ForwardMode.TARGET_VERIFY:
            return [next_token(tokens[: before + 1 + number]) for number in range(accepted + 1)]
        return [next_token(tokens)] if wanted == len(request.tokens) else []

    def read(self, request: Request, tokens: list[int], length: int) -> None:
        slots = self.pool.slots(request.row, 0, length).tolist()
        for position in {*range(0, length, 37), length - 1}:
            assert self.stored[slots[position]] == tuple(tokens[: position + 1])
        for position in range(max(0, length - WINDOW), length):
            window_slot = int(self.pool.full_to_swa[slots[position]])
            assert window_slot >= self.pool.window_page_size, "evicted too early"
            assert self.window[window_slot] == tuple(tokens[: position + 1])

    def run(self) -> None:
        while self.step() is not None:
            pass

    def check_done(self, requests: list[Request]) -> None:
        for request in requests:
            tokens = request.tokens[: request.prompt_length]
            for _ in range(request.max_new_tokens):
                tokens.append(next_token(tokens))
            assert request.tokens == tokens
            assert request.row == 0
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        prefixes = self.scheduler._prefixes
        prefixes.evict(self.pool.num_pages, self.pool.num_window_pages)
        assert self.pool.free_pages == self.pool.num_pages
        assert self.pool.free_window_pages == self.pool.num_window_pages


@pytest.mark.parametrize(
    ("drafts", "uniform"), [(0, True), (3, True), (3, False), (9, False)], ids=["plain", "3", "3-ragged", "9-ragged"]
)
def test_random_schedules(drafts: int, uniform: bool) -> None:
    counts: Counter[str] = Counter()
    for seed in range(75):
        rng = np.random.default_rng(seed)
        pool = make_pool(
            pages=int(rng.integers(6, 10)), window_pages=int(rng.integers(8, 40)), rows=int(rng.integers(1, 7))
        )
        run = Run(pool, seed=seed, chunk_size=int(rng.integers(1, 300)), num_drafts=drafts, uniform=uniform)
        base = rng.integers(1000, size=600).tolist()
        coming = sorted(rng.integers(15, size=rng.integers(1, 10)).tolist())
        requests, number = [], 0
        while True:
            while coming and coming[0] <= number:
                coming.pop(0)
                prompt = base[: rng.integers(1, 600)] if rng.random() < 0.7 else rng.integers(1000, size=50).tolist()
                requests.append(run.scheduler.add(prompt, int(rng.integers(1, 80))))
            if run.step() is None and not coming:
                break
            number += 1
        counts["hits"] += run.scheduler.hit_tokens > 0
        counts["put back"] += run.scheduler.put_back > 0
        counts["ragged"] += any(s.mode is ForwardMode.TARGET_VERIFY and len({*s.rows}) > 1 for s in run.steps)
        run.check_done(requests)
    assert counts["hits"] > 10
    assert counts["put back"] > 3
    assert (counts["ragged"] > 0) == (drafts > 0 and not uniform)


def test_who_decodes_joins_the_chunks_of_a_prompt() -> None:
    run = Run(make_pool(), chunk_size=64)
    first = run.scheduler.add([1, 2, 3], 20)
    run.step()
    second = run.scheduler.add(list(range(150)), 2)
    for _ in range(4):
        run.step()
    assert [step.mode.value for step in run.steps] == ["EXTEND"] * 4 + ["DECODE"]
    assert [list(step.rows) for step in run.steps] == [[3], [64, 1], [64, 1], [22, 1], [1, 1]]
    assert len(first.output) == 5
    assert len(second.output) == 2
    run.run()
    run.check_done([first, second])


def test_a_prefix_is_computed_once() -> None:
    run = Run(make_pool(), chunk_size=512)
    prompt = list(range(300))
    requests = [run.scheduler.add(prompt, 3)]
    run.run()
    requests.append(run.scheduler.add(prompt[:260] + [7] * 40, 3))
    run.step()
    assert list(run.steps[-1].before) == [256]
    assert run.scheduler.hit_tokens == 256
    run.run()
    requests.append(run.scheduler.add(prompt[:256], 3))  # its last token must be computed all the same
    run.step()
    assert list(run.steps[-1].before) == [128]
    run.run()
    requests.append(run.scheduler.add([9, *prompt], 3))
    run.step()
    assert list(run.steps[-1].before) == [0]
    run.run()
    for hit in (0, 256):  # blocks that are alike, but not where they stand
        requests.append(run.scheduler.add([5] * 300, 3))
        run.step()
        assert list(run.steps[-1].before) == [hit]
        run.run()
    run.check_done(requests)


def test_the_youngest_is_put_back_when_pages_run_out() -> None:
    run = Run(make_pool(pages=4), chunk_size=512)
    old, young = run.scheduler.add([1] * 250, 100), run.scheduler.add([2] * 250, 100)
    run.run()
    assert (old.put_back, young.put_back) == (0, 1)
    run.check_done([old, young])


def test_the_window_behind_is_let_go() -> None:
    pool = make_pool(pages=8, window_pages=8)
    run = Run(pool, chunk_size=64)
    request = run.scheduler.add(list(range(900)), 60)
    while run.step() is not None:
        if request.row:
            assert len(pool.window_pages(request.row)) <= 4
    run.check_done([request])


def test_refusals() -> None:
    scheduler = Scheduler(make_pool(pages=3), window=WINDOW, chunk_size=8, num_drafts=2)
    for prompt, new, message in (
        ([], 1, "prompt: expected at least one token, got none"),
        ([1], 0, "max_new_tokens: expected at least 1, got 0"),
        ([1] * 300, 83, "prompt: expected room for 385 tokens with all that follows, got 384"),
    ):
        with pytest.raises(ValueError, match=message):
            scheduler.add(prompt, new)
    scheduler.add([1] * 300, 82)
    scheduler = Scheduler(make_pool(window_pages=3), window=WINDOW, chunk_size=8)
    with pytest.raises(ValueError, match="prompt: expected at least 4 window pages, got 3"):
        scheduler.add([1] * 100, 100)
    assert scheduler.next_step() is None
