"""Faults: named ways in which a planner can be wrong. Each changes a finished plan; the ledger has to notice.

A fault takes the plan and its step, changes the plan in place and returns True, or returns False where it would change
nothing that matters. Counts in the header follow, so that the header alone gives nothing away.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dsv4_backend.replay.image import RATIOS, UNUSED, PlanImage
from dsv4_backend.replay.step import Step

Fault = Callable[[PlanImage, Step], bool]

_UNUSED_COMPRESS = (UNUSED, 0, 0, -1, -1)
_UNUSED_WRITE = (UNUSED, -1)
_HEADER_COMPRESS = {4: 4, 128: 6}
_HEADER_WRITE = {4: 5, 128: 7}


def _dropped_row(plan: PlanImage, step: Step) -> bool:
    """A group is closed and nobody computes its entry."""
    for ratio, lists in plan.lists.items():
        used = _used(lists.compress, "seq_len")
        if used:
            _delete(lists.compress, used // 2, _UNUSED_COMPRESS)
            _count(plan, _HEADER_COMPRESS[ratio], -1)
            return True
    return False


def _duplicated_row(plan: PlanImage, step: Step) -> bool:
    """One entry is computed twice."""
    for ratio, lists in plan.lists.items():
        used = _used(lists.compress, "seq_len")
        if used and used < len(lists.compress):
            lists.compress[used] = lists.compress[used - 1]
            _count(plan, _HEADER_COMPRESS[ratio], 1)
            return True
    return False


def _shifted_id(plan: PlanImage, step: Step) -> bool:
    """A row id is off by one."""
    for lists in plan.lists.values():
        if _used(lists.compress, "seq_len"):
            lists.compress["ragged_id"][0] += 1
            return True
    return False


def _wrong_page(plan: PlanImage, step: Step) -> bool:
    """A read page is that of a neighbour."""
    for records, row, _ in _reading_rows(plan, step):
        records["read_page_1"][row] += 1
        return True
    return False


def _wrong_previous_page(plan: PlanImage, step: Step) -> bool:
    """Ratio 4 takes its overlap from the own group's page."""
    for records, row, ratio in _reading_rows(plan, step):
        if ratio == 4 and records["seq_len"][row] > 4:
            records["read_page_0"][row] = records["read_page_1"][row]
            return True
    return False


def _placeholder_page(plan: PlanImage, step: Step) -> bool:
    """Pages of ratio 128 were never resolved and still hold -1 and 0."""
    for records, row, ratio in _reading_rows(plan, step):
        if ratio == 128:
            records["read_page_0"][row], records["read_page_1"][row] = -1, 0
            return True
    return False


def _wrong_seq_len(plan: PlanImage, step: Step) -> bool:
    """A length that belongs to the next group."""
    for lists in plan.lists.values():
        if _used(lists.compress, "seq_len"):
            lists.compress["seq_len"][0] += 4
            return True
    for rows in plan.decode.values():
        rows["seq_len"][0] += 4
        return True
    return False


def _wrong_buffer_len(plan: PlanImage, step: Step) -> bool:
    """A window row of the batch is taken from the ring."""
    for lists in plan.lists.values():
        if _used(lists.compress, "seq_len"):
            lists.compress["buffer_len"][0] += 1
            return True
    return False


def _stale_ring_row(plan: PlanImage, step: Step) -> bool:
    """The last row of a request, part of an open group, is not kept: the ring still holds an older one."""
    last = np.cumsum(step.extend_lens) - 1
    for ratio, lists in plan.lists.items():
        open_group = last[step.after % ratio != 0] if ratio == 128 else last
        used = _used(lists.write, "ragged_id")
        places = np.flatnonzero(np.isin(lists.write["ragged_id"][:used], open_group))
        if len(places):
            _delete(lists.write, int(places[0]), _UNUSED_WRITE)
            _count(plan, _HEADER_WRITE[ratio], -1)
            return True
    return False


def _wrong_write_loc(plan: PlanImage, step: Step) -> bool:
    """A row is kept one place too far."""
    for lists in plan.lists.values():
        if _used(lists.write, "ragged_id"):
            lists.write["write_loc"][0] += 1
            return True
    for rows in plan.decode.values():
        rows["write_loc"][0] += 1
        return True
    return False


def _write_conflict(plan: PlanImage, step: Step) -> bool:
    """Two rows are kept at one place."""
    for lists in plan.lists.values():
        if _used(lists.write, "ragged_id") > 1:
            lists.write["write_loc"][1] = lists.write["write_loc"][0]
            return True
    return False


