"""What a graph is known by, and what capturing took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key")


class GraphKey(NamedTuple):
    """What a graph was captured for. Two batches with the same number of lanes are not the same shape.

    Attributes:
        batch_size: of the bucket.
        topk: branches a request.
        num_steps: draft steps.
        variant: which draft model.
    """

    batch_size: int
    topk: int
    num_steps: int
    variant: str


@dataclass(frozen=True)
class CaptureReport(Generic[Key]):
    """What a capture took; `Key` is what a runner knows its graphs by.

    Attributes:
        executor: "cuda_graph" or "eager".
        seconds: in all.
        pool_bytes: device memory that the graphs hold together.
        buckets: for each key, in the order of capture: by how many bytes the pool grew, and the seconds it took.
    """

    executor: str
    seconds: float
    pool_bytes: int
    buckets: Mapping[Key, tuple[int, float]]
