"""Plan containers: which rows complete a compressed entry, and which rows are kept as state.

Byte layouts are SGLang's, little endian (docs/plans.md), so that its kernels read our plans as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import torch

from dsv4_backend.geometry import RATIOS
from dsv4_backend.validation import expect_dense

PACKED_MAX_ROWS = 65_536
"""The packed layout holds a row id in 16 bits; plans with more rows use the wide one."""

MAX_ROWS = 2**30
"""Kernels count rows in signed 32-bit integers, and look one block ahead."""

INVALID = 0xFFFFFFFF
"""`seq_len` of a compress row and `ragged_id` of a write row that are not in use."""

# The same markers as the 32-bit words of a row.
INVALID_PACKED_WORDS = (-1, 0, -1, -1)
INVALID_WIDE_WORDS = (-1, 0, 0, -1, -1)
INVALID_WRITE_WORDS = (-1, -1)

COMPRESS_FIELDS = ("seq_len", "ragged_id", "buffer_len", "read_page_0", "read_page_1")
PACKED_COMPRESS = np.dtype(list(zip(COMPRESS_FIELDS, ("<u4", "<u2", "<u2", "<i4", "<i4"), strict=True)))
WIDE_COMPRESS = np.dtype(list(zip(COMPRESS_FIELDS, ("<u4", "<u4", "<u4", "<i4", "<i4"), strict=True)))
WRITE = np.dtype([("ragged_id", "<u4"), ("write_loc", "<i4")])
DECODE = np.dtype([("seq_len", "<u4"), ("write_loc", "<i4"), ("read_page_0", "<i4"), ("read_page_1", "<i4")])

HEADER_FIELDS = (
    "min_extend",
    "max_extend",
    "total_tokens",
    "is_uniform",
    "c4_compress_rows",
    "c4_write_rows",
    "c128_compress_rows",
    "c128_write_rows",
)

ERROR_LENGTHS = 1
ERROR_SLOT = 2
ERROR_UNOWNED = 4
ERROR_TEXT = {
    ERROR_LENGTHS: "a length or request id was out of range (negative, longer than the table, or more rows than "
    "num_rows); that request, or with too many rows the whole batch, was planned as empty or as padding",
    ERROR_SLOT: "a slot in req_to_token or out_cache_loc lies beyond full_to_swa; it was read as window slot 0",
    ERROR_UNOWNED: "out_cache_loc holds a slot for a row that no request has; it was left out",
}


Lists = TypeVar("Lists")


def compress_dtype(num_rows: int) -> np.dtype:
    """Record layout of a compress list with room for `num_rows` rows."""
    return PACKED_COMPRESS if num_rows <= PACKED_MAX_ROWS else WIDE_COMPRESS


def check_ratios(ratios: Iterable[int]) -> tuple[int, ...]:
    """`ratios` as a tuple; ValueError when it is not a selection of 4 and 128, each at most once."""
    found = tuple(ratios) if isinstance(ratios, Iterable) else None
    if found is None or any(type(r) is not int or r not in RATIOS for r in found) or len(set(found)) != len(found):
        raise ValueError(f"ratios: expected a selection of {RATIOS}, each at most once, got {ratios!r}")
    return found


@dataclass(frozen=True, eq=False)
class CompressPlan:
    """The rows of one ratio in a batch with several rows a request.

    Attributes:
        compress: uint8 [num_rows, 16] (packed) or [num_rows, 20] (wide, above 65,536 rows). Rows that complete an
            entry, ascending by row id, then invalid markers (seq_len 0xFFFFFFFF, row id and buffer_len 0, pages -1).
        write: uint8 [num_rows, 8]. Rows kept as state, ascending, then invalid markers (0xFFFFFFFF, -1).
    """

    ratio: int
    compress: torch.Tensor
    write: torch.Tensor

    def __post_init__(self) -> None:
        rows = self.compress.shape[0] if isinstance(self.compress, torch.Tensor) and self.compress.ndim else 0
        _expect_buffer(f"c{self.ratio}.compress", self.compress, (rows, compress_dtype(rows).itemsize), torch.uint8)
        _expect_buffer(f"c{self.ratio}.write", self.write, (rows, WRITE.itemsize), torch.uint8, self.compress.device)

    @cached_property
    def compress_words(self) -> torch.Tensor:
        """`compress` as 32-bit words: int32 [num_rows, 4 or 5]."""
        return self.compress.view(torch.int32)

    @cached_property
    def write_words(self) -> torch.Tensor:
        """`write` as 32-bit words: int32 [num_rows, 2]."""
        return self.write.view(torch.int32)

    def compress_records(self) -> np.ndarray:
        """The valid compress rows on the host: seq_len, ragged_id, buffer_len, read_page_0, read_page_1.

        seq_len: position + 1 of the completing row. ragged_id: its row in the batch. buffer_len: how many of the
        first tokens of its read window come from the state ring. read_page_0, read_page_1: groups of `ratio` state
        rows that hold the previous and the own group; both -1 where buffer_len is 0, since nothing is read.
        """
        rows = _to_records(self.compress, compress_dtype(self.compress.shape[0]))
        return rows[rows["seq_len"] != INVALID]

    def write_records(self) -> np.ndarray:
        """The valid write rows on the host: ragged_id, write_loc (state row; negative: not to be written)."""
        rows = _to_records(self.write, WRITE)
        return rows[rows["ragged_id"] != INVALID]


class _Plans(Generic[Lists]):
    """What plans of both ratios share, whatever form the lists of a ratio have."""

    error: torch.Tensor
    c4: Lists | None
    c128: Lists | None

    @property
    def device(self) -> torch.device:
        return self.error.device

    @cached_property
    def ratios(self) -> tuple[int, ...]:
        """The ratios planned, ascending."""
        return tuple(ratio for ratio in RATIOS if self.ratio(ratio) is not None)

    def ratio(self, ratio: int) -> Lists | None:
        """`c4` or `c128` by number."""
        return {4: self.c4, 128: self.c128}[ratio]

    def lists(self) -> Iterator[Lists]:
        """The lists of each ratio planned, ascending."""
        return (lists for lists in (self.c4, self.c128) if lists is not None)

    def check(self) -> None:
        """Raises ValueError if planning into these buffers met a bad input since the last check; clears the flag.

        Waits for the current stream, which must be the one that plans.
        """
        check_error(self.error)


@dataclass(frozen=True, eq=False)
class PrefillPlan(_Plans[CompressPlan]):
    """Plans of a batch with any number of rows a request (prefill, verify).

    Attributes:
        header: int32 [8], see `HEADER_FIELDS`; the counts of a ratio not asked for are 0.
        error: int32 [1]. Set, never cleared, by planning; see `check`.
        c4, c128: CompressPlan, or None for a ratio not asked for.
    """

    header: torch.Tensor
    error: torch.Tensor
    c4: CompressPlan | None
    c128: CompressPlan | None

    def __post_init__(self) -> None:
        _expect_buffer("header", self.header, (len(HEADER_FIELDS),), torch.int32)
        _expect_buffer("error", self.error, (1,), torch.int32, self.header.device)
        _expect_ratios(self.c4, self.c128, CompressPlan)
        for plan in self.lists():
            shape = (self.num_rows or 0, compress_dtype(self.num_rows or 0).itemsize)
            _expect_buffer(f"c{plan.ratio}.compress", plan.compress, shape, torch.uint8, self.device)
        _expect_distinct(self)

    @cached_property
    def num_rows(self) -> int | None:
        """Rows that each list has room for; None in a plan of no ratio, which has no lists."""
        plan = self.c4 or self.c128
        return None if plan is None else plan.compress.shape[0]

    @classmethod
    def empty(cls, num_rows: int, ratios: Iterable[int] = RATIOS, device: torch.device | str = "cpu") -> PrefillPlan:
        """Buffers for `out=`: room for `num_rows` rows, contents undefined but for the error flag, which is clear.

        Raises:
            ValueError: a negative `num_rows`, or a ratio other than 4 and 128.
        """
        num_rows, ratios = check_num_rows(num_rows), check_ratios(ratios)
        compress_bytes = compress_dtype(num_rows).itemsize
        plans = {
            ratio: CompressPlan(
                ratio,
                torch.empty((num_rows, compress_bytes), dtype=torch.uint8, device=device),
                torch.empty((num_rows, WRITE.itemsize), dtype=torch.uint8, device=device),
            )
            for ratio in ratios
        }
        return cls(
            header=torch.empty(len(HEADER_FIELDS), dtype=torch.int32, device=device),
            error=torch.zeros(1, dtype=torch.int32, device=device),
            c4=plans.get(4),
            c128=plans.get(128),
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors of everything planning writes, but for the error flag."""
        yield "header", self.header
        for plan in self.lists():
            yield f"c{plan.ratio}.compress", plan.compress
            yield f"c{plan.ratio}.write", plan.write


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """The rows of one ratio in a batch with one row a request.

    Attributes:
        rows: uint8 [B, 16], one a request. A reader compresses only where seq_len is a multiple of the ratio.
    """

    ratio: int
    rows: torch.Tensor

    def __post_init__(self) -> None:
        rows = self.rows.shape[0] if isinstance(self.rows, torch.Tensor) and self.rows.ndim else 0
        _expect_buffer(f"c{self.ratio}.rows", self.rows, (rows, DECODE.itemsize), torch.uint8)

    @cached_property
    def words(self) -> torch.Tensor:
        """`rows` as 32-bit words: int32 [B, 4]."""
        return self.rows.view(torch.int32)

    def records(self) -> np.ndarray:
        """The rows on the host: seq_len, write_loc, read_page_0, read_page_1."""
        return _to_records(self.rows, DECODE)


