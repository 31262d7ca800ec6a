"""What a step does: its mode, and the lengths, ids and write slots of its requests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from dsv4_backend.validation import INT_DTYPES, expect_tensor, expect_type


class ForwardMode(str, Enum):
    """Kind of a step. What `seq_lens` counts depends on it; see `RawBatch`."""

    DECODE = "DECODE"
    EXTEND = "EXTEND"
    TARGET_VERIFY = "TARGET_VERIFY"
    DRAFT_EXTEND = "DRAFT_EXTEND"
    DRAFT_DECODE = "DRAFT_DECODE"
    IDLE = "IDLE"


_WITH_DRAFTS = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
_MAY_BE_RAGGED = (ForwardMode.EXTEND, *_WITH_DRAFTS, ForwardMode.IDLE)


@dataclass(frozen=True, eq=False)
class RawBatch:
    """One step of B requests with T rows in all, request-major, before anything is derived from it.

    | mode | `seq_lens` counts | rows of a request | `out_cache_loc` |
    |---|---|---|---|
    | DECODE | the current token, too | 1 | B |
    | EXTEND | prefix and extend | `extend_lens[b]` | their sum |
    | TARGET_VERIFY | what is committed, **not** the drafts | `num_draft_tokens`, or `extend_lens[b]` if given | T |
    | DRAFT_EXTEND | the draft tokens, too | the same | T |
    | DRAFT_DECODE | what is committed, the same in every step | 1 in each step | B * topk * num_steps |
    | IDLE | ignored | ignored | ignored: as many rows as it has, all of them padding |

    Args:
        mode: kind of the step.
        req_pool_indices: int32 or int64 [B], any stride: rows of `RequestTables.req_to_token`. 0 is padding.
        seq_lens: int32 or int64 [B], any stride, on the same device, as all that follow.
        out_cache_loc: int32 or int64 [T], any stride: slots of the full pool that the rows are written to, those of the
            real rows and no more. DRAFT_DECODE: request b owns entries b * topk * num_steps and up; with topk 1, entry
            b * num_steps + i is written in step i.
        extend_lens: int32 or int64 [B], any stride: rows of each request. EXTEND needs it. TARGET_VERIFY and
            DRAFT_EXTEND take it for a ragged batch, where none may be above `num_draft_tokens`.
        num_draft_tokens: rows of a request in TARGET_VERIFY and DRAFT_EXTEND; with `extend_lens` the most of them, and
            0 stands for what the rings can hold. Other modes ignore it.
        num_steps: draft steps of DRAFT_DECODE. The last one only samples and runs no forward. Other modes ignore it.
        topk: branches of DRAFT_DECODE. Other modes ignore it.

    Raises:
        ValueError: an argument is missing, does not belong to the mode, or has another dtype, rank, length or device
            than stated. Values on a GPU are not looked at.

    Source: docs/metadata.md, "Modes".
    """

    mode: ForwardMode
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    extend_lens: torch.Tensor | None = None
    num_draft_tokens: int = 0
    num_steps: int = 0
    topk: int = 1

    def __post_init__(self) -> None:
        expect_type("mode", self.mode, ForwardMode)
        mode = self.mode
        req = expect_tensor("req_pool_indices", self.req_pool_indices, dtypes=INT_DTYPES, ndim=1)
        size, device = req.shape[0], req.device
        expect_tensor("seq_lens", self.seq_lens, dtypes=INT_DTYPES, ndim=1, size=size, device=device)
        expect_tensor("out_cache_loc", self.out_cache_loc, dtypes=INT_DTYPES, ndim=1, device=device)
        self._check_numbers()
        if self.extend_lens is not None:
            if mode not in _MAY_BE_RAGGED:
                raise ValueError(f"extend_lens: expected none in mode {mode.value}, got a tensor")
            expect_tensor("extend_lens", self.extend_lens, dtypes=INT_DTYPES, ndim=1, size=size, device=device)
        elif mode is ForwardMode.EXTEND:
            raise ValueError("extend_lens: expected int32 or int64 [B] in mode EXTEND, got none")
        self._check_slots()

    @property
    def batch_size(self) -> int:
        """B."""
        return self.req_pool_indices.shape[0]

    @property
    def num_rows(self) -> int:
        """T; for DRAFT_DECODE the rows of one step."""
        if self.mode is ForwardMode.DRAFT_DECODE:
            return self.req_pool_indices.shape[0] * self.topk
        return self.out_cache_loc.shape[0]

    @property
    def device(self) -> torch.device:
        return self.req_pool_indices.device

    @property
    def ragged(self) -> bool:
        """Whether each request has a number of rows of its own."""
        return self.extend_lens is not None

    def _check_numbers(self) -> None:
        drafts_low = int(self.mode in _WITH_DRAFTS and self.extend_lens is None)
        steps_low = int(self.mode is ForwardMode.DRAFT_DECODE)
        for name, low in (("num_draft_tokens", drafts_low), ("num_steps", steps_low), ("topk", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise ValueError(f"{name}: expected an int of at least {low} in mode {self.mode.value}, got {value!r}")

    def _check_slots(self) -> None:
        """Checks how many write slots there are, as far as that is known without looking at values."""
        size, slots = self.req_pool_indices.shape[0], self.out_cache_loc.shape[0]
        if self.mode is ForwardMode.DECODE:
            expected, why = size, f"one for each of {size} requests"
        elif self.mode is ForwardMode.DRAFT_DECODE:
            expected = size * self.topk * self.num_steps
            why = f"{size} requests x {self.topk} x {self.num_steps} steps"
        elif self.mode in _WITH_DRAFTS and self.extend_lens is None:
            expected = size * self.num_draft_tokens
            why = f"{size} requests x {self.num_draft_tokens} draft tokens"
        else:
            return
        if slots == expected:
            return
        hint = ""
        if self.mode is ForwardMode.DECODE and slots > size > 0:
            hint = "; mode EXTEND takes several rows of a request, DRAFT_DECODE the slots of all draft steps"
        elif self.mode is ForwardMode.DRAFT_DECODE and slots == size * self.topk:
            hint = "; build_draft_steps takes the slots of all steps, not those of one"
        raise ValueError(f"out_cache_loc: expected {expected} slots ({why}), got {slots}{hint}")
