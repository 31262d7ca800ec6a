"""`dsv4 verify attention`: goldens of another implementation, through cache, metadata, plans and kernels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from backends import INTERPRET, each_backend, each_fast_backend
from dsv4_backend import CacheGeometry, chunks, cli
from dsv4_backend.attention_goldens import AttentionGolden, load_attention_goldens
from dsv4_backend.attention_verify import verify_attention
from goldens_location import goldens_dir
from layout import ROOT

SMALL = ROOT / "tests" / "goldens" / "attention"
SHIPPED = {golden.name: golden for golden in load_attention_goldens(SMALL)}
# The interpreter gets the selection of this repository, which is shorter.
GOLDENS = {g.name: g for g in load_attention_goldens(SMALL if INTERPRET else goldens_dir("attention"))}
EACH_GOLDEN = pytest.mark.parametrize("golden", GOLDENS.values(), ids=GOLDENS)


def expect_ok(golden: AttentionGolden, impl: str, device: str, how: str, kv: str = "fp32") -> None:
    verdict = verify_attention(golden, impl, torch.device(device), chunks=how, kv=kv)
    assert verdict.ok is not False, verdict.text
    assert verdict.ok or kv == "fp8"


@each_backend
@EACH_GOLDEN
def test_goldens(impl: str, device: str, golden: AttentionGolden) -> None:
    expect_ok(golden, impl, device, "7,1,2,rest")


@each_fast_backend
@EACH_GOLDEN
@pytest.mark.parametrize("how", ["rest", "token", "random:0", "random:1"])
def test_goldens_in_other_chunks(impl: str, device: str, golden: AttentionGolden, how: str) -> None:
    expect_ok(golden, impl, device, how)


@each_fast_backend
@EACH_GOLDEN
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_goldens_in_rounded_caches(impl: str, device: str, golden: AttentionGolden, kv: str) -> None:
    expect_ok(golden, impl, device, "random:2", kv)


@each_fast_backend
@EACH_GOLDEN
def test_goldens_with_the_rings_of_speculation(impl: str, device: str, golden: AttentionGolden) -> None:
    geom = CacheGeometry(window=golden.config.window, c4_ring=16, c128_ring=256)
    verdict = verify_attention(golden, impl, torch.device(device), chunks="random:3", kv="fp32", geom=geom)
    assert verdict.ok, verdict.text


@each_backend
def test_packed_caches_of_the_selection(impl: str, device: str) -> None:
    expect_ok(SHIPPED["real_w128_k64_T16_csa_s2"], impl, device, "7,1,2,rest", "fp8")


def verify(directory: Path, *options: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(cli.app, ["verify", "attention", str(directory), "--device", "cpu", *options])
    return result.exit_code, result.output.splitlines()


def test_command_counts_and_exits() -> None:
    code, lines = verify(SMALL, "--impl", "torch", "--chunks", "rest")
    assert code == 0
    names = sorted(path.stem for path in SMALL.glob("*.npz"))
    assert [line.split()[1].rstrip(":") for line in lines[:-1]] == names
    assert (
        lines[-1]
        == f"{len(names)} checked, {len(names)} equal, 0 different, 0 skipped (impl torch, cpu, chunks rest, kv fp32)"
    )


def test_command_says_why_it_skips(tmp_path: Path) -> None:
    code, lines = verify(SMALL, "--impl", "torch", "--kv", "fp8", "--chunks", "rest")
    assert code == 0
    assert any(line.startswith("skip tiny_") and "48 channels" in line for line in lines)
    for path in SMALL.glob("*tiny*"):
        shutil.copy(path, tmp_path)
    shutil.copy(SMALL / "manifest.json", tmp_path)
    code, lines = verify(tmp_path, "--impl", "torch", "--kv", "fp8", "--chunks", "rest")
    assert code == 2
    assert lines[-1].startswith("0 checked")


def test_command_exits_with_1_on_a_difference(tmp_path: Path) -> None:
    name = "tiny_w16_k8_T50_csa_s0"
    arrays = dict(np.load(SMALL / f"{name}.npz"))
    arrays["kv_rope"][7, 0] += 1.0
    np.savez(tmp_path / f"{name}.npz", **arrays)
    shutil.copy(SMALL / "manifest.json", tmp_path)
    code, lines = verify(tmp_path, "--impl", "torch", "--chunks", "rest")
    assert code == 1
    assert lines[0].startswith(f"DIFF {name}: kv_rope[7, 0]: expected ")


@pytest.mark.parametrize("options", [("--chunks", "7,1"), ("--kv", "int8"), ("--chunks", "random:")], ids=str)
def test_command_refuses_options(options: tuple[str, str]) -> None:
    assert verify(SMALL, *options)[0] == 2


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a folder of attention goldens, .* got one without manifest.json"):
        load_attention_goldens(tmp_path)
    (tmp_path / "manifest.json").write_text("{'files': []}")
    with pytest.raises(ValueError, match=r"manifest.json: expected a readable JSON file, got JSONDecodeError"):
        load_attention_goldens(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"cases": []}))
    with pytest.raises(ValueError, match=r"manifest.json: expected the goldens' manifest, got KeyError"):
        load_attention_goldens(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"files": []}))
    with pytest.raises(ValueError, match="expected at least one golden"):
        load_attention_goldens(tmp_path)
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match=r"a.npz: expected an entry in manifest.json, got none"):
        load_attention_goldens(tmp_path)
    settings = json.loads((SMALL / "manifest.json").read_text())["files"][0]["cfg"]
    entry = {"file": "a.npz", "compress_ratio": 4, "cfg": settings}
    (tmp_path / "manifest.json").write_text(json.dumps({"files": [entry]}))
    with pytest.raises(ValueError, match=r"a.npz: expected a golden of ratio 4, got none of comp_kv, idx_k"):
        load_attention_goldens(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"files": [entry | {"compress_ratio": 3}]}))
    with pytest.raises(ValueError, match="expected compress_ratio 0, 4 or 128"):
        load_attention_goldens(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"out": np.zeros((49, 64), np.float32)}, r"out: expected float32 \[50, 64\], got float32 \[49, 64\]"),
        ({"topk_idx": np.zeros((50, 8), np.int64)}, r"topk_idx: expected int32 \[50, 8\], got int64 \[50, 8\]"),
        ({"out": np.full((50, 64), np.nan, np.float32)}, "out: expected finite values, got 3200 others"),
        ({"rows": None}, r"q_latent: expected float32 \[0, 32\], got float32 \[4, 32\]"),
        ({"rows": np.array([0, 7, 7, 9], np.int32)}, r"rows: expected ascending tokens below 50, got \[0, 7, 7, 9\]"),
        ({"rows": np.array([0, 7, 9, 50], np.int32)}, r"rows: expected ascending tokens below 50, got \[0, 7, 9, 50\]"),
    ],
    ids=["rows of out", "dtype of topk_idx", "not finite", "no rows", "rows that repeat", "rows beyond the end"],
)
def test_answers_that_do_not_fit_are_refused(
    arrays: dict[str, np.ndarray | None], message: str, tmp_path: Path
) -> None:
    name = "tiny_w16_k8_T50_csa_s0"
    merged = {key: value for key, value in (SHIPPED[name].arrays | arrays).items() if value is not None}
    np.savez(tmp_path / f"{name}.npz", **merged)
    shutil.copy(SMALL / "manifest.json", tmp_path)
    with pytest.raises(ValueError, match=message):
        load_attention_goldens(tmp_path)


def test_chunks_add_up() -> None:
    assert list(chunks.split("7,1,2,rest", 300)) == [7, 1, 2, 290]
    assert list(chunks.split("7,1,2,rest", 8)) == [7, 1]
    assert list(chunks.split("rest", 5)) == [5]
    assert list(chunks.split("token", 3)) == [1, 1, 1]
    first, again, other = (list(chunks.split("random:3", 500, lane)) for lane in (0, 0, 1))
    assert sum(first) == 500
    assert first == again != other
    for wrong in ("", "7,1", "0,rest", "random", "random:x", "rest,7"):
        with pytest.raises(ValueError, match="chunks: expected sizes and then rest"):
            chunks.check(wrong)
