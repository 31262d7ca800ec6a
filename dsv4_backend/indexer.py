"""The indexer of ratio-4 layers: which compressed entries a row attends to.

A row's query is compared with the keys of all its closed entries, and the best k are kept. The semantics live in
`dsv4_backend.reference.indexer`.
"""

from __future__ import annotations

from types import ModuleType

import torch

from dsv4_backend import dispatch
from dsv4_backend.indexer_checks import (
    IndexQuery,
    check_heads,
    check_keys,
    check_matrix,
    check_query,
    check_selection,
    check_tables,
    expect_unit_columns,
)
from dsv4_backend.layouts import EntryPool
from dsv4_backend.validation import INT_DTYPES, expect_aligned, expect_separate, expect_tensor

WORKSPACE_BYTES = 256 << 20
"""What `select_entries` allocates for scores at most, unless a single row takes more."""
_MAX_SLOTS, _MAX_PAGES = 2**31, 2**31 - 1


def index_query(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    keys: EntryPool,
    *,
    impl: str = "auto",
    out: IndexQuery | None = None,
) -> IndexQuery:
    """Ropes queries, transforms them as the keys are, rounds them to the keys' format and folds scales into weights.

    With H heads of D = `keys.layout.head_dim` channels, 16 to 256, H * D up to 32,768, everything on the keys' device:

    Args:
        q: float32 or bfloat16 [T, H, D], the heads of a row side by side, row stride a multiple of 8 elements, on a
            16-byte boundary. Without norm and rope.
        head_weights: float32 or bfloat16 [T, H], unit column stride. Signed.
        positions: int32 or int64 [T], any stride (`AttnMetadata.positions`). At positions that the table does not have
            the channels that rotate become zero.
        rope: float32 [positions, rope_dim], contiguous (`rope.rope_table` of the layer).
        keys: the pool of keys; only its format matters. fp32: nothing is rounded or transformed. bf16: Hadamard
            transform, then bfloat16. fp8: Hadamard transform, then float8 e4m3 with one float32 scale a vector,
            max(1e-4, largest magnitude) / 448.
        impl: "auto" (Triton on a GPU, torch on a CPU), "triton" or "torch".
        out: where the result goes; None: new tensors.

    Returns:
        `out`, or a new IndexQuery.

    Raises:
        ValueError: before anything is written; the message says what was expected and what came.

    Source: spec/attention_math.md, sections 5 and 6.
    """
    layout = check_keys(keys).layout
    q = expect_tensor("q", q, dtypes=(torch.float32, torch.bfloat16), ndim=3, device=keys.device)
    rows, heads, dim = q.shape
    if dim != layout.head_dim:
        raise ValueError(f"q: expected heads of {layout.head_dim} channels, got shape {list(q.shape)}")
    check_heads("q", heads, dim)
    if q.stride(2) != 1 or (heads > 1 and q.stride(1) != dim) or (rows > 1 and q.stride(0) % 8):
        raise ValueError(
            f"q: expected heads side by side and a row stride that is a multiple of 8, got strides {list(q.stride())}"
        )
    expect_aligned("q", q)
    check_matrix("head_weights", head_weights, (torch.float32, torch.bfloat16), (rows, heads), keys)
    expect_tensor("positions", positions, dtypes=INT_DTYPES, ndim=1, size=rows, device=keys.device)
    check_matrix("rope", rope, (torch.float32,), (None, layout.rope_dim), keys)
    if rope.shape[0] < 1 or not rope.is_contiguous() or rope.data_ptr() % 16:
        raise ValueError(
            f"rope: expected at least one position, contiguous on a 16-byte boundary, got shape {list(rope.shape)}, "
            f"strides {list(rope.stride())}, address {rope.data_ptr():#x}"
        )
    implementation = dispatch.indexer(impl, keys.device)
    if out is None:
        out = IndexQuery.empty(keys, rows, heads)
    elif check_query("out", out, keys) != (rows, heads):
        raise ValueError(f"out: expected {rows} rows of {heads} heads, got shape {list(out.values.shape)}")
    if rows:
        implementation.index_query(
            q=q,
            head_weights=head_weights,
            positions=positions,
            rope=rope,
            keys=keys,
            values=out.values,
            weights=out.weights,
        )
    return out


