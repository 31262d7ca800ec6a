"""`verify_metadata` notices a wrong value in each field, in the rows and columns that count, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from dsv4_backend import AttnMetadata, ForwardMode, MetadataBuilder, RawBatch, metadata_buffers, metadata_verify
from dsv4_backend.metadata import FIELDS, TABLE_FIELDS
from dsv4_backend.metadata_goldens import MetadataGolden, load_metadata_goldens
from dsv4_backend.metadata_verify import verify_metadata
from dsv4_backend.plans import ERROR_SLOT
from goldens_location import golden_folders

VERIFY, DECODE, EXTEND = "verify_d4_graph_b3_pad4", "decode_graph_b17_pad24", "extend_b8_padded"
DRAFT_EXTEND, IDLE = "draft_extend_d4_graph_b17_pad24", "decode_graph_idle_b8"
DRAFT, EAGER_DRAFT = "eagle_s3_graph_b3_pad4_ratios_4_128", "eagle_s3_b8_ratios_4_128"
WINDOW_FIELDS = [name for name, spec in FIELDS.items() if spec.ratio == 0]

Change = Callable[[AttnMetadata], "AttnMetadata | None"]


@cache
def goldens() -> dict[str, MetadataGolden]:
    return {golden.name: golden for golden in load_metadata_goldens(golden_folders("metadata")[0])}


def added(field: str, *place: int, amount: int = 1) -> Change:
    """A change in place, after which `field` has another value at `place`."""

    def change(meta: AttnMetadata) -> None:
        getattr(meta, field)[place] += amount

    return change


def difference(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Change, *, build: int = 0, step: int = 0, window: str = "frozen"
) -> str | None:
    """What `verify_metadata` says when one of the builder's results is changed.

    Args:
        change: changes a metadata in place, or returns another one.
        build: number of the build that it applies to, among those of the golden's mode (and `window`).
        step, window: draft step, and window of the builds that count.
    """
    builds = []

    class Changing(MetadataBuilder):
        def build(self, batch: RawBatch, padded_rows: int | None = None) -> AttnMetadata:
            meta = super().build(batch, padded_rows)
            if batch.mode is not goldens()[name].mode:
                return meta  # DECODE, to compare draft steps with
            builds.append(batch)
            return (change(meta) or meta) if len(builds) == build + 1 else meta

        def build_draft_steps(self, batch: RawBatch, *args: Any, **kwargs: Any) -> list[AttnMetadata]:
            steps = super().build_draft_steps(batch, *args, **kwargs)
            if kwargs["draft_window"] == window:
                builds.append(batch)
                if len(builds) == build + 1:
                    steps[step] = change(steps[step]) or steps[step]
            return steps

    monkeypatch.setattr(metadata_verify, "MetadataBuilder", Changing)
    found = verify_metadata(goldens()[name], "torch", torch.device("cpu"))
    assert len(builds) > build
    return found


@pytest.mark.parametrize("name", [VERIFY, DECODE, EXTEND])
@pytest.mark.parametrize("field", FIELDS)
def test_wrong_value(monkeypatch: pytest.MonkeyPatch, name: str, field: str) -> None:
    place = (2, 0) if FIELDS[field].columns else (2,)
    found = difference(monkeypatch, name, added(field, *place))
    assert found is not None
    assert found.startswith(f"{field}{list(place)}: expected ")


@pytest.mark.parametrize("field", WINDOW_FIELDS)
def test_wrong_value_without_ratios(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    place = (5, 0) if FIELDS[field].columns else (5,)
    found = difference(monkeypatch, DRAFT_EXTEND, added(field, *place))
    assert found is not None
    assert found.startswith(f"{field}{list(place)}: expected ")


@pytest.mark.parametrize("name", [VERIFY, DECODE, EXTEND])
@pytest.mark.parametrize("field", FIELDS)
def test_wrong_value_in_padding(monkeypatch: pytest.MonkeyPatch, name: str, field: str) -> None:
    row = goldens()[name].rows - 1
    assert row >= goldens()[name].real_rows
    place = (row, 0) if FIELDS[field].columns else (row,)
    found = difference(monkeypatch, name, added(field, *place))
    assert found is not None
    assert found.startswith(f"padding: {field}{list(place)}: expected ")


@pytest.mark.parametrize("field", FIELDS)
def test_wrong_value_in_idle(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    place = (7, 0) if FIELDS[field].columns else (7,)
    found = difference(monkeypatch, IDLE, added(field, *place))
    assert found is not None
    assert f"{field}{list(place)}: expected " in found


@pytest.mark.parametrize("field", FIELDS)
def test_wrong_value_in_a_draft_step(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    place = (1, 0) if FIELDS[field].columns else (1,)
    found = difference(monkeypatch, DRAFT, added(field, *place), step=1)
    assert found is not None
    assert found.startswith(f"step 1, {field}{list(place)}: expected ")


@pytest.mark.parametrize("field", FIELDS)
def test_wrong_value_in_a_growing_draft_step(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    place = (1, 0) if FIELDS[field].columns else (1,)
    found = difference(monkeypatch, DRAFT, added(field, *place), step=1, window="growing")
    assert found is not None
    assert found.startswith(f"growing step 1, {field}{list(place)}: expected ")


def test_wrong_plan_in_a_growing_draft_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(meta: AttnMetadata) -> None:
        assert meta.plans is not None
        dict(meta.plans.tensors())["c4.rows"][2, 0] += 1

    found = difference(monkeypatch, DRAFT, change, window="growing")
    assert found is not None
    assert found.startswith("growing step 0, plans.c4.rows[2, 0]: expected ")


@pytest.mark.parametrize("name", [VERIFY, DECODE, DRAFT_EXTEND, DRAFT])
def test_wrong_value_from_padded_inputs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found = difference(monkeypatch, name, added("positions", 1), build=1)
    assert found is not None
    assert found.startswith("padded inputs, ")
    assert "positions[1]: expected " in found


@pytest.mark.parametrize("field", FIELDS)
def test_field_that_is_written_once(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    class WritingOnce(MetadataBuilder):
        def build(self, batch: RawBatch, padded_rows: int | None = None) -> AttnMetadata:
            before = [buffers[field].clone() for buffers in self.buffers().values()]
            meta = super().build(batch, padded_rows)
            for buffers, old in zip(self.buffers().values(), before, strict=False):
                buffers[field].copy_(old)
            return meta

    monkeypatch.setattr(metadata_verify, "MetadataBuilder", WritingOnce)
    found = verify_metadata(goldens()[VERIFY], "torch", torch.device("cpu"))
    assert found is not None
    assert found.startswith(f"padded inputs, {field}[")


@pytest.mark.parametrize("field", ["swa_page_indices", "c4_sparse_page_indices"])
def test_all_columns_count(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    for row in (2, goldens()[VERIFY].rows - 1):
        found = difference(monkeypatch, VERIFY, added(field, row, -1))
        assert found is not None
        assert f"{field}[{row}, " in found


def live_columns(meta: AttnMetadata, field: str) -> list[int]:
    length = meta.seq_lens_causal
    return (-(-length // meta.page_size) if field == "page_table" else length // 128).tolist()


@pytest.mark.parametrize("field", TABLE_FIELDS)
def test_live_columns_count_and_no_others(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    limits = []

    def change_the_last_live_one(meta: AttnMetadata) -> None:
        limits[:] = live_columns(meta, field)
        added(field, limits.index(max(limits)), max(limits) - 1)(meta)

    def change_all_others(meta: AttnMetadata) -> None:
        for row, limit in enumerate(live_columns(meta, field)):
            getattr(meta, field)[row, max(limit, 1) :] = 12345

    found = difference(monkeypatch, DECODE, change_the_last_live_one)
    assert found is not None
    assert found.startswith(f"{field}[{limits.index(max(limits))}, {max(limits) - 1}]: expected ")
    assert difference(monkeypatch, DECODE, change_all_others) is None


@pytest.mark.parametrize("field", TABLE_FIELDS)
def test_tables_kept_once_a_request(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    def change(meta: AttnMetadata) -> None:
        assert meta.table_rows is not None
        longest = int(meta.seq_lens_causal.argmax())
        added(field, int(meta.table_rows[longest]), 0)(meta)

    monkeypatch.setattr(metadata_buffers, "MAX_TABLE_BYTES", 0)
    found = difference(monkeypatch, EXTEND, change)
    assert found is not None
    assert found.startswith(f"{field}[")


@pytest.mark.parametrize("field", ["c4_lengths", "c4_sparse_lengths", "c128_lengths"])
def test_lengths_are_not_clamped(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    def clamp(meta: AttnMetadata) -> None:
        lengths = getattr(meta, field)[: goldens()[DECODE].real_rows]
        assert (lengths == 0).any()
        lengths.clamp_(min=1)

    found = difference(monkeypatch, DECODE, clamp)
    assert found is not None
    assert found.startswith(f"{field}[")
    assert ": expected 0, got 1" in found


@pytest.mark.parametrize("field", FIELDS)
def test_wrong_dtype(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    other = torch.int32 if FIELDS[field].dtype is torch.int64 else torch.int64
    found = difference(monkeypatch, VERIFY, lambda meta: replace(meta, **{field: getattr(meta, field).to(other)}))
    assert found == f"{field}: expected {FIELDS[field].dtype}, got {other}"


@pytest.mark.parametrize("field", FIELDS)
def test_missing_rows(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    found = difference(monkeypatch, VERIFY, lambda meta: replace(meta, **{field: getattr(meta, field)[:-1]}))
    assert found is not None
    assert found.startswith(f"{field}: expected 16 rows, got shape [15")


@pytest.mark.parametrize("field", FIELDS)
def test_missing_field(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    found = difference(monkeypatch, VERIFY, lambda meta: replace(meta, **{field: None}))
    assert found == f"{field}: expected a tensor with ratios (4, 128)"


def test_field_of_a_ratio_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = difference(monkeypatch, DRAFT_EXTEND, lambda meta: replace(meta, c4_lengths=meta.positions))
    assert found == "c4_lengths: expected none with ratios ()"


@pytest.mark.parametrize("attribute", ["c4_page_size", "max_c4_length"])
def test_wrong_scalar(monkeypatch: pytest.MonkeyPatch, attribute: str) -> None:
    monkeypatch.setattr(AttnMetadata, attribute, property(lambda _: 7))
    found = verify_metadata(goldens()[DECODE], "torch", torch.device("cpu"))
    assert found is not None
    assert found.startswith(f"{attribute}: expected ")
    assert ", got 7 (out_indexer_" in found


def test_buffer_that_a_replay_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only answer about padding rows outside IDLE."""
    row = goldens()[DRAFT_EXTEND].real_rows
    found = difference(monkeypatch, DRAFT_EXTEND, added("swa_out_cache_loc", row))
    assert found == (f"swa_out_cache_loc[{row}]: expected 0, got 1 (out_swa_out_cache_loc_persistent_buffer)")


