"""Weights of a layer under the names of goldens, checkpoints and transformers, and what is said when they are wrong."""

from __future__ import annotations

import pytest
import torch

from cache_harness import small_config
from dsv4_backend import DSV4Attention, DSV4Config
from dsv4_backend.layer_weights import collect_weights, layer_weights

RATIOS = pytest.mark.parametrize("ratio", [0, 4, 128], ids=["window", "c4", "c128"])
SCHEMES = pytest.mark.parametrize("scheme", ["plain", "checkpoint", "transformers"])


def random_weights(ratio: int) -> dict[str, torch.Tensor]:
    """By plain name; values that bfloat16 has."""
    generator = torch.Generator().manual_seed(ratio)
    wanted = layer_weights(small_config(ratio), ratio)
    return {name: torch.randn(each.shape, generator=generator).bfloat16() for name, each in wanted.items()}


def renamed(weights: dict[str, torch.Tensor], ratio: int, scheme: str) -> dict[str, torch.Tensor]:
    wanted = layer_weights(small_config(ratio), ratio)
    return {name if scheme == "plain" else getattr(wanted[name], scheme): each for name, each in weights.items()}


def test_the_released_model_has_these_names() -> None:
    flash = layer_weights(DSV4Config.v4_flash(), 4)
    names = {
        each.checkpoint: (each.transformers, each.shape)
        for name, each in flash.items()
        if name.startswith("idx") or name in ("sink", "wo_a", "comp_ape")
    }
    assert names == {
        "attn_sink": ("sinks", (64,)),
        "wo_a": ("o_a_proj", (8 * 1024, 4096)),
        "compressor.ape": ("compressor.position_bias", (4, 1024)),
        "indexer.wq_b": ("compressor.indexer.q_b_proj", (64 * 128, 1024)),
        "indexer.weights_proj": ("compressor.indexer.scorer.weights_proj", (64, 4096)),
        "indexer.compressor.wkv": ("compressor.indexer.kv_proj", (256, 4096)),
        "indexer.compressor.wgate": ("compressor.indexer.gate_proj", (256, 4096)),
        "indexer.compressor.ape": ("compressor.indexer.position_bias", (4, 256)),
        "indexer.compressor.norm": ("compressor.indexer.kv_norm", (128,)),
    }
    heavy = layer_weights(DSV4Config.v4_pro(), 128)
    assert heavy["comp_wkv"].shape == (512, 7168)
    assert heavy["comp_ape"].shape == (128, 512)
    assert not any(name.startswith("idx") for name in heavy)
    assert len(layer_weights(DSV4Config.v4_flash(), 0)) == 8


@RATIOS
@SCHEMES
@pytest.mark.parametrize("suffix", ["", ".weight"], ids=["bare", "weight"])
def test_every_scheme_of_names_loads(ratio: int, scheme: str, suffix: str) -> None:
    weights = random_weights(ratio)
    given = {f"layers.3.attn.{name}{suffix}": each for name, each in renamed(weights, ratio, scheme).items()}
    given["layers.30.attn.other.weight"] = torch.zeros(1)
    layer = DSV4Attention.from_weights(given, small_config(ratio), ratio, prefix="layers.3.attn.", dtype=torch.bfloat16)
    state = layer.state_dict()
    assert set(state) == set(weights)
    for name, each in weights.items():
        assert state[name].dtype == (
            torch.float32 if layer_weights(small_config(ratio), ratio)[name].float32 else torch.bfloat16
        )
        assert torch.equal(state[name].float(), each.float()), name


@SCHEMES
def test_wrong_weights_are_listed(scheme: str) -> None:
    weights = renamed(random_weights(4), 4, scheme)
    names = renamed({name: torch.empty(0) for name in random_weights(4)}, 4, scheme)
    by_plain = dict(zip(random_weights(4), names, strict=True))
    del weights[by_plain["idx_wproj"]]
    weights[by_plain["wo_a"]] = torch.zeros(3, 5)
    weights["extra.bias"] = torch.zeros(7)
    with pytest.raises(ValueError, match="weights: expected all 18 of a layer of ratio 4, got 17 of them: ") as raised:
        collect_weights(weights, small_config(4), 4)
    message = str(raised.value)
    assert "missing idx_wproj or indexer.weights_proj or compressor.indexer.scorer.weights_proj [4, 64]" in message
    assert f"{by_plain['wo_a']}: expected [48, 64], got [3, 5]" in message
    assert "unexpected extra.bias float32 [7]" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_a_proj": torch.zeros(32, 64)}, "wq_a and q_a_proj are the same weight"),
        (
            {"wo_b": torch.zeros(64, 48, dtype=torch.float8_e4m3fn)},
            "wo_b: expected a float32, bfloat16 or float16 tensor",
        ),
        ({"wo_b": None}, r"wo_b: expected a float32, bfloat16 or float16 tensor, got \(NoneType\)"),
        ({"wo_b.scale": torch.zeros(1, 1)}, r"unexpected wo_b.scale float32 \[1, 1\]"),
    ],
    ids=["twice", "float8", "no tensor", "scales"],
)
def test_other_faults_are_named(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collect_weights(random_weights(0) | change, small_config(0), 0)


def test_a_prefix_without_weights_is_said() -> None:
    with pytest.raises(ValueError, match=r"all 8 of a layer of ratio 0 below 'attn.', got 0 of them: missing wq_a"):
        collect_weights(random_weights(0), small_config(0), 0, "attn.")
