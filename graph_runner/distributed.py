"""What ranks that draft together must agree on before they launch anything."""

from __future__ import annotations

import torch
import torch.distributed as dist


class RankGroup:
    """Agreement over a `torch.distributed` group.

    Args:
        group: the ranks that run the draft model together. Best a gloo group: the numbers lie on the host, and a group
            that only knows GPUs makes every agreement wait for the device.
        device: where the numbers of an NCCL group are reduced.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device if "gloo" not in str(dist.get_backend(group)) else torch.device("cpu")

    def largest(self, batch_size: int, refusal: str) -> int:
        """The largest batch of all ranks. Every rank must call it.

        Args:
            batch_size: of this rank.
            refusal: why this rank cannot run its batch, or "".

        Raises:
            ValueError: on every rank, where any of them refuses; none then waits in a collective for one that left.
        """
        largest, refused = self._maximum([batch_size, int(bool(refusal))])
        if refusal:
            raise ValueError(refusal)
        if refused:
            raise ValueError("batch: expected one that every rank can run, got one that another rank refused")
        return largest

    def expect_same(self, name: str, values: tuple[int, ...]) -> None:
        """Raises ValueError, on every rank, unless all ranks have the same `values`."""
        counts = self._maximum([len(values), -len(values)])
        same = counts[0] == -counts[1]
        if same and values:
            bounds = self._maximum([*values, *(-value for value in values)])
            same = bounds[: len(values)] == [-value for value in bounds[len(values) :]]
        if not same:
            raise ValueError(f"{name}: expected the same on every rank, got {values} on rank {dist.get_rank()}")

    def _maximum(self, values: list[int]) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in tensor.tolist()]
