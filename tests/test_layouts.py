"""Layouts: sizes of pages and rings, what a pool accepts, and the order of position biases."""

from __future__ import annotations

import pytest
import torch

from dsv4_backend import CacheGeometry, EntryLayout, EntryPool
from dsv4_backend.layouts import bias_shape, state_rows, state_width


@pytest.mark.parametrize(("entries", "page_bytes"), [(256, 149_760), (128, 74_880), (64, 37_440), (2, 1728)], ids=str)
def test_packed_pages_are_those_of_the_released_engine(entries: int, page_bytes: int) -> None:
    layout = EntryLayout("fp8", 512, 64, entries)
    assert (layout.row_bytes, layout.entry_bytes, layout.page_bytes) == (576, 584, page_bytes)
    assert layout.shape(7) == (7, page_bytes)


def test_indexer_pages_are_those_of_the_released_engine() -> None:
    layout = EntryLayout("fp8", 128, 64, 64, indexer=True)
    assert (layout.entry_bytes, layout.page_bytes) == (132, 8448)
    assert layout.hadamard
    assert not EntryLayout("fp32", 128, 64, 64, indexer=True).hadamard


def test_plain_rows() -> None:
    layout = EntryLayout("bf16", 512, 64, 64)
    assert layout.shape(3) == (192, 512)
    pool = EntryPool.empty(layout, 3)
    assert (pool.num_slots, pool.data.dtype) == (192, torch.bfloat16)
    assert EntryPool.empty(EntryLayout("fp8", 512, 64, 64), 3).num_slots == 192


def test_state() -> None:
    assert [state_width(4, 512), state_width(4, 128), state_width(128, 512)] == [2048, 512, 1024]
    geom = CacheGeometry.for_drafts(4)
    assert state_rows(geom, 4, num_window_pages=10, num_requests=3) == 160
    assert state_rows(geom, 128, num_window_pages=10, num_requests=3) == 768
    assert [bias_shape(4, 512), bias_shape(128, 512)] == [(4, 1024), (128, 512)]


BAD_LAYOUTS = {
    "format": (("fp4", 512, 64, 64), "format: expected one of"),
    "power of two": (("bf16", 576, 64, 64), "head_dim: expected a power of two, got 576"),
    "rope": (("bf16", 64, 128, 64), "rope_dim: expected an even number up to 64, got 128"),
    "odd": (("bf16", 64, 15, 64), "rope_dim: expected an even number up to 64, got 15"),
    "page": (("bf16", 64, 16, 0), "page_entries: expected an int of at least 1, got 0"),
    "blocks": (("fp8", 64, 16, 64), "head_dim: expected 1 to 8 blocks of 64 channels .* got 48 channels"),
    "scales": (("fp8", 1024, 64, 64), "head_dim: expected 1 to 8 blocks of 64 channels .* got 960 channels"),
}


@pytest.mark.parametrize("case", BAD_LAYOUTS.values(), ids=BAD_LAYOUTS)
def test_layouts_refuse(case: tuple[tuple[str, int, int, int], str]) -> None:
    with pytest.raises(ValueError, match=case[1]):
        EntryLayout(*case[0])


BAD_DATA = {
    "dtype": (torch.zeros(128, 512), "data: expected dtype bfloat16, got float32"),
    "part of a page": (
        torch.zeros(100, 512, dtype=torch.bfloat16),
        r"whole pages, \[64, 512\], got shape \[100, 512\]",
    ),
    "columns": (torch.zeros(64, 256, dtype=torch.bfloat16), r"whole pages, \[64, 512\], got shape \[64, 256\]"),
    "stride": (torch.zeros(64, 520, dtype=torch.bfloat16)[:, :512], r"strides \[520, 1\]"),
    "address": (torch.zeros(64 * 512 + 8, dtype=torch.bfloat16)[1:32_769].view(64, 512), "data: expected an address"),
}


@pytest.mark.parametrize("case", BAD_DATA.values(), ids=BAD_DATA)
def test_pools_refuse(case: tuple[torch.Tensor, str]) -> None:
    with pytest.raises(ValueError, match=case[1]):
        EntryPool(EntryLayout("bf16", 512, 64, 64), case[0])
