"""In which pieces a sequence is computed: one shot, given sizes, token by token, or at random."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_LONGEST_RANDOM = 200


def split(chunks: str, num_tokens: int, lane: int = 0) -> Iterator[int]:
    """Sizes that add up to `num_tokens`.

    Args:
        chunks: "7,1,2,rest" (these, then all that is left; "rest" alone is one shot), "token" (one each) or
            "random:SEED" (from 1 to 200, half of them below 10).
        num_tokens: tokens in all.
        lane: makes "random" differ between sequences.

    Raises:
        ValueError: `chunks` says none of these.
    """
    sizes = _sizes(chunks, lane)
    left = num_tokens
    while left:
        size = min(left, next(sizes, left))
        yield size
        left -= size


def check(chunks: str) -> None:
    """Raises ValueError unless `split` understands `chunks`."""
    _sizes(chunks, 0)


def _sizes(chunks: str, lane: int) -> Iterator[int]:
    if chunks == "token":
        return iter(lambda: 1, 0)
    kind, _, seed = chunks.partition(":")
    if kind == "random" and seed.isdecimal():
        return _random_sizes(int(seed), lane)
    *sizes, last = chunks.split(",")
    if last == "rest" and all(size.isdecimal() and int(size) > 0 for size in sizes):
        return iter([int(size) for size in sizes])
    raise ValueError(
        f"chunks: expected sizes and then rest, as in 7,1,2,rest, or token, or random:SEED, got {chunks!r}"
    )


def _random_sizes(seed: int, lane: int) -> Iterator[int]:
    rng = np.random.default_rng((seed, lane))
    while True:
        yield int(rng.integers(1, 10 if rng.random() < 0.5 else _LONGEST_RANDOM + 1))
