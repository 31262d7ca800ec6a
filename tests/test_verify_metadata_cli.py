"""`dsv4 verify metadata`: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import Result

from golden_files import UNREADABLE, added, dsv4, edit, expect_refusal
from goldens_location import golden_folders

GOLDENS = golden_folders("metadata")[0]
DECODE, RAGGED, DRAFT = "decode_b1_len1", "verify_ragged_b3", "eagle_s3_graph_b3_pad4_ratios_4_128"
NAMES = [RAGGED, DECODE, DRAFT]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three goldens and their pool."""
    cases = {case["name"]: case for case in json.loads((GOLDENS / "manifest.json").read_text())["cases"]}
    write_manifest(tmp_path, {"cases": [cases[name] for name in NAMES]})
    for name in (*NAMES, "pool"):
        shutil.copy(GOLDENS / f"{name}.npz", tmp_path)
    return tmp_path


def write_manifest(folder: Path, manifest: object) -> None:
    (folder / "manifest.json").write_text(json.dumps(manifest))


def edit_case(folder: Path, number: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Applies `change` to a case of the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest["cases"][number])
    write_manifest(folder, manifest)


def verify(folder: Path, *options: str) -> Result:
    return dsv4("verify", "metadata", folder, "--device", "cpu", *options)


def test_equal_metadata_exits_0(folder: Path) -> None:
    result = verify(folder)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        *(f"ok   {name}" for name in NAMES),
        "3 checked, 3 equal, 0 different (impl torch, cpu)",
    ]


def test_one_difference_exits_1_and_names_the_place(folder: Path) -> None:
    edit(folder / f"{RAGGED}.npz", "out_swa_page_indices", added(3, 2, 1))
    result = verify(folder, "--impl", "torch")
    assert result.exit_code == 1
    assert f"DIFF {RAGGED}: swa_page_indices[3, 2]: expected " in result.output
    assert f"ok   {DECODE}" in result.output
    assert result.output.splitlines()[-1] == "3 checked, 2 equal, 1 different (impl torch, cpu)"


@pytest.mark.parametrize(
    ("name", "array", "place", "field"),
    [
        (RAGGED, "out_seq_lens_causal", (0,), "seq_lens_causal[0]"),
        (RAGGED, "out_raw_out_loc", (6,), "raw_out_cache_loc[6]"),
        (RAGGED, "out_page_table", (5, 0), "page_table[5, 0]"),
        (RAGGED, "out_c128_page_indices", (1, 0), "c128_page_indices[1, 0]"),
        (RAGGED, "out_c4_topk_lengths_clamp1", (0,), "c4_lengths[0]"),
        (RAGGED, "out_indexer_max_c4_seq_len", (), "max_c4_length"),
        (DRAFT, "out_step1_swa_out_cache_loc", (2,), "step 1, swa_out_cache_loc[2]"),
        (DRAFT, "out_step0_c4_topk_lengths_raw", (1,), "step 0, c4_lengths[1]"),
        (DRAFT, "out_req_pool_indices_repeated", (0,), "step 0, req_pool_indices_per_row[0]"),
        (DRAFT, "in_out_cache_loc", (4,), "step 1, swa_out_cache_loc[1]"),
        (DRAFT, "in_padded_out_cache_loc", (1,), "padded inputs, step 1, raw_out_cache_loc[0]"),
        (DRAFT, "in_padded_seq_lens", (0,), "padded inputs, step 0, seq_lens_causal[0]"),
    ],
)
def test_another_answer_or_input_is_a_difference(
    folder: Path, name: str, array: str, place: tuple[int, ...], field: str
) -> None:
    edit(folder / f"{name}.npz", array, added(*place, 1))
    result = verify(folder)
    assert result.exit_code == 1, result.output
    assert f"DIFF {name}: {field}: expected " in result.output


@pytest.mark.parametrize("array", ["raw_out_loc", "c4_out_loc", "c128_out_loc"])
def test_slots_of_draft_steps_come_from_the_inputs(folder: Path, array: str) -> None:
    edit(folder / f"{DRAFT}.npz", f"out_step0_{array}", added(0, 1))
    assert verify(folder).exit_code == 0


def test_more_real_rows_than_there_are_is_a_difference(folder: Path) -> None:
    edit_case(folder, 0, lambda case: case.update(real_rows=8))
    assert f"DIFF {RAGGED}: " in verify(folder).output
    edit_case(folder, 0, lambda case: case.update(real_rows=6))
    assert f"DIFF {RAGGED}: padding: seq_lens_causal[6]: expected 1, got " in verify(folder).output


