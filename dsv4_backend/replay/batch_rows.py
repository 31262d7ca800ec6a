"""The rows of a step as the ledger sees them: whose they are, which token each is, and where its state belongs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsv4_backend.replay.step import Step, StepMode
from dsv4_backend.replay.trace import BLOCK_TOKENS

TAIL = 128
"""Tokens before a batch that a window can reach back to."""

# A tag names a token. Positive: step + 1, request, position of a private token. Negative: block and offset of a prompt
# token that others may share. 0: nothing was written.
_POSITION_BITS, _REQUEST_BITS, _STEP_BITS = 21, 20, 21
MAX_POSITION, MAX_REQUESTS = 1 << _POSITION_BITS, 1 << _REQUEST_BITS


def private_tags(step: int, request: np.ndarray, position: np.ndarray) -> np.ndarray:
    """int64: tags of tokens that belong to one request and were written in `step`."""
    stamp = (step + 1) % (1 << _STEP_BITS)
    return (stamp << (_POSITION_BITS + _REQUEST_BITS)) | (request << _POSITION_BITS) | position


def block_tags(block: np.ndarray, position: np.ndarray) -> np.ndarray:
    """int64: tags of tokens of full prompt blocks, the same for every request that has them."""
    return -(block * BLOCK_TOKENS + position % BLOCK_TOKENS + 1)


def describe_tag(tag: int) -> str:
    """A tag for people."""
    tag = int(tag)
    if tag == 0:
        return "a row that was not written"
    if tag < 0:
        block, offset = divmod(-tag - 1, BLOCK_TOKENS)
        return f"token {offset} of prompt block {block}"
    position, rest = tag % MAX_POSITION, tag >> _POSITION_BITS
    return f"request {rest % MAX_REQUESTS} position {position} of step {(rest >> _REQUEST_BITS) - 1}"


@dataclass(frozen=True)
class CacheSizes:
    """Plain sizes of the cache and of the state pools.

    Args:
        page_size: tokens of a page of the full pool.
        window_page_size: tokens of a window page.
        window: tokens that a row sees, itself included; at most TAIL.
        c4_ring: state rows of a window page.
        c128_ring: state rows of a request.
        index_topk: ratio-4 entries that the indexer selects for a row, at most.
    """

    page_size: int
    window_page_size: int
    window: int
    c4_ring: int
    c128_ring: int
    index_topk: int


class BatchRows:
    """The T rows of a step, with what the ledger knows about the tokens before them.

    Args:
        step: the step.
        recent: int64 [R, TAIL], by request row and position % TAIL: tags of the last committed tokens.
        chains: int64 [R, blocks], by request row: names of full prompt blocks, -1 for the rest.
        req_to_token, full_to_swa: the slot tables.
        sizes: of the state pools.

    Attributes:
        owner, offset, position, tag: int64 [T]. Place in the batch of the row's request, place among its rows, token.
        starts: int64 [B], each request's first row.
    """

    def __init__(
        self,
        step: Step,
        recent: np.ndarray,
        chains: np.ndarray,
        req_to_token: np.ndarray,
        full_to_swa: np.ndarray,
        sizes: CacheSizes,
    ) -> None:
        self.step, self.sizes = step, sizes
        self._recent, self.req_to_token, self.full_to_swa = recent, req_to_token, full_to_swa
        self.starts = np.cumsum(step.extend_lens) - step.extend_lens
        self.owner = np.repeat(np.arange(len(step.before)), step.extend_lens)
        self.offset = np.arange(len(self.owner)) - self.starts[self.owner]
        self.position = step.before[self.owner] + self.offset
        block = chains[step.req_pool_indices[self.owner], self.position // BLOCK_TOKENS]
        private = private_tags(step.index, step.requests[self.owner], self.position)
        self.tag = np.where(block < 0, private, block_tags(block, self.position))

    def request(self, owner: np.ndarray) -> np.ndarray:
        """Numbers in the trace."""
        return self.step.requests[owner]

    def token_at(self, owner: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Tags of tokens of the batch's requests: of the batch itself, or of the last TAIL before it."""
        in_batch = position >= self.step.before[owner]
        row = np.where(in_batch, self.starts[owner] + position - self.step.before[owner], 0)
        return np.where(
            in_batch, self.tag[row], self._recent[self.step.req_pool_indices[owner], np.maximum(position, 0) % TAIL]
        )

    def window_slot(self, owner: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Window slots of tokens, by the tables; 0 where there is none."""
        return self.full_to_swa[self.req_to_token[self.step.req_pool_indices[owner], np.maximum(position, 0)]]

    def state_row(self, ratio: int, owner: np.ndarray, position: np.ndarray) -> np.ndarray:
        """State rows of tokens: by window page for ratio 4, by request for ratio 128 (docs/plans.md)."""
        if ratio == 128:
            ring = self.sizes.c128_ring
            return self.step.req_pool_indices[owner] * ring + position % ring
        slot = self.window_slot(owner, position)
        return slot // self.sizes.window_page_size * self.sizes.c4_ring + slot % self.sizes.c4_ring

    def possible_accepts(self) -> tuple[np.ndarray, np.ndarray]:
        """Every (request of the batch, rows that stay) the step can end with: int64 [n] each."""
        extend = self.step.extend_lens
        if self.step.mode is not StepMode.TARGET_VERIFY:
            return np.arange(len(extend)), extend
        return self.owner, self.offset + 1