def _uniform_for_ragged(plan: PlanImage, step: Step) -> bool:
    """A ragged batch is planned as if every request had as many rows as the longest one."""
    width = int(step.extend_lens.max())
    if not plan.lists or width == step.extend_lens.min():
        return False
    owner, offset = np.divmod(np.arange(min(len(step.before) * width, step.num_rows)), width)
    position = step.before[owner] + offset
    planned = {ratio: np.flatnonzero((position + 1) % ratio == 0) for ratio in plan.lists}
    used = {ratio: _used(lists.compress, "seq_len") for ratio, lists in plan.lists.items()}
    if all(np.array_equal(ids, plan.lists[r].compress["ragged_id"][: used[r]]) for r, ids in planned.items()):
        return False
    for ratio, ids in planned.items():
        records = plan.lists[ratio].compress
        records[:] = _UNUSED_COMPRESS
        new = records[: len(ids)]
        new["ragged_id"], new["seq_len"] = ids, position[ids] + 1
        new["buffer_len"] = np.maximum(0, (8 if ratio == 4 else 128) - 1 - offset[ids])
        _count(plan, _HEADER_COMPRESS[ratio], len(ids) - used[ratio])
    return True


def _dirty_tail(plan: PlanImage, step: Step) -> bool:
    """An unused row was never marked."""
    for lists in plan.lists.values():
        used = _used(lists.compress, "seq_len")
        if used < len(lists.compress):
            lists.compress[-1] = (0, 0, 0, 0, 0)
            return True
    return False


def _half_marker(plan: PlanImage, step: Step) -> bool:
    """An unused row of the write list has its marker, but a place to write to, too."""
    for lists in plan.lists.values():
        if _used(lists.write, "ragged_id") < len(lists.write):
            lists.write["write_loc"][-1] = 0
            return True
    return False


def _header_lies(plan: PlanImage, step: Step) -> bool:
    """The header calls a ragged batch uniform, or the other way round."""
    if plan.header is None:
        return False
    plan.header[3] ^= 1
    return True


def _unordered_rows(plan: PlanImage, step: Step) -> bool:
    """Rows come in the order in which threads got to them."""
    for lists in plan.lists.values():
        if _used(lists.compress, "seq_len") > 1:
            lists.compress[[0, 1]] = lists.compress[[1, 0]]
            return True
    return False


def _padded_row(plan: PlanImage, step: Step) -> bool:
    """A row of the padded bucket is planned as if it were real."""
    for ratio, lists in plan.lists.items():
        used = _used(lists.compress, "seq_len")
        if step.num_rows > step.total_rows and used < len(lists.compress):
            lists.compress[used] = (ratio, step.total_rows, 0, -1, -1)
            _count(plan, _HEADER_COMPRESS[ratio], 1)
            return True
    return False


def _swapped_requests(plan: PlanImage, step: Step) -> bool:
    """State of ratio 128 goes to the ring of another request."""
    owner = np.repeat(np.arange(len(step.before)), step.extend_lens)
    if plan.lists:
        writes = plan.lists[128].write[: _used(plan.lists[128].write, "ragged_id")]
        owner = owner[writes["ragged_id"]]
    else:
        writes = plan.decode[128]
    if len(np.unique(owner)) < 2:
        return False
    one, other = (np.flatnonzero(owner == who)[0] for who in np.unique(owner)[:2])
    writes["write_loc"][[one, other]] = writes["write_loc"][[other, one]]
    return True


def _used(records: np.ndarray, key: str) -> int:
    return int(np.count_nonzero(records[key] != UNUSED))


def _delete(records: np.ndarray, place: int, unused: tuple[int, ...]) -> None:
    records[place:-1] = records[place + 1 :].copy()
    records[-1] = unused


def _count(plan: PlanImage, field: int, change: int) -> None:
    if plan.header is not None:
        plan.header[field] += change


def _reading_rows(plan: PlanImage, step: Step) -> list[tuple[np.ndarray, int, int]]:
    """(records, place, ratio) of rows that read a committed token through read_page_1, one for each ratio at most."""
    found = []
    offset = np.concatenate([np.arange(rows) for rows in step.extend_lens])
    for ratio in RATIOS:
        if plan.lists:
            records = plan.lists[ratio].compress
            used = records[: _used(records, "seq_len")]
            # The own group starts before the batch.
            reads = offset[used["ragged_id"].astype(np.int64)] < ratio - 1
        else:
            records = plan.decode[ratio]
            reads = records["seq_len"] % ratio == 0
        found += [(records, int(place), ratio) for place in np.flatnonzero(reads)[:1]]
    return found


PLAN_FAULTS: dict[str, Fault] = {
    fault.__name__.removeprefix("_"): fault
    for fault in (
        _dropped_row,
        _duplicated_row,
        _shifted_id,
        _wrong_page,
        _wrong_previous_page,
        _placeholder_page,
        _wrong_seq_len,
        _wrong_buffer_len,
        _stale_ring_row,
        _wrong_write_loc,
        _write_conflict,
        _uniform_for_ragged,
        _dirty_tail,
        _half_marker,
        _header_lies,
        _unordered_rows,
        _padded_row,
        _swapped_requests,
    )
}
"""By name."""
