"""How close an attention layer must come to its golden, and what is said about it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TOLERANCE, ROPE_TOLERANCE = 1e-5, 1e-4
"""Largest difference of float32 values, and of channels that rotate: frequencies differ by an ulp."""
NORM_TOLERANCE = {"bf16": 5e-3, "fp8": 4e-2}
"""Largest difference from the golden's, relative to their norm, by format of the cache, where it is rounded."""
OWN_TOLERANCE = 4e-3
"""The same, from what we compute in float64 of equally rounded entries."""
OWN_SCORE_TOLERANCE = 1e-5
"""The same for index scores, which add up exact products."""
MARGINS = {"fp32": 5e-5, "bf16": 1e-2, "fp8": 1e-1}
"""A row whose last selected score is ahead by less may have another selection, by format of the cache."""


@dataclass(frozen=True)
class Finding:
    """What came of one comparison: `size` is the largest difference, `text` says it, or the first one too large."""

    name: str
    ok: bool
    size: float
    text: str


def close(
    name: str,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    rows: torch.Tensor,
    tolerance: float = TOLERANCE,
    rope_dim: int = 0,
) -> Finding:
    """Whether values [n, ..., channels] are the golden's, the last `rope_dim` channels within `ROPE_TOLERANCE`.

    Places where `theirs` is NaN are not compared. `rows`, [n], names the rows; there may be none.
    """
    difference = (ours.double() - theirs.double()).abs()
    split = difference.shape[-1] - rope_dim
    limit = torch.full(difference.shape[-1:], tolerance, dtype=difference.dtype, device=difference.device)
    limit[split:] = ROPE_TOLERANCE
    bad = ~(difference <= limit) & ~theirs.isnan()
    difference = difference.where(~theirs.isnan(), 0.0)
    if bad.any():
        return Finding(name, False, torch.inf, f"{name}{_first(bad, ours, theirs, rows)}")
    text = f"{name} {_largest(difference[..., :split]):.1e}"
    if rope_dim:
        text += f" and {_largest(difference[..., split:]):.1e} where it turns"
    return Finding(name, True, _largest(difference), text)


def close_by_norm(
    name: str,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    rows: torch.Tensor,
    tolerance: float,
    *,
    row_tolerance: float | None = None,
    of: str = "",
) -> Finding:
    """Whether rows [n, ...] are, all in all, within `tolerance` of the golden's, relative to their norm.

    Each row is within `row_tolerance` of its own norm, twice the tolerance if None. `of` says what they are compared
    with, if not the golden.
    """
    ours, theirs = ours.double().flatten(1), theirs.double().flatten(1)
    limit = 2 * tolerance if row_tolerance is None else row_tolerance
    difference, norm = (ours - theirs).norm(dim=1), theirs.norm(dim=1)
    bad = ~(difference <= limit * norm)
    if bad.any():
        at = int(bad.nonzero()[0])
        size = float(difference[at] / norm[at])
        text = f"{name}[{int(rows[at])}]: expected at most {limit:.0e} of its norm{of}, got {size:.1e}"
        return Finding(name + of, False, torch.inf, text)
    size = float(difference.norm() / norm.norm().clamp(min=1e-30))
    if not size <= tolerance:
        text = f"{name}: expected at most {tolerance:.0e} of its norm{of}, got {size:.1e}"
        return Finding(name + of, False, torch.inf, text)
    return Finding(name + of, True, size, f"{name} {size:.1e} of its norm{of}")


def _largest(difference: torch.Tensor) -> float:
    return float(difference.max()) if difference.numel() else 0.0


def _first(bad: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor, rows: torch.Tensor) -> str:
    place = bad.nonzero()[0].tolist()
    named = [int(rows[place[0]]), *place[1:]]
    return f"{named}: expected {float(theirs[tuple(place)])}, got {float(ours[tuple(place)])}"


def compare_selection(
    ours: torch.Tensor, theirs: torch.Tensor, margin: torch.Tensor, rows: torch.Tensor, kv: str
) -> tuple[Finding, torch.Tensor]:
    """Whether selections are the golden's, as sets; and which rows' are, bool [n].

    Args:
        ours, theirs: int64 [n, columns]: what each row selects, -1 for nothing.
        margin: float32 [n]: how far the last selected score is ahead of the first one that is not; -1: there is none.
        rows: int64 [n]: the tokens.
        kv: format of the cache.
    """
    columns = max(ours.shape[1], theirs.shape[1])
    one, other = (_sorted(each, columns) for each in (ours, theirs))
    same = (one == other).all(dim=1)
    narrow = (margin >= 0) & (margin < MARGINS[kv])
    bad = ~same & ~narrow
    if bad.any():
        at = int(bad.nonzero()[0])
        chosen, wanted = {*ours[at].tolist()}, {*theirs[at].tolist()}
        missing, extra = sorted(wanted - chosen), sorted(chosen - wanted)
        text = f"topk_idx[{int(rows[at])}]: expected the golden's selection at margin {float(margin[at]):.1e}, got "
        return Finding("topk_idx", False, torch.inf, f"{text}one without {missing} and with {extra}"), same
    tokens = rows[narrow].unique().tolist()
    if kv != "fp32":
        others = rows[~same].unique().tolist()
        text = f"topk_idx equal{f' but for {len(others)} of {len(tokens)} close rows' if others else ''}"
        return Finding("topk_idx", True, float(len(others)), text), same
    if len(tokens) > 1:
        text = f"topk_idx: expected at most one row with a margin below {MARGINS[kv]:.0e}, got rows {tokens}"
        return Finding("topk_idx", False, torch.inf, text), same
    text = "topk_idx equal"
    if tokens:
        text += f" (skipped row {tokens[0]}, margin {float(margin[narrow][0]):.1e})"
    return Finding("topk_idx", True, 0.0, text), same


def _sorted(selection: torch.Tensor, columns: int) -> torch.Tensor:
    padded = torch.nn.functional.pad(selection, (0, columns - selection.shape[1]), value=-1)
    return padded.sort(dim=1).values