@pytest.mark.parametrize(
    ("name", "step", "array", "field"),
    [
        (DRAFT, 0, "raw_out_loc", "raw_out_cache_loc"),
        (DRAFT, 1, "raw_out_loc", "raw_out_cache_loc"),
        (DRAFT, 0, "c4_out_loc", "c4_out_loc"),
        (EAGER_DRAFT, 0, "c4_out_loc", "c4_out_loc"),
        (EAGER_DRAFT, 1, "c4_out_loc", "c4_out_loc"),
        (EAGER_DRAFT, 1, "c128_out_loc", "c128_out_loc"),
    ],
)
def test_slots_that_are_wrong_in_the_golden_are_wrong_in_ours(
    monkeypatch: pytest.MonkeyPatch, name: str, step: int, array: str, field: str
) -> None:
    golden = goldens()[name]
    theirs = torch.from_numpy(golden.arrays[golden.array_name(array, step)])[: golden.real_rows]

    def change(meta: AttnMetadata) -> None:
        getattr(meta, field)[: golden.real_rows] = theirs

    found = difference(monkeypatch, name, change, step=step)
    assert found is not None
    assert found.startswith(f"step {step}, {field}[")


def test_missing_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneStep(MetadataBuilder):
        def build_draft_steps(self, *args: Any, **kwargs: Any) -> list[AttnMetadata]:
            return super().build_draft_steps(*args, **kwargs)[:1]

    monkeypatch.setattr(metadata_verify, "MetadataBuilder", OneStep)
    found = verify_metadata(goldens()[DRAFT], "torch", torch.device("cpu"))
    assert found == "expected 2 steps, got 1"


