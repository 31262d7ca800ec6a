"""`dsv4 verify attention`: goldens of another implementation, through cache, metadata, plans and kernels."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from backends import INTERPRET, each_backend, each_fast_backend
from dsv4_backend import AttnMetadata, CacheGeometry, DSV4Attention, LayerCache, chunks, cli
from dsv4_backend import layer as layer_module
from dsv4_backend.attention_goldens import ROW_ANSWERS, AttentionGolden, load_attention_goldens
from dsv4_backend.attention_verify import verify_attention
from goldens_location import goldens_dir
from layout import ROOT

SMALL = ROOT / "tests" / "goldens" / "attention"
SHIPPED = {golden.name: golden for golden in load_attention_goldens(SMALL)}
# The interpreter gets the selection of this repository, which is shorter.
GOLDENS = {g.name: g for g in load_attention_goldens(SMALL if INTERPRET else goldens_dir("attention"))}
SPARSE, DENSE, WINDOW = "tiny_w16_k8_T50_csa_s0", "tiny_w16_k8_T130_hca_s0", "tiny_w16_k8_T20_swa_s0"
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


def changed(golden: AttentionGolden, **arrays: np.ndarray | None) -> AttentionGolden:
    """A golden with other arrays; None: without that one."""
    merged = {name: array for name, array in (golden.arrays | arrays).items() if array is not None}
    return AttentionGolden(golden.name, golden.ratio, golden.settings, merged)


def told(golden: AttentionGolden, kv: str = "fp32") -> str:
    """What is said of a golden that we differ from."""
    verdict = verify_attention(golden, "torch", torch.device("cpu"), chunks="40,1,rest", kv=kv)
    assert verdict.ok is False, verdict.text
    return verdict.text


ANSWERS = ("kv_rope", "comp_kv", "idx_k", "q_latent", "q_rope", "idx_q", "idx_w", "idx_score")
ANSWERS += ("ctx_rotated", "ctx", "out", "out_f64")


@pytest.mark.parametrize("name", ANSWERS)
def test_a_difference_in_any_answer_is_found(name: str) -> None:
    golden = SHIPPED[SPARSE]
    array = golden.arrays[name].copy()
    array[-1, ..., 0] += 1e-3  # of the last token or entry, which only one of the sequences has
    place = ", ".join(["0"] * (array.ndim - 1))
    row = len(array) - 1 if name in ("kv_rope", "comp_kv", "idx_k", "out") else golden.arrays["rows"][-1]
    assert told(changed(golden, **{name: array})).startswith(f"{name}[{row}, {place}]: expected ")


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("name", ["kv_rope", "comp_kv", "idx_k", "idx_q", "ctx_rotated", "ctx", "out", "out_f64"])
def test_a_difference_in_rounded_caches_is_found(name: str, kv: str) -> None:
    golden = SHIPPED["real_w128_k64_T16_csa_s2"]
    array = golden.arrays[name].copy()
    array[-1] *= 1.2
    assert told(changed(golden, **{name: array}), kv).startswith(f"{name}[")


WEIGHTS = [(name, weight) for name in (SPARSE, DENSE, WINDOW) for weight in SHIPPED[name].weights("cpu")]


@pytest.mark.parametrize(
    ("name", "weight"), WEIGHTS, ids=[f"{name.split('_')[4]}-{weight}" for name, weight in WEIGHTS]
)
def test_a_wrong_weight_is_noticed(name: str, weight: str) -> None:
    golden = SHIPPED[name]
    array = golden.arrays[f"w_{weight}"].copy()
    array[(3 if weight == "sink" else array.shape[0] // 2,) + (0,) * (array.ndim - 1)] += 0.25
    told(changed(golden, **{f"w_{weight}": array}))


@pytest.mark.parametrize("weight", ["wq_a", "q_norm", "wq_b", "sink", "wo_a", "wo_b"])
def test_the_output_alone_notices_a_wrong_weight(weight: str) -> None:
    golden = SHIPPED[DENSE]
    array = golden.arrays[f"w_{weight}"].copy()
    array[..., 0] += 0.25
    only = dict.fromkeys(("q_latent", "q_rope", "ctx_rotated", "ctx", "out_f64"))
    assert told(changed(golden, **{f"w_{weight}": array}, **only)).startswith("out[")


@pytest.mark.parametrize(
    ("key", "name"), [("compress_rope_theta", SPARSE), ("compress_rope_theta", DENSE), ("rope_theta", WINDOW)]
)
def test_a_wrong_rope_is_noticed(key: str, name: str) -> None:
    golden = SHIPPED[name]
    settings = golden.settings | {key: golden.settings[key] * 1.01}
    text = told(AttentionGolden(golden.name, golden.ratio, settings, golden.arrays))
    assert text.startswith("kv_rope[")


def _without_rope(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, positions, rope, **rest: attend(*args, **rest)


def _without_sink(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, sink, **rest: attend(*args, **rest)


def _one_less(position: int) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Takes 1 from the lengths that are an argument of a call."""

    def wrap(call: Callable[..., object]) -> Callable[..., object]:
        def shorter(*args: torch.Tensor, **rest: object) -> object:
            return call(*args[:position], args[position] - 1, *args[position + 1 :], **rest)

        return shorter

    return wrap


