"""Bucket sizes: the default ladder, explicit ones, multiples, and which one serves a batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_graph_runner import BucketPolicy
from dsv4_graph_runner.buckets import align_sizes, default_sizes, pad_to_bucket


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (9, (1, 2, 4, 8, 9)),
        (12, (1, 2, 4, 8, 12)),
        (20, (1, 2, 4, 8, 16, 20)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
    ],
)
def test_default_sizes(largest: int, expected: tuple[int, ...]) -> None:
    assert default_sizes(largest) == expected
    assert BucketPolicy(max_batch_size=largest).buckets == expected


@given(largest=st.integers(1, 600), multiple=st.integers(1, 40), size=st.integers(0, 700))
def test_ladder_holds_whatever_fits(largest: int, multiple: int, size: int) -> None:
    policy = BucketPolicy(max_batch_size=largest, multiple=multiple)
    buckets = policy.buckets
    assert list(buckets) == sorted(set(buckets))
    assert all(bucket > 0 and bucket % multiple == 0 for bucket in buckets)
    assert largest <= policy.largest < largest + multiple
    found = policy.bucket_for(size)
    assert found == min((bucket for bucket in buckets if bucket >= size), default=None)


def test_explicit_sizes_are_taken_as_they_are() -> None:
    policy = BucketPolicy(sizes=[8, 2, 8, 4])
    assert policy.buckets == (2, 4, 8)
    assert policy.sizes == (8, 2, 8, 4)
    assert [policy.bucket_for(size) for size in (0, 1, 2, 3, 8, 9)] == [2, 2, 2, 4, 8, None]
    assert BucketPolicy(sizes=iter([4])).buckets == (4,)
    assert align_sizes([1, 2, 5, 8], 4) == (4, 8)
    assert pad_to_bucket(3, ()) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "expected either max_batch_size or sizes"),
        ({"max_batch_size": 4, "sizes": [4]}, "expected either max_batch_size or sizes"),
        ({"max_batch_size": 0}, "max_batch_size: expected an int of at least 1, got 0"),
        ({"max_batch_size": 2.0}, "max_batch_size: expected an int of at least 1, got 2.0"),
        ({"sizes": []}, "sizes: expected at least one, got none"),
        ({"sizes": [4, 0]}, r"sizes\[1\]: expected an int of at least 1, got 0"),
        ({"sizes": [4, True]}, r"sizes\[1\]: expected an int of at least 1, got True"),
        ({"sizes": [4, 6], "multiple": 4}, r"sizes\[1\]: expected a multiple of 4, got 6"),
        ({"max_batch_size": 4, "multiple": 0}, "multiple: expected an int of at least 1, got 0"),
    ],
)
def test_refusals(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BucketPolicy(**arguments)
