"""A small paged cache for draft models: pages with red zones between them, and a table of whose slot is which."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsv4_graph_runner import DraftBatch

RED = 2
"""Rows between two pages that belong to nobody."""


class RedZonePool:
    """Keys and values by slot. A slot that is off by a page's border lands in a red zone, where `check` finds it.

    Args:
        num_slots: slots, slot 0 included; a multiple of `page_size`.
        page_size: slots a page. Page 0 is reserved for padding.
        widths: of each tensor.
        dtype: of all tensors.
        device: where.
    """

    def __init__(
        self, num_slots: int, page_size: int, widths: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        if num_slots % page_size:
            raise ValueError(f"num_slots: expected a multiple of {page_size}, got {num_slots}")
        self.num_slots, self.page_size = num_slots, page_size
        rows = num_slots // page_size * (page_size + RED) + RED
        self._sentinel = -77
        self._tensors = [torch.full((rows, width), self._sentinel, dtype=dtype, device=device) for width in widths]
        slots = torch.arange(num_slots, device=device)
        self.row_of_slot = slots // page_size * (page_size + RED) + slots % page_size + RED
        self._red = torch.ones(rows, dtype=torch.bool, device=device)
        self._red[self.row_of_slot] = False
        self.clear()

    def tensors(self) -> list[torch.Tensor]:
        return self._tensors

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows of `slots`; an index error for a slot that there is not."""
        return self.row_of_slot[slots]

    def clear(self) -> None:
        """Zero in every slot."""
        for tensor in self._tensors:
            tensor[self.row_of_slot] = 0

    def check(self) -> None:
        """Raises RuntimeError when something was written between the pages."""
        for i, tensor in enumerate(self._tensors):
            touched = ((tensor != self._sentinel).any(1) & self._red).nonzero()
            if len(touched):
                raise RuntimeError(f"tensor {i}: row {int(touched[0, 0])} lies in a red zone and was written")


class SlotTable:
    """Slots of every position of every request, for lengths up to a million in a small pool.

    A request keeps a ring of whole pages, in shuffled order, so that position p and p + ring share a slot.

    Args:
        num_requests: without the reserved request 0.
        max_len: positions a request.
        window: positions that a draft step looks back, its own included.
        page_size: slots a page.
        ring: slots a request; at least the window and the steps drafted.
        device: where the table lies.

    Attributes:
        table: int64 [num_requests + 1, window + max_len]; column window + p is position p. Everything before position 0
            and all of row 0 is slot 0.
    """

    def __init__(
        self, num_requests: int, max_len: int, window: int, page_size: int, ring: int, device: torch.device
    ) -> None:
        if ring % page_size:
            raise ValueError(f"ring: expected a multiple of {page_size}, got {ring}")
        self.num_requests, self.max_len, self.window = num_requests, max_len, window
        self.num_slots = page_size + num_requests * ring
        pages = torch.randperm(num_requests * ring // page_size, generator=torch.Generator().manual_seed(1)) + 1
        slots = (pages[:, None] * page_size + torch.arange(page_size)).view(num_requests, ring)
        turns = -(-max_len // ring)
        self.table = torch.zeros(num_requests + 1, window + max_len, dtype=torch.int64, device=device)
        self.table[1:, window:] = slots.to(device).repeat(1, turns)[:, :max_len]

    def slots(self, requests: torch.Tensor, seq_lens: torch.Tensor, count: int) -> torch.Tensor:
        """[B * count]: slots of the `count` positions after each prefix, request-major."""
        at = self.window + seq_lens[:, None] + torch.arange(count, device=seq_lens.device)
        return self.table[requests[:, None], at].flatten()


class BatchMaker:
    """Draws batches whose slots are those of the table.

    Args:
        table: the slots.
        num_steps: draft steps.
        vocab_size: tokens are below it.
        hidden_size, hidden_dtype: of the hidden states.
        seed: of everything drawn.
    """

    def __init__(
        self,
        table: SlotTable,
        num_steps: int,
        vocab_size: int,
        hidden_size: int,
        hidden_dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        self._table, self._num_steps, self._vocab_size = table, num_steps, vocab_size
        self._hidden_size, self._hidden_dtype = hidden_size, hidden_dtype
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, batch_size: int, host_lengths: bool = True) -> DraftBatch:
        """A batch of different requests; lengths are short, near a border, or anything up to the longest."""
        device, generator = self._table.table.device, self._generator
        requests = (torch.randperm(self._table.num_requests, generator=generator) + 1)[:batch_size]
        top = self._table.max_len - self._num_steps
        bound = [3, min(300, top), top][int(torch.randint(3, (1,), generator=generator))]
        seq_lens = torch.randint(0, bound + 1, (batch_size,), generator=generator)
        on_device = seq_lens.to(device)
        return DraftBatch(
            req_pool_indices=requests.to(device),
            seq_lens=on_device,
            positions=on_device.clone(),
            out_cache_loc=self._table.slots(requests.to(device), on_device, self._num_steps),
            topk_p=torch.rand(batch_size, 1, generator=generator).to(device),
            topk_index=torch.randint(0, self._vocab_size, (batch_size, 1), generator=generator).to(device),
            hidden_states=torch.randn(batch_size, self._hidden_size, generator=generator).to(
                device, self._hidden_dtype
            ),
            seq_lens_cpu=seq_lens if host_lengths else None,
        )
