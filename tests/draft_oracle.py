"""What `HashDraft` must draft, in plain Python, from the definition of a draft chain."""

from __future__ import annotations

from collections.abc import Iterable

from dsv4_bench.draft_pool import SlotTable
from dsv4_graph_runner import DraftBatch


class HashOracle:
    """Keeps a cache of its own, by slot, and drafts one request after another.

    Args:
        table: slots of every position.
        vocab_size: of the model.
    """

    def __init__(self, table: SlotTable, vocab_size: int) -> None:
        self._table, self._vocab_size = table, vocab_size
        self.cache: dict[int, int] = {}

    def drafts(self, batch: DraftBatch, num_steps: int) -> list[list[int]]:
        """Tokens [B][num_steps]; the cache is left as the forwards leave it."""
        fields = (batch.req_pool_indices, batch.seq_lens, batch.topk_index[:, 0], batch.hidden_states[:, 0])
        slots = batch.out_cache_loc.tolist()
        return [
            self._chain(*request, slots[b * num_steps : (b + 1) * num_steps])
            for b, request in enumerate(zip(*(field.tolist() for field in fields), strict=True))
        ]

    def _chain(self, request: int, seq_len: int, token: int, hidden: float, slots: list[int]) -> list[int]:
        tokens = [token]
        for i, slot in enumerate(slots[:-1]):
            position = seq_len + i
            self.cache[slot] = tokens[i]
            total = sum((entry + 1) * (back + 1) % self._vocab_size for back, entry in self._window(request, position))
            mixed = tokens[i] * 3 + position * 5 + slot * 7 + total * 11 + int(hidden + i) * 13
            tokens.append(mixed % self._vocab_size)
        return tokens

    def _window(self, request: int, position: int) -> Iterable[tuple[int, int]]:
        window = self._table.window
        for back in range(min(window, position + 1)):
            slot = int(self._table.table[request, window + position - back])
            yield back, self.cache.get(slot, 0)
