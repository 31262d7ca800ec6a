"""Serving traces: the requests of a replay, read from a file or made from a seed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BLOCK_TOKENS = 512
"""Prompt tokens behind one `hash_ids` entry."""

_BORDER_LENGTHS = (
    *(1, 2, 3, 4, 5, 7, 8, 9, 127, 128, 129, 131, 132, 133, 255, 256, 257, 383, 384, 385),
    *(511, 512, 513, 515, 516, 767, 768, 769, 1023, 1024, 1025, 1151, 1152, 1535, 1536, 1537, 2048, 2049, 2600, 3001),
)
_BORDER_OUTPUTS = (1, 2, 3, 4, 5, 6, 11, 31, 64, 127, 128, 129, 150, 257)


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Args:
        timestamp: arrival in milliseconds from the start of the trace; only its order matters here.
        input_length: prompt tokens, at least 1.
        output_length: tokens to generate, at least 1.
        hash_ids: one id for each 512-token block of the prompt, the last one possibly partial. Requests whose leading
            ids are equal share that part of the prompt.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not math.isfinite(self.timestamp) or self.timestamp < 0:
            raise ValueError(f"timestamp: expected milliseconds of at least 0, got {self.timestamp!r}")
        for name in ("input_length", "output_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        blocks = -(-self.input_length // BLOCK_TOKENS)
        if len(self.hash_ids) != blocks:
            raise ValueError(
                f"hash_ids: expected {blocks} ids (one for each {BLOCK_TOKENS} of {self.input_length} tokens), "
                f"got {len(self.hash_ids)}"
            )

    @property
    def cached_tokens(self) -> int:
        """Tokens in the cache when the request ends: the last generated token is never fed back."""
        return self.input_length + self.output_length - 1


def load_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Reads a trace, one JSON object a line (Mooncake's format), in timestamp order.

    Args:
        path: the file.
        limit: keep at most so many requests, the earliest; None keeps all.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is malformed (the message has its number), or there is no request.
    """
    requests = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    requests.append(_parse_line(line, f"{path}, line {number}"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text, got byte {error.object[error.start]:#04x}") from error
    if not requests:
        raise ValueError(f"{path}: expected at least one request, got none")
    requests.sort(key=lambda request: request.timestamp)
    return requests[:limit]


def synthetic_trace(count: int = 100, seed: int = 0) -> list[TraceRequest]:
    """`count` requests made from `seed`: lengths at page, group and window borders, about half with a shared prefix."""
    rng = np.random.default_rng(seed)
    lengths = np.resize(rng.permutation(_BORDER_LENGTHS), count)
    prefixes = [tuple(range(first, first + blocks)) for first, blocks in ((0, 1), (100, 2), (200, 4), (300, 5))]
    next_id, requests = 1000, []
    for index in range(count):
        length = int(lengths[index])
        ids: tuple[int, ...] = ()
        if rng.random() < 0.6:
            ids = prefixes[int(rng.integers(len(prefixes)))]
            # Tails after a shared prefix are short, as those of a chat turn, or the border length itself.
            length = len(ids) * BLOCK_TOKENS + length if length < 600 else length
        full = length // BLOCK_TOKENS
        ids = ids[:full]
        own = -(-length // BLOCK_TOKENS) - len(ids)
        ids += tuple(range(next_id, next_id + own))
        next_id += own
        requests.append(TraceRequest(10.0 * (index // 3), length, int(rng.choice(_BORDER_OUTPUTS)), ids))
    return requests


def prefix_chains(requests: Sequence[TraceRequest]) -> list[list[int]]:
    """Names the full prompt blocks of each request so that equal names mean equal tokens from the start on.

    Returns:
        For each request, input_length // 512 numbers, one for each chain of ids that ends with a full block, counted
        from 0 over the whole trace. A block id that follows two different prefixes gets two numbers.
    """
    numbers: dict[tuple[int, int], int] = {}
    chains = []
    for request in requests:
        chain: list[int] = []
        parent = -1
        for block in request.hash_ids[: request.input_length // BLOCK_TOKENS]:
            parent = numbers.setdefault((parent, block), len(numbers))
            chain.append(parent)
        chains.append(chain)
    return chains


def _parse_line(line: str, where: str) -> TraceRequest:
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: expected a JSON object, got {_shorten(line.strip())!r}") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected a JSON object, got {_shorten(line.strip())!r}")
    try:
        timestamp = entry.get("timestamp")
        if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
            raise ValueError(f"timestamp: expected a number, got {_describe(entry, 'timestamp')}")
        ids = entry.get("hash_ids")
        if not isinstance(ids, list) or not all(_is_int(block) for block in ids):
            raise ValueError(f"hash_ids: expected a list of ints, got {_describe(entry, 'hash_ids')}")
        lengths = []
        for name in ("input_length", "output_length"):
            if not _is_int(entry.get(name)):
                raise ValueError(f"{name}: expected an int, got {_describe(entry, name)}")
            lengths.append(entry[name])
        return TraceRequest(float(timestamp), lengths[0], lengths[1], tuple(ids))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{where}: {error}") from error


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _describe(entry: dict[str, object], name: str) -> str:
    return _shorten(repr(entry[name])) if name in entry else "nothing"


def _shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
