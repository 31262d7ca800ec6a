"""The invariants of built metadata, row by row, against the slot tables and what the ledger knows of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dsv4_backend.replay.batch_rows import BatchRows, CacheSizes
from dsv4_backend.replay.builds import builds_of
from dsv4_backend.replay.metadata_image import COMPRESSED_FIELDS, TABLES, WINDOW_FIELDS, MetadataImage
from dsv4_backend.replay.metadata_rows import MetadataRows
from dsv4_backend.replay.violation import Findings


class _Report:
    """Adds what is wrong with one image to the findings, with the row it is wrong in."""

    def __init__(self, rows: MetadataRows, image: MetadataImage, found: Findings) -> None:
        self.image, self._found = image, found
        self._request = rows.request
        self._position = np.where(rows.live, rows.position, -1)

    def add(
        self,
        kind: str,
        ratio: int,
        bad: np.ndarray,
        expected: Callable[[int], object],
        got: Callable[[int], object],
        row: np.ndarray | None = None,
    ) -> None:
        """Counts each True in `bad`, bool [n]; `row` says which rows these are, int64 [n], if not all of them."""
        place = np.arange(len(bad)) if row is None else row
        self._found.add(
            kind,
            ratio,
            bad,
            request=self._request[place],
            position=self._position[place],
            expected=lambda i: str(expected(i)),
            got=lambda i: f"{got(i)} (row {place[i]} of {self.image.label})",
        )

    def compare(self, kind: str, name: str, want: np.ndarray, ratio: int = 0) -> None:
        """Checks the field `name` against `want`: int64 [N], or [N, columns], where the first that differs is named."""
        got = self.image.fields[name]
        if got.ndim == 1:
            self.add(kind, ratio, got != want, lambda i: want[i], lambda i: got[i])
        else:
            self.compare_columns(kind, ratio, name, want, got, np.True_)

    def compare_columns(
        self,
        kind: str,
        ratio: int,
        name: str,
        want: np.ndarray,
        got: np.ndarray,
        read: np.ndarray | np.bool_,
        row: np.ndarray | None = None,
    ) -> None:
        """Checks the columns of `got` where `read` is True."""
        wrong = (got != want) & read

        def say(side: np.ndarray) -> Callable[[int], str]:
            return lambda i: f"{name}[{(column := int(wrong[i].argmax()))}] = {side[i, column]}"

        self.add(kind, ratio, wrong.any(axis=1), say(want), say(got), row)


def check_builds(rows: BatchRows, images: Sequence[MetadataImage], found: Findings) -> None:
    """Checks that every build of a step gave as many steps as it should."""
    for build in builds_of(rows.step):
        count = sum(image.build == build for image in images)
        wrong = np.array([count != build.steps])
        found.add("build_steps", 0, wrong, expected=f"{build.steps} of {build.mode.value}", got=str(count))


def check_metadata(rows: BatchRows, image: MetadataImage, sizes: CacheSizes, found: Findings) -> bool:
    """Checks the metadata of one step of a build.

    Args:
        rows: the batch that it is for.
        image: the metadata.
        sizes: of the cache.
        found: where violations go.

    Returns:
        Whether its tensors have the form that they should have; if not, nothing else was checked.
    """
    wanted = MetadataRows(rows, image.build, image.place)
    moved = np.array(image.moved)
    found.add("moved_buffer", 0, moved != "", expected=f"{image.label} where it was", got=moved)
    if not _check_layout(wanted, image, sizes, found):
        return False
    report = _Report(wanted, image, found)
    _check_rows(wanted, report)
    _check_write_slots(wanted, report)
    _check_windows(wanted, report, sizes)
    compressed = not image.build.mode.drafts
    if compressed:
        _check_compressed(wanted, report, sizes)
    return _check_tables(wanted, report, sizes, compressed)


def _check_layout(rows: MetadataRows, image: MetadataImage, sizes: CacheSizes, found: Findings) -> bool:
    """Which tensors there are, and that each has its dtype, its rows and room for its columns."""
    longest = int(rows.length.max()) if len(rows) else 0
    pages = -(-longest // sizes.page_size)
    columns = {
        "page_table": pages,
        "swa_page_indices": sizes.window,
        "c4_sparse_page_indices": sizes.index_topk,
        "c128_page_indices": max(1, longest // 128),
    }
    wanted: dict[str, type] = {**WINDOW_FIELDS, **({} if image.build.mode.drafts else COMPRESSED_FIELDS)}
    before = found.count
    per_request = "table_rows" in image.fields
    for name, dtype in {**wanted, **({"table_rows": np.int32} if per_request else {})}.items():
        array = image.fields.get(name)
        count = 0 if name in TABLES and per_request else len(rows)
        if (
            array is not None
            and array.dtype == dtype
            and array.ndim == 1 + (name in columns)
            and (not count or len(array) == count)
            and (name not in columns or array.shape[1] >= columns[name])
        ):
            continue
        want = f"{dtype.__name__} [{count or '...'}{f', at least {columns[name]}' if name in columns else ''}]"
        got = "none" if array is None else f"{array.dtype} {list(array.shape)}"
        found.add("layout", 0, np.ones(1, bool), expected=f"{name} {want}", got=f"{got} ({image.label})")
    extra = sorted(set(image.fields) - set(wanted) - {"table_rows"})
    found.add("layout", 0, np.array([bool(extra)]), expected="no more", got=f"{', '.join(extra)} ({image.label})")
    return found.count == before


def _check_rows(rows: MetadataRows, report: _Report) -> None:
    report.compare("row_request", "req_pool_indices_per_row", rows.req)
    report.compare("position", "positions", rows.position)
    report.compare("causal_length", "seq_lens_causal", rows.length)


def _check_write_slots(rows: MetadataRows, report: _Report) -> None:
    """Each row writes where the tables have its token, and nobody else does."""
    report.compare("write_slot", "raw_out_cache_loc", rows.slot)
    report.compare("window_write_slot", "swa_out_cache_loc", rows.batch.full_to_swa[rows.slot])
    for name in ("raw_out_cache_loc", "swa_out_cache_loc"):
        slot = report.image.fields[name]
        _check_own_slots(name, 0, slot, np.flatnonzero(rows.live), report)


def _check_own_slots(name: str, ratio: int, slot: np.ndarray, writers: np.ndarray, report: _Report) -> None:
    """The rows `writers` write to a slot each, none of them the reserved slot 0."""
    slot = slot[writers]
    _, inverse, times = np.unique(slot, return_inverse=True, return_counts=True)
    shared = (slot <= 0) | (times[inverse] > 1)
    report.add("shared_slot", ratio, shared, lambda i: f"{name}: a slot of its own", lambda i: slot[i], writers)


def _check_windows(rows: MetadataRows, report: _Report, sizes: CacheSizes) -> None:
    report.compare("window_length", "swa_lengths", np.minimum(rows.length, sizes.window))
    want, evicted = rows.windows(sizes.window)
    columns = report.image.fields["swa_page_indices"].shape[1]
    if columns > sizes.window:
        want = np.pad(want, ((0, 0), (0, columns - sizes.window)), constant_values=-1)
    report.compare("window_slot", "swa_page_indices", want)
    if len(evicted):
        first = [np.flatnonzero(rows.live & (rows.owner == owner))[0] for owner in evicted[:, 0]]
        report.add(
            "evicted",
            0,
            np.ones(len(evicted), bool),
            lambda i: f"a window slot for position {evicted[i, 1]}",
            lambda i: "none",
            np.array(first),
        )


def _check_compressed(rows: MetadataRows, report: _Report, sizes: CacheSizes) -> None:
    for ratio in (4, 128):
        report.compare("entry_length", f"c{ratio}_lengths", rows.length // ratio, ratio)
        closes = rows.live & (rows.length % ratio == 0)
        name = f"c{ratio}_out_loc"
        report.compare("entry_slot", name, np.where(closes, rows.slot // ratio, 0), ratio)
        _check_own_slots(name, ratio, report.image.fields[name], np.flatnonzero(closes), report)
    report.compare("sparse_length", "c4_sparse_lengths", np.minimum(rows.length // 4, sizes.index_topk), 4)
    selected = report.image.fields["c4_sparse_page_indices"]
    dirty = (selected != -1).any(axis=1)
    report.add("sparse_fill", 4, dirty, lambda i: -1, lambda i: selected[i][selected[i] != -1][0])


def _check_tables(rows: MetadataRows, report: _Report, sizes: CacheSizes, compressed: bool) -> bool:
    """Checks pages and ratio-128 entries up to each row's length; False where a row's table is out of range."""
    if not len(rows):
        return True
    fields, per_page = report.image.fields, sizes.page_size // 128
    pages = rows.pages(sizes.page_size)
    place = np.where(rows.live, rows.owner, len(pages) - 1)
    row, table_row = np.arange(len(rows)), fields.get("table_rows")
    length = rows.length
    if table_row is None:
        table_row = row
    else:
        tables = len(fields["page_table"])
        outside = (table_row < 0) | (table_row >= tables)
        report.add("table_row", 0, outside, lambda i: f"a row of {tables} tables", lambda i: fields["table_rows"][i])
        if outside.any():
            return False
        # Rows of one request that share a table: the longest of them reads all that the others read.
        _, inverse = np.unique(place * tables + table_row, return_inverse=True)
        row = np.zeros(inverse.max() + 1, np.int64)
        order = np.argsort(length, kind="stable")
        row[inverse[order]] = order
        place, table_row, length = place[row], table_row[row], length[row]

    _check_owned_pages(rows, pages, sizes, report)
    live = -(-length // sizes.page_size)
    _compare_tables(report, "page", 0, "page_table", pages, place, table_row, live, row)
    if compressed:
        entries = np.repeat(pages * per_page, per_page, axis=1) + np.tile(np.arange(per_page), pages.shape[1])
        _compare_tables(report, "entry", 128, "c128_page_indices", entries, place, table_row, length // 128, row)
        first = fields["c128_page_indices"][:, 0]
        if "table_rows" not in fields:
            wrong = (rows.length < 128) & (first != -1)
            report.add("entry", 128, wrong, lambda i: "c128_page_indices[0] = -1", lambda i: first[i])
    return True


def _compare_tables(
    report: _Report,
    kind: str,
    ratio: int,
    name: str,
    wanted: np.ndarray,
    place: np.ndarray,
    table_row: np.ndarray,
    count: np.ndarray,
    row: np.ndarray,
) -> None:
    """Checks the first `count` columns of the tables in `table_row` against those of `wanted` in `place`."""
    width = int(count.max())
    got = report.image.fields[name][:, :width]
    if len(got) != len(table_row) or (table_row != np.arange(len(got))).any():
        got = got[table_row]
    read = np.arange(width) < count[:, None]
    report.compare_columns(kind, ratio, name, wanted[:, :width].astype(np.int32)[place], got, read, row)


def _check_owned_pages(rows: MetadataRows, pages: np.ndarray, sizes: CacheSizes, report: _Report) -> None:
    """Every page of a request's tokens is one of the pool, and its own: none comes twice."""
    live = np.flatnonzero(rows.live)
    last = live[np.diff(rows.owner[live], append=-1) != 0]
    owners, count = rows.owner[last], -(-rows.length[last] // sizes.page_size)
    owned = np.where(np.arange(pages.shape[1]) < count[:, None], pages[owners], -1 - np.arange(pages.shape[1]))
    owned.sort(axis=1)
    bad = (owned == 0) | (np.diff(owned, axis=1, prepend=np.iinfo(np.int64).min) == 0)
    report.add(
        "owned_page",
        0,
        bad.any(axis=1),
        lambda i: "pages of the pool, each once",
        lambda i: f"page {owned[i][bad[i]][0]}",
        last,
    )
