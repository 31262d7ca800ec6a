"""`dsv4 capture-test`: graph replays against eager runs, for a given time, over suites of cases.

A suite is a function from options to cases; `SUITES` names them. A case makes up its inputs from a seed, so that suite,
case and seed repeat it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dsv4_bench import capture_planner, capture_runner
from dsv4_bench.capture_case import CaptureCase, CaptureOptions, Difference

Suite = Callable[[CaptureOptions], Sequence[CaptureCase]]
Progress = Callable[[str, int, float], None]

SUITES: Mapping[str, Suite] = {"planner": capture_planner.cases, "runner": capture_runner.cases}


@dataclass(frozen=True)
class Found:
    """The first difference.

    Attributes:
        suite, case, seed: what repeats it.
        what: what differs.
    """

    suite: str
    case: str
    seed: int
    what: str


@dataclass
class Outcome:
    """What was run, and what was found.

    Attributes:
        rounds: whole rounds over all cases.
        cases, replays: by suite, how many ran.
        seconds: in all.
        found: the first difference, after which nothing more runs; None if there was none.
    """

    rounds: int = 0
    cases: dict[str, int] = field(default_factory=dict)
    replays: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    found: Found | None = None


def select(options: CaptureOptions, suites: Sequence[str], case: str | None) -> list[tuple[str, CaptureCase]]:
    """The cases to run, with their suites.

    Raises:
        ValueError: a suite or a case that there is not.
    """
    for name in suites:
        if name not in SUITES:
            raise ValueError(f"--suite: expected one of {', '.join(SUITES)}, got {name!r}")
    chosen = [(name, each) for name in suites or SUITES for each in SUITES[name](options)]
    if case is not None:
        named = [pair for pair in chosen if pair[1].id == case]
        if not named:
            raise ValueError(f"--case: expected one of {', '.join(each.id for _, each in chosen)}; got {case!r}")
        return named
    return chosen


def run(chosen: Sequence[tuple[str, CaptureCase]], seconds: float, seed: int, progress: Progress) -> Outcome:
    """Runs all cases in rounds, with a new seed each, until the time is up; the first round always to its end.

    Args:
        chosen: from `select`.
        seconds: time to spend.
        seed: of the first round.
        progress: called with the case, the replays so far and the seconds so far.
    """
    outcome, begin = Outcome(), time.perf_counter()
    while outcome.rounds == 0 or time.perf_counter() - begin < seconds:
        for suite, case in chosen:
            outcome.seconds = time.perf_counter() - begin
            if outcome.rounds and outcome.seconds >= seconds:
                return outcome
            progress(f"{suite} {case.id}", sum(outcome.replays.values()), outcome.seconds)
            replays, what = _attempt(case, seed + outcome.rounds)
            outcome.cases[suite] = outcome.cases.get(suite, 0) + 1
            outcome.replays[suite] = outcome.replays.get(suite, 0) + replays
            if what is not None:
                outcome.found = Found(suite, case.id, seed + outcome.rounds, what)
                outcome.seconds = time.perf_counter() - begin
                return outcome
        outcome.rounds += 1
    outcome.seconds = time.perf_counter() - begin
    return outcome


def _attempt(case: CaptureCase, seed: int) -> tuple[int, str | None]:
    """Replays compared, and the first difference. Whatever a case raises counts as one."""
    try:
        replays = case.check(seed)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a fault on the device belongs to the case that caused it
    except Difference as difference:
        return 0, str(difference)
    except Exception as error:
        return 0, f"raised {type(error).__name__}: {error}"
    return replays, None
