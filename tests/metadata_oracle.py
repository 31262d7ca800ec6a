"""What metadata must say, as loops over requests, rows and columns in plain Python.

Rules: docs/metadata.md. It takes no arithmetic from dsv4_backend, only the sizes that a geometry holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dsv4_backend import ForwardMode
from metadata_steps import Setting, Step
from planner_oracle import Answer, Oracle

LENGTHS, SLOT, UNOWNED = 1, 2, 4
FIRST_COUNTS_THE_ROWS = (ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND)


@dataclass
class Row:
    """A row of a step; padding unless it is given a request.

    `owner` is the place of its request in the batch, None for padding.
    """

    req: int = 0
    position: int = 0
    slot: int = 0
    owner: int | None = None


@dataclass
class MetadataAnswer:
    """What a build owes for one step.

    Attributes:
        fields: by name, a value a row. Of `page_table` and `c128_page_indices` the columns that may be read.
        owners: place in the batch of each row's request; None for padding.
        prefill, decode: plans by ratio, where the step has them.
    """

    fields: dict[str, list]
    owners: list[int | None]
    prefill: dict[int, Answer] = field(default_factory=dict)
    decode: dict[int, Answer] = field(default_factory=dict)


class MetadataOracle:
    """The metadata of one cache."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.geom = setting, setting.geom
        self.slots = setting.pool.req_to_token.tolist()
        self.window_slots = setting.pool.full_to_swa.tolist()
        self.planner = Oracle(setting.pool.req_to_token, setting.pool.full_to_swa, setting.geom)
        self.errors = 0

    def answers(self, step: Step) -> list[MetadataAnswer]:
        """One for each step that runs a forward; `errors` is then what a build may set."""
        self.errors = 0
        number = step.num_steps - 1 if step.mode is ForwardMode.DRAFT_DECODE else 1
        return [self._answer(step, i) for i in range(number)]

    def _answer(self, step: Step, i: int) -> MetadataAnswer:
        self.planner.read_a_bad_slot = False
        counts, live = self._requests(step, i)
        slots = step.slots[i :: step.num_steps] if step.mode is ForwardMode.DRAFT_DECODE else step.slots
        rows, spans = [], []
        for b, count in enumerate(counts):
            spans.append(len(rows))
            for j in range(count):
                row = Row(step.reqs[b], self._first(step, i, b, count) + j, slots[len(rows)], b)
                rows.append(row if live[b] else Row())
        if step.mode is not ForwardMode.IDLE and any(slots[len(rows) :]):
            self.errors |= UNOWNED
        rows += [Row() for _ in range(self._num_rows(step) - len(rows))]

        answer = MetadataAnswer(self._fields(rows), [row.owner for row in rows])
        if step.mode in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
            planned = [count if live[b] else 0 for b, count in enumerate(counts)]
            answer.prefill = {ratio: self._prefill(ratio, rows, planned, spans) for ratio in self.setting.ratios}
        elif step.mode is not ForwardMode.DRAFT_DECODE or step.grows:
            lengths, reqs = [row.position + 1 for row in rows], [row.req for row in rows]
            answer.decode = {}
            for ratio in self.setting.ratios:
                answer.decode[ratio] = self.planner.decode(ratio, lengths, reqs)
                self.errors |= answer.decode[ratio].errors
        self.errors |= SLOT if self.planner.read_a_bad_slot else 0
        return answer

    def _num_rows(self, step: Step) -> int:
        rows = len(step.reqs) if step.mode is ForwardMode.DRAFT_DECODE else len(step.slots)
        return rows if step.padded is None else step.padded

    def _first(self, step: Step, i: int, b: int, count: int) -> int:
        """Position of a request's first row."""
        seq = step.seqs[b]
        if step.mode is ForwardMode.DRAFT_DECODE:
            return seq + i if step.grows else seq - 1
        return seq - count if step.mode in FIRST_COUNTS_THE_ROWS else seq

    def _requests(self, step: Step, i: int) -> tuple[list[int], list[bool]]:
        """Rows of each request, and whether they are anything but padding."""
        if step.mode is ForwardMode.IDLE:
            return [], []
        if step.extends is not None:
            counts = list(step.extends)
            most = self.setting.longest if step.mode is ForwardMode.EXTEND else step.drafts or self._capacity()
            if any(not 0 <= count <= most for count in counts) or sum(counts) > len(step.slots):
                self.errors |= LENGTHS
                return [0] * len(counts), [False] * len(counts)
        else:
            one = step.mode in (ForwardMode.DECODE, ForwardMode.DRAFT_DECODE)
            counts = [1 if one else step.drafts] * len(step.reqs)
        live = []
        for b, count in enumerate(counts):
            first, req = self._first(step, i, b, count), step.reqs[b]
            exists = 0 <= req < len(self.slots)
            good = 0 <= step.seqs[b] <= self.setting.longest and (exists or count == 0)
            good = good and first >= 0 and first + count <= self.setting.longest
            self.errors |= 0 if good or req == 0 else LENGTHS
            live.append(good and exists and req != 0)
        return counts, live

    def _capacity(self) -> int:
        return min(self.geom.c4_ring - 8, self.geom.c128_ring - 128) + 2

    def _fields(self, rows: list[Row]) -> dict[str, list]:
        window, topk = self.geom.window, self.setting.topk
        found: dict[str, list] = {
            "seq_lens_causal": [row.position + 1 for row in rows],
            "positions": [row.position for row in rows],
            "req_pool_indices_per_row": [row.req for row in rows],
            "raw_out_cache_loc": [row.slot for row in rows],
            "swa_out_cache_loc": [self._window_slot(row.slot) for row in rows],
            "page_table": [self._pages(row) for row in rows],
            "swa_lengths": [min(row.position + 1, window) for row in rows],
            "swa_page_indices": [self._window(row) for row in rows],
        }
        if 4 in self.setting.ratios:
            closed = [(row.position + 1) // 4 for row in rows]
            found["c4_lengths"] = closed
            found["c4_sparse_lengths"] = [min(n, topk) for n in closed]
            found["c4_sparse_page_indices"] = [[-1] * topk for _ in rows]
            found["c4_out_loc"] = [self._out_loc(row, 4) for row in rows]
        if 128 in self.setting.ratios:
            found["c128_lengths"] = [(row.position + 1) // 128 for row in rows]
            found["c128_page_indices"] = [self._entries(row) for row in rows]
            found["c128_out_loc"] = [self._out_loc(row, 128) for row in rows]
        return found

    def _window(self, row: Row) -> list[int]:
        columns = -(-self.geom.window // 64) * 64
        seen = min(row.position + 1, self.geom.window)
        slots = [self.slots[row.req][row.position - k] for k in range(seen)]
        return [self._window_slot(slot) for slot in slots] + [-1] * (columns - seen)

    def _pages(self, row: Row) -> list[int]:
        found = []
        for position in range(0, row.position + 1, self.geom.page_size):
            slot = self.slots[row.req][position]
            outside = not -1 <= slot < len(self.window_slots)
            self.errors |= SLOT if outside else 0
            found.append(0 if outside or slot == -1 else slot // self.geom.page_size)
        return found

    def _entries(self, row: Row) -> list[int]:
        """Of groups of 128 that are closed, the slots of their entries."""
        each, pages = self.geom.page_size // 128, self._pages(row)
        return [pages[j // each] * each + j % each for j in range((row.position + 1) // 128)]

    def _out_loc(self, row: Row, ratio: int) -> int:
        if (row.position + 1) % ratio:
            return 0
        return row.slot // ratio if row.slot >= 0 else -(-row.slot // ratio)

    def _window_slot(self, slot: int) -> int:
        if slot == -1:
            return -1
        if 0 <= slot < len(self.window_slots):
            return self.window_slots[slot]
        self.errors |= SLOT
        return 0

    def _prefill(self, ratio: int, rows: list[Row], planned: list[int], spans: list[int]) -> Answer:
        answer = Answer(extends=planned)
        for ragged_id, row in enumerate(rows):
            if row.owner is None:
                continue
            j = ragged_id - spans[row.owner]
            seq = row.position - j + planned[row.owner]
            self.planner._prefill_row(answer, ratio, seq, row.position, j, ragged_id, row.req)
        return answer
