"""Attention weights from small checkpoints that the tests write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cache_harness import small_config
from dsv4_backend import DSV4Config
from dsv4_backend.fp8_blocks import dequantise, quantise
from dsv4_backend.layer_weights import layer_weights

pytest.importorskip("safetensors", reason="no safetensors, which comes with transformers")

from safetensors.torch import save_file

from dsv4_examples.hf_dsv4.checkpoint import INDEX, Checkpoint, attention_layers, attention_weights

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
FLOAT8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "idx_wq_b")
"""What the release keeps in float8."""
BFLOAT16 = ("idx_wproj", "comp_wkv", "comp_wgate", "idx_comp_wkv", "idx_comp_wgate")
RATIOS = (0, 4, 128)


def wide_config() -> DSV4Config:
    """Sizes that blocks of 128 do not divide: every projection has blocks that are cut off."""
    return DSV4Config(
        hidden_size=200,
        num_heads=6,
        head_dim=48,
        rope_dim=16,
        q_lora_rank=136,
        o_groups=2,
        o_lora_rank=72,
        window=16,
        index_topk=8,
        index_heads=8,
        index_head_dim=32,
        compress_ratios=RATIOS,
        max_position=64,
    )


def stored_layer(
    cfg: DSV4Config, layer: int, suffix: str = ".scale", kind: torch.dtype = E8M0
) -> dict[str, torch.Tensor]:
    """A layer as the release has it, with random weights."""
    generator = torch.Generator().manual_seed(layer)
    stored: dict[str, torch.Tensor] = {}
    for plain, weight in layer_weights(cfg, cfg.compress_ratios[layer]).items():
        value = torch.randn(weight.shape, generator=generator)
        name = f"layers.{layer}.attn.{weight.checkpoint}"
        if plain in FLOAT8:
            codes, scales = quantise(value)
            stored[f"{name}.weight"] = codes
            stored[name + suffix] = {E8M0: scales, torch.uint8: scales.view(torch.uint8)}.get(kind, scales.float())
        else:
            named = name if plain in ("sink", "comp_ape", "idx_comp_ape") else f"{name}.weight"
            stored[named] = value.bfloat16() if plain in BFLOAT16 else value
    return stored


def whole(cfg: DSV4Config, **options: object) -> dict[str, torch.Tensor]:
    stored = {"embed.weight": torch.zeros(3, 2), "layers.0.ffn.w1.scale": torch.ones(1, 1)}
    for layer in range(cfg.num_layers):
        stored |= stored_layer(cfg, layer, **options)
    return stored


def save_sharded(stored: dict[str, torch.Tensor], folder: Path, shards: int = 3) -> dict[str, str]:
    """Writes tensors to files in turn, so that a weight and its scales lie apart; returns the index's map."""
    names = sorted(stored)
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in {*files.values()}:
        save_file({name: stored[name] for name in names if files[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": files}))
    return files


@pytest.mark.parametrize(
    ("suffix", "kind"),
    [(".scale", E8M0), (".scale", torch.uint8), (".weight_scale_inv", torch.float32)],
    ids=["e8m0", "uint8", "float32"],
)
def test_a_layer_loads(tmp_path: Path, suffix: str, kind: torch.dtype) -> None:
    cfg = wide_config()
    stored = whole(cfg, suffix=suffix, kind=kind)
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path / "model.safetensors")
    assert set(checkpoint.files) == set(stored)
    for layer, ratio in enumerate(cfg.compress_ratios):
        found = attention_weights(checkpoint, cfg, layer)
        wanted = layer_weights(cfg, ratio)
        assert list(found) == list(wanted)
        for plain, weight in wanted.items():
            name = f"layers.{layer}.attn.{weight.checkpoint}"
            value = stored[name] if name in stored else stored[f"{name}.weight"]
            if plain in FLOAT8:
                value = dequantise(value, stored[name + suffix])
            assert found[plain].dtype is value.dtype
            assert torch.equal(found[plain], value), plain


def test_shards_are_the_same_as_one_file(tmp_path: Path) -> None:
    cfg = wide_config()
    stored = whole(cfg)
    files = save_sharded(stored, tmp_path)
    (tmp_path / "one").mkdir()
    save_file(stored, tmp_path / "one" / "weights.safetensors")
    assert len({files["layers.1.attn.wo_a.weight"], files["layers.1.attn.wo_a.scale"]}) == 2
    by_folder, by_index, one = Checkpoint(tmp_path), Checkpoint(tmp_path / INDEX), Checkpoint(tmp_path / "one")
    for layer in range(cfg.num_layers):
        expected = attention_weights(one, cfg, layer)
        for checkpoint in (by_folder, by_index):
            found = attention_weights(checkpoint, cfg, layer)
            assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_layers_have_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    """`wo_a`, too, loses nothing in bfloat16: it has no more digits than float8."""
    cfg = wide_config()
    stored = whole(cfg)
    save_sharded(stored, tmp_path)
    layers = attention_layers(Checkpoint(tmp_path), cfg, dtype=dtype)
    assert [layer.ratio for layer in layers] == list(cfg.compress_ratios)
    for number, layer in enumerate(layers):
        name = f"layers.{number}.attn.wo_a"
        assert layer.wo_a.dtype is dtype
        assert torch.equal(layer.wo_a.float(), dequantise(stored[f"{name}.weight"], stored[f"{name}.scale"]))
        assert torch.equal(layer.sink, stored[f"layers.{number}.attn.attn_sink"])


def test_another_prefix(tmp_path: Path) -> None:
    cfg = small_config(0)
    save_file(
        {name.replace("layers.0", "mtp.0"): each for name, each in stored_layer(cfg, 0).items()},
        tmp_path / "a.safetensors",
    )
    assert len(attention_weights(Checkpoint(tmp_path), cfg, 0, prefix="mtp.{layer}.attn.")) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"wq_a.scale": None},
            r"wq_a.weight is float8: expected layers.0.attn.wq_a.weight_scale_inv or .*.scale, got neither",
        ),
        ({"wq_a.weight_scale_inv": torch.ones(2, 2)}, "are scales of the same weight"),
        (
            {"wq_a.scale": torch.ones(2, 3)},
            r"wq_a.weight with layers.0.attn.wq_a.scale: scales: .*\[2, 2\], got \[2, 3\]",
        ),
        (
            {"wq_a.weight": torch.zeros(136, 200)},
            "wq_a.scale: expected a float8_e4m3fn layers.0.attn.wq_a.weight, got float32",
        ),
        ({"wq_a.weight": None}, "wq_a.scale: expected a weight beside these scales, got none"),
        ({"wq_a.weight": None, "wq_a.scale": None}, r"all 8 of a layer of ratio 0 .*, got 7 of them: missing wq_a"),
        ({"kv_norm.weight": torch.ones(47)}, r"kv_norm.weight: expected \[48\], got \[47\]"),
        ({"q_norm.weight": torch.full((136,), torch.nan)}, r"q_norm.weight\[0\]: expected a finite number, got nan"),
        ({"wq_a.weight": torch.full((136, 200), torch.nan).to(E4M3)}, r"wq_a.weight\[0, 0\]: expected a finite number"),
        ({"wq_a.scale": torch.full((2, 2), 2.0**120)}, r"wq_a.weight\[\d+, \d+\]: expected a finite number, got -?inf"),
        ({"bias": torch.ones(3)}, r"unexpected layers.0.attn.bias float32 \[3\]"),
        (
            {"wo_b.weight": torch.zeros(200, 144, dtype=torch.int8), "wo_b.scale": None},
            "wo_b.weight: expected a float32",
        ),
    ],
    ids=[
        "no scales",
        "scales twice",
        "shape of scales",
        "scales of float32",
        "scales alone",
        "missing",
        "misshapen",
        "NaN",
        "float8 NaN",
        "infinite",
        "unexpected",
        "int8",
    ],
)
def test_faults_are_named(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    stored: dict[str, torch.Tensor | None] = {**stored_layer(wide_config(), 0)}
    stored |= {f"layers.0.attn.{name}": value for name, value in change.items()}
    path = tmp_path / "a.safetensors"
    save_file({name: value for name, value in stored.items() if value is not None}, path)
    with pytest.raises(ValueError, match=message) as raised:
        attention_weights(Checkpoint(path), wide_config(), 0)
    assert str(raised.value).startswith(f"{path}: ")


def test_layers_that_there_are_not(tmp_path: Path) -> None:
    save_file(stored_layer(wide_config(), 0), tmp_path / "a.safetensors")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(ValueError, match="layer: expected 0 to 2, got 3"):
        attention_weights(checkpoint, wide_config(), 3)
    with pytest.raises(ValueError, match=r"all 18 of a layer of ratio 4 below 'layers.1.attn.', got 0 of them"):
        attention_weights(checkpoint, wide_config(), 1)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="expected a safetensors file, an index of several or their folder, got nothing"
    ):
        Checkpoint(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"expected .* or one safetensors file, got 0 without an index"):
        Checkpoint(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"something else")
    with pytest.raises(ValueError, match="expected a safetensors file, got "):
        Checkpoint(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="got 2 without an index"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no", "expected JSON, got "),
        ("[]", 'expected "weight_map" with the file of each tensor, got none'),
        ('{"weight_map": {}}', 'expected "weight_map"'),
        ('{"weight_map": {"a": "gone.safetensors"}}', "expected the file 'gone.safetensors' beside it"),
        ('{"weight_map": {"a": "../here.safetensors"}}', "expected the file '../here.safetensors' beside it"),
    ],
    ids=["no json", "list", "empty", "no file", "outside"],
)
def test_indices_that_are_refused(tmp_path: Path, content: str, message: str) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "here.safetensors")
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / INDEX).write_text(content)
    with pytest.raises(ValueError, match=message):
        Checkpoint(folder)


