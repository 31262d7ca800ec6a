"""What the example's engine does after an exception in a step, and with drafts that are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from hf_harness import Guesses, case, each_device


class Interrupted(Exception):
    pass


def interrupts(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, nth: int, part: str | None = None) -> None:
    """The nth call of a method, with `part` as its argument if given, raises before it does anything."""
    method, calls = getattr(owner, name), 0

    def wrapped(*given: Any) -> Any:
        nonlocal calls
        calls += part in (None, *given)
        if calls == nth and part in (None, *given):
            raise Interrupted
        return method(*given)

    monkeypatch.setattr(owner, name, wrapped)


PLACES = [("schedule", 3), ("upload", 5), ("model", 4), *(("read", nth) for nth in range(2, 7)), ("commit", 6)]
PLACES += [
    ("_admit", 2),
    ("_offer_blocks", 4),
    ("_grow", 5),
    ("_close", 6),
    ("open", 2),
    ("grow", 3),
    ("trim_window", 3),
]


@each_device
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("place", "nth"), PLACES, ids=[f"{place}-{nth}" for place, nth in PLACES])
def test_an_interrupted_step_is_run_again(
    device: str, drafts: int, place: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all of it has been computed, and rows of state lie where others did that the step read."""
    served = case("small", device)
    engine = served.engine(max_requests=3, chunk_size=37, drafts=drafts)
    engine.speculation = Guesses(served, drafts)
    prompts = [served.tokens(length, seed=length) for length in (150, 60, 250)]
    requests = [engine.add(prompt, 10) for prompt in prompts]
    scheduler = engine.scheduler
    owner = next((each for each in (scheduler, scheduler._pool) if place != "commit" and hasattr(each, place)), None)
    if owner is None:
        interrupts(monkeypatch, engine.statistics, "timed", nth, place)
    else:
        interrupts(monkeypatch, owner, place, nth)
    with pytest.raises(Interrupted):
        engine.run()
    engine.run()
    requests += [engine.add(prompt, 10) for prompt in prompts]  # what they share came from interrupted steps
    engine.run()
    assert served.check(engine, requests) == 0
    assert scheduler.hit_tokens > 0


BAD_DRAFTS = {
    "none": (lambda good: None, "drafts: expected a torch.Tensor, got NoneType"),
    "list": (lambda good: good.tolist(), "drafts: expected a torch.Tensor, got list"),
    "wide": (lambda good: torch.cat((good, good), dim=1), "drafts: expected 3 columns, got 6"),
    "narrow": (lambda good: good[:, :2], "drafts: expected 3 columns, got 2"),
    "flat": (lambda good: good.flatten(), "drafts: expected 2 dimensions"),
    "rows": (lambda good: good[1:], "drafts: expected 3 elements, got 2"),
    "float": (lambda good: good.float(), "drafts: expected dtype int32 or int64, got float32"),
}


@each_device
@pytest.mark.parametrize("bad", BAD_DRAFTS.values(), ids=BAD_DRAFTS)
def test_bad_drafts_are_refused_and_the_engine_goes_on(device: str, bad: tuple[Any, str]) -> None:
    served = case("small", device)
    engine = served.engine(max_requests=3, drafts=3)
    good = engine.speculation = Guesses(served, 3)
    propose = good.propose
    good.propose = lambda step: bad[0](propose(step))  # type: ignore[method-assign]
    requests = [engine.add(served.tokens(length, seed=length), 10) for length in (40, 60, 9)]
    with pytest.raises(ValueError, match=bad[1]):
        engine.run()
    good.propose = propose  # type: ignore[method-assign]
    engine.run()
    assert served.check(engine, requests) == 0


@each_device
@pytest.mark.parametrize("token", [-1, 10**9, -(2**31)])
def test_drafts_outside_of_the_vocabulary_are_wrong_drafts(device: str, token: int) -> None:
    served = case("small", device)
    engine = served.engine(max_requests=3, drafts=3)
    good = engine.speculation = Guesses(served, 3)
    propose = good.propose
    good.propose = lambda step: torch.full_like(propose(step), token)  # type: ignore[method-assign]
    requests = [engine.add(served.tokens(length, seed=length), 10) for length in (40, 60, 9)]
    engine.run()
    assert served.check(engine, requests) == 0
