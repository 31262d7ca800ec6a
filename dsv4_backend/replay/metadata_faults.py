"""Faults of metadata: named ways in which a builder can be wrong, most of them seen in released engines.

A fault takes the images of a step and the step, changes one image and returns True, or returns False where it would
change nothing that matters. Fields that follow from each other are changed together, as the mistake would.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dsv4_backend.replay.builds import BuildMode
from dsv4_backend.replay.metadata_image import MetadataImage
from dsv4_backend.replay.step import Step

MetadataFault = Callable[[list[MetadataImage], Step], bool]

WINDOW = 128


def _first_slots(images: list[MetadataImage], step: Step) -> bool:
    """A draft step writes to the first entries of the request-major list instead of its own slice."""
    for image in _drafts(images):
        rows = _live(image)
        taken = _chains(image, step).ravel()[: len(rows)]
        if (image.fields["raw_out_cache_loc"][rows] != taken).any():
            _write_to(image, rows, taken, images)
            return True
    return False


def _unpadded_slots(images: list[MetadataImage], step: Step) -> bool:
    """A draft step in a padded bucket is shown the slot list of the batch: padding takes what lies behind its slice."""
    for image in _drafts(images):
        padding = np.flatnonzero(image.fields["req_pool_indices_per_row"] == 0)
        if len(padding):
            _write_to(image, padding[-1:], _chains(image, step).ravel()[-1:], images)
            return True
    return False


def _frozen_steps(images: list[MetadataImage], step: Step) -> bool:
    """Draft steps that grow all see what the first one sees."""
    drafts = [image for image in _drafts(images) if not image.build.frozen]
    for image in drafts[1:]:
        for name in ("positions", "seq_lens_causal", "swa_lengths", "swa_page_indices", "page_table"):
            image.fields[name] = drafts[0].fields[name].copy()
        return bool(len(_live(image)))
    return False


def _committed_length(images: list[MetadataImage], step: Step) -> bool:
    """Rows of a verify step have the length of the committed tokens, the drafts left out."""
    if step.num_draft_tokens:
        _set_length(images[0], slice(0, step.total_rows), np.repeat(step.before, step.extend_lens))
    return step.num_draft_tokens > 0


def _next_position(images: list[MetadataImage], step: Step) -> bool:
    """Every row has the position of the row behind it."""
    images[0].edit("positions")[: step.total_rows] += 1
    return True


def _next_request(images: list[MetadataImage], step: Step) -> bool:
    """The last row of a request is taken for one of the next request."""
    if len(step.before) > 1:
        images[0].edit("req_pool_indices_per_row")[step.extend_lens[0] - 1] = step.req_pool_indices[1]
    return len(step.before) > 1


def _zero_padding(images: list[MetadataImage], step: Step) -> bool:
    """Padding rows have length 0."""
    return _pad_lengths(images, lambda count: np.zeros(count, np.int64))


def _negative_padding(images: list[MetadataImage], step: Step) -> bool:
    """Padding rows of a step after the drafts count down from length 1, below zero."""
    return _pad_lengths(images, lambda count: 1 - np.arange(count)[::-1], BuildMode.DRAFT_EXTEND, at_least=2)


def _shared_slot(images: list[MetadataImage], step: Step) -> bool:
    """Two rows write to one slot."""
    if step.total_rows < 2:
        return False
    for name in ("raw_out_cache_loc", "swa_out_cache_loc"):
        slots = images[0].edit(name)
        slots[1] = slots[0]
    return True


def _untranslated_slot(images: list[MetadataImage], step: Step) -> bool:
    """Rows write to the window pool at their slot of the full pool."""
    slots, full = images[0].edit("swa_out_cache_loc"), images[0].fields["raw_out_cache_loc"]
    changed = bool((slots != full).any())
    slots[:] = full
    return changed


def _idle_slot(images: list[MetadataImage], step: Step) -> bool:
    """An idle step still writes to a slot of the batch before it."""
    for image in images:
        if image.build.mode is BuildMode.IDLE:
            _write_to(image, np.arange(1), step.out_cache_loc[:1], images)
            return True
    return False


def _late_window(images: list[MetadataImage], step: Step) -> bool:
    """A window without the row's own token."""
    window = images[0].edit("swa_page_indices")[_longest(images[0])]
    window[:-1], window[-1] = window[1:].copy(), -1
    return True


def _reversed_window(images: list[MetadataImage], step: Step) -> bool:
    """A window with the oldest token first."""
    row = _longest(images[0])
    length = int(images[0].fields["swa_lengths"][row])
    window = images[0].edit("swa_page_indices")[row]
    window[:length] = window[:length][::-1].copy()
    return length > 1


def _evicted_slot(images: list[MetadataImage], step: Step) -> bool:
    """The oldest token of a window has lost its window slot."""
    row = _longest(images[0])
    images[0].edit("swa_page_indices")[row, images[0].fields["swa_lengths"][row] - 1] = 0
    return True


def _foreign_window_slot(images: list[MetadataImage], step: Step) -> bool:
    """A window holds a token of another request."""
    last = np.cumsum(step.extend_lens) - 1
    if len(last) > 1:
        window = images[0].edit("swa_page_indices")
        window[last[0], 0] = window[last[1], 0]
    return len(last) > 1


