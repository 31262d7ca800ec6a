"""Goldens of the metadata, on every backend; which of their arrays are wrong; and the selection in this repository."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from backends import INTERPRET, each_backend
from dsv4_backend import ForwardMode, metadata_buffers
from dsv4_backend.metadata_goldens import MODES, MetadataGolden, load_metadata_goldens
from dsv4_backend.metadata_verify import verify_metadata
from golden_files import on
from goldens_location import golden_folders

FOLDERS = golden_folders("metadata")


@cache
def goldens_of(folder: Path) -> dict[str, MetadataGolden]:
    return {golden.name: golden for golden in load_metadata_goldens(folder)}


def names_of(folder: Path) -> list[str]:
    return [case["name"] for case in json.loads((folder / "manifest.json").read_text())["cases"]]


# What is in both folders is checked once: a test below compares the two.
PLACES = {name: folder for folder in reversed(FOLDERS) for name in names_of(folder)}
DRAFTS = [name for name in PLACES if name.startswith("eagle")]
EXTENDS = [name for name in PLACES if name.startswith("extend")]


def golden_of(name: str) -> MetadataGolden:
    return goldens_of(PLACES[name])[name]


@each_backend
@pytest.mark.parametrize("name", PLACES)
def test_metadata_equals_golden(name: str, impl: str, device: str) -> None:
    assert verify_metadata(golden_of(name), impl, on(device)) is None


@each_backend
@pytest.mark.parametrize("name", ["extend_b3_mixed", "extend_b8_padded"] if INTERPRET else EXTENDS)
def test_tables_kept_once_a_request_equal_goldens(
    monkeypatch: pytest.MonkeyPatch, name: str, impl: str, device: str
) -> None:
    monkeypatch.setattr(metadata_buffers, "MAX_TABLE_BYTES", 0)
    assert verify_metadata(golden_of(name), impl, on(device)) is None


def test_goldens_cover_what_there_is() -> None:
    for folder in FOLDERS:
        goldens = goldens_of(folder).values()
        assert {golden.kind for golden in goldens} == set(MODES)
        assert {golden.mode for golden in goldens} == set(ForwardMode)
        assert {golden.constants["index_topk"] for golden in goldens} == {512, 1024}
        assert {golden.geometry.c4_ring for golden in goldens if golden.ratios} == {8, 16}
        for mode in ForwardMode:
            assert any(golden.real_rows < golden.rows for golden in goldens if golden.mode is mode), mode
        assert {golden.ratios for golden in goldens if golden.mode is ForwardMode.DRAFT_DECODE} == {(), (4, 128)}


def test_selection_is_part_of_the_full_set() -> None:
    selection, full = FOLDERS[0], FOLDERS[-1]
    if selection == full:
        pytest.skip("no full set beside this checkout")
    for name, ours in goldens_of(selection).items():
        theirs = goldens_of(full)[name]
        assert (ours.kind, ours.rows, ours.real_rows) == (theirs.kind, theirs.rows, theirs.real_rows)
        assert ours.constants == {key: theirs.constants[key] for key in ours.constants}
        assert ours.ratios == theirs.ratios
        for array, values in ours.arrays.items():
            np.testing.assert_array_equal(values, theirs.arrays[array], err_msg=f"{name} {array}")
            assert values.dtype == theirs.arrays[array].dtype
        np.testing.assert_array_equal(ours.req_to_token, theirs.req_to_token)
        np.testing.assert_array_equal(ours.full_to_swa, theirs.full_to_swa)


def test_goldens_of_the_repository_are_small() -> None:
    size = sum(path.stat().st_size for path in FOLDERS[0].parent.rglob("*") if path.is_file())
    assert size < 2_000_000


def by_rule(golden: MetadataGolden, name: str) -> bool:
    """Whether the file's own slots are those of each step's slice, in all steps."""
    return all(
        np.array_equal(
            golden.arrays[golden.array_name(name, step)][: golden.real_rows],
            golden.answer_by_rule(name, step)[: golden.real_rows],
        )
        for step in range(golden.num_steps)
    )


@pytest.mark.parametrize("name", DRAFTS)
def test_slots_of_draft_steps_are_wrong_where_the_notes_say(name: str) -> None:
    golden = golden_of(name)
    assert by_rule(golden, "raw_out_loc") == (not golden.in_graph)
    assert golden.is_wrong("raw_out_loc") == golden.in_graph
    assert not golden.is_wrong("swa_out_cache_loc")
    if golden.ratios:
        assert not (by_rule(golden, "c4_out_loc") and by_rule(golden, "c128_out_loc"))
    assert golden.is_wrong("c4_out_loc")
    assert golden.is_wrong("c128_out_loc")


def test_slots_of_other_modes_count() -> None:
    for name in PLACES.keys() - set(DRAFTS):
        golden = golden_of(name)
        assert not any(golden.is_wrong(slots) for slots in ("raw_out_loc", "c4_out_loc", "c128_out_loc")), name


def test_number_of_files_with_wrong_slots() -> None:
    """Those of the graph path, and of eager steps with ratios."""
    wrong = [golden_of(name) for name in DRAFTS if golden_of(name).in_graph or golden_of(name).ratios]
    assert len(wrong) == (8 if len(FOLDERS) > 1 else 4)
    assert {golden.in_graph for golden in wrong} == {True, False}
