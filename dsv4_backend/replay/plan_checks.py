"""The invariants of one plan, ratio by ratio, against simulated state rings."""

from __future__ import annotations

import numpy as np

from dsv4_backend.replay.batch_rows import BatchRows, describe_tag
from dsv4_backend.replay.image import UNUSED, WIDE_ABOVE, RatioImage
from dsv4_backend.replay.violation import Findings

WINDOW_ROWS = {4: 8, 128: 128}
"""Tokens that a completed group reads; ratio 4 reads the group before it, too."""

_COMPRESS_MARKER = {"seq_len": UNUSED, "ragged_id": 0, "buffer_len": 0, "read_page_0": -1, "read_page_1": -1}
_WRITE_MARKER = {"ragged_id": UNUSED, "write_loc": -1}
_PADDING = (1, 0, 0, 0)


def check_lists(rows: BatchRows, ratio: int, image: RatioImage, state: np.ndarray, found: Findings) -> np.ndarray:
    """Checks both lists of a ratio and applies the writes.

    Kernels compress first, from the rings as the steps before left them, and write afterwards.

    Args:
        rows: the batch.
        image: the lists.
        state: int64 [state rows], tags; the writes are applied to it.
        found: where violations go.

    Returns:
        int64 [n], places in the batch of the rows that the plan compresses.
    """
    _check_size(rows, ratio, image, found)
    used = _used_rows(ratio, "compress", image.compress, _COMPRESS_MARKER, found)
    used = _rows_in_batch(rows, ratio, "compress", used, found)
    ids = used["ragged_id"].astype(np.int64)
    _check_groups(rows, ratio, ids, found)
    _check_fields(rows, ratio, ids, used, found)
    _check_batch_reads(rows, ratio, ids, used, state, found)

    writes = _used_rows(ratio, "write", image.write, _WRITE_MARKER, found)
    writes = _rows_in_batch(rows, ratio, "write", writes, found)
    write_ids = writes["ragged_id"].astype(np.int64)
    _apply_writes(rows, ratio, write_ids, writes["write_loc"].astype(np.int64), state, found)
    return ids


def check_decode(rows: BatchRows, ratio: int, image: np.ndarray, state: np.ndarray, found: Findings) -> np.ndarray:
    """Checks the rows of a decode plan and applies the writes, which kernels do before they compress.

    Arguments and result as for `check_lists`; `image` is structured [num_rows]. Rows of the padded bucket are those of
    the reserved request 0 with length 1.
    """
    batch, room = len(rows.step.before), rows.step.num_rows
    if len(image) != room:
        wrong = np.ones(1, bool)
        found.add("plan_size", ratio, wrong, expected=f"{room} rows", got=str(len(image)))
        return np.zeros(0, np.int64)
    padding, image = image[batch:], image[:batch]
    dirty = padding != np.array(_PADDING, image.dtype)
    found.add("padding_row", ratio, dirty, expected=f"the padding row {_PADDING}", got=padding)
    ids = np.arange(batch)
    request, position = rows.request(ids), rows.position
    seq_len, write_loc = image["seq_len"].astype(np.int64), image["write_loc"].astype(np.int64)
    where = {"request": request, "position": position}
    found.add("seq_len", ratio, seq_len != position + 1, expected=position + 1, got=seq_len, **where)
    page = write_loc // ratio
    torn = image["read_page_1"] != page
    found.add("own_page", ratio, torn, expected=page, got=image["read_page_1"], **where)
    _apply_writes(rows, ratio, ids, write_loc, state, found)
    ends = np.flatnonzero((position + 1) % ratio == 0)
    count = np.full(len(ends), WINDOW_ROWS[ratio])
    _check_reads(rows, ratio, ends, count, image[ends], state, found)
    return ends


