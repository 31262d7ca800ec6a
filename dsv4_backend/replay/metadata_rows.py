"""What the rows of a build must be, worked out from the step and the slot tables alone."""

from __future__ import annotations

import numpy as np

from dsv4_backend.replay.batch_rows import BatchRows
from dsv4_backend.replay.builds import Build, BuildMode, drafting


class MetadataRows:
    """The N rows of one step of a build, padding included, in the order of their requests.

    Args:
        rows: the batch that the build is for.
        build: what was asked for; `place`: which of its steps.

    Attributes:
        live: bool [N]; the others are padding: request 0, length 1, slot 0.
        owner: int64 [N], place of the row's request in the batch; 0 for padding.
        request: int64 [N], number in the trace; -1 for padding.
        req: int64 [N], row of the request table.
        position, length: int64 [N]: the last token that the row attends to, and how many these are.
        slot: int64 [N], full-pool slot that the row is written to.
    """

    def __init__(self, rows: BatchRows, build: Build, place: int) -> None:
        self.batch = rows
        self.owner, self.position, written = (np.zeros(build.num_rows, np.int64) for _ in range(3))
        self.live = np.zeros(build.num_rows, bool)
        step = rows.step
        if build.mode is BuildMode.DRAFT_DECODE:
            lanes = np.flatnonzero(drafting(step, build.chain))
            self.live[lanes], self.owner[lanes] = True, lanes
            written[lanes] = step.before[lanes] + place
            self.position[lanes] = step.before[lanes] - 1 if build.frozen else written[lanes]
        elif build.mode is not BuildMode.IDLE:
            count = len(rows.owner)
            self.live[:count], self.owner[:count] = True, rows.owner
            self.position[:count] = written[:count] = rows.position
        self.length = self.position + 1
        self.request = np.where(self.live, step.requests[self.owner], -1)
        self.req = np.where(self.live, step.req_pool_indices[self.owner], 0)
        self.slot = rows.req_to_token[self.req, written].astype(np.int64)

    def __len__(self) -> int:
        return len(self.live)

    def windows(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Window slots of the last `width` tokens of each row, newest first: int64 [N, width], -1 where there is none.

        Also the positions of tokens among them that have no window slot: int64 [n, 2], place in the batch and position.
        """
        found = np.full((len(self), width), -1, np.int64)
        found[~self.live, 0] = 0
        live = np.flatnonzero(self.live)
        if not len(live):
            return found, np.zeros((0, 2), np.int64)
        owner, position = self.owner[live], self.position[live]
        # The tokens that the rows of a request attend to lie side by side: one list of them all, and a view of it.
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        rows_each = np.diff(first, append=len(live))
        low = position[first] - (width - 1)
        count = position[first + rows_each - 1] - low + 1
        begin = np.cumsum(count) - count
        group = np.repeat(np.arange(len(first)), count)
        token = np.arange(len(group)) - begin[group] + low[group]
        slot = self.batch.window_slot(owner[first][group], token)
        evicted = (token >= 0) & (slot <= 0)
        slot[token < 0] = -1
        row_group = np.repeat(np.arange(len(first)), rows_each)
        start = begin[row_group] + position - (width - 1) - low[row_group]
        found[live] = np.lib.stride_tricks.sliding_window_view(slot, width)[start][:, ::-1]
        return found, np.stack((owner[first][group[evicted]], token[evicted]), axis=1)

    def pages(self, page_size: int) -> np.ndarray:
        """Pages of the batch's requests in the order of their tokens, then those of padding: int64 [B + 1, columns]."""
        req = np.append(self.batch.step.req_pool_indices, 0)
        longest = int(self.length.max()) if len(self) else 0
        return self.batch.req_to_token[req, : -(-longest // page_size) * page_size : page_size] // page_size
