"""Where two metadata objects of SGLang differ in what a consumer may read."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

# Not compared: what no one reads of a draft step or a prompt, or what has no defined contents.
UNDEFINED = {"c4_sparse_raw_indices"}


def differences(ours: Any, theirs: Any, rows: int | None = None, skip: tuple[str, ...] = ()) -> list[str]:
    """Names of the parts of two DSV4Metadata that differ in the first `rows` rows; dtypes and missing parts count."""
    found = [f"type {type(ours).__name__}"] if type(ours) is not type(theirs) else []
    core, other = ours.core_attn_metadata, theirs.core_attn_metadata
    lengths = other.seq_lens_casual[:rows]
    for field in fields(core):
        if field.name not in skip and not same(
            field.name, getattr(core, field.name), getattr(other, field.name), lengths
        ):
            found.append(field.name)
    for name in ("c4_compress_metadata", "c128_compress_metadata"):
        if name not in skip and not same_plan(getattr(ours, name), getattr(theirs, name)):
            found.append(name)
    return found + indexer_differences(ours, theirs, rows, skip)


def same(name: str, ours: Any, theirs: Any, lengths: torch.Tensor) -> bool:
    if not isinstance(theirs, torch.Tensor):
        return ours == theirs
    if not isinstance(ours, torch.Tensor) or ours.dtype != theirs.dtype or ours.shape[0] != theirs.shape[0]:
        return False
    if name in UNDEFINED:
        return ours.shape == theirs.shape
    rows = len(lengths)
    ours, theirs = ours[:rows], theirs[:rows]
    if name in ("page_table", "c128_page_indices"):
        width = min(ours.shape[1], theirs.shape[1])
        live = -(-lengths // 256) if name == "page_table" else (lengths // 128).clamp(min=1)
        readable = torch.arange(width) < live[:, None]
        return bool(((ours[:, :width] == theirs[:, :width]) | ~readable).all())
    return torch.equal(ours, theirs)


def same_plan(ours: Any, theirs: Any) -> bool:
    """Byte for byte, but for markers behind the lists and pages that are not read."""
    if theirs is None or ours is None:
        return ours is theirs
    if type(ours) is not type(theirs) or ours[0] != theirs[0]:
        return False
    return all(torch.equal(a, b) for a, b in zip(ours[1:3], theirs[1:3], strict=True) if isinstance(b, torch.Tensor))


def indexer_differences(ours: Any, theirs: Any, rows: int | None, skip: tuple[str, ...]) -> list[str]:
    a, b = ours.indexer_metadata, theirs.indexer_metadata
    if b is None or a is None:
        return [] if a is b else ["indexer_metadata"]
    shared = (x.indexer_metadata.page_table is x.core_attn_metadata.page_table for x in (ours, theirs))
    found = [] if next(shared) == next(shared) else ["indexer page_table is the core's"]
    lengths = theirs.core_attn_metadata.seq_lens_casual[:rows]
    for field in fields(b):
        name = f"indexer {field.name}"
        if name not in skip and not same(field.name, getattr(a, field.name), getattr(b, field.name), lengths):
            found.append(name)
    return found
