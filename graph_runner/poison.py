"""Proves that padding lanes touch slot 0 only: fills what they must not reach with poison, and looks at everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from dsv4_graph_runner.batch import DraftBatch, DraftOutput
from dsv4_graph_runner.guard import GuardError

if TYPE_CHECKING:
    from dsv4_graph_runner.runner import EagleDraftGraphRunner


class SlotMemory(Protocol):
    """Persistent state of a draft model that is written by slot, a paged KV cache for one."""

    def tensors(self) -> Sequence[torch.Tensor]:
        """All of it, each [rows, ...]. What lies between the slots belongs to it, too."""
        ...

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """int64: the rows in which `slots` (int64, any number) are kept."""
        ...


def check_lane_poison(
    runner: EagleDraftGraphRunner, batch: DraftBatch, memory: SlotMemory, reserved_slots: int
) -> DraftOutput:
    """Replays `batch` twice, the second time with poison wherever a wrong lane could read or write.

    Poison goes to the runner's inputs and outputs (which a replay resets, padding lanes included) and to the reserved
    slots, 0 included. Then the drafts must be the same bit for bit, slots 1 to `reserved_slots` - 1 still poisoned,
    and no row changed but those of `batch.out_cache_loc` and slot 0.

    Args:
        runner: the runner. With a group, every rank must make the same call.
        batch: a batch. It is not changed, and the memory is as before when this returns or raises.
        memory: the state that the draft model writes.
        reserved_slots: slots at the front that belong to no request, at least 1: the padding page.

    Returns:
        The drafts, cloned.

    Raises:
        GuardError: of kind "poison", with the first row that differs.
    """
    tensors = list(memory.tensors())
    device = tensors[0].device
    reserved = memory.rows(torch.arange(reserved_slots, device=device))
    written = memory.rows(batch.out_cache_loc.long())
    before = [tensor.clone() for tensor in tensors]
    try:
        clean = runner.replay(batch, clone=True)
        after = [tensor.clone() for tensor in tensors]
        for i, tensor in enumerate(tensors):
            allowed = torch.cat((written, reserved[:1]))
            _expect_equal(f"memory {i}, without poison", tensor, before[i], allowed)
            tensor.copy_(before[i])
            tensor[reserved] = _poison(tensor.dtype)
            after[i][reserved] = _poison(tensor.dtype)
        runner.poison_padding()
        poisoned = runner.replay(batch, clone=True)
        for name in ("draft_tokens", "parents", "scores"):
            _expect_equal(name, getattr(poisoned, name), getattr(clean, name), None)
        for i, tensor in enumerate(tensors):
            _expect_equal(f"memory {i}", tensor, after[i], reserved[:1])
    finally:
        for tensor, original in zip(tensors, before, strict=True):
            tensor.copy_(original)
    return clean


def _poison(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max


def _expect_equal(name: str, got: torch.Tensor, expected: torch.Tensor, except_rows: torch.Tensor | None) -> None:
    """Compares bits, so that NaN equals NaN; raises with the first row that differs."""
    if not got.numel():
        return
    differs = _bytes(got) != _bytes(expected)
    rows = differs.any(1)
    if except_rows is not None:
        rows[except_rows] = False
    if bool(rows.any()):
        row = int(rows.nonzero()[0, 0])
        raise GuardError("poison", f"{name}, row {row}: expected {_shown(expected[row])}, got {_shown(got[row])}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(len(tensor), -1).view(torch.uint8)


def _shown(row: torch.Tensor) -> str:
    values = row.flatten()[:4].tolist()
    return f"{values}{'...' if row.numel() > 4 else ''}"
