"""Goldens of plans, and `dsv4 verify plans`: what it finds, what it refuses, and its exit codes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import Result

from backends import each_backend
from dsv4_backend import CompressPlan, PrefillPlan
from dsv4_backend import verify as dsv4_verify
from dsv4_backend.goldens import PlanGolden, load_plan_goldens
from dsv4_backend.verify import check_order, verify_plan
from golden_files import UNREADABLE, added, dsv4, edit, expect_refusal, on
from goldens_location import goldens_dir

PLANS = goldens_dir("plans")
GOLDENS = sorted(path.stem for path in PLANS.glob("*.npz") if not path.name.startswith("pool_"))
PREFILL, DECODE = "c4_page256_ring16_mixed_cpu", "c4_page256_ring16_decode_pad"


@pytest.fixture(scope="module")
def goldens() -> dict[str, PlanGolden]:
    return {golden.name: golden for golden in load_plan_goldens(PLANS)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A prefill golden, a decode golden and their pool."""
    for name in (PREFILL, DECODE, "pool_page256"):
        shutil.copy(PLANS / f"{name}.npz", tmp_path)
    return tmp_path


def verify(folder: Path, *options: str) -> Result:
    return dsv4("verify", "plans", folder, "--device", "cpu", *options)


def test_goldens_cover_both_ratios_and_kinds(goldens: dict[str, PlanGolden]) -> None:
    assert sorted(goldens) == GOLDENS
    assert {(g.kind, g.ratio) for g in goldens.values()} == {(k, r) for k in ("prefill", "decode") for r in (4, 128)}
    for word in ("verify", "underfilled", "padreq", "mixed", "zero_extend", "negative", "wide300"):
        assert any(word in name for name in goldens), word


@each_backend
@pytest.mark.parametrize("name", GOLDENS)
def test_plan_equals_golden(goldens: dict[str, PlanGolden], name: str, impl: str, device: str) -> None:
    assert verify_plan(goldens[name], impl, on(device)) is None


@pytest.mark.parametrize(
    ("name", "field", "change", "difference"),
    [
        (PREFILL, "exp_plan_c", added(2, 0, 4), r"compress row 2, seq_len: expected \d+, got \d+"),
        (PREFILL, "exp_plan_c", added(1, 1, 1), r"compress row 1, ragged_id: expected \d+, got \d+"),
        (PREFILL, "exp_plan_c", added(0, 2, 1), r"compress row 0, buffer_len: expected \d+, got \d+"),
        (PREFILL, "exp_plan_w", added(-1, 1, -1), r"write row \d+, write_loc: expected \d+, got \d+"),
        (PREFILL, "exp_plan_w", added(3, 0, 1), r"write row 3, ragged_id: expected \d+, got \d+"),
        (PREFILL, "exp_plan_w", lambda rows: rows[:-1], r"write: expected (\d+) rows, got \d+"),
        (PREFILL, "num_q_tokens", lambda _: 1, r"refused: num_rows: expected at least the sum .*, got 1"),
        (DECODE, "exp_plan_d", added(4, 2, 1), r"decode row 4, read_page_0: expected \d+, got \d+"),
        (DECODE, "exp_plan_d", added(4, 1, 1), r"decode row 4, write_loc: expected \d+, got \d+"),
        (DECODE, "req_pool_indices", lambda ids: ids + 10**6, r"refused: req_pool_indices\[0\]: expected .*"),
    ],
)
def test_a_difference_is_named(
    folder: Path, name: str, field: str, change: Callable[[np.ndarray], object], difference: str
) -> None:
    edit(folder / f"{name}.npz", field, change)
    changed = next(golden for golden in load_plan_goldens(folder) if golden.name == name)
    found = verify_plan(changed, "torch", torch.device("cpu"))
    assert found is not None
    assert re.fullmatch(difference, found)


def test_pages_count_only_where_they_are_read(folder: Path) -> None:
    path = folder / f"{PREFILL}.npz"
    with np.load(path) as file:
        read = file["exp_plan_c_pages_meaningful"].astype(bool)
    assert read.any()
    assert not read.all()
    edit(path, "exp_plan_c", lambda rows: np.where(read[:, None] | (np.arange(5) < 3), rows, 777))
    assert verify(folder).exit_code == 0
    edit(path, "exp_plan_c", added(int(np.argmax(read)), 4, 1))
    result = verify(folder)
    assert result.exit_code == 1
    assert f"compress row {int(np.argmax(read))}, read_page_1: expected " in result.output


