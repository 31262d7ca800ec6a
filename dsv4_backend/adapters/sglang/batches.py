"""What SGLang hands to the methods of a backend, as our batches. Plain attribute access: SGLang is not needed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dsv4_backend.batch import ForwardMode, RawBatch
from dsv4_backend.geometry import OVERLAP_ROWS, READ_WINDOW, CacheGeometry


def decode_batch(raw: Any) -> RawBatch:
    """A DSV4RawDecodeMetadata: req_pool_indices, seq_lens and out_cache_loc, [B] each."""
    return RawBatch(ForwardMode.DECODE, raw.req_pool_indices, raw.seq_lens, raw.out_cache_loc)


def verify_batch(raw: Any, num_draft_tokens: int) -> RawBatch:
    """A DSV4RawVerifyMetadata: lengths before the drafts; ragged where it has `verify_lens`.

    A ragged step has a fixed number of rows. SGLang gives those that nobody needs to the padding requests, or to the
    last request where there are none. Here they stay padding: they are the rows whose slot is 0, all at the end.
    """
    if raw.verify_lens is None:
        return RawBatch(
            ForwardMode.TARGET_VERIFY,
            raw.req_pool_indices,
            raw.seq_lens,
            raw.out_cache_loc,
            num_draft_tokens=num_draft_tokens,
        )
    slots = raw.out_cache_loc
    total = (slots != 0).sum()
    lens = raw.verify_lens.long()
    begin = lens.cumsum(0) - lens
    lens = torch.minimum(lens, (total - begin).clamp(min=0))
    if slots.device.type == "cpu":  # where lengths can be read, slots must be exactly as many
        slots = slots[: int(total)]
    return RawBatch(
        ForwardMode.TARGET_VERIFY,
        raw.req_pool_indices,
        raw.seq_lens,
        slots,
        extend_lens=lens,
        num_draft_tokens=num_draft_tokens,
    )


def extend_batch(
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    real_rows: int,
    longest: int,
) -> RawBatch:
    """A prompt step of `out_cache_loc.shape[0]` rows, of which those from `real_rows` on are padding.

    They become padding requests, so that a step of any number of rows uses the buffers of the next power of two.
    """
    padding = out_cache_loc.shape[0] - real_rows
    if padding:
        lens = seq_lens.new_full((-(-padding // longest),), longest, dtype=torch.int64)
        lens[-1:].fill_(padding - longest * (len(lens) - 1))  # numbers, not a tensor: a copy from the host would wait
        req_pool_indices = torch.cat((req_pool_indices.long(), torch.zeros_like(lens)))
        seq_lens = torch.cat((seq_lens.long(), lens))
        extend_lens = torch.cat((extend_lens.long(), lens))
    return RawBatch(ForwardMode.EXTEND, req_pool_indices, seq_lens, out_cache_loc, extend_lens=extend_lens)


def draft_extend_batch(
    req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, num_draft_tokens: int, out_cache_loc: torch.Tensor
) -> RawBatch:
    """The last `num_draft_tokens` rows of each request; slots are those of the first requests, 0 for the others."""
    rows = req_pool_indices.shape[0] * num_draft_tokens
    return RawBatch(
        ForwardMode.DRAFT_EXTEND,
        req_pool_indices,
        seq_lens,
        padded(out_cache_loc, rows),
        num_draft_tokens=num_draft_tokens,
    )


def draft_batch(
    req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, out_cache_loc: torch.Tensor, num_steps: int, topk: int
) -> RawBatch:
    """Draft steps from the committed tokens; `out_cache_loc` [B * topk * num_steps], request-major."""
    return RawBatch(
        ForwardMode.DRAFT_DECODE, req_pool_indices, seq_lens, out_cache_loc, num_steps=num_steps, topk=max(topk, 1)
    )


@dataclass(frozen=True, eq=False)
class DraftInputs:
    """The inputs of a bucket of draft steps, at addresses that a graph can keep; padding behind the live requests.

    Attributes:
        req_pool_indices, seq_lens: int64 [B]; padding 0 and 1.
        out_cache_loc: int64 [B * num_steps]; padding 0.
    """

    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor

    @classmethod
    @torch.inference_mode(False)  # plain tensors: a replay may be outside of the inference mode of the capture
    def empty(cls, size: int, num_steps: int, device: torch.device) -> DraftInputs:
        """All padding."""
        ints = torch.zeros(size * (2 + num_steps), dtype=torch.int64, device=device)
        ints[size : 2 * size] = 1
        return cls(ints[:size], ints[size : 2 * size], ints[2 * size :])

    def load(self, batch: Any) -> None:
        """Copies the requests of `batch`, and its slots, which may be those of the live requests only.

        What an idle rank has is not read: all of it becomes padding.
        """
        size, idle = self.req_pool_indices.shape[0], batch.forward_mode.is_idle()
        pairs = []
        for name, target, filler in (
            ("req_pool_indices", self.req_pool_indices, 0),
            ("seq_lens", self.seq_lens, 1),
            ("out_cache_loc", self.out_cache_loc, 0),
        ):
            source = getattr(batch, name)
            source = source[: 0 if idle else size if name != "out_cache_loc" else None]
            if source.shape[0] > target.shape[0]:
                raise ValueError(
                    f"{name}: expected at most {target.shape[0]} in a bucket of {size}, got {source.shape[0]}"
                )
            pairs.append((target, source, filler))
        for target, source, filler in pairs:
            live = source.shape[0]
            target[:live].copy_(source)
            if live < target.shape[0]:
                target[live:].fill_(filler)


def padded(values: torch.Tensor, size: int) -> torch.Tensor:
    """`values` [n] with zeros behind them; ValueError where there are more than `size`."""
    missing = size - values.shape[0]
    if missing < 0:
        raise ValueError(f"out_cache_loc: expected at most {size} slots, got {values.shape[0]}")
    return torch.nn.functional.pad(values, (0, missing)) if missing else values


def plan_row_counts(
    seq_lens: Sequence[int], extend_lens: Sequence[int], ratio: int, geom: CacheGeometry
) -> tuple[int, int]:
    """Rows in the compress and in the write list of a plan whose lengths the host knows.

    Source: docs/plans.md, "Compress list" and "Write list".
    """
    seq = np.asarray(seq_lens, dtype=np.int64)
    prefix = seq - np.asarray(extend_lens, dtype=np.int64)
    compress = int((seq // ratio - prefix // ratio).sum())
    ring = geom.c4_ring if ratio == 4 else geom.c128_ring
    pad = ring - READ_WINDOW[ratio] + 2 if ring > READ_WINDOW[ratio] else 0
    first = np.minimum(seq // ratio * ratio - (OVERLAP_ROWS if ratio == 4 else 0), seq - pad)
    first = np.clip(first, prefix, seq)
    write = int((seq - first).sum())
    if ratio == 4:
        write += int((_page_ends(first, geom.swa_page_size) - _page_ends(prefix, geom.swa_page_size)).sum())
    return compress, write


def _page_ends(position: np.ndarray, page: int) -> np.ndarray:
    """Positions below `position` that are among the last rows of a window page."""
    found: np.ndarray = position // page * OVERLAP_ROWS + np.maximum(position % page - (page - OVERLAP_ROWS), 0)
    return found
