"""The request tables of a paged cache: which slot holds which token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from dsv4_backend.validation import expect_tensor


@dataclass(frozen=True, eq=False)
class RequestTables:
    """Maps a request and a position to a slot of the full pool, and that slot to one of the sliding-window pool.

    Args:
        req_to_token: int32 [R, C], any row stride, unit column stride. `req_to_token[r, p]` is the slot of position p
            of request r. Row 0 is the padding request: all zero.
        full_to_swa: int64 [S], contiguous, on the same device. Window slot of a full slot; 0 where the token was
            evicted or never had one, else at least -1. The last element is -1.

    Request 0, page 0 and slot 0 are reserved: padding reads and writes land there. Slots at or beyond S (and below
    -1) translate to window slot 0 and set the error flag of whatever read them; slot -1 translates to -1.

    Raises:
        ValueError: a dtype, rank, stride, size or device is not as above.

    Contents are not checked. Source: docs/plans.md, "Tables".
    """

    req_to_token: torch.Tensor
    full_to_swa: torch.Tensor

    def __post_init__(self) -> None:
        expect_tensor("req_to_token", self.req_to_token, dtypes=(torch.int32,), ndim=2)
        expect_tensor("full_to_swa", self.full_to_swa, dtypes=(torch.int64,), ndim=1, device=self.req_to_token.device)
        rows, columns = self.req_to_token.shape
        if rows < 1 or columns < 1:
            raise ValueError(f"req_to_token: expected at least one row and one column, got [{rows}, {columns}]")
        for name, size in (("req_to_token", max(rows, columns)), ("full_to_swa", self.full_to_swa.numel())):
            if size >= 2**31:
                raise ValueError(f"{name}: expected fewer than 2^31 in each dimension, got {size}")
        if columns > 1 and self.req_to_token.stride(1) != 1:
            raise ValueError(f"req_to_token: expected unit column stride, got {self.req_to_token.stride(1)}")
        if self.full_to_swa.numel() < 1:
            raise ValueError("full_to_swa: expected at least one element, got none")
        if not self.full_to_swa.is_contiguous():
            raise ValueError(f"full_to_swa: expected a contiguous tensor, got stride {self.full_to_swa.stride(0)}")

    @cached_property
    def device(self) -> torch.device:
        return self.req_to_token.device

    @cached_property
    def num_requests(self) -> int:
        """Rows of `req_to_token`, the reserved one included; request ids are 0 .. num_requests - 1."""
        return self.req_to_token.shape[0]

    @cached_property
    def max_seq_len(self) -> int:
        """Columns of `req_to_token`: the longest length that a request can have."""
        return self.req_to_token.shape[1]

    @cached_property
    def num_slots(self) -> int:
        """Full slots that `full_to_swa` translates."""
        return self.full_to_swa.shape[0]
