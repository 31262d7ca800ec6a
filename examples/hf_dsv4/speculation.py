"""Greedy speculation: a chain of drafts for each request, the step that verifies them, and how many of them stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from dsv4_backend import ForwardMode, RawBatch
from dsv4_graph_runner import BucketPolicy, DraftBatch, EagleDraftGraphRunner
from dsv4_graph_runner.protocols import DraftModel, MetadataProvider


class Speculator:
    """Drafts for the requests of a decode step.

    A request has L committed tokens, which are in the cache, and one more, the target's last, which is not yet: the
    step begins with it. The runner's chain takes it for token 0, which is certain, so `num_drafts` drafts are a chain
    of `num_drafts + 1` tokens, and that many forwards less one; its tokens and slots are the rows of the verify step.

    Args:
        draft: the draft model.
        metadata: what builds its metadata; a `DSV4DraftBackend`.
        num_drafts: S, drafts a request and step, at least 1.
        hidden_size, hidden_dtype: of the hidden states that the draft returns.
        buckets: batch sizes to capture.
        device: where everything runs.
        executor: "cuda_graph", "eager" or "auto", as for `EagleDraftGraphRunner`.

    The request table needs columns for S positions after the longest request. The geometry needs a `draft_capacity` of
    at least S + 1 (`CacheGeometry.for_drafts`).

    Raises:
        ValueError: an argument is not as above.
    """

    def __init__(
        self,
        draft: DraftModel,
        metadata: MetadataProvider,
        *,
        num_drafts: int,
        hidden_size: int,
        hidden_dtype: torch.dtype,
        buckets: BucketPolicy,
        device: torch.device | str,
        executor: str = "auto",
    ) -> None:
        if type(num_drafts) is not int or num_drafts < 1:
            raise ValueError(f"num_drafts: expected an int of at least 1, got {num_drafts!r}")
        self.num_drafts, self.device = num_drafts, torch.device(device)
        self.runner = EagleDraftGraphRunner(
            draft,
            metadata,
            num_steps=num_drafts + 1,
            hidden_size=hidden_size,
            hidden_dtype=hidden_dtype,
            buckets=buckets,
            device=device,
            executor=executor,
            # On a CPU the builder reads values, to check them, which the guard would refuse.
            guard="capture" if self.device.type == "cuda" else "off",
        )
        self._no_hidden = torch.zeros((0, hidden_size), dtype=hidden_dtype, device=device)

    def capture(self, progress: Callable[[int, int, str], None] | None = None) -> Any:
        """Captures the draft loop for all buckets; see `EagleDraftGraphRunner.capture`."""
        return self.runner.capture(progress)

    def propose(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, last_tokens: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """The last token and S drafts for each request. Nothing waits for the device.

        Args:
            req_pool_indices: int64 [B]: rows of the request table.
            seq_lens: int64 [B]: committed tokens, L.
            last_tokens: int64 [B]: the token at position L.
            slots: int64 [B, S + 1]: of positions L and up. A request that is to have fewer rows in the verify step may
                have 0, the reserved slot, instead of the others; those drafts are then worth nothing.

        Returns:
            int64 [B, S + 1]; the runner's own memory, until the next call.

        Raises:
            ValueError: shapes, dtypes or devices do not go together.
        """
        expected = (req_pool_indices.shape[0], self.num_drafts + 1)
        if tuple(slots.shape) != expected:
            raise ValueError(f"slots: expected shape {list(expected)}, got {list(slots.shape)}")
        batch = DraftBatch(
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens,
            positions=seq_lens,
            out_cache_loc=slots.reshape(-1),
            topk_p=torch.ones((expected[0], 1), device=self.device),
            topk_index=last_tokens[:, None],
            hidden_states=self._hidden(expected[0]),
        )
        return self.runner.replay(batch).draft_tokens

    def _hidden(self, size: int) -> torch.Tensor:
        """Zeros: a draft that begins with the embedding has no use for the target's hidden states."""
        if size > len(self._no_hidden):
            self._no_hidden = self._no_hidden.new_zeros((size, self._no_hidden.shape[1]))
        return self._no_hidden[:size]


class Verification(NamedTuple):
    """A verify step.

    Attributes:
        batch: mode TARGET_VERIFY; uniform, or with `extend_lens` where a request has fewer rows.
        ids: int64 [T]: the rows' tokens: of each request its last one, then drafts.
        tokens: int64 [B, S + 1]: as proposed.
        rows: int64 [B] on the device, rows of each request; None for a uniform step.
    """

    batch: RawBatch
    ids: torch.Tensor
    tokens: torch.Tensor
    rows: torch.Tensor | None