def _attends_first(self: DSV4Attention, x: torch.Tensor, meta: AttnMetadata, cache: LayerCache) -> torch.Tensor:
    made = self.project(x, meta.positions)
    self.select(made, meta, cache)
    self.writer(cache).write(meta, made.kv, made.kv_score, made.index_score)
    return self.combine(self.attend(made.query, meta, cache))


FAULTS = {
    "the output is not turned back": ("sparse_attention", _without_rope, "ctx["),
    "no sink": ("sparse_attention", _without_sink, "ctx["),
    "the oldest window entry is missing": ("sparse_attention", _one_less(3), "ctx["),
    "the last selected entry is missing": ("sparse_attention", _one_less(6), "ctx["),
    "the newest entry can't be selected": ("select_entries", _one_less(3), "topk_idx["),
}


@pytest.mark.parametrize(("function", "wrap", "text"), FAULTS.values(), ids=FAULTS)
def test_faults_of_a_layer_are_noticed(
    function: str, wrap: Callable[..., object], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_module, function, wrap(getattr(layer_module, function)))
    assert told(SHIPPED[SPARSE]).startswith(text)


def test_selecting_before_storing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DSV4Attention, "forward", _attends_first)
    assert told(SHIPPED[SPARSE]).startswith("topk_idx[")


def test_what_a_golden_lacks_is_said() -> None:
    golden = SHIPPED[SPARSE]
    for arrays, end in (
        ({"w_wo_a": None}, "; without the layer's wo_a nothing but what is stored"),
        ({"idx_score": None, "topk_margin": None}, "; without idx_score, topk_margin"),
        (dict.fromkeys((*ROW_ANSWERS, "rows")), f"; without rows, {', '.join(sorted_answers())}"),
    ):
        verdict = verify_attention(changed(golden, **arrays), "torch", torch.device("cpu"), chunks="rest", kv="fp32")
        assert verdict.ok
        assert verdict.text.endswith(end), verdict.text
    wrong = changed(golden, w_wo_a=None, comp_kv=golden.arrays["comp_kv"] + 1)
    assert told(wrong).startswith("comp_kv[0, 0]: expected ")


def sorted_answers() -> list[str]:
    """Answers for some tokens, in the order in which files have them."""
    return ["q_latent", "q_rope", "ctx_rotated", "ctx", "out_f64", "idx_q", "idx_w", "idx_score"]


def other_selection(golden: AttentionGolden, token: int, margin: float) -> AttentionGolden:
    """A golden that selects something else for a token, with that margin."""
    selected, margins = golden.arrays["topk_idx"].copy(), golden.arrays["topk_margin"].copy()
    unused = min({*range((token + 1) // 4)} - {*selected[token].tolist()})
    selected[token, 0], margins[token] = unused, margin
    return changed(golden, topk_idx=selected, topk_margin=margins)


@pytest.mark.parametrize(("kv", "margin"), [("fp32", 5e-5), ("bf16", 1e-2)], ids=["fp32", "bf16"])
def test_another_selection_needs_a_small_margin(kv: str, margin: float) -> None:
    golden = SHIPPED[SPARSE]
    text = told(other_selection(golden, 48, 1.1 * margin), kv)
    assert text.startswith(
        f"topk_idx[48]: expected the golden's selection at margin {1.1 * margin:.1e}, got one without "
    )
    near = other_selection(golden, 48, 0.9 * margin)
    verdict = verify_attention(near, "torch", torch.device("cpu"), chunks="rest", kv=kv)
    assert verdict.ok, verdict.text
    expected = "(skipped row 48, margin 4.5e-05)" if kv == "fp32" else "equal but for 1 of "
    assert expected in verdict.text
    # The output of such a row is not the golden's either, and not compared; that of others is.
    out = near.arrays["out"].copy()
    out[48] += 1
    verdict = verify_attention(changed(near, out=out), "torch", torch.device("cpu"), chunks="rest", kv=kv)
    assert verdict.ok, verdict.text
    out[47] += 1
    assert told(changed(near, out=out), kv).startswith("out[47")


def test_a_second_row_with_a_small_margin_is_a_difference() -> None:
    golden = other_selection(other_selection(SHIPPED[SPARSE], 48, 1e-5), 40, 1e-5)
    assert told(golden) == "topk_idx: expected at most one row with a margin below 5e-05, got rows [40, 48]"


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
    name = SPARSE
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
    with pytest.raises(ValueError, match=r"manifest.json: expected the goldens' manifest"):
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