def check_state(rows: BatchRows, ratio: int, state: np.ndarray, found: Findings) -> None:
    """Checks that whatever number of rows stays, the rings hold every token that the next group's window needs."""
    owner, accepted = rows.possible_accepts()
    after = rows.step.before[owner] + accepted
    first = after // ratio * ratio - (ratio if WINDOW_ROWS[ratio] > ratio else 0)
    position = first[:, None] + np.arange(WINDOW_ROWS[ratio])
    case, column = np.nonzero((position >= 0) & (position < after[:, None]))
    owner, accepted, position = owner[case], accepted[case], position[case, column]
    want, have = rows.token_at(owner, position), state[rows.state_row(ratio, owner, position)]
    found.add(
        "lost_state",
        ratio,
        want != have,
        request=rows.request(owner),
        position=position,
        expected=lambda i: f"{describe_tag(want[i])} if {accepted[i]} rows stay",
        got=lambda i: describe_tag(have[i]),
    )


def check_header(
    rows: BatchRows, header: np.ndarray, lists: dict[int, RatioImage], padding_requests: int, found: Findings
) -> None:
    """Checks the eight numbers that sum a plan up against the batch and the lists; padding requests have no rows."""
    extend = np.append(rows.step.extend_lens, np.zeros(padding_requests, np.int64))
    expected = {
        "min_extend": int(extend.min()),
        "max_extend": int(extend.max()),
        "total_tokens": int(extend.sum()),
        "is_uniform": int(extend.min() == extend.max()),
    }
    for ratio, image in lists.items():
        expected[f"c{ratio}_compress_rows"] = int(np.count_nonzero((rows.position + 1) % ratio == 0))
        expected[f"c{ratio}_write_rows"] = int(np.count_nonzero(image.write["ragged_id"] != UNUSED))
    want = np.array([f"{name} = {value}" for name, value in expected.items()])
    wrong = header.astype(np.int64) != np.array(list(expected.values()))
    found.add("header", 0, wrong, expected=want, got=header)


def _check_size(rows: BatchRows, ratio: int, image: RatioImage, found: Findings) -> None:
    room = rows.step.num_rows
    layout = 20 if room > WIDE_ABOVE else 16
    for name, records, size in (("compress", image.compress, layout), ("write", image.write, 8)):
        wrong = np.array([len(records) != room or records.dtype.itemsize != size])
        got = f"{len(records)} of {records.dtype.itemsize}"
        found.add("plan_size", ratio, wrong, expected=f"{room} {name} rows of {size} bytes", got=got)


def _used_rows(ratio: int, name: str, records: np.ndarray, marker: dict[str, int], found: Findings) -> np.ndarray:
    """The rows in use; they must come first and the others must be the marker, bit for bit."""
    unused = records[next(iter(marker))] == UNUSED
    late = ~unused & (np.cumsum(unused) > 0)
    found.add(
        "marker", ratio, late, expected="nothing after the first unused row", got=lambda i: f"{name} row {i} in use"
    )
    dirty = np.zeros(len(records), bool)
    for field, value in marker.items():
        dirty |= unused & (records[field] != value)
    found.add("marker", ratio, dirty, expected=f"the unused {name} row {tuple(marker.values())}", got=records)
    return records[~unused]


def _rows_in_batch(rows: BatchRows, ratio: int, name: str, used: np.ndarray, found: Findings) -> np.ndarray:
    """The records whose row is one of the batch; rows must ascend, each once."""
    ids, total = used["ragged_id"].astype(np.int64), len(rows.owner)
    outside = ids >= total
    found.add("row_range", ratio, outside, expected=f"a {name} row below {total}", got=ids)
    used, ids = used[~outside], ids[~outside]
    steps = np.diff(ids, prepend=-1)
    where = {"request": rows.request(rows.owner[ids]), "position": rows.position[ids]}
    found.add("row_repeat", ratio, steps == 0, expected=f"each {name} row once", got=ids, **where)
    found.add("row_order", ratio, steps < 0, expected=f"ascending {name} rows", got=ids, **where)
    return used