def _stale_page(images: list[MetadataImage], step: Step) -> bool:
    """A page table still has the page of an older owner of the row."""
    table = images[0].edit("page_table")
    row = _table_row(images[0], _longest(images[0]))
    table[row, 0] += 1
    return True


def _foreign_table(images: list[MetadataImage], step: Step) -> bool:
    """A row reads the page table of another request."""
    last, image = np.cumsum(step.extend_lens) - 1, images[0]
    if len(last) < 2:
        return False
    one, other = (_table_row(image, int(row)) for row in last[:2])
    if image.fields["page_table"][one, 0] == image.fields["page_table"][other, 0]:
        return False  # a shared prefix
    if "table_rows" in image.fields:
        image.edit("table_rows")[last[0]] = other
    else:
        table = image.edit("page_table")
        table[one] = table[other]
    return True


def _shifted_entry(images: list[MetadataImage], step: Step) -> bool:
    """Entries of ratio 128 lie one too far on their page."""
    row = _longest(images[0])
    count = int(images[0].fields["c128_lengths"][row])
    images[0].edit("c128_page_indices")[_table_row(images[0], row), :count] += 1
    return count > 0


def _open_group_slot(images: list[MetadataImage], step: Step) -> bool:
    """A row that closes no group writes an entry all the same."""
    slots, full = images[0].edit("c4_out_loc"), images[0].fields["raw_out_cache_loc"]
    rows = np.flatnonzero((slots == 0) & (full >= 4))
    slots[rows] = full[rows] // 4
    return bool(len(rows))


def _clamped_length(images: list[MetadataImage], step: Step) -> bool:
    """Rows without an entry have length 1, as some kernels want it."""
    lengths = images[0].edit("c4_lengths")
    empty = lengths == 0
    lengths[empty] = 1
    return bool(empty.any())


def _dirty_selection(images: list[MetadataImage], step: Step) -> bool:
    """The entries that an indexer selected for an earlier batch are still there."""
    images[0].edit("c4_sparse_page_indices")[-1, -1] = 7
    return True


def _moved_buffer(images: list[MetadataImage], step: Step) -> bool:
    """A tensor does not lie where a captured graph would read it."""
    images[0].moved = ("positions",)
    return True


def _drafts(images: list[MetadataImage]) -> list[MetadataImage]:
    return [image for image in images if image.build.mode is BuildMode.DRAFT_DECODE]


def _live(image: MetadataImage) -> np.ndarray:
    return np.flatnonzero(image.fields["req_pool_indices_per_row"] > 0)


def _longest(image: MetadataImage) -> int:
    """The row that attends to most tokens."""
    return int(image.fields["seq_lens_causal"].argmax())


def _table_row(image: MetadataImage, row: int) -> int:
    return int(image.fields["table_rows"][row]) if "table_rows" in image.fields else row


def _chains(image: MetadataImage, step: Step) -> np.ndarray:
    """int64 [B, chain]: the slot list of the draft steps; a request without that many repeats its last slot."""
    first, column = np.cumsum(step.extend_lens) - step.extend_lens, np.arange(image.build.chain)
    return step.out_cache_loc[first[:, None] + np.minimum(column, step.extend_lens[:, None] - 1)]


def _write_to(image: MetadataImage, rows: np.ndarray, slots: np.ndarray, images: list[MetadataImage]) -> None:
    """Lets rows write to slots of the batch, in the window pool, too."""
    own = images[0].fields
    window = dict(zip(own["raw_out_cache_loc"].tolist(), own["swa_out_cache_loc"].tolist(), strict=True))
    image.edit("raw_out_cache_loc")[rows] = slots
    image.edit("swa_out_cache_loc")[rows] = [window[slot] for slot in slots.tolist()]


def _set_length(image: MetadataImage, rows: np.ndarray | slice, length: np.ndarray) -> None:
    image.edit("seq_lens_causal")[rows] = length
    image.edit("positions")[rows] = length - 1
    image.edit("swa_lengths")[rows] = np.minimum(length, WINDOW)


def _pad_lengths(
    images: list[MetadataImage],
    lengths: Callable[[int], np.ndarray],
    mode: BuildMode | None = None,
    at_least: int = 1,
) -> bool:
    for image in images:
        rows = np.flatnonzero(image.fields["req_pool_indices_per_row"] == 0)
        if mode in (None, image.build.mode) and len(rows) >= at_least:
            _set_length(image, rows, lengths(len(rows)))
            return True
    return False


METADATA_FAULTS: dict[str, MetadataFault] = {
    fault.__name__.removeprefix("_"): fault
    for fault in (
        _first_slots,
        _unpadded_slots,
        _frozen_steps,
        _committed_length,
        _next_position,
        _next_request,
        _zero_padding,
        _negative_padding,
        _shared_slot,
        _untranslated_slot,
        _idle_slot,
        _late_window,
        _reversed_window,
        _evicted_slot,
        _foreign_window_slot,
        _stale_page,
        _foreign_table,
        _shifted_entry,
        _open_group_slot,
        _clamped_length,
        _dirty_selection,
        _moved_buffer,
    )
}
"""By name."""
