"""Draft models to test and measure a graph runner with, and the window metadata that they read."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from dsv4_bench.draft_pool import RedZonePool, SlotTable
from dsv4_graph_runner import DraftInputs


@dataclass(frozen=True, eq=False)
class WindowStep:
    """Metadata of one draft step: slots of the last positions, int64 [B, window], the step's own one last.

    What lies before position 0 is slot 0; the model masks it by position.
    """

    slots: torch.Tensor


class WindowMetadata:
    """A metadata provider in plain torch: two kernels build the windows of all steps.

    Args:
        table: slots of every position. Drafts are looked up in it too: what step i writes is in the window of step i.
        max_batch_size: of the largest bucket.
        num_steps: draft steps.
    """

    def __init__(self, table: SlotTable, max_batch_size: int, num_steps: int) -> None:
        device, window = table.table.device, table.window
        self._table = table
        forwards = max(num_steps - 1, 0)
        steps, back = torch.arange(forwards, device=device), torch.arange(window, device=device)
        self._offsets = (steps[:, None, None] + 1 + back).contiguous()  # column of position p is window + p
        self._columns, self._slots = (
            torch.zeros(forwards * max_batch_size * window, dtype=torch.int64, device=device) for _ in range(2)
        )

    def bind_draft(self, inputs: DraftInputs) -> list[WindowStep]:
        return [WindowStep(slots) for slots in self._view(self._slots, inputs.batch_size)]

    def record_draft(self, inputs: DraftInputs) -> None:
        columns, slots = (self._view(buffer, inputs.batch_size) for buffer in (self._columns, self._slots))
        torch.add(inputs.seq_lens[None, :, None], self._offsets, out=columns)
        rows = inputs.req_pool_indices[None, :, None]
        torch.ops.aten.index.Tensor_out(self._table.table, [rows, columns], out=slots)

    def prepare_draft(self, inputs: DraftInputs, raw_batch_size: int) -> None:
        """Nothing to do on the host."""

    def build_draft(self, inputs: DraftInputs) -> list[WindowStep]:
        columns = (
            self._table.window
            + inputs.seq_lens[:, None]
            + torch.arange(1 - self._table.window, 1, device=inputs.seq_lens.device)
        )
        rows = inputs.req_pool_indices[:, None]
        return [WindowStep(self._table.table[rows, columns + i]) for i in range(inputs.num_steps - 1)]

    def draft_fingerprint(self) -> Hashable:
        return tuple(t.data_ptr() for t in (self._table.table, self._offsets, self._columns, self._slots))

    def _view(self, buffer: torch.Tensor, batch_size: int) -> torch.Tensor:
        forwards, _, window = self._offsets.shape
        return buffer[: forwards * batch_size * window].view(forwards, batch_size, window)


class TransformerDraft(torch.nn.Module):
    """One layer of causal attention over a window of the paged cache, and a head.

    Args:
        pool: keeps keys and values: two tensors of `hidden_size` columns.
        vocab_size, hidden_size, num_heads: the model's.
        dtype: of weights and activations.
        seed: of the weights.
    """

    def __init__(
        self,
        pool: RedZonePool,
        vocab_size: int = 512,
        hidden_size: int = 128,
        num_heads: int = 4,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.pool, self.vocab_size, self.num_heads = pool, vocab_size, num_heads
        device = pool.row_of_slot.device
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> torch.nn.Parameter:
            values = torch.randn(rows, columns, generator=generator) / columns**0.5
            return torch.nn.Parameter(values.to(device, dtype), requires_grad=False)

        self.embed, self.head = weight(vocab_size, hidden_size), weight(vocab_size, hidden_size)
        self.mix, self.qkv = weight(hidden_size, 2 * hidden_size), weight(3 * hidden_size, hidden_size)
        self.up, self.down = weight(2 * hidden_size, hidden_size), weight(hidden_size, 2 * hidden_size)
        self.frequencies = (10_000 ** -torch.linspace(0, 1, hidden_size // 2)).to(device)

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        out_cache_loc: torch.Tensor,
        metadata: WindowStep,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        token = torch.nn.functional.embedding(input_ids, self.embed)
        x = torch.cat((token, hidden_states.to(token.dtype)), dim=-1) @ self.mix.t()
        x = torch.nn.functional.layer_norm(x + self._rotary(positions).to(x.dtype), x.shape[-1:])
        x = x + self._attention(x, positions, out_cache_loc, metadata)
        x = x + torch.nn.functional.silu(x @ self.up.t()) @ self.down.t()
        x = torch.nn.functional.layer_norm(x, x.shape[-1:])
        return x @ self.head.t(), x.to(hidden_states.dtype)

    def _rotary(self, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None].float() * self.frequencies
        return torch.cat((angles.sin(), angles.cos()), dim=-1)

    def _attention(
        self, x: torch.Tensor, positions: torch.Tensor, out_cache_loc: torch.Tensor, metadata: WindowStep
    ) -> torch.Tensor:
        lanes, hidden = x.shape
        query, key, value = (x @ self.qkv.t()).split(hidden, dim=-1)
        keys, values = self.pool.tensors()
        rows = self.pool.row_of_slot[out_cache_loc]
        keys[rows] = key
        values[rows] = value
        window = self.pool.row_of_slot[metadata.slots]  # [B, window]
        width = window.shape[1]
        back = torch.arange(width - 1, -1, -1, device=x.device)
        seen = (back <= positions[:, None])[:, None, None]
        heads = (lanes, width, self.num_heads, -1)
        q = query.view(lanes, self.num_heads, 1, -1)
        k, v = (each[window].view(heads).transpose(1, 2) for each in (keys, values))
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        weights = torch.softmax(scores.float().masked_fill(~seen, float("-inf")), dim=-1).to(x.dtype)
        # A row that nobody reads may hold anything, NaN too.
        return (weights @ v.masked_fill(~seen.transpose(-1, -2), 0)).view(lanes, hidden)


class HashDraft:
    """Integer arithmetic over everything a draft step is given: exact, on any device, at any batch size.

    The next token is a sum of token, position, slot, hidden state and all tokens that its window holds, each times an
    odd number, modulo the vocabulary. Slot and window therefore show in the drafts. The token is stored at its slot.

    Args:
        pool: keeps tokens: one int64 tensor of one column.
        vocab_size: tokens are below it.
    """

    def __init__(self, pool: RedZonePool, vocab_size: int = 257) -> None:
        self.pool, self.vocab_size = pool, vocab_size
        self._vocabulary = torch.arange(vocab_size, device=pool.row_of_slot.device)

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        out_cache_loc: torch.Tensor,
        metadata: WindowStep,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (cache,) = self.pool.tensors()
        cache[self.pool.row_of_slot[out_cache_loc], 0] = input_ids
        window = cache[self.pool.row_of_slot[metadata.slots], 0]
        width = window.shape[1]
        back = torch.arange(width - 1, -1, -1, device=window.device)
        seen = (window + 1) * (back + 1) % self.vocab_size
        total = torch.where(back <= positions[:, None], seen, 0).sum(1)
        mixed = input_ids * 3 + positions * 5 + out_cache_loc * 7 + total * 11 + hidden_states[:, 0].long() * 13
        token = mixed % self.vocab_size
        logits = 4.0 * (self._vocabulary == token[:, None])
        return logits, hidden_states + 1