def test_order_and_markers_are_checked() -> None:
    def order(compress: list[tuple[int, ...]], write: list[tuple[int, ...]]) -> str | None:
        rows = [np.array(x, dtype=np.uint32).view(np.uint8) for x in (compress, write)]
        return check_order(CompressPlan(4, *(torch.from_numpy(r.copy()) for r in rows)))

    none, unused = 2**32 - 1, (2**32 - 1, 0, 2**32 - 1, 2**32 - 1)
    first, second = (4, 3, 0, 0), (8, 7, 0, 0)
    assert order([first, second, unused], [(1, 5), (2, 6), (none, none)]) is None
    assert order([unused] * 3, [(none, none)] * 3) is None
    assert order([second, first, unused], [(1, 5)] * 3) == "compress row 1: row ids do not ascend"
    assert order([first, first, unused], [(1, 5)] * 3) == "compress row 1: row ids do not ascend"
    assert order([first] + [unused] * 2, [(0, 5), (2, 5), (1, 5)]) == "write row 2: row ids do not ascend"
    assert order([first, unused, second], [(1, 5)] * 3).startswith("compress row 2: expected the invalid marker, got ")
    bad = (none, 9, none, none)
    assert order([first, unused, bad], [(1, 5)] * 3) == (
        "compress row 2: expected the invalid marker, got the words [-1, 9, -1, -1]"
    )
    assert order([first, second, unused], [(1, 5), (none, 5), (none, none)]) == (
        "write row 1: expected the invalid marker, got the words [-1, 5]"
    )