@dataclass(frozen=True, eq=False)
class DecodePlans(_Plans[DecodePlan]):
    """Plans of a batch with one row a request.

    Attributes:
        error: int32 [1]. Set, never cleared, by planning; see `check`.
        c4, c128: DecodePlan, or None for a ratio not asked for.
    """

    error: torch.Tensor
    c4: DecodePlan | None
    c128: DecodePlan | None

    def __post_init__(self) -> None:
        _expect_buffer("error", self.error, (1,), torch.int32)
        _expect_ratios(self.c4, self.c128, DecodePlan)
        for plan in self.lists():
            shape = (self.num_rows or 0, DECODE.itemsize)
            _expect_buffer(f"c{plan.ratio}.rows", plan.rows, shape, torch.uint8, self.device)
        _expect_distinct(self)

    @cached_property
    def num_rows(self) -> int | None:
        """Requests that there is room for; None in a plan of no ratio."""
        plan = self.c4 or self.c128
        return None if plan is None else plan.rows.shape[0]

    @classmethod
    def empty(cls, batch_size: int, ratios: Iterable[int] = RATIOS, device: torch.device | str = "cpu") -> DecodePlans:
        """Buffers for `out=`; contents undefined but for the error flag, which is clear."""
        batch_size = check_num_rows(batch_size, "batch_size")
        plans = {
            ratio: DecodePlan(ratio, torch.empty((batch_size, DECODE.itemsize), dtype=torch.uint8, device=device))
            for ratio in check_ratios(ratios)
        }
        return cls(torch.zeros(1, dtype=torch.int32, device=device), plans.get(4), plans.get(128))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors of everything planning writes, but for the error flag."""
        for plan in self.lists():
            yield f"c{plan.ratio}.rows", plan.rows


def check_num_rows(num_rows: object, name: str = "num_rows") -> int:
    """`num_rows` as an int of at most `MAX_ROWS`; ValueError otherwise."""
    if isinstance(num_rows, bool) or not isinstance(num_rows, int):
        raise ValueError(f"{name}: expected an int, got {num_rows!r}")
    if not 0 <= num_rows <= MAX_ROWS:
        raise ValueError(f"{name}: expected a number from 0 to {MAX_ROWS}, got {num_rows}")
    return num_rows


def check_error(error: torch.Tensor) -> None:
    """Reads an int32 [1] error flag, clears it, and raises ValueError if it was set.

    Waits for the current stream: call it on the one that plans. Where several things were wrong, at least one is named.
    """
    code = int(error.item())
    if code:
        error.zero_()
        raise ValueError("device input: " + "; ".join(text for bit, text in ERROR_TEXT.items() if code & bit))


def _expect_ratios(c4: object, c128: object, kind: type[CompressPlan] | type[DecodePlan]) -> None:
    for name, ratio, plan in (("c4", 4, c4), ("c128", 128, c128)):
        if plan is None:
            continue
        if not isinstance(plan, kind):
            raise ValueError(f"{name}: expected a {kind.__name__} or None, got {type(plan).__name__}")
        if plan.ratio != ratio:
            raise ValueError(f"{name}: expected a plan of ratio {ratio}, got one of ratio {plan.ratio}")


def _expect_buffer(
    name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> None:
    """Raises ValueError unless kernels can write `value` as it is: contiguous, on a 16-byte boundary."""
    expect_dense(name, value, (dtype,), shape, device, aligned=True)


def _expect_distinct(plan: PrefillPlan | DecodePlans) -> None:
    """Raises ValueError when two buffers of `plan` share memory."""
    begin, begin_name = 0, ""
    spans = ((t.data_ptr(), t.numel() * t.element_size(), name) for name, t in (("error", plan.error), *plan.tensors()))
    for start, size, name in sorted(span for span in spans if span[0]):
        if start < begin:
            raise ValueError(f"{name}: expected memory of its own, got some of {begin_name}")
        begin, begin_name = start + size, name


def _to_records(rows: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    return rows.cpu().contiguous().numpy().view(dtype).reshape(-1).copy()
