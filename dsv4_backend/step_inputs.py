"""Fixed memory for the inputs of a step, so that a CUDA graph can record what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from dsv4_backend.batch import ForwardMode, RawBatch
from dsv4_backend.metadata import AttnMetadata
from dsv4_backend.validation import INT_DTYPES, expect_tensor

BOUND_MODES = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
"""Modes in which each request can have as many rows as every other one, so that a batch size says all about a shape."""


class _Words(NamedTuple):
    """int64 [B], [B], [T], [T]: all that a graph reads of a step's inputs."""

    requests: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    ids: torch.Tensor


class _Copies(NamedTuple):
    """Where batches of one size go. Sliced once: on the replay path slices add up."""

    live: tuple[torch.Tensor, ...]
    pad: tuple[torch.Tensor, ...]
    pad_values: tuple[torch.Tensor, ...]


class StepInputs:
    """A padded batch at fixed addresses, and the metadata that is built from it. `DSV4AttnBackend.bind` makes it.

    Args:
        mode: one of `BOUND_MODES`.
        batch_size: B, padding included.
        width: rows of a request; for the modes with drafts also `num_draft_tokens`.
        device: where.
        build: gives the metadata of a batch.

    Attributes:
        batch: of B requests with `width` rows each; int64 tensors. Padding has request 0, length 1 and slots 0.
        ids: int64 [B * width]: the rows' tokens, for the model; 0 for padding. Attention does not read them.
        width: as given.
        meta: what every build from `batch` writes: views of the builder's buffers, the same tensors every time.
    """

    def __init__(
        self,
        mode: ForwardMode,
        batch_size: int,
        width: int,
        device: torch.device,
        build: Callable[[RawBatch], AttnMetadata],
    ) -> None:
        self._words, self._padding = (_padding(batch_size, width, device) for _ in range(2))
        drafts = 0 if mode is ForwardMode.DECODE else width
        self.batch = RawBatch(
            mode, self._words.requests, self._words.lengths, self._words.slots, num_draft_tokens=drafts
        )
        self.ids, self.width = self._words.ids, width
        self.meta = build(self.batch)
        self._copies: dict[int, _Copies] = {}

    @property
    def batch_size(self) -> int:
        """B, padding included."""
        return self.batch.batch_size

    @property
    def num_rows(self) -> int:
        """B * width."""
        return self.batch.num_rows

    def load(self, batch: RawBatch, ids: torch.Tensor) -> None:
        """Copies a batch in, and resets all that is behind it; see `DSV4AttnBackend.load`."""
        self._check(batch, ids)
        copies = self._copies.get(batch.batch_size)
        if copies is None:
            copies = self._copies[batch.batch_size] = self._slice(batch.batch_size)
        sources = [batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc, ids] if batch.batch_size else []
        _copy([*copies.pad, *copies.live], [*copies.pad_values, *sources])

    def _check(self, batch: RawBatch, ids: torch.Tensor) -> None:
        ours, size = self.batch, batch.batch_size
        if size > ours.batch_size:
            raise ValueError(f"batch: expected at most {ours.batch_size} requests, got {size}")
        if size and batch.mode is not ours.mode:
            raise ValueError(f"batch: expected mode {ours.mode.value}, got {batch.mode.value}")
        if size and batch.ragged:
            raise ValueError(f"extend_lens: expected none, since each request has {self.width} rows, got a tensor")
        rows = size * self.width
        if size and batch.num_rows != rows:
            raise ValueError(
                f"out_cache_loc: expected {rows} slots ({size} requests x {self.width}), got {batch.num_rows}"
            )
        if size and batch.device != ours.device:
            raise ValueError(f"batch: expected tensors on {ours.device}, got them on {batch.device}")
        expect_tensor("ids", ids, dtypes=INT_DTYPES, ndim=1, size=rows, device=ours.device if size else None)

    def _slice(self, live: int) -> _Copies:
        splits = [len(target) // self.batch_size * live for target in self._words]
        heads = tuple(target[:split] for target, split in zip(self._words, splits, strict=True))
        tails = tuple(target[split:] for target, split in zip(self._words, splits, strict=True))
        values = tuple(each[split:] for each, split in zip(self._padding, splits, strict=True))
        padded = live < self.batch_size
        return _Copies(heads if live else (), tails if padded else (), values if padded else ())


@torch.inference_mode(False)
def _padding(batch_size: int, width: int, device: torch.device) -> _Words:
    """Inputs that are all padding, in one piece; plain tensors even when made in inference mode."""
    rows = batch_size * width
    words = torch.zeros(2 * (batch_size + rows), dtype=torch.int64, device=device)
    found = _Words(*words.split((batch_size, batch_size, rows, rows)))
    found.lengths.fill_(1)
    return found


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """One grouped copy for each dtype of the sources; a single launch where all are contiguous int64."""
    groups: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        to, of = groups.setdefault(source.dtype, ([], []))
        to.append(target)
        of.append(source)
    for to, of in groups.values():
        torch._foreach_copy_(to, of)