def verification(
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    rows: Sequence[int] | None = None,
) -> Verification:
    """The step that verifies what was proposed.

    Args:
        req_pool_indices, seq_lens, slots: as for `Speculator.propose`.
        tokens: int64 [B, S + 1]: what it returned.
        rows: rows of each request, 1 to S + 1, on the host: the last token and as many drafts as it still has room
            for. None, or S + 1 for all: a uniform step, which graphs can run.

    Raises:
        ValueError: a number of rows is not as above, or shapes do not go together.
    """
    size, width = tokens.shape
    if tuple(slots.shape) != (size, width):
        raise ValueError(f"slots: expected shape {[size, width]}, as the tokens, got {list(slots.shape)}")
    if rows is not None:
        if len(rows) != size or not all(1 <= count <= width for count in rows):
            raise ValueError(f"rows: expected 1 to {width} for each of {size} requests, got {list(rows)}")
        if min(rows, default=width) == width:
            rows = None
    counts, ids, out_cache_loc = None, tokens.reshape(-1), slots.reshape(-1)
    if rows is not None:
        places = [b * width + j for b, count in enumerate(rows) for j in range(count)]
        counts, kept = _to_device(rows, tokens.device), _to_device(places, tokens.device)
        ids, out_cache_loc = ids[kept], out_cache_loc[kept]
    batch = RawBatch(
        ForwardMode.TARGET_VERIFY,
        req_pool_indices,
        seq_lens,
        out_cache_loc,
        extend_lens=counts,
        num_draft_tokens=width,
    )
    return Verification(batch, ids, tokens, counts)


def accept_greedy(step: Verification, predicted: torch.Tensor) -> torch.Tensor:
    """How far the target agrees with the drafts. Nothing waits for the device.

    Row j of a request is right if the target's token after it is draft j + 1. The drafts up to the first that is wrong
    stay, so of L committed tokens there are L + accepted + 1 after the step, and the target's token after the last of
    them is the request's new last one. Rejected rows are forgotten: the next step stores over them.

    Args:
        step: the step.
        predicted: int64 [T]: the target's likeliest token after each row.

    Returns:
        int64 [B, S + 2]: the number of drafts that stay, then the target's tokens, of which the first `accepted + 1`
        are the request's next tokens, the last of them its new last token. Read it with one copy to the host.

    Raises:
        ValueError: `predicted` has another number of rows than the step.
    """
    size, width = step.tokens.shape
    if predicted.ndim != 1 or predicted.shape != step.ids.shape:
        raise ValueError(f"predicted: expected shape {list(step.ids.shape)}, got {list(predicted.shape)}")
    column = torch.arange(width, device=predicted.device)
    if step.rows is None:
        found = predicted.view(size, width)
        right = found[:, :-1] == step.tokens[:, 1:]
    else:
        last = step.rows[:, None] - 1
        starts = step.rows.cumsum(0)[:, None] - step.rows[:, None]
        found = predicted[starts + torch.minimum(column, last)]
        right = (found[:, :-1] == step.tokens[:, 1:]) & (column[:-1] < last)
    accepted = right.long().cumprod(dim=1).sum(dim=1, keepdim=True)
    return torch.cat((accepted, found), dim=1)


class AcceptLengths:
    """How many drafts verify steps accepted, over a run.

    Attributes:
        counts: requests and steps by the number of drafts accepted, 0 to S.
        offered: drafts verified.
    """

    def __init__(self, num_drafts: int) -> None:
        self.counts = [0] * (num_drafts + 1)
        self.offered = 0

    def add(self, accepted: Iterable[int], rows: Iterable[int]) -> None:
        """Counts a step: drafts accepted, and rows verified, of each request."""
        for stay, count in zip(accepted, rows, strict=True):
            self.counts[stay] += 1
            self.offered += count - 1

    @property
    def accepted(self) -> int:
        """Drafts accepted."""
        return sum(length * count for length, count in enumerate(self.counts))

    @property
    def mean(self) -> float:
        """Tokens that a request gains in a step: drafts accepted, and one more; 0.0 before the first step."""
        steps = sum(self.counts)
        return (self.accepted + steps) / steps if steps else 0.0


def _to_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64, without waiting for the device: from pinned memory where that makes a difference."""
    tensor = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
