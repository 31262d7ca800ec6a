"""What plans must say and what they must achieve, in plain Python.

`Oracle` is the planners once more, as loops over requests and positions. `Serving` knows none of their rules: it serves
requests by plans and sees whether the state that is read is the state that is needed.

Rules: docs/plans.md. It takes no arithmetic from
dsv4_backend, only the sizes that a geometry holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dsv4_backend import CacheGeometry, plan_decode, plan_prefill
from strategies import make_pool

NOT_READ = -1
LENGTHS, SLOT = 1, 2

COMPRESS_MARKER = (0xFFFFFFFF, 0, 0, -1, -1)
WRITE_MARKER = (0xFFFFFFFF, -1)


@dataclass
class Answer:
    """What a planner owes for one ratio, and the error bits that it may set."""

    compress: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    write: list[tuple[int, int]] = field(default_factory=list)
    decode: list[tuple[int, int, int, int]] = field(default_factory=list)
    errors: int = 0
    extends: list[int] = field(default_factory=list)

    @property
    def header(self) -> list[int]:
        smallest, largest = min(self.extends, default=0), max(self.extends, default=0)
        return [smallest, largest, sum(self.extends), int(smallest == largest)]


class Oracle:
    """The planners of one cache."""

    def __init__(self, req_to_token: np.ndarray, full_to_swa: np.ndarray, geom: CacheGeometry) -> None:
        self.num_requests, self.columns = req_to_token.shape
        self.slots = req_to_token.tolist()
        self.window_slots = full_to_swa.tolist()
        self.geom = geom
        self.read_a_bad_slot = False

    def prefill(
        self, ratio: int, seq_lens: Sequence[int], extend_lens: Sequence[int], reqs: Sequence[int], num_rows: int
    ) -> Answer:
        self.read_a_bad_slot = False
        answer = Answer()
        reqs = list(reqs)
        for b, (seq, extend) in enumerate(zip(seq_lens, extend_lens, strict=True)):
            fine = 0 <= extend <= seq <= self.columns
            answer.extends.append(extend if fine else 0)
            answer.errors |= 0 if fine else LENGTHS
            if not 0 <= reqs[b] < self.num_requests:
                reqs[b] = 0
                answer.errors |= LENGTHS if answer.extends[b] else 0
        if sum(answer.extends) > num_rows:
            answer.extends = [0] * len(answer.extends)
            answer.errors |= LENGTHS

        ragged_id = 0
        for seq, extend, req in zip(seq_lens, answer.extends, reqs, strict=True):
            for j in range(extend):
                self._prefill_row(answer, ratio, seq, seq - extend + j, j, ragged_id, req)
                ragged_id += 1
        answer.errors |= SLOT if self.read_a_bad_slot else 0
        return answer

    def _prefill_row(
        self, answer: Answer, ratio: int, seq: int, position: int, j: int, ragged_id: int, req: int
    ) -> None:
        window = {4: 8, 128: 128}[ratio]
        if (position + 1) % ratio == 0:
            from_ring = window - min(j + 1, window)
            pages = (NOT_READ, NOT_READ)
            if from_ring > 0:
                pages = (self._page(ratio, req, max(position - ratio, 0)), self._page(ratio, req, position))
            answer.compress.append((position + 1, ragged_id, from_ring, *pages))

        ring = {4: self.geom.c4_ring, 128: self.geom.c128_ring}[ratio]
        pad = ring - window + 2 if ring > window else 0
        group_start = seq - seq % ratio
        first = min(group_start - 4 if ratio == 4 else group_start, seq - pad)
        page = self.geom.swa_page_size
        if position >= first or (ratio == 4 and position % page in range(page - 4, page)):
            answer.write.append((ragged_id, self._row(ratio, req, position)))

    def decode(self, ratio: int, seq_lens: Sequence[int], reqs: Sequence[int]) -> Answer:
        self.read_a_bad_slot = False
        answer = Answer()
        for seq, req in zip(seq_lens, reqs, strict=True):
            if not (1 <= seq <= self.columns and 0 <= req < self.num_requests):
                answer.errors |= LENGTHS
                seq, req = 1, 0
            write_loc = self._row(ratio, req, seq - 1)
            read_page_0 = self._page(ratio, req, max(seq - 1 - ratio, 0))
            answer.decode.append((seq, write_loc, read_page_0, _c_div(write_loc, ratio)))
        answer.errors |= SLOT if self.read_a_bad_slot else 0
        return answer

    def _page(self, ratio: int, req: int, position: int) -> int:
        return _c_div(self._row(ratio, req, position), ratio)

    def _row(self, ratio: int, req: int, position: int) -> int:
        """State row of a token."""
        if ratio == 128:
            return req * self.geom.c128_ring + position % self.geom.c128_ring
        slot = self.slots[req][position]
        if slot == -1:
            window_slot = -1
        elif 0 <= slot < len(self.window_slots):
            window_slot = self.window_slots[slot]
        else:
            self.read_a_bad_slot, window_slot = True, 0
        ring = self.geom.c4_ring
        return _c_div(window_slot, self.geom.swa_page_size) * ring + _c_rem(window_slot, ring)


class Serving:
    """A cache served by nothing but plans. Its state rows hold the number of the token whose state they carry.

    Every read of a plan is checked on the way: each token of a read window must come from where the plan points to.
    """

    def __init__(self, impl: str, device: str, geom: CacheGeometry, seed: int) -> None:
        self.impl, self.device, self.geom = impl, device, geom
        self.tables = make_pool(geom, 4, 900, seed).tables(device)
        self.new_token = itertools.count().__next__
        self.tokens: dict[int, list[int]] = {1: [], 2: [], 3: []}
        self.state: dict[int, dict[int, int]] = {4: {}, 128: {}}

    def room(self, req: int) -> int:
        return self.tables.max_seq_len - len(self.tokens[req])

    def extend(self, counts: dict[int, int]) -> None:
        """A prefill, or a chunk of one."""
        counts = {req: min(count, self.room(req)) for req, count in counts.items()}
        added = {req: [self.new_token() for _ in range(count)] for req, count in counts.items()}
        flat = [token for tokens in added.values() for token in tokens]
        for req, tokens in added.items():
            self.tokens[req] += tokens
        plan = plan_prefill(
            torch.tensor([len(self.tokens[req]) for req in added]),
            torch.tensor(list(counts.values())),
            torch.tensor(list(added), device=self.device),
            self.tables,
            self.geom,
            impl=self.impl,
        )
        plan.check()
        owner = [req for req, count in counts.items() for _ in range(count)]
        for ratio in (4, 128):
            lists = plan.ratio(ratio)
            for seq_len, ragged_id, from_state, *pages in lists.compress_records().tolist():
                width = {4: 8, 128: 128}[ratio]
                found = self.read_state(ratio, pages)[:from_state]
                found += flat[ragged_id - width + 1 + from_state : ragged_id + 1]
                self.expect_window(ratio, owner[ragged_id], seq_len, found)
            for ragged_id, row in lists.write_records().tolist():
                self.state[ratio][row] = flat[ragged_id]

    def verify(self, drafts: int, accepted: dict[int, int]) -> None:
        """Runs `drafts` new tokens of each request and takes all but the first `accepted` back."""
        accepted = {req: min(count, drafts) for req, count in accepted.items() if self.room(req) >= drafts}
        kept = {req: len(self.tokens[req]) + count for req, count in accepted.items()}
        self.extend(dict.fromkeys(accepted, drafts))
        for req, length in kept.items():
            del self.tokens[req][length:]

    def decode(self, reqs: Iterable[int]) -> None:
        reqs = [req for req in reqs if self.room(req)]
        for req in reqs:
            self.tokens[req].append(self.new_token())
        plan = plan_decode(
            torch.tensor([len(self.tokens[req]) for req in reqs], device=self.device, dtype=torch.int64),
            torch.tensor(reqs, device=self.device, dtype=torch.int64),
            self.tables,
            self.geom,
            impl=self.impl,
        )
        plan.check()
        for ratio in (4, 128):
            records = plan.ratio(ratio).records().tolist()
            for req, (_, row, _, _) in zip(reqs, records, strict=True):
                self.state[ratio][row] = self.tokens[req][-1]
            for req, (seq_len, row, *pages) in zip(reqs, records, strict=True):
                if seq_len % ratio == 0:
                    assert row == pages[1] * ratio + ratio - 1
                    self.expect_window(ratio, req, seq_len, self.read_state(ratio, pages))

    def share(self, source: int, target: int) -> None:
        """A new request `target` takes over the whole pages of `source` as its prefix, as a prefix cache does."""
        length = len(self.tokens[source]) // self.geom.page_size * self.geom.page_size
        if not self.tokens[target] and length:
            self.tables.req_to_token[target, :length] = self.tables.req_to_token[source, :length]
            self.tokens[target] = self.tokens[source][:length]

    def read_state(self, ratio: int, pages: list[int]) -> list[int | None]:
        pages = pages if ratio == 4 else pages[1:]
        return [self.state[ratio].get(page * ratio + i) for page in pages for i in range(ratio)]

    def expect_window(self, ratio: int, req: int, seq_len: int, found: list[int | None]) -> None:
        first_half_absent = ratio == 4 and seq_len <= 4
        found = found[4:] if first_half_absent else found
        assert found == self.tokens[req][:seq_len][-len(found) :], f"c{ratio}, request {req}, entry at {seq_len}"


def compress_bytes(answer: Answer, num_rows: int) -> np.ndarray:
    """The whole compress list, uint8 [num_rows, 16 or 20]."""
    rows = answer.compress + [COMPRESS_MARKER] * (num_rows - len(answer.compress))
    id_type = "<u2" if num_rows <= 65_536 else "<u4"
    return _bytes(rows, ["<u4", id_type, id_type, "<i4", "<i4"])


def write_bytes(answer: Answer, num_rows: int) -> np.ndarray:
    """The whole write list, uint8 [num_rows, 8]."""
    return _bytes(answer.write + [WRITE_MARKER] * (num_rows - len(answer.write)), ["<u4", "<i4"])


def decode_bytes(answer: Answer) -> np.ndarray:
    """The whole decode list, uint8 [B, 16]."""
    return _bytes(answer.decode, ["<u4", "<i4", "<i4", "<i4"])


def _bytes(rows: Sequence[tuple[int, ...]], types: list[str]) -> np.ndarray:
    packed = np.array(rows, dtype=",".join(types))
    return packed.view(np.uint8).reshape(len(rows), packed.itemsize)


def _c_div(a: int, b: int) -> int:
    """Division as in C: toward zero."""
    quotient = abs(a) // b
    return quotient if a >= 0 else -quotient


def _c_rem(a: int, b: int) -> int:
    return a - b * _c_div(a, b)