def index_scores(
    query: IndexQuery,
    keys: EntryPool,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    out: torch.Tensor,
    table_rows: torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Scores each row's entries: the sum over heads of weight * max(0, <query, key>).

    NaN in a query or a key gives a score of NaN. With E = `keys.layout.page_entries`, everything on the keys' device:

    Args:
        query: T queries in the keys' format.
        keys: the pool.
        page_table: int32 [T, P], unit column stride: page of the pool for each page of the row's request
            (`AttnMetadata.page_table`). Entry w of row t is at slot page_table[t, w // E] * E + w % E.
        lengths: int32 [T], any stride: entries of each row (`AttnMetadata.c4_lengths`).
        out: float32 [T, N], unit column stride, rows that do not overlap. Columns below min(lengths[t], N) are written,
            others not touched. Entries beyond the page table, and on pages that the pool does not have, score minus
            infinity.
        table_rows: int32 [T], any stride: row of `page_table`, then [R, P], that serves row t
            (`AttnMetadata.table_rows`); a row that is not there has no pages. None: row t serves row t.
        impl: as for `index_query`.

    Keys beyond a row's length are not read. The cost follows the lengths, not N. Equal calls give equal bits.

    Raises:
        ValueError: before anything is written.

    Source: spec/attention_math.md, sections 5 and 6.
    """
    rows, _ = check_query("query", query, check_keys(keys))
    check_tables(page_table, table_rows, lengths, rows, keys.device)
    check_matrix("out", out, (torch.float32,), (rows, None), keys)
    expect_separate("out", out)
    implementation = dispatch.indexer(impl, keys.device)
    if out.numel():
        implementation.index_scores(
            values=query.values,
            weights=query.weights,
            keys=keys,
            page_table=page_table,
            table_rows=table_rows,
            lengths=lengths,
            num_pages=_pages(keys),
            out=out,
        )


def select_topk(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    page_entries: int,
    *,
    out: torch.Tensor,
    raw: torch.Tensor | None = None,
    table_rows: torch.Tensor | None = None,
    num_pages: int | None = None,
    impl: str = "auto",
) -> None:
    """Selects the k entries with the largest scores of each row, and gives their slots in ascending order of entry.

    Exact: of equal scores the lowest entries are taken. Zeros of both signs are equal; NaN, of either sign, is below
    minus infinity. Equal calls give equal bits. Everything is on the scores' device:

    Args:
        scores: float32 [T, N], unit column stride. A row's columns from its length on are not read, and none of a row
            that has no more than k entries.
        lengths: int32 [T], any stride: entries of each row. An entry that was not scored can't be selected: lengths
            beyond N count as N. Negative ones count as 0.
        page_table: int32 [T, P], unit column stride, as for `index_scores`.
        page_entries: entries of a page.
        out: int32 [T, k], k >= 1, unit column stride: slots, -1 behind them. A selected entry whose page is not in the
            page table or not in the pool is -1, too, in its place.
        raw: int32 [T, k] like `out`, or None: the entries themselves, -1 behind them. No row of either overlaps
            another.
        table_rows: as for `index_scores`.
        num_pages: pages of the pool; None: as many as int32 slots allow.
        impl: as for `index_query`.

    Raises:
        ValueError: before anything is written.

    Source: spec/attention_math.md, section 5.
    """
    scores = expect_tensor("scores", scores, dtypes=(torch.float32,), ndim=2)
    expect_unit_columns("scores", scores)
    rows, device = scores.shape[0], scores.device
    check_tables(page_table, table_rows, lengths, rows, device)
    limits = {"page_entries": page_entries} | ({} if num_pages is None else {"num_pages": num_pages})
    for name, value in limits.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}: expected an int of at least 1, got {value!r}")
    check_selection(out, raw, rows, device)
    most = min(_MAX_SLOTS // page_entries, _MAX_PAGES)
    _select(
        dispatch.indexer(impl, device),
        scores=scores,
        lengths=lengths,
        width=scores.shape[1],
        page_table=page_table,
        table_rows=table_rows,
        page_entries=page_entries,
        num_pages=most if num_pages is None else min(num_pages, most),
        out=out,
        raw=raw,
    )


def select_entries(
    query: IndexQuery,
    keys: EntryPool,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    out: torch.Tensor,
    max_length: int,
    workspace: torch.Tensor | None = None,
    raw: torch.Tensor | None = None,
    table_rows: torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Scores each row's entries and selects the best k: `index_scores` and `select_topk`, some rows at a time.

    The number of launches depends on shapes alone, so that a CUDA graph can record it: two for as many rows as the
    workspace has room for; one in all, without scores, where `max_length` is at most k and everything is selected.

    Args:
        query, keys, page_table, lengths, table_rows, impl: as for `index_scores`.
        out, raw: as for `select_topk` (`AttnMetadata.c4_sparse_page_indices`).
        max_length: entries that a row may have (`AttnMetadata.max_c4_length`, or less where the host knows better).
            Larger lengths count as this.
        workspace: float32 [n], contiguous, on a 16-byte boundary, with room for one row at least: `workspace_row`
            elements each. None: allocated, up to `WORKSPACE_BYTES`. A CUDA graph wants one that stays.

    Raises:
        ValueError: before anything is written.
    """
    rows, _ = check_query("query", query, check_keys(keys))
    check_tables(page_table, table_rows, lengths, rows, keys.device)
    check_selection(out, raw, rows, keys.device)
    if type(max_length) is not int or max_length < 0:
        raise ValueError(f"max_length: expected an int of at least 0, got {max_length!r}")
    row_size, scored = workspace_row(max_length), max_length > out.shape[1]
    if workspace is not None:
        expect_tensor("workspace", workspace, dtypes=(torch.float32,), ndim=1, device=keys.device)
        if not workspace.is_contiguous() or workspace.data_ptr() % 16 or (scored and len(workspace) < row_size):
            raise ValueError(
                f"workspace: expected {row_size} contiguous elements or more on a 16-byte boundary, got "
                f"{len(workspace)}, stride {workspace.stride(0)}, address {workspace.data_ptr():#x}"
            )
    implementation = dispatch.indexer(impl, keys.device)
    if not rows:
        return
    layout = keys.layout
    chunk, scores = rows, None
    if scored:
        if workspace is None:
            most = max(1, WORKSPACE_BYTES // (4 * row_size))
            workspace = torch.empty(min(rows, most) * row_size, dtype=torch.float32, device=keys.device)
        chunk = min(rows, len(workspace) // row_size)
        scores = workspace[: chunk * row_size].view(chunk, row_size)[:, :max_length]
    for start in range(0, rows, chunk):
        part = slice(start, min(rows, start + chunk))
        tables = {
            "page_table": page_table if table_rows is not None else page_table[part],
            "table_rows": table_rows if table_rows is None else table_rows[part],
            "lengths": lengths[part],
        }
        part_scores = scores if scores is None else scores[: part.stop - start]
        if part_scores is not None:
            implementation.index_scores(
                values=query.values[part],
                weights=query.weights[part],
                keys=keys,
                num_pages=_pages(keys),
                out=part_scores,
                **tables,
            )
        _select(
            implementation,
            scores=part_scores,
            width=max_length,
            page_entries=layout.page_entries,
            num_pages=_pages(keys),
            out=out[part],
            raw=raw if raw is None else raw[part],
            **tables,
        )


def workspace_row(max_length: int) -> int:
    """Elements of a workspace that a row takes in `select_entries`: whole units of 16 bytes."""
    return -(-max_length // 4) * 4


def _pages(keys: EntryPool) -> int:
    """Pages of a pool whose slots int32 can name."""
    return min(min(keys.num_slots, _MAX_SLOTS) // keys.layout.page_entries, _MAX_PAGES)


def _select(
    implementation: ModuleType, *, out: torch.Tensor, scores: torch.Tensor | None, width: int, **rest: object
) -> None:
    if not out.shape[0]:
        return
    # Where every row selects all that it has, what the scores are does not matter.
    scores = scores if width > out.shape[1] else None
    implementation.select_topk(out=out, scores=scores, width=width, **rest)
