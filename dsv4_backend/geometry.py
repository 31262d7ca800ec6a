"""Slot, page and ring arithmetic of the paged DSv4 cache, in one place."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

import torch

RATIOS = (4, 128)
READ_WINDOW = {4: 8, 128: 128}
"""Tokens that one compressed entry reads: two overlapping groups of 4, or one group of 128."""
OVERLAP_ROWS = 4
"""Rows at the end of every window page that ratio 4 keeps as state, so that a prefix hit can go on after the page."""

IntOrTensor = TypeVar("IntOrTensor", int, torch.Tensor)

_DRAFT_RINGS = {"c4_ring": 16, "c128_ring": 256}
"""Rings of `CacheGeometry.for_drafts`."""


def trunc_div(a: IntOrTensor, b: int) -> IntOrTensor:
    """`a / b` rounded toward zero, as C does for integers; `b` > 0."""
    if isinstance(a, torch.Tensor):
        return torch.div(a, b, rounding_mode="trunc")
    return a // b if a >= 0 else -(-a // b)


def trunc_rem(a: IntOrTensor, b: int) -> IntOrTensor:
    """The remainder that belongs to `trunc_div`: it has the sign of `a`."""
    return a - trunc_div(a, b) * b


@dataclass(frozen=True)
class CacheGeometry:
    """Sizes of the paged cache and of the rings that hold compression state.

    Args:
        page_size: tokens of a page of the full pool; a multiple of 128, so that a page holds whole groups of both
            ratios. A compressed slot is the full slot divided by the ratio, on the page with the same number.
        swa_page_size: tokens of a page of the sliding-window pool; a multiple of `c4_ring`.
        window: tokens that a query sees through the sliding window, itself included.
        c4_ring: state rows of ratio 4 for each window page; a multiple of 4, at least 8.
        c128_ring: state rows of ratio 128 for each request; a multiple of 128.

    Raises:
        ValueError: a size is not an int, not positive, or breaks one of the rules above.

    Source: docs/plans.md, "State rings".
    """

    page_size: int = 256
    swa_page_size: int = 256
    window: int = 128
    c4_ring: int = 8
    c128_ring: int = 128

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{field.name}: expected an int, got {value!r}")
            if value <= 0:
                raise ValueError(f"{field.name}: expected a positive number, got {value}")
        _expect_multiple("page_size", self.page_size, 128)
        for ratio, ring in ((4, self.c4_ring), (128, self.c128_ring)):
            _expect_multiple(f"c{ratio}_ring", ring, ratio)
            if ring < READ_WINDOW[ratio]:
                raise ValueError(f"c{ratio}_ring: expected at least the read window {READ_WINDOW[ratio]}, got {ring}")
        _expect_multiple("swa_page_size", self.swa_page_size, self.c4_ring)

    @classmethod
    def for_drafts(cls, num_draft_tokens: int) -> CacheGeometry:
        """The default geometry with rings for a verify step of `num_draft_tokens` rows a request (0: no speculation).

        Raises:
            ValueError: negative, or more than the speculative rings can roll back.
        """
        geom = cls() if num_draft_tokens == 0 else cls(**_DRAFT_RINGS)
        geom.check_drafts(num_draft_tokens)
        return geom

    @property
    def draft_capacity(self) -> int:
        """Most rows of a request in a verify step: no more fit the rings beside the windows that read them.

        A ring without spare rows (8 / 128: capacity 2) writes no pad, so there a rejected row next to a border of 128
        leaves a window without its state. `for_drafts` never chooses such rings for speculation.
        """
        return min(self.ring(ratio) - READ_WINDOW[ratio] + 2 for ratio in RATIOS)

    def check_drafts(self, num_draft_tokens: int) -> None:
        """Raises ValueError unless `num_draft_tokens` is an int from 0 to `draft_capacity`."""
        if isinstance(num_draft_tokens, bool) or not isinstance(num_draft_tokens, int) or num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens: expected an int of at least 0, got {num_draft_tokens!r}")
        if num_draft_tokens <= self.draft_capacity:
            return
        # The ratio with the least room over its read window is the one that refuses.
        ratio = min(RATIOS, key=lambda r: self.ring(r) - READ_WINDOW[r])
        need = num_draft_tokens + READ_WINDOW[ratio] - 2
        fits = num_draft_tokens <= CacheGeometry(**_DRAFT_RINGS).draft_capacity
        hint = "; " + ", ".join(f"{name}={size}" for name, size in _DRAFT_RINGS.items()) + " hold them" if fits else ""
        raise ValueError(
            f"num_draft_tokens: expected at most {self.draft_capacity}, got {num_draft_tokens} "
            f"(needs {need} rows in the ratio-{ratio} ring of {self.ring(ratio)}){hint}"
        )

    def check_requests(self, num_requests: int) -> None:
        """Raises ValueError unless the state rows of `num_requests` requests can be counted in 31 bits."""
        if num_requests * self.c128_ring >= 2**31:
            raise ValueError(
                f"geom: expected fewer than 2^31 state rows for ratio 128, got {num_requests} requests of "
                f"{self.c128_ring} rows"
            )

    def ring(self, ratio: int) -> int:
        """State rows of the ring of `ratio`: of a window page for 4, of a request for 128."""
        return {4: self.c4_ring, 128: self.c128_ring}[ratio]

    def write_pad(self, ratio: int) -> int:
        """Rows at the end of a batch that are kept so that drafts can be rejected; 0 in a ring without spare rows."""
        spare = self.ring(ratio) - READ_WINDOW[ratio]
        return spare + 2 if spare > 0 else 0

    def state_loc(
        self, ratio: int, swa_slot: IntOrTensor, req_pool_index: IntOrTensor, position: IntOrTensor
    ) -> IntOrTensor:
        """State row of a token. Ratio 4 follows the window slot, ratio 128 the request. Window slot -1 gives -1.

        All three arguments are ints, or int64 tensors of one shape.
        """
        if ratio == 4:
            return trunc_div(swa_slot, self.swa_page_size) * self.c4_ring + trunc_rem(swa_slot, self.c4_ring)
        return req_pool_index * self.c128_ring + trunc_rem(position, self.c128_ring)

    def state_page(self, ratio: int, state_loc: IntOrTensor) -> IntOrTensor:
        """Group of `ratio` state rows that holds `state_loc`, the unit in which compression reads state."""
        return trunc_div(state_loc, ratio)


def _expect_multiple(name: str, value: int, base: int) -> None:
    if value % base:
        raise ValueError(f"{name}: expected a multiple of {base}, got {value}")
