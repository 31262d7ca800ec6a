"""Fixed memory for the inputs of a step, so that a CUDA graph can record what is made of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dsv4_backend.batch import ForwardMode, RawBatch
from dsv4_backend.metadata import AttnMetadata
from dsv4_backend.validation import INT_DTYPES, expect_tensor

BOUND_MODES = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
"""Modes in which each request has as many rows as every other one, so that a batch size says all about a shape."""

_FIELDS = ("req_pool_indices", "seq_lens", "out_cache_loc")


class _Copies(NamedTuple):
    """Where batches of one size go. Sliced once: on the replay path slices add up."""

    live: tuple[torch.Tensor, ...]
    pad: tuple[torch.Tensor, ...]
    pad_values: tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class StepInputs:
    """A padded batch at fixed addresses, and the metadata that is built from it. `DSV4AttnBackend.bind` makes it.

    Attributes:
        batch: of B requests with `width` rows each; int64 tensors. Padding has request 0, length 1 and slots 0.
        ids: int64 [B * width]: the rows' tokens, for the model; 0 for padding. Attention does not read them.
        width: rows of a request.
        meta: what every build from `batch` writes: views of the builder's buffers, the same tensors every time.
    """

    batch: RawBatch
    ids: torch.Tensor
    width: int
    meta: AttnMetadata
    _copies: dict[int, _Copies] = field(default_factory=dict, repr=False)

    @property
    def batch_size(self) -> int:
        """B, padding included."""
        return self.batch.batch_size

    @property
    def num_rows(self) -> int:
        """B * width."""
        return self.ids.shape[0]

    def load(self, batch: RawBatch, ids: torch.Tensor) -> None:
        """Copies a batch in, and resets all that is behind it; see `DSV4AttnBackend.load`."""
        self._check(batch, ids)
        copies = self._copies.get(batch.batch_size)
        if copies is None:
            copies = self._copies[batch.batch_size] = self._slice(batch.batch_size)
        sources = [batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc, ids] if batch.batch_size else []
        _copy([*copies.pad, *copies.live], [*copies.pad_values, *sources])

    def _check(self, batch: RawBatch, ids: torch.Tensor) -> None:
        ours = self.batch
        if batch.batch_size > ours.batch_size:
            raise ValueError(f"batch: expected at most {ours.batch_size} requests, got {batch.batch_size}")
        if batch.batch_size:
            if batch.mode is not ours.mode:
                raise ValueError(f"batch: expected mode {ours.mode.value}, got {batch.mode.value}")
            if batch.ragged or batch.num_rows != batch.batch_size * self.width:
                got = "rows of its own for each" if batch.ragged else f"{batch.num_rows} rows for {batch.batch_size}"
                raise ValueError(f"batch: expected {self.width} rows a request, got {got}")
            if batch.device != self.ids.device:
                raise ValueError(f"batch: expected tensors on {self.ids.device}, got them on {batch.device}")
        rows = batch.batch_size * self.width
        expect_tensor("ids", ids, dtypes=INT_DTYPES, ndim=1, size=rows, device=self.ids.device)

    def _slice(self, live: int) -> _Copies:
        targets = [(getattr(self.batch, name), 1 if name == "seq_lens" else 0) for name in _FIELDS] + [(self.ids, 0)]
        parts = [(tensor, value, live * (tensor.shape[0] // self.batch_size)) for tensor, value in targets]
        pad = [(tensor[split:], value) for tensor, value, split in parts if split < tensor.shape[0]]
        return _Copies(
            live=tuple(tensor[:split] for tensor, _, split in parts if split),
            pad=tuple(tensor for tensor, _ in pad),
            pad_values=tuple(torch.full_like(tensor, value) for tensor, value in pad),
        )


@torch.inference_mode(False)
def make_inputs(mode: ForwardMode, batch_size: int, width: int, device: torch.device) -> tuple[RawBatch, torch.Tensor]:
    """A batch that is all padding, and its ids, in new memory; plain tensors even when made in inference mode."""
    words = torch.zeros(batch_size * (2 + 2 * width), dtype=torch.int64, device=device)
    rows = batch_size * width
    requests, lengths, slots, ids = words.split((batch_size, batch_size, rows, rows))
    lengths.fill_(1)
    drafts = 0 if mode is ForwardMode.DECODE else width
    return RawBatch(mode, requests, lengths, slots, num_draft_tokens=drafts), ids


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """One grouped copy for each dtype of the sources; a single launch where all are contiguous int64."""
    groups: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        to, of = groups.setdefault(source.dtype, ([], []))
        to.append(target)
        of.append(source)
    for to, of in groups.values():
        torch._foreach_copy_(to, of)