@pytest.mark.parametrize(
    ("array", "value", "message"),
    [
        ("in_req_pool_indices", [10**6, 1, 2], "refused: req_pool_indices[0]: expected 0 to 48"),
        ("in_seq_lens", [-4, 3, 2], "refused: seq_lens[0]: expected 0 to "),
        ("in_verify_lens", [1, 9, 2], "refused: extend_lens[1]: expected 0 to 4"),
        ("in_verify_lens", [-1, 4, 4], "refused: extend_lens[0]: expected 0 to 4"),
    ],
    ids=["request id", "length", "more rows than drafts", "negative rows"],
)
def test_an_input_that_is_refused_is_a_difference(folder: Path, array: str, value: list[int], message: str) -> None:
    edit(folder / f"{RAGGED}.npz", array, lambda old: np.array(value, old.dtype))
    result = verify(folder)
    assert result.exit_code == 1, result.output
    assert f"DIFF {RAGGED}: {message}" in result.output


def test_names_are_printed_as_they_are(folder: Path) -> None:
    """Square brackets are markup to Rich."""
    edit_case(folder, 0, lambda case: case.update(name="a[bold] [red]"))
    assert "ok   a[bold] [red]\n" in verify(folder).output


def test_no_folder(tmp_path: Path) -> None:
    expect_refusal(verify(tmp_path / "none"), tmp_path / "none", "expected a folder of goldens, got nothing")
    expect_refusal(verify(GOLDENS / "manifest.json"), "expected a folder of goldens, got a file")


def test_no_manifest(tmp_path: Path) -> None:
    """As in a folder of goldens of another kind."""
    result = verify(tmp_path)
    expect_refusal(result, tmp_path, "expected a folder of metadata goldens, manifest.json and the .npz files")
    assert "got one without manifest.json" in result.output
    result = dsv4("verify", "attention", tmp_path, "--device", "cpu")
    expect_refusal(result, tmp_path, "expected a folder of attention goldens, manifest.json and the .npz files")


@pytest.mark.parametrize(
    "content", [b"", b"{'cases': []}", b"\xff\xfe", b"[" * 100_000], ids=["empty", "no JSON", "no UTF-8", "too deep"]
)
def test_an_unreadable_manifest(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    expect_refusal(verify(folder), folder / "manifest.json", "expected a readable JSON file, got ")


@pytest.mark.parametrize(
    "manifest", [{}, [], {"cases": []}, {"cases": {"name": "a"}}, {"cases": None}, 3], ids=lambda value: str(value)
)
def test_a_manifest_without_cases(folder: Path, manifest: object) -> None:
    write_manifest(folder, manifest)
    expect_refusal(verify(folder), folder / "manifest.json", "expected a list of cases with at least one, got ")


def without(*path: str) -> Callable[[dict[str, Any]], object]:
    def change(case: dict[str, Any]) -> None:
        for key in path[:-1]:
            case = case[key]
        del case[path[-1]]

    return change


def constant(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda case: case["constants"].update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("name"), "name: expected a string, got None"),
        (without("file"), "file: expected a string, got None"),
        (lambda case: case.update(pool=3), "pool: expected a string, got 3"),
        (lambda case: case.update(mode="DRAFT"), "mode: expected one of DECODE, "),
        (without("rows"), "expected real_rows from 0 to rows, got real_rows 3, rows None"),
        (lambda case: case.update(real_rows=5), "expected real_rows from 0 to rows, got real_rows 5, rows 4"),
        (lambda case: case.update(real_rows=True), "expected real_rows from 0 to rows, got real_rows True, rows 4"),
        (lambda case: case.update(constants=[1] * 1000), "constants: expected an object, got [1, 1, "),
        (without("constants", "index_topk"), "constants.index_topk: expected an int of at least 0, got None"),
        (without("constants", "graph_bs"), "constants.graph_bs: expected an int of at least 0, got None"),
        (constant("num_steps", 1), "constants.num_steps: expected an int of at least 2, got 1"),
        (constant("page_size", "256"), "constants.page_size: expected an int of at least 0, got '256'"),
        (constant("c4_ring_size", 8.0), "constants.c4_ring_size: expected an int of at least 0, got 8.0"),
        (constant("present_ratios", 4), "constants.present_ratios: expected a list of 0, 4 and 128, got 4"),
        (constant("present_ratios", [4, 8]), "constants.present_ratios: expected a list of 0, 4 and 128, got [4, 8]"),
    ],
    ids=[
        *(
            "no name",
            "no file",
            "pool is no string",
            "unknown mode",
            "no rows",
            "too many real rows",
            "rows are no int",
        ),
        *("constants are no object", "no top-k", "no bucket", "one step", "page size is no int", "ring is no int"),
        *("ratios are no list", "another ratio"),
    ],
)
def test_a_case_that_is_none(folder: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    edit_case(folder, 2, change)
    expect_refusal(verify(folder), f"{folder / 'manifest.json'}: cases[2]: {message}")


def test_a_case_that_is_no_object(folder: Path) -> None:
    write_manifest(folder, {"cases": ["decode"]})
    expect_refusal(verify(folder), "manifest.json: cases[0]: expected an object, got 'decode'")


@pytest.mark.parametrize("make", UNREADABLE.values(), ids=UNREADABLE.keys())
@pytest.mark.parametrize("which", [DECODE, "pool"])
def test_an_unreadable_file(folder: Path, which: str, make: Callable[[Path], object]) -> None:
    path = folder / f"{which}.npz"
    path.unlink()
    make(path)
    expect_refusal(verify(folder), path, "expected a readable .npz file, got ")


@pytest.mark.parametrize("which", [DECODE, "pool"])
def test_a_missing_file(folder: Path, which: str) -> None:
    (folder / f"{which}.npz").unlink()
    expect_refusal(verify(folder), folder / f"{which}.npz", "expected a readable .npz file, got FileNotFoundError")


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("full_to_swa", lambda _: None, "expected req_to_token and full_to_swa, got ['req_to_token']"),
        (
            "full_to_swa",
            lambda table: table.astype(np.int32),
            "full_to_swa: expected int64 with 1 dimensions, got ",
        ),
        ("req_to_token", lambda table: table[0], "req_to_token: expected int32 with 2 dimensions, got int32 [3332]"),
    ],
    ids=["missing", "dtype", "rank"],
)
def test_a_pool_that_is_none(folder: Path, table: str, change: Callable[[np.ndarray], object], message: str) -> None:
    edit(folder / "pool.npz", table, change)
    expect_refusal(verify(folder), f"{folder / 'pool.npz'}: {message}")


