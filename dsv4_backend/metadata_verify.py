"""Compares the metadata that we build with goldens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from dsv4_backend.batch import ForwardMode, RawBatch
from dsv4_backend.metadata import FIELDS, TABLE_FIELDS, AttnMetadata
from dsv4_backend.metadata_builder import MetadataBuilder
from dsv4_backend.metadata_goldens import SCALARS, MetadataGolden

_UNREADABLE = -2
"""What `AttnMetadata.readable` shows where a consumer may not read."""


def verify_metadata(golden: MetadataGolden, impl: str, device: torch.device) -> str | None:
    """The first difference between our metadata and the golden's, as one line; None when there is none.

    It compares what a consumer may read of the real rows, for the inputs as they are and, in a graph, padded as for its
    replay, in buffers that hold garbage. Beyond the golden it checks what we promise on top: dtypes, exact lengths,
    padding rows, no error flag, and that draft steps with a growing window are decode steps.
    """
    try:
        builder = MetadataBuilder(
            golden.config,
            golden.geometry,
            golden.tables(device),
            max_rows=max(1, golden.rows),
            max_seq_len=golden.constants["max_context_len"],
            ratios=golden.ratios,
            impl=impl,
        )
        for inputs, batch in golden.batches(device):
            difference = _batch_difference(golden, builder, batch)
            if difference:
                return f"{inputs}, {difference}" if inputs else difference
            _poison(builder)
    except ValueError as error:
        return f"refused: {error}"
    return None


def _poison(builder: MetadataBuilder) -> None:
    """Fills the fields with what no build writes, so that the next one cannot live on this one."""
    for buffers in builder.buffers().values():
        for name in buffers.keys() & FIELDS.keys():
            buffers[name].fill_(-77)


def _batch_difference(golden: MetadataGolden, builder: MetadataBuilder, batch: RawBatch) -> str | None:
    if batch.mode is not ForwardMode.DRAFT_DECODE:
        meta = builder.build(batch, padded_rows=golden.rows)
        builder.check()
        return _step_difference(golden, 0, meta)
    # The golden's steps all look from the committed tokens.
    steps = builder.build_draft_steps(batch, padded_batch_size=golden.rows, draft_window="frozen")
    builder.check()
    if len(steps) != golden.num_steps:
        return f"expected {golden.num_steps} steps, got {len(steps)}"
    for step, meta in enumerate(steps):
        difference = _step_difference(golden, step, meta)
        if difference:
            return f"step {step}, {difference}"
    return _growing_difference(golden, builder, batch)


def _growing_difference(golden: MetadataGolden, builder: MetadataBuilder, batch: RawBatch) -> str | None:
    """Where draft steps with a growing window are not what DECODE builds with one token more each."""
    steps = builder.build_draft_steps(batch, padded_batch_size=golden.rows, draft_window="growing")
    for step, meta in enumerate(steps):
        decode = RawBatch(
            ForwardMode.DECODE,
            batch.req_pool_indices,
            batch.seq_lens + step + 1,
            batch.out_cache_loc[step :: batch.num_steps],
        )
        difference = meta.difference(builder.build(decode, padded_rows=golden.rows))
        builder.check()
        if difference:
            return f"growing step {step}, {difference}"
    return None


def _step_difference(golden: MetadataGolden, step: int, meta: AttnMetadata) -> str | None:
    return (
        _form_difference(golden, meta)
        or _answer_difference(golden, step, meta)
        or _exact_difference(golden, step, meta)
        or _padding_difference(golden, meta)
    )


def _form_difference(golden: MetadataGolden, meta: AttnMetadata) -> str | None:
    """The first field that is missing, should not be there, or has another dtype or number of rows."""
    for name, spec in FIELDS.items():
        tensor = getattr(meta, name)
        if (tensor is not None) != (spec.ratio in (0, *golden.ratios)):
            return f"{name}: expected {'none' if tensor is not None else 'a tensor'} with ratios {golden.ratios}"
        if tensor is None:
            continue
        if tensor.dtype != spec.dtype:
            return f"{name}: expected {spec.dtype}, got {tensor.dtype}"
        per_request = meta.table_rows is not None and name in TABLE_FIELDS
        if tensor.ndim != 1 + bool(spec.columns) or (not per_request and len(tensor) != golden.rows):
            return f"{name}: expected {golden.rows} rows, got shape {list(tensor.shape)}"
    return None


def _answer_difference(golden: MetadataGolden, step: int, meta: AttnMetadata) -> str | None:
    lengths = golden.answer("seq_lens_causal", step)
    for name, answer in golden.answers():
        rows = golden.rows if answer.all_rows or golden.mode is ForwardMode.IDLE else golden.real_rows
        ours, theirs = _read(meta, answer.field)[:rows], golden.answer(name, step)[:rows]
        columns = FIELDS[answer.field].columns
        if columns in ("pages", "entries"):
            width = min(ours.shape[1], theirs.shape[1])
            live = -(-lengths // meta.page_size) if columns == "pages" else np.maximum(lengths // 128, 1)
            readable = np.arange(width) < live[:rows, None]
            ours, theirs = ours[:, :width], np.where(readable, theirs[:, :width], _UNREADABLE)
        if answer.clamped:
            ours = np.maximum(ours, 1)
        found = _first_difference(answer.field, ours, theirs)
        if found:
            return found if answer.field == name else f"{found} ({golden.array_name(name, step)})"
    return _scalar_difference(golden, step, meta)


def _scalar_difference(golden: MetadataGolden, step: int, meta: AttnMetadata) -> str | None:
    if 4 not in golden.ratios:
        return None
    for name, attribute in SCALARS.items():
        if name == "indexer_max_c4_seq_len" and golden.answer("page_table", step).shape[1] < meta.page_table.shape[1]:
            continue  # that of the batch; ours is always the capacity
        ours, theirs = getattr(meta, attribute), int(golden.answer(name, step))
        if ours != theirs:
            return f"{attribute}: expected {theirs}, got {ours} ({golden.array_name(name, step)})"
    return None


def _exact_difference(golden: MetadataGolden, step: int, meta: AttnMetadata) -> str | None:
    """Lengths of real rows are 0 where nothing is closed, which the golden's are not."""
    rows = golden.real_rows
    lengths = golden.answer("seq_lens_causal", step)[:rows]
    exact = {"c4_sparse_lengths": np.minimum(lengths // 4, meta.index_topk), "c128_lengths": lengths // 128}
    for name, theirs in exact.items():
        if FIELDS[name].ratio in golden.ratios:
            found = _first_difference(name, _read(meta, name)[:rows], theirs)
            if found:
                return found
    return None


def _padding_difference(golden: MetadataGolden, meta: AttnMetadata) -> str | None:
    for name, theirs in _padding_row(golden, meta):
        ours = _read(meta, name)[golden.real_rows :]
        found = _first_difference(name, ours, np.broadcast_to(theirs, ours.shape), golden.real_rows)
        if found:
            return f"padding: {found}"
    return None


def _padding_row(golden: MetadataGolden, meta: AttnMetadata) -> Iterator[tuple[str, np.ndarray]]:
    """What each field has in a padding row: request 0 with one token, and no compressed entry."""
    slot = int(golden.req_to_token[0, 0])
    firsts = {
        "seq_lens_causal": 1,
        "swa_lengths": 1,
        "swa_page_indices": int(golden.full_to_swa[slot]),
        "page_table": slot // meta.page_size,
        "c4_sparse_page_indices": -1,
        "c128_page_indices": -1,
    }
    others = {"pages": _UNREADABLE, "entries": _UNREADABLE, "window": -1, "topk": -1}
    for name, spec in FIELDS.items():
        tensor = getattr(meta, name)
        if tensor is not None:
            row = np.full(tensor.shape[1:] or 1, others.get(spec.columns, 0))
            row[0] = firsts.get(name, 0)
            yield name, row if spec.columns else row[0]


def _read(meta: AttnMetadata, name: str) -> np.ndarray:
    return meta.readable(name).cpu().numpy()


def _first_difference(name: str, ours: np.ndarray, theirs: np.ndarray, first_row: int = 0) -> str | None:
    """The first place where two arrays differ; `first_row` is the row of the step that they begin with."""
    if ours.shape != theirs.shape:
        return f"{name}: expected shape {list(theirs.shape)}, got {list(ours.shape)}"
    different = ours != theirs
    if not different.any():
        return None
    place = np.unravel_index(int(np.argmax(different)), ours.shape)
    row, *column = (int(i) for i in place)
    where = ", ".join(map(str, (first_row + row, *column)))
    return f"{name}[{where}]: expected {theirs[place]}, got {ours[place]}"
