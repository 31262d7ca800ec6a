"""The batch that a caller hands in, and the split of its slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_graph_runner import DraftBatch, split_draft_out_cache_loc
from runners import make_batch


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("batch_size", "topk", "num_steps"), [(0, 1, 3), (1, 1, 1), (4, 1, 3), (2, 2, 3), (3, 4, 5)])
def test_split_by_definition(dtype: torch.dtype, batch_size: int, topk: int, num_steps: int) -> None:
    slots = torch.randperm(batch_size * topk * num_steps).to(dtype)
    rows = split_draft_out_cache_loc(slots, batch_size, topk, num_steps)
    assert (rows.shape, rows.dtype, rows.is_contiguous()) == ((num_steps, batch_size * topk), dtype, True)
    for step in range(num_steps):
        for lane in range(batch_size * topk):
            assert rows[step, lane] == slots[lane * num_steps + step]


@pytest.mark.parametrize("length", [0, 9, 11, 13])
def test_split_refuses_any_other_length(length: int) -> None:
    message = rf"expected shape \[12\] \(batch_size 4 \* topk 1 \* num_steps 3\), got \[{length}\]"
    with pytest.raises(ValueError, match=message):
        split_draft_out_cache_loc(torch.zeros(length, dtype=torch.int64), 4, 1, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3, 4), 4, 1, 3), r"got \[3, 4\]"),
        (([0] * 12, 4, 1, 3), "got list"),
        ((torch.zeros(0), -1, 1, 3), "batch_size: expected an int of at least 0, got -1"),
        ((torch.zeros(0), 0, 0, 3), "topk: expected an int of at least 1, got 0"),
        ((torch.zeros(0), 0, 1, 0), "num_steps: expected an int of at least 1, got 0"),
        ((torch.zeros(12), 4.0, 1, 3), "batch_size: expected an int of at least 0, got 4.0"),
    ],
)
def test_split_refuses(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_draft_out_cache_loc(*arguments)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"req_pool_indices": [1, 2]}, "req_pool_indices: expected a torch.Tensor, got list"),
        ({"req_pool_indices": torch.zeros(2)}, "req_pool_indices: expected dtype int64 or int32, got float32"),
        (
            {"req_pool_indices": torch.zeros(3, dtype=torch.int64)},
            r"topk_p: expected shape \[3, 1\], got shape \[2, 1\]",
        ),
        ({"seq_lens": torch.zeros(3, dtype=torch.int64)}, r"seq_lens: expected shape \[2\], got shape \[3\]"),
        ({"positions": torch.zeros(2, 1, dtype=torch.int64)}, r"positions: expected shape \[2\], got shape \[2, 1\]"),
        ({"out_cache_loc": torch.zeros(7, dtype=torch.int64)}, r"multiple of 2 slots \(B 2 \* topk 1\), got 7"),
        ({"topk_p": torch.zeros(2)}, r"topk_p: expected 2 dimensions, got shape \[2\]"),
        ({"topk_p": torch.zeros(2, 0)}, "topk_p: expected at least one column"),
        ({"topk_index": torch.zeros(2, 2, dtype=torch.int64)}, r"topk_index: expected shape \[2, 1\]"),
        ({"hidden_states": torch.zeros(1, 128)}, r"hidden_states: expected 2 rows, got shape \[1, 128\]"),
        ({"seq_lens_cpu": torch.zeros(1, dtype=torch.int64)}, r"seq_lens_cpu: expected shape \[2\]"),
        ({"seq_lens_cpu": torch.zeros(2, dtype=torch.int64, device="meta")}, "seq_lens_cpu: expected a tensor on cpu"),
        ({"variant": None}, "variant: expected a str, got NoneType"),
    ],
)
def test_batch_refuses(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_batch([3, 4], **changed)


def test_an_empty_batch_has_no_slots() -> None:
    idle = DraftBatch.idle(8, torch.bfloat16, "cpu")
    assert (idle.batch_size, idle.topk, idle.num_steps) == (0, 1, None)
    with pytest.raises(ValueError, match="expected a multiple of 0 slots"):
        make_batch([], slots=[1, 2, 3])
