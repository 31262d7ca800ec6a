"""Queries of the indexer, and checks of what its functions are given."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4_backend.layouts import EntryPool
from dsv4_backend.validation import expect_aligned, expect_separate, expect_tensor, expect_type

HEAD_DIMS = (16, 256)
"""Channels of keys: what a matrix product takes at least, and what fits on chip with MAX_QUERY on every chip."""
MAX_QUERY = 32_768
"""Values of a query. 128 heads of 256 channels are as many as fit on chip everywhere."""


@dataclass(frozen=True, eq=False)
class IndexQuery:
    """Queries of the indexer, in the format of the keys that they are compared with.

    Args:
        values: [T, heads, channels], contiguous: float32, bfloat16, or uint8 (float8 e4m3 by its bits) for keys of
            format fp32, bf16, fp8.
        weights: float32 [T, heads], contiguous: the head weights times channels**-0.5 * heads**-0.5 and, for fp8, times
            the scale of the query's values.
    """

    values: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def empty(cls, keys: EntryPool, num_rows: int, heads: int) -> IndexQuery:
        """Room for `num_rows` queries against `keys`, not initialised."""
        layout, device = keys.layout, keys.device
        return cls(
            torch.empty((num_rows, heads, layout.head_dim), dtype=layout.dtype, device=device),
            torch.empty((num_rows, heads), dtype=torch.float32, device=device),
        )


def check_keys(keys: EntryPool) -> EntryPool:
    expect_type("keys", keys, EntryPool)
    least, most = HEAD_DIMS
    if not keys.layout.indexer or not least <= keys.layout.head_dim <= most:
        raise ValueError(f"keys: expected a pool of indexer keys of {least} to {most} channels, got {keys.layout}")
    return keys


def check_heads(name: str, heads: int, dim: int) -> None:
    most = MAX_QUERY // dim
    if not 1 <= heads <= most:
        raise ValueError(f"{name}: expected 1 to {most} heads of {dim} channels, got {heads}")


def check_query(name: str, query: IndexQuery, keys: EntryPool) -> tuple[int, int]:
    """Rows and heads of a query that is in the format of `keys`."""
    expect_type(name, query, IndexQuery)
    values = expect_tensor(f"{name}.values", query.values, dtypes=(keys.layout.dtype,), ndim=3, device=keys.device)
    rows, heads, dim = values.shape
    if dim != keys.layout.head_dim:
        raise ValueError(
            f"{name}.values: expected heads of {keys.layout.head_dim} channels, got shape {list(values.shape)}"
        )
    check_heads(f"{name}.values", heads, dim)
    check_matrix(f"{name}.weights", query.weights, (torch.float32,), (rows, heads), keys)
    for field, tensor in (("values", values), ("weights", query.weights)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}.{field}: expected a contiguous tensor, got strides {list(tensor.stride())}")
    expect_aligned(f"{name}.values", values)
    return rows, heads


def check_tables(
    page_table: torch.Tensor,
    table_rows: torch.Tensor | None,
    lengths: torch.Tensor,
    rows: int,
    device: torch.device,
) -> None:
    expect_tensor("lengths", lengths, dtypes=(torch.int32,), ndim=1, size=rows, device=device)
    if table_rows is not None:
        expect_tensor("table_rows", table_rows, dtypes=(torch.int32,), ndim=1, size=rows, device=device)
    size = rows if table_rows is None else None
    expect_tensor("page_table", page_table, dtypes=(torch.int32,), ndim=2, size=size, device=device)
    expect_unit_columns("page_table", page_table)


def check_selection(out: torch.Tensor, raw: torch.Tensor | None, rows: int, device: torch.device) -> None:
    out = expect_tensor("out", out, dtypes=(torch.int32,), ndim=2, size=rows, device=device)
    expect_unit_columns("out", out)
    expect_separate("out", out)
    if out.shape[1] < 1:
        raise ValueError("out: expected at least one column, got none")
    if raw is not None:
        raw = expect_tensor("raw", raw, dtypes=(torch.int32,), ndim=2, size=rows, device=device)
        expect_unit_columns("raw", raw)
        expect_separate("raw", raw)
        if raw.data_ptr() == out.data_ptr() and raw.numel():
            raise ValueError("raw: expected memory of its own, got that of out")
        if raw.shape != out.shape:
            raise ValueError(f"raw: expected the shape of out, {list(out.shape)}, got {list(raw.shape)}")


def check_matrix(
    name: str,
    value: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, int | None],
    keys: EntryPool,
) -> None:
    value = expect_tensor(name, value, dtypes=dtypes, ndim=2, size=shape[0], device=keys.device)
    if shape[1] is not None and value.shape[1] != shape[1]:
        raise ValueError(f"{name}: expected {shape[1]} columns, got {value.shape[1]}")
    expect_unit_columns(name, value)


def expect_unit_columns(name: str, value: torch.Tensor) -> None:
    if value.shape[1] > 1 and value.stride(1) != 1:
        raise ValueError(f"{name}: expected unit column stride, got {list(value.stride())}")
