"""What `dsv4 verify attention` notices: wrong answers, wrong weights, faults of a layer, and what goldens lack."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dsv4_backend import AttnMetadata, DSV4Attention, LayerCache
from dsv4_backend import layer as layer_module
from dsv4_backend.attention_compare import close
from dsv4_backend.attention_goldens import ROW_ANSWERS, AttentionGolden, load_attention_goldens
from dsv4_backend.attention_verify import verify_attention
from layout import ROOT

SHIPPED = {golden.name: golden for golden in load_attention_goldens(ROOT / "tests" / "goldens" / "attention")}
SPARSE, DENSE, WINDOW = "tiny_w16_k8_T50_csa_s0", "tiny_w16_k8_T130_hca_s0", "tiny_w16_k8_T20_swa_s0"


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


def test_nothing_to_compare_is_no_difference() -> None:
    none, rows = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    assert close("empty", none, none, rows, rope_dim=2).text == "empty 0.0e+00 and 0.0e+00 where it turns"
    channels = torch.ones(3, 2)  # all of them turn
    assert close("turning", channels, channels, torch.arange(3), rope_dim=2).size == 0


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