def arrays_of(name: str) -> list[str]:
    with np.load(GOLDENS / f"{name}.npz") as file:
        return file.files


@pytest.mark.parametrize(
    ("name", "array"),
    [(name, array) for name in (RAGGED, DRAFT) for array in arrays_of(name) if not array.startswith("out_step2_")],
)
def test_a_missing_array(folder: Path, name: str, array: str) -> None:
    """Every array of the selection is needed, but for those of a draft step that runs no forward."""
    edit(folder / f"{name}.npz", array, lambda _: None)
    expect_refusal(verify(folder), f"{folder / name}.npz: expected an array {array}, got in_")


@pytest.mark.parametrize(
    ("array", "change", "message"),
    [
        ("in_seq_lens", lambda a: a[:-1], "expected 1 dimensions, the first of 3, got [2]"),
        ("in_verify_lens", lambda a: a[:, None], "expected 1 dimensions, the first of 3, got [3, 1]"),
        ("in_out_cache_loc", lambda a: a.astype(float), "expected integers, got float64"),
        ("out_positions", lambda a: a[:-1], "expected 1 dimensions, the first of 8, got [7]"),
        ("out_positions", lambda a: a > 0, "expected integers, got bool"),
        ("out_page_table", lambda a: a[:, 0], "expected 2 dimensions, the first of 8, got [8]"),
        ("out_swa_page_indices", lambda a: a[:, :-1], "expected 128 columns, got 127"),
        ("out_c4_sparse_page_indices", lambda a: a[:, :-1], "expected 512 columns, got 511"),
        ("out_indexer_c4_page_size", lambda a: a[None], "expected 0 dimensions, got [1]"),
    ],
    ids=[
        *("requests", "rank of an input", "floats", "rows", "truth values", "rank of an answer", "window", "top-k"),
        "scalar",
    ],
)
def test_an_array_of_the_wrong_form(
    folder: Path, array: str, change: Callable[[np.ndarray], object], message: str
) -> None:
    edit(folder / f"{RAGGED}.npz", array, change)
    expect_refusal(verify(folder), f"{folder / RAGGED}.npz: {array}: {message}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--impl", "numpy"), "impl: expected one of "),
        (("--device", "tpu"), "--device: expected auto, cpu or cuda, got 'tpu'"),
    ],
    ids=["impl", "device"],
)
def test_options_are_checked(folder: Path, options: tuple[str, ...], message: str) -> None:
    expect_refusal(dsv4("verify", "metadata", folder, *options), message)


@pytest.mark.gpu
def test_auto_takes_the_gpu(folder: Path) -> None:
    result = dsv4("verify", "metadata", folder)
    assert result.exit_code == 0, result.output
    assert "cuda:" in result.output.splitlines()[-1]
