"""Which batch sizes get a graph, and which of them serves a batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

DENSE_SIZES = (1, 2, 4, 8)
STEP = 8


def default_sizes(max_batch_size: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then steps of 8, and always `max_batch_size` itself, so that the largest batch has a graph."""
    _expect_positive("max_batch_size", max_batch_size)
    sizes = (*DENSE_SIZES, *range(DENSE_SIZES[-1] + STEP, max_batch_size, STEP))
    return (*(size for size in sizes if size < max_batch_size), max_batch_size)


def align_sizes(sizes: Iterable[int], multiple: int) -> tuple[int, ...]:
    """`sizes` rounded up to multiples of `multiple`, sorted and unique."""
    return tuple(sorted({-(-size // multiple) * multiple for size in sizes}))


def pad_to_bucket(batch_size: int, buckets: tuple[int, ...]) -> int | None:
    """The smallest of the sorted `buckets` that holds `batch_size` requests; None when none does."""
    at = bisect_left(buckets, batch_size)
    return buckets[at] if at < len(buckets) else None


@dataclass(frozen=True)
class BucketPolicy:
    """The batch sizes to capture. Give either `max_batch_size` or `sizes`.

    Args:
        max_batch_size: the largest batch that will run; sizes are 1, 2, 4, 8, then steps of 8, then this one.
        sizes: explicit sizes, in any order. They are taken as they are: a batch above the largest runs without a graph.
        multiple: every bucket is a multiple of it, as a group that scatters a batch over its ranks needs. Default sizes
            are rounded up to it.

    Attributes:
        buckets: the sizes, ascending and unique.

    Raises:
        ValueError: neither or both of the first two; a size below 1; an explicit size that is no multiple.
    """

    max_batch_size: int | None = None
    sizes: Iterable[int] | None = None
    multiple: int = 1
    buckets: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        _expect_positive("multiple", self.multiple)
        if (self.max_batch_size is None) == (self.sizes is None):
            raise ValueError(
                f"BucketPolicy: expected either max_batch_size or sizes, got max_batch_size={self.max_batch_size!r} "
                f"and sizes={self.sizes!r}"
            )
        if self.sizes is None:
            assert self.max_batch_size is not None
            buckets = align_sizes(default_sizes(self.max_batch_size), self.multiple)
        else:
            buckets = self._explicit(self.sizes)
        object.__setattr__(self, "buckets", buckets)

    def _explicit(self, sizes: Iterable[int]) -> tuple[int, ...]:
        found = tuple(sizes)
        if not found:
            raise ValueError("sizes: expected at least one, got none")
        for i, size in enumerate(found):
            _expect_positive(f"sizes[{i}]", size)
            if size % self.multiple:
                raise ValueError(f"sizes[{i}]: expected a multiple of {self.multiple}, got {size}")
        object.__setattr__(self, "sizes", found)
        return tuple(sorted(set(found)))

    @property
    def largest(self) -> int:
        return self.buckets[-1]

    def bucket_for(self, batch_size: int) -> int | None:
        """The smallest bucket that holds `batch_size` requests (0 fits the smallest); None when none does."""
        return pad_to_bucket(batch_size, self.buckets)


def _expect_positive(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}: expected an int of at least 1, got {value!r}")