def test_a_header_that_miscounts_is_a_difference(
    goldens: dict[str, PlanGolden], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_prefill = dsv4_verify.plan_prefill

    def miscounting(*arguments: object, **more: object) -> PrefillPlan:
        plan = plan_prefill(*arguments, **more)
        plan.header[5] += 1  # rows of the ratio-4 write list
        return plan

    monkeypatch.setattr(dsv4_verify, "plan_prefill", miscounting)
    golden = next(g for g in goldens.values() if g.kind == "prefill" and g.ratio == 4)
    difference = verify_plan(golden, "torch", torch.device("cpu"))
    assert re.fullmatch(r"header: expected row counts \[(\d+), (\d+)\], got \[\1, (\d+)\]", difference)


def test_equal_plans_exit_0(folder: Path) -> None:
    result = verify(folder)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[:-1] == [f"ok   {name}" for name in sorted((PREFILL, DECODE))]
    assert lines[-1] == "2 checked, 2 equal, 0 different (impl torch, cpu)"


def test_one_difference_exits_1_and_names_the_row(folder: Path) -> None:
    edit(folder / f"{DECODE}.npz", "exp_plan_d", added(3, 1, 1))
    result = verify(folder, "--impl", "torch")
    assert result.exit_code == 1
    assert f"DIFF {DECODE}: decode row 3, write_loc: expected " in result.output
    assert f"ok   {PREFILL}" in result.output
    assert result.output.splitlines()[-1] == "2 checked, 1 equal, 1 different (impl torch, cpu)"


def test_every_file_is_checked_after_a_difference(folder: Path) -> None:
    edit(folder / f"{PREFILL}.npz", "exp_plan_w", added(0, 1, 1))
    edit(folder / f"{DECODE}.npz", "exp_plan_d", added(0, 0, 1))
    result = verify(folder)
    assert result.exit_code == 1
    assert result.output.count("DIFF ") == 2
    assert "2 checked, 0 equal, 2 different" in result.output


def test_names_are_printed_as_they_are(folder: Path) -> None:
    """Square brackets are markup to Rich."""
    (folder / f"{DECODE}.npz").rename(folder / "decode[bold] [red].npz")
    result = verify(folder)
    assert result.exit_code == 0, result.output
    assert "ok   decode[bold] [red]\n" in result.output


def test_no_folder(tmp_path: Path) -> None:
    expect_refusal(verify(tmp_path / "none"), tmp_path / "none", "expected a folder of goldens, got nothing")


def test_a_file_for_a_folder(folder: Path) -> None:
    expect_refusal(verify(folder / f"{DECODE}.npz"), "expected a folder of goldens, got a file")


def test_an_empty_folder(tmp_path: Path) -> None:
    expect_refusal(verify(tmp_path), tmp_path, "expected at least one golden (*.npz), got none")


def test_a_folder_with_pools_only(tmp_path: Path) -> None:
    shutil.copy(PLANS / "pool_page256.npz", tmp_path)
    (tmp_path / "README.txt").write_text("not a golden")
    expect_refusal(verify(tmp_path), "expected at least one golden (*.npz), got none")


@pytest.mark.parametrize("make", UNREADABLE.values(), ids=UNREADABLE.keys())
@pytest.mark.parametrize("which", ["broken", "pool_page256"])
def test_an_unreadable_file(folder: Path, which: str, make: Callable[[Path], object]) -> None:
    path = folder / f"{which}.npz"
    path.unlink(missing_ok=True)
    make(path)
    expect_refusal(verify(folder), path, "expected a readable .npz file, got ")


def test_no_pool(folder: Path) -> None:
    (folder / "pool_page256.npz").unlink()
    expect_refusal(verify(folder), folder / "pool_page256.npz", "expected a readable .npz file, got FileNotFoundError")


def test_a_pool_that_is_none(folder: Path) -> None:
    edit(folder / "pool_page256.npz", "full_to_state", lambda _: None)
    expect_refusal(verify(folder), folder / "pool_page256.npz", "expected req_to_token and full_to_state, got ")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": 1}, "expected a plan golden, got kind 'nothing'"),
        ({"kind": "verify"}, "expected a plan golden, got kind 'verify'"),
        ({"kind": "prefill"}, "expected a plan golden, got kind 'prefill' without compress_ratio, "),
        (
            {"kind": "decode", "seq_lens": 1},
            "expected a plan golden, got kind 'decode' without compress_ratio, ",
        ),
        ({"kind": np.arange(3)}, "expected a plan golden, got kind '[0 1 2]'"),
    ],
    ids=["no kind", "another kind", "prefill without the rest", "decode without the rest", "kind is no word"],
)
def test_an_npz_that_is_no_golden(folder: Path, arrays: dict[str, object], message: str) -> None:
    path = folder / "another.npz"
    np.savez(path, **arrays)
    result = verify(folder)
    expect_refusal(result, path, message)
    assert not result.output.rstrip().endswith(("without", ","))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        (DECODE, "compress_ratio", 7),
        (DECODE, "compress_ratio", "four"),
        (DECODE, "swa_page_size", 100),
        (DECODE, "ring_size", np.arange(2)),
        (DECODE, "exp_plan_d", np.zeros(10, dtype=np.int64)),
        (DECODE, "exp_plan_d", np.zeros((10, 2), dtype=np.int64)),
        (DECODE, "seq_lens", np.zeros((2, 5), dtype=np.int64)),
        (PREFILL, "exp_plan_c_pages_meaningful", np.zeros(1, dtype=bool)),
        (PREFILL, "exp_plan_c", np.zeros((3, 3), dtype=np.int64)),
        (PREFILL, "num_q_tokens", "many"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(np.asarray(value).shape),
)
def test_a_golden_with_arrays_of_the_wrong_form(folder: Path, name: str, field: str, value: object) -> None:
    """Whether it counts as unreadable or as different: its name is printed, and no traceback."""
    edit(folder / f"{name}.npz", field, lambda _: value)
    result = verify(folder)
    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert name in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--impl", "numpy"), "impl: expected one of "),
        (("--device", "tpu"), "--device: expected auto, cpu or cuda, got 'tpu'"),
        (("--device", "cuda:0"), "--device: expected auto, cpu or cuda, got 'cuda:0'"),
    ],
)
def test_options_are_checked(folder: Path, options: tuple[str, ...], message: str) -> None:
    expect_refusal(dsv4("verify", "plans", folder, *options), message)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu(folder: Path) -> None:
    expect_refusal(dsv4("verify", "plans", folder, "--device", "cuda"), "--device: expected a CUDA GPU")
    assert dsv4("verify", "plans", folder).output.endswith("(impl torch, cpu)\n")


@pytest.mark.gpu
def test_auto_takes_the_gpu(folder: Path) -> None:
    result = dsv4("verify", "plans", folder)
    assert result.exit_code == 0, result.output
    assert "cuda:" in result.output.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments", [(), ("verify",), ("verify", "plans"), ("verify", "metadata"), ("verify", "nothing", ".")], ids=str
)
def test_usage_errors_exit_2(arguments: tuple[str, ...]) -> None:
    result = dsv4(*arguments)
    assert result.exit_code == 2
    assert "Usage: " in result.output