def test_an_index_that_is_wrong_about_a_file(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"a": "a.safetensors", "layers.0.attn.b": "a.safetensors"}})
    )
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.below("a")["a"], torch.zeros(1))
    with pytest.raises(
        ValueError, match=r"a.safetensors: expected layers.0.attn.b, as the index says, got no such tensor"
    ):
        attention_weights(checkpoint, wide_config(), 0)


def test_a_model_with_attention_from_a_checkpoint(tmp_path: Path) -> None:
    """The rest of a model of transformers, with attention from files, is the model that has these weights itself."""
    pytest.importorskip("transformers", minversion="5.17", reason="no transformers with DeepSeek-V4")
    from dsv4_examples.hf_dsv4.configs import CONFIGS
    from dsv4_examples.hf_dsv4.engine import Engine
    from dsv4_examples.hf_dsv4.model import FlatModel

    example = CONFIGS["tiny"]
    hf = example.build()
    cfg = DSV4Config.from_hf(hf.config)
    stored = {}
    for layer, ratio in enumerate(cfg.compress_ratios):
        attention = hf.model.layers[layer].self_attn
        own = attention.state_dict()
        for plain, weight in layer_weights(cfg, ratio).items():
            key = next(key for key in own if key.removesuffix(".weight") == weight.transformers)
            name = f"layers.{layer}.attn.{weight.checkpoint}"
            if plain in FLOAT8:
                stored[f"{name}.weight"], stored[f"{name}.scale"] = quantise(own[key])
                own[key] = dequantise(stored[f"{name}.weight"], stored[f"{name}.scale"])
            else:
                stored[name] = own[key]
        attention.load_state_dict(own)
    save_sharded(stored, tmp_path)
    theirs = FlatModel.from_hf(hf)
    layers = attention_layers(Checkpoint(tmp_path), cfg, dtype=torch.float32)
    ours = FlatModel(hf, theirs.blocks, layers, cfg, impl="auto")
    outputs = []
    for model in (ours, theirs):
        engine = Engine(model, geom=example.geometry(), max_requests=1, max_len=160, chunk_size=140)
        request = engine.add([*range(100), *range(50)], 8)
        engine.run()
        outputs.append(request.output)
    assert outputs[0] == outputs[1]
    weights = [dict(model.layers[2].named_parameters()) for model in (ours, theirs)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