@pytest.mark.parametrize("name", [VERIFY, DRAFT])
def test_what_the_builder_flags(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    class Flagging(MetadataBuilder):
        def check(self) -> None:
            self._error.fill_(ERROR_SLOT)
            super().check()

    monkeypatch.setattr(metadata_verify, "MetadataBuilder", Flagging)
    found = verify_metadata(goldens()[name], "torch", torch.device("cpu"))
    assert found is not None
    assert found.startswith("refused: device input: ")


def test_every_mode_is_built_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which builds a golden takes: `(mode, requests, rows)`."""
    calls: list[tuple[ForwardMode, int, int]] = []

    class Noting(MetadataBuilder):
        def build(self, batch: RawBatch, padded_rows: int | None = None) -> AttnMetadata:
            calls.append((batch.mode, batch.batch_size, batch.num_rows))
            return super().build(batch, padded_rows)

    monkeypatch.setattr(metadata_verify, "MetadataBuilder", Noting)
    for name in (VERIFY, "verify_ragged_graph_b8_pad12", DRAFT_EXTEND, EXTEND, IDLE, DRAFT):
        assert verify_metadata(goldens()[name], "torch", torch.device("cpu")) is None
    modes = ForwardMode
    assert calls == [
        (modes.TARGET_VERIFY, 3, 12),
        (modes.TARGET_VERIFY, 4, 16),
        (modes.TARGET_VERIFY, 8, 32),
        (modes.TARGET_VERIFY, 12, 32),
        (modes.DRAFT_EXTEND, 17, 68),
        (modes.DRAFT_EXTEND, 24, 96),
        (modes.EXTEND, 8, 71),
        (modes.IDLE, 8, 8),
        *[(modes.DECODE, 3, 3)] * 2,
        *[(modes.DECODE, 4, 4)] * 2,
    ]