def _check_groups(rows: BatchRows, ratio: int, ids: np.ndarray, found: Findings) -> None:
    ends = (rows.position + 1) % ratio == 0
    planned = np.zeros(len(rows.owner), bool)
    planned[ids] = True
    where = {"request": rows.request(rows.owner), "position": rows.position}
    found.add("missing_row", ratio, ends & ~planned, expected="a compress row", got="none", **where)
    found.add("unexpected_row", ratio, planned & ~ends, expected="no compress row", got="one", **where)


def _check_fields(rows: BatchRows, ratio: int, ids: np.ndarray, used: np.ndarray, found: Findings) -> None:
    position = rows.position[ids]
    where = {"request": rows.request(rows.owner[ids]), "position": position}
    seq_len, buffered = used["seq_len"].astype(np.int64), used["buffer_len"].astype(np.int64)
    found.add("seq_len", ratio, seq_len != position + 1, expected=position + 1, got=seq_len, **where)
    want = np.maximum(0, WINDOW_ROWS[ratio] - 1 - rows.offset[ids])
    found.add("buffer_len", ratio, buffered != want, expected=want, got=buffered, **where)


def _check_batch_reads(
    rows: BatchRows, ratio: int, ids: np.ndarray, used: np.ndarray, state: np.ndarray, found: Findings
) -> None:
    before_batch = WINDOW_ROWS[ratio] - 1 - rows.offset[ids]
    reads = (before_batch > 0) & ((rows.position[ids] + 1) % ratio == 0)
    _check_reads(rows, ratio, ids[reads], before_batch[reads], used[reads], state, found)


def _check_reads(
    rows: BatchRows,
    ratio: int,
    ids: np.ndarray,
    count: np.ndarray,
    pages: np.ndarray,
    state: np.ndarray,
    found: Findings,
) -> None:
    """Checks that the pages of each record lead to the tokens of its window's first `count` rows."""
    window = WINDOW_ROWS[ratio]
    place = np.arange(window)
    position = rows.position[ids][:, None] - (window - 1) + place
    # Positions before the request: only in the first group of ratio 4, which has no group before it.
    record, column = np.nonzero((place < count[:, None]) & (position >= 0))
    page = np.where(column < window - ratio, pages["read_page_0"][record], pages["read_page_1"][record])
    address = page.astype(np.int64) * ratio + column % ratio
    owner, position = rows.owner[ids[record]], position[record, column]
    where = {"request": rows.request(owner), "position": position}
    outside = (address < 0) | (address >= len(state))
    found.add("page_range", ratio, outside, expected=f"state rows below {len(state)}", got=address, **where)
    want, have = rows.token_at(owner, position), state[np.where(outside, 0, address)]
    found.add(
        "stale_read",
        ratio,
        ~outside & (want != have),
        expected=lambda i: describe_tag(want[i]),
        got=lambda i: f"{describe_tag(have[i])} (state row {address[i]})",
        **where,
    )


def _apply_writes(
    rows: BatchRows, ratio: int, ids: np.ndarray, loc: np.ndarray, state: np.ndarray, found: Findings
) -> None:
    owner, position = rows.owner[ids], rows.position[ids]
    where = {"request": rows.request(owner), "position": position}
    want = rows.state_row(ratio, owner, position)
    found.add("write_loc", ratio, loc != want, expected=want, got=loc, **where)
    outside = (loc < -1) | (loc >= len(state))
    found.add("write_range", ratio, outside, expected=f"a state row below {len(state)}", got=loc, **where)
    # Rows 0 and -1 are dummies: what lands there is never read.
    real = ~outside & (loc > 0)
    _, inverse, times = np.unique(loc, return_inverse=True, return_counts=True)
    conflict = real & (times[inverse] > 1)
    found.add("write_conflict", ratio, conflict, expected="one write to a state row", got=loc, **where)
    state[loc[real]] = rows.tag[ids[real]]
