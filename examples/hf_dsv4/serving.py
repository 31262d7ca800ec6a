"""Made-up requests that arrive over time, and an engine that serves them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dsv4_examples.hf_dsv4.engine import Engine
from dsv4_examples.hf_dsv4.scheduler import Request


@dataclass(frozen=True)
class Job:
    """A request to come.

    Attributes:
        arrival: number of the step before which it comes.
        prompt: its tokens.
        max_new_tokens: tokens to generate.
    """

    arrival: int
    prompt: Sequence[int]
    max_new_tokens: int


def make_jobs(
    count: int, *, vocabulary: int, prompts: tuple[int, int], max_new_tokens: int, seed: int = 0
) -> list[Job]:
    """Requests with random tokens; each third one begins like the one before, as turns of a conversation do.

    Args:
        count: how many.
        vocabulary: tokens are 0 .. vocabulary - 1.
        prompts: shortest and longest prompt.
        max_new_tokens: most tokens that one generates; each generates at least half as many.
        seed: of everything that is random.
    """
    rng = np.random.default_rng(seed)
    jobs: list[Job] = []
    arrival = 0
    for index in range(count):
        prompt = rng.integers(vocabulary, size=rng.integers(*prompts, endpoint=True)).tolist()
        if index % 3 == 2:
            before = jobs[-1].prompt
            prompt = (list(before) + prompt)[: max(len(before), len(prompt))]
        new = int(rng.integers(-(-max_new_tokens // 2), max_new_tokens, endpoint=True))
        jobs.append(Job(arrival, prompt, new))
        arrival += int(rng.integers(4))
    return jobs


def serve(engine: Engine, jobs: Sequence[Job], progress: Callable[[int, int], None] | None = None) -> list[Request]:
    """Serves the jobs, whose arrivals ascend; returns their requests in the same order.

    Args:
        engine: with nothing to do.
        jobs: what comes.
        progress: called after each step with the numbers of finished requests and of generated tokens.
    """
    coming, requests = deque(jobs), list[Request]()
    steps = finished = 0
    while True:
        while coming and coming[0].arrival <= steps:
            job = coming.popleft()
            requests.append(engine.add(job.prompt, job.max_new_tokens))
        done = engine.step()
        if done is None and not coming:
            return requests
        steps, finished = steps + 1, finished + len(done or ())
        if progress is not None:
            progress(finished, engine.statistics.tokens)
