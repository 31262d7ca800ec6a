"""A finished plan as plain bytes on the host, read by this package's own description of the byte layouts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

RATIOS = (4, 128)
UNUSED = 0xFFFFFFFF

# Spec "Plans" 5.1, written down a second time: a check that borrowed the planner's description would share its errors.
_LAYOUTS = {
    16: np.dtype({"names": ["seq_len", "ragged_id", "buffer_len", "read_page_0", "read_page_1"],
                  "formats": ["<u4", "<u2", "<u2", "<i4", "<i4"], "offsets": [0, 4, 6, 8, 12], "itemsize": 16}),
    20: np.dtype({"names": ["seq_len", "ragged_id", "buffer_len", "read_page_0", "read_page_1"],
                  "formats": ["<u4", "<u4", "<u4", "<i4", "<i4"], "offsets": [0, 4, 8, 12, 16], "itemsize": 20}),
}  # fmt: skip
_WRITE = np.dtype({"names": ["ragged_id", "write_loc"], "formats": ["<u4", "<i4"], "offsets": [0, 4], "itemsize": 8})
_DECODE = np.dtype({"names": ["seq_len", "write_loc", "read_page_0", "read_page_1"],
                    "formats": ["<u4", "<i4", "<i4", "<i4"], "offsets": [0, 4, 8, 12], "itemsize": 16})  # fmt: skip
WIDE_ABOVE = 65_536
"""Rows above which a compress list must use the wide layout."""


@dataclass
class RatioImage:
    """Lists of one ratio: structured arrays [num_rows] over the plan's bytes, unused rows included."""

    compress: np.ndarray
    write: np.ndarray


@dataclass
class PlanImage:
    """A plan on the host.

    Attributes:
        header: int32 [8] of a plan with lists; None for a decode plan.
        lists: by ratio, the lists of a plan with several rows a request; empty for a decode plan.
        decode: by ratio, structured [B], the rows of a decode plan; empty otherwise.
        error: the plan's error flag; 0 where all went well.
    """

    header: np.ndarray | None
    lists: dict[int, RatioImage]
    decode: dict[int, np.ndarray]
    error: int


def compress_records(rows: torch.Tensor) -> np.ndarray:
    """A compress list, packed or wide, uint8 [num_rows, 16 or 20], copied to the host as records."""
    return _records(rows, _LAYOUTS)


def write_records(rows: torch.Tensor) -> np.ndarray:
    """A write list, uint8 [num_rows, 8], copied to the host as records."""
    return _records(rows, {8: _WRITE})


def decode_records(rows: torch.Tensor) -> np.ndarray:
    """The rows of a decode plan, uint8 [B, 16], copied to the host as records."""
    return _records(rows, {16: _DECODE})


def _records(rows: torch.Tensor, layouts: dict[int, np.dtype]) -> np.ndarray:
    if rows.dtype != torch.uint8 or rows.ndim != 2 or rows.shape[1] not in layouts:
        raise ValueError(
            f"plan: expected uint8 rows of {' or '.join(map(str, layouts))} bytes, got {rows.dtype} {list(rows.shape)}"
        )
    return np.array(rows.cpu().numpy(), order="C").view(layouts[rows.shape[1]]).reshape(-1)
