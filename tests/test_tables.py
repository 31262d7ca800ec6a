"""Request tables, and the checks of caller tensors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import dsv4_backend as d4
from dsv4_backend import RequestTables
from dsv4_backend.validation import expect_tensor

SLOTS = torch.zeros(4, 300, dtype=torch.int32)
WINDOW_SLOTS = torch.tensor([0] * 16 + [-1])


def test_sizes() -> None:
    tables = RequestTables(SLOTS, WINDOW_SLOTS)
    assert (tables.num_requests, tables.max_seq_len, tables.device) == (4, 300, torch.device("cpu"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        tables.req_to_token = SLOTS


@pytest.mark.parametrize(
    "slots",
    [
        torch.zeros(4, 304, dtype=torch.int32)[:, :300],
        torch.zeros(9, 304, dtype=torch.int32)[1::2, 4:],
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(4, 9, dtype=torch.int32)[:, ::9],
        torch.zeros(1, 300, dtype=torch.int32).expand(4, 300),
    ],
    ids=["spare columns", "offset and skipped rows", "one element", "one column of many", "one row for all"],
)
def test_any_row_stride_is_kept(slots: torch.Tensor) -> None:
    tables = RequestTables(slots, WINDOW_SLOTS)
    assert tables.req_to_token is slots


@pytest.mark.parametrize(
    ("slots", "window_slots", "message"),
    [
        (SLOTS.tolist(), WINDOW_SLOTS, "req_to_token: expected a torch.Tensor, got list"),
        (SLOTS.long(), WINDOW_SLOTS, "req_to_token: expected dtype int32, got int64"),
        (SLOTS.float(), WINDOW_SLOTS, "req_to_token: expected dtype int32, got float32"),
        (SLOTS[0], WINDOW_SLOTS, "req_to_token: expected 2 dimensions, got shape [300]"),
        (SLOTS[:0], WINDOW_SLOTS, "req_to_token: expected at least one row and one column, got [0, 300]"),
        (SLOTS[:, :0], WINDOW_SLOTS, "req_to_token: expected at least one row and one column, got [4, 0]"),
        (SLOTS[:, ::2], WINDOW_SLOTS, "req_to_token: expected unit column stride, got 2"),
        (SLOTS.t(), WINDOW_SLOTS, "req_to_token: expected unit column stride, got 300"),
        (SLOTS, None, "full_to_swa: expected a torch.Tensor, got NoneType"),
        (SLOTS, WINDOW_SLOTS.int(), "full_to_swa: expected dtype int64, got int32"),
        (SLOTS, WINDOW_SLOTS[None], "full_to_swa: expected 1 dimension, got shape [1, 17]"),
        (SLOTS, WINDOW_SLOTS[:0], "full_to_swa: expected at least one element, got none"),
        (SLOTS, WINDOW_SLOTS[::2], "full_to_swa: expected a contiguous tensor, got stride 2"),
        (SLOTS, WINDOW_SLOTS.to("meta"), "full_to_swa: expected a tensor on cpu, got one on meta"),
    ],
)
def test_refusals_say_what_was_expected_and_what_came(slots: object, window_slots: object, message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  the whole message is compared
        RequestTables(slots, window_slots)
    assert str(raised.value) == message


def test_expect_tensor_returns_what_it_got() -> None:
    value = torch.zeros(3, 2, dtype=torch.int64)
    both = (torch.int32, torch.int64)
    assert expect_tensor("x", value, dtypes=both, ndim=2, size=3, device=torch.device("cpu")) is value


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"dtypes": (torch.int32,)}, "x: expected dtype int32, got int64"),
        ({"dtypes": (torch.int32, torch.uint8)}, "x: expected dtype int32 or uint8, got int64"),
        ({"ndim": 1}, "x: expected 1 dimension, got shape [3, 2]"),
        ({"ndim": 3}, "x: expected 3 dimensions, got shape [3, 2]"),
        ({"size": 4}, "x: expected 4 elements, got 3"),
        ({"size": 0}, "x: expected 0 elements, got 3"),
        ({"device": torch.device("meta")}, "x: expected a tensor on meta, got one on cpu"),
    ],
)
def test_expect_tensor_refuses(rules: dict, message: str) -> None:
    value = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError) as raised:  # noqa: PT011  the whole message is compared
        expect_tensor("x", value, **{"dtypes": (torch.int64,), "ndim": 2, **rules})
    assert str(raised.value) == message


def test_sizes_that_32_bits_cannot_count_are_refused() -> None:
    slots = torch.empty(8, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=r"req_to_token: expected fewer than 2\^31 in each dimension, got 2147483648"):
        d4.RequestTables(torch.empty(1, 2**31, dtype=torch.int32, device="meta"), slots)
    with pytest.raises(ValueError, match=r"full_to_swa: expected fewer than 2\^31"):
        d4.RequestTables(
            torch.empty(1, 4, dtype=torch.int32, device="meta"), torch.empty(2**31, dtype=torch.int64, device="meta")
        )
    tables = d4.RequestTables(torch.empty(2**24, 4, dtype=torch.int32, device="meta"), slots)
    ids = torch.empty(2, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=r"geom: expected fewer than 2\^31 state rows for ratio 128"):
        d4.plan_decode(ids, ids, tables, d4.CacheGeometry())
