"""Attention sizes, built in and read from Hugging Face configs."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest

from dsv4_backend.config import DSV4Config

CSA, HCA, SWA = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
FLASH, PRO = DSV4Config.v4_flash(), DSV4Config.v4_pro()

# The table and the schedules of spec/attention_math.md, section 1, and the YaRN constants of section 2.
SHARED_SIZES = dict(
    head_dim=512,
    rope_dim=64,
    o_lora_rank=1024,
    window=128,
    index_heads=64,
    index_head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    yarn_factor=16.0,
    yarn_beta_fast=32.0,
    yarn_beta_slow=1.0,
    yarn_original_max_position=65536,
    max_position=1048576,
    mtp_compress_ratio=0,
)
FLASH_SIZES = dict(hidden_size=4096, num_heads=64, q_lora_rank=1024, o_groups=8, index_topk=512)
PRO_SIZES = dict(hidden_size=7168, num_heads=128, q_lora_rank=1536, o_groups=16, index_topk=1024)
FLASH_LAYERS = {0: (0, 1), 4: tuple(range(2, 43, 2)), 128: tuple(range(3, 42, 2))}
PRO_LAYERS = {0: (), 4: tuple(range(2, 61, 2)), 128: (0, *range(1, 60, 2))}


def released(
    *, hidden: int, heads: int, q_lora: int, groups: int, topk: int, layers: int, ratios: list[int]
) -> dict[str, Any]:
    """The keys of a released config.json, some that are not about attention among them."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "compress_ratios": ratios,
        "compress_rope_theta": 160000,
        "hc_mult": 4,
        "head_dim": 512,
        "hidden_size": hidden,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": topk,
        "max_position_embeddings": 1048576,
        "model_type": "deepseek_v4",
        "n_routed_experts": 256,
        "num_attention_heads": heads,
        "num_hash_layers": 3,
        "num_hidden_layers": layers,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 1,
        "o_groups": groups,
        "o_lora_rank": 1024,
        "q_lora_rank": q_lora,
        "qk_rope_head_dim": 64,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "sliding_window": 128,
        "vocab_size": 129280,
    }


RELEASED_FLASH = released(
    hidden=4096, heads=64, q_lora=1024, groups=8, topk=512, layers=43, ratios=[0, 0, *[4, 128] * 20, 4, 0]
)
RELEASED_PRO = released(
    hidden=7168, heads=128, q_lora=1536, groups=16, topk=1024, layers=61, ratios=[128, 128, *[4, 128] * 29, 4, 0]
)
# What DeepseekV4Config(**RELEASED_FLASH).to_dict() of transformers 5.19.0 returns, without keys of other parts.
TRANSFORMERS_FLASH: dict[str, Any] = {
    "transformers_version": "5.19.0",
    "architectures": ["DeepseekV4ForCausalLM"],
    "dtype": None,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000,
    "layer_types": [SWA, SWA, *[CSA, HCA] * 20, CSA],
    "compress_rates": {CSA: 4, HCA: 128},
    "compress_rope_theta": 160000,
    "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
    "sliding_window": 128,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.125},
        "compress": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
            "rope_theta": 160000,
            "rope_type": "yarn",
            "partial_rotary_factor": 0.125,
            "attention_factor": 1.0,
        },
    },
    "partial_rotary_factor": 0.125,
    "attention_bias": False,
    "model_type": "deepseek_v4",
    "qk_rope_head_dim": 64,
}


class HasToDict:
    def __init__(self, result: object) -> None:
        self.result = result

    def to_dict(self) -> object:
        return self.result


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A deep copy with keys set. `a__b` is key b inside a; `...` removes the key."""
    config = copy.deepcopy(config)
    for path, value in changes.items():
        *parents, key = path.split("__")
        inner = config
        for parent in parents:
            inner = inner[parent]
        if value is ...:
            del inner[key]
        else:
            inner[key] = value
    return config


def refuses(message: str) -> Any:
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize(
    ("config", "sizes", "num_layers", "layers", "ratios"),
    [
        (FLASH, FLASH_SIZES, 43, FLASH_LAYERS, (4, 128)),
        (PRO, PRO_SIZES, 61, PRO_LAYERS, (4, 128)),
    ],
    ids=["flash", "pro"],
)
def test_built_in_configs(
    config: DSV4Config, sizes: dict[str, int], num_layers: int, layers: dict[int, tuple[int, ...]], ratios: tuple
) -> None:
    fields = dataclasses.asdict(config)
    assert fields.pop("compress_ratios") == config.compress_ratios
    assert fields == SHARED_SIZES | sizes
    assert config.num_layers == num_layers
    assert {ratio: config.layers_of(ratio) for ratio in layers} == layers
    assert config.ratios == ratios
    assert config.num_heads // config.o_groups == 8


def test_schedules_have_the_counts_of_the_spec() -> None:
    assert [len(FLASH.layers_of(ratio)) for ratio in (0, 4, 128)] == [2, 21, 20]
    assert [len(PRO.layers_of(ratio)) for ratio in (0, 4, 128)] == [0, 30, 31]


@pytest.mark.parametrize(
    ("compress_ratios", "ratios"),
    [((0,), ()), ([1, 0, 1], ()), ((128, 4, 0), (4, 128)), ((128, 1), (128,)), ((4, 4), (4,))],
    ids=str,
)
def test_ratios(compress_ratios: Any, ratios: tuple[int, ...]) -> None:
    config = dataclasses.replace(FLASH, compress_ratios=compress_ratios)
    assert config.ratios == ratios
    assert config.num_layers == len(compress_ratios)
    assert config.compress_ratios == tuple(0 if ratio == 1 else ratio for ratio in compress_ratios)
    layers = [config.layers_of(ratio) for ratio in (0, 4, 128)]
    assert sorted(sum(layers, ())) == list(range(config.num_layers))
    assert config.layers_of(1) == config.layers_of(0)


def test_the_mtp_layer_is_not_among_the_layers() -> None:
    config = dataclasses.replace(FLASH, compress_ratios=(0, 4), mtp_compress_ratio=128)
    assert (config.num_layers, config.ratios, config.layers_of(128)) == (2, (4,), ())
    assert dataclasses.replace(FLASH, mtp_compress_ratio=1).mtp_compress_ratio == 0


@pytest.mark.parametrize("ratio", [2, -4, 4.0, True, None], ids=repr)
def test_layers_of_another_ratio(ratio: Any) -> None:
    with refuses(f"ratio: expected 0, 4 or 128 (or 1, read as 0), got {ratio!r}"):
        FLASH.layers_of(ratio)


def test_a_config_is_a_value() -> None:
    assert DSV4Config.v4_flash() == FLASH != PRO
    assert len({FLASH, PRO, DSV4Config.v4_flash()}) == 2
    assert type(dataclasses.replace(FLASH, rope_theta=10000).rope_theta) is float
    with pytest.raises(dataclasses.FrozenInstanceError):
        FLASH.window = 64  # type: ignore[misc]


INTS = [field.name for field in dataclasses.fields(DSV4Config) if type(getattr(FLASH, field.name)) is int]
INTS.remove("mtp_compress_ratio")
FLOATS = [field.name for field in dataclasses.fields(DSV4Config) if type(getattr(FLASH, field.name)) is float]


@pytest.mark.parametrize("name", INTS)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "expected a positive number, got 0"),
        (-64, "expected a positive number, got -64"),
        (64.0, "expected an int, got 64.0"),
        ("64", "expected an int, got '64'"),
        (True, "expected an int, got True"),
        (None, "expected an int, got None"),
    ],
    ids=repr,
)
def test_sizes_are_positive_ints(name: str, value: Any, message: str) -> None:
    with refuses(f"{name}: {message}"):
        dataclasses.replace(FLASH, **{name: value})


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "expected a positive finite number, got 0"),
        (-1.5, "expected a positive finite number, got -1.5"),
        (float("inf"), "expected a positive finite number, got inf"),
        (float("nan"), "expected a positive finite number, got nan"),
        ("16", "expected a number, got '16'"),
        (True, "expected a number, got True"),
        (None, "expected a number, got None"),
    ],
    ids=repr,
)
def test_numbers_are_positive_and_finite(name: str, value: Any, message: str) -> None:
    with refuses(f"{name}: {message}"):
        dataclasses.replace(FLASH, **{name: value})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"rope_dim": 63}, "rope_dim: expected an even number, got 63"),
        ({"rope_dim": 514}, "rope_dim: expected at most head_dim 512, got 514"),
        ({"rope_dim": 130}, "rope_dim: expected at most index_head_dim 128, got 130"),
        ({"num_heads": 60}, "num_heads: expected a multiple of o_groups 8, got 60"),
        ({"o_groups": 128}, "num_heads: expected a multiple of o_groups 128, got 64"),
        ({"rope_theta": 1}, "rope_theta: expected a number above 1, got 1.0"),
        ({"compress_rope_theta": 0.5}, "compress_rope_theta: expected a number above 1, got 0.5"),
        ({"yarn_factor": 0.5}, "yarn_factor: expected at least 1, got 0.5"),
        ({"yarn_beta_slow": 33}, "yarn_beta_slow: expected at most yarn_beta_fast 32.0, got 33.0"),
        (
            {"compress_ratios": (0, 4, 2)},
            "compress_ratios[2]: expected 0, 4 or 128 (or 1, read as 0), got 2",
        ),
        (
            {"compress_ratios": (4.0,)},
            "compress_ratios[0]: expected 0, 4 or 128 (or 1, read as 0), got 4.0",
        ),
        (
            {"compress_ratios": (True,)},
            "compress_ratios[0]: expected 0, 4 or 128 (or 1, read as 0), got True",
        ),
        ({"compress_ratios": ()}, "compress_ratios: expected a list or tuple with an entry for each layer, got ()"),
        ({"compress_ratios": 4}, "compress_ratios: expected a list or tuple with an entry for each layer, got 4"),
        ({"compress_ratios": "4"}, "compress_ratios: expected a list or tuple with an entry for each layer, got '4'"),
        ({"mtp_compress_ratio": 8}, "mtp_compress_ratio: expected 0, 4 or 128 (or 1, read as 0), got 8"),
        ({"mtp_compress_ratio": None}, "mtp_compress_ratio: expected 0, 4 or 128 (or 1, read as 0), got None"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_sizes_fit_each_other(sizes: dict[str, Any], message: str) -> None:
    with refuses(message):
        dataclasses.replace(FLASH, **sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        {"rope_dim": 2},
        {"rope_dim": 128, "head_dim": 128},
        {"num_heads": 3, "o_groups": 3},
        {"index_topk": 1},
        {"window": 1},
        {"yarn_factor": 1.0, "yarn_beta_slow": 32.0},
    ],
    ids=str,
)
def test_unusual_sizes_are_allowed(sizes: dict[str, Any]) -> None:
    config = dataclasses.replace(FLASH, **sizes)
    assert {name: getattr(config, name) for name in sizes} == sizes


@pytest.mark.parametrize(("config", "expected"), [(RELEASED_FLASH, FLASH), (RELEASED_PRO, PRO)], ids=["flash", "pro"])
def test_from_released_config(config: dict[str, Any], expected: DSV4Config) -> None:
    before = copy.deepcopy(config)
    assert DSV4Config.from_hf(config) == expected
    assert DSV4Config.from_hf(HasToDict(config)) == expected
    assert config == before


def test_from_transformers() -> None:
    assert DSV4Config.from_hf(TRANSFORMERS_FLASH) == FLASH
    assert DSV4Config.from_hf(HasToDict(TRANSFORMERS_FLASH)) == FLASH


def test_every_key_goes_to_its_field() -> None:
    """The real sizes repeat numbers (64, 128, 1024), which would hide two keys that are swapped."""
    keys = dict(
        hidden_size=10, num_attention_heads=12, head_dim=40, qk_rope_head_dim=8, q_lora_rank=20, o_groups=3,
        o_lora_rank=22, sliding_window=24, index_topk=26, index_n_heads=28, index_head_dim=30, rms_norm_eps=0.5,
        rope_theta=50, compress_rope_theta=51, rope_scaling__factor=52, rope_scaling__beta_fast=54,
        rope_scaling__beta_slow=53, rope_scaling__original_max_position_embeddings=55, max_position_embeddings=56,
        num_hidden_layers=2, compress_ratios=[4, 0, 128],
    )  # fmt: skip
    fields = dict(
        hidden_size=10, num_heads=12, head_dim=40, rope_dim=8, q_lora_rank=20, o_groups=3, o_lora_rank=22, window=24,
        index_topk=26, index_heads=28, index_head_dim=30, rms_norm_eps=0.5, rope_theta=50, compress_rope_theta=51,
        yarn_factor=52, yarn_beta_fast=54, yarn_beta_slow=53, yarn_original_max_position=55, max_position=56,
        compress_ratios=(4, 0), mtp_compress_ratio=128,
    )  # fmt: skip
    assert dataclasses.asdict(DSV4Config.from_hf(changed(RELEASED_FLASH, **keys))) == fields


RATIOS = RELEASED_FLASH["compress_ratios"]
TYPES = TRANSFORMERS_FLASH["layer_types"]
FLAT_YARN = RELEASED_FLASH["rope_scaling"]
NESTED = TRANSFORMERS_FLASH["rope_parameters"]
SAME_AS_FLASH = {
    "no-mtp-entry": changed(RELEASED_FLASH, compress_ratios=RATIOS[:-1]),
    "ratio-1": changed(RELEASED_FLASH, compress_ratios=[1, 1, *RATIOS[2:-1], 1]),
    "tuple": changed(RELEASED_FLASH, compress_ratios=tuple(RATIOS)),
    "types-with-mtp": changed(TRANSFORMERS_FLASH, layer_types=[*TYPES, SWA]),
    "ratios-and-types": changed(RELEASED_FLASH, layer_types=TYPES),
    "no-rates": changed(TRANSFORMERS_FLASH, compress_rates=...),
    "rates-none": changed(TRANSFORMERS_FLASH, compress_rates=None),
    "released-layers-nested-rope": changed(RELEASED_FLASH, rope_scaling=..., rope_parameters=NESTED),
    "rope-scaling-nested": changed(RELEASED_FLASH, rope_scaling=NESTED),
    "rope-parameters-flat": changed(TRANSFORMERS_FLASH, rope_parameters=FLAT_YARN),
    "rope-scaling-none": changed(TRANSFORMERS_FLASH, rope_scaling=None),
    "rope-scaling-first": changed(RELEASED_FLASH, rope_parameters={"rope_type": "default"}),
    "rope-type-key": changed(RELEASED_FLASH, rope_scaling__type=..., rope_scaling__rope_type="yarn"),
    "attention-factor-1": changed(RELEASED_FLASH, rope_scaling__attention_factor=1),
    # The trap of spec section 7: transformers would scale cos and sin by 1.2773; DeepSeek-V4 never does.
    "no-attention-factor": changed(TRANSFORMERS_FLASH, rope_parameters__compress__attention_factor=...),
    "nested-bases-win": changed(TRANSFORMERS_FLASH, rope_theta=5, compress_rope_theta=6),
    "no-flat-bases": changed(TRANSFORMERS_FLASH, rope_theta=..., compress_rope_theta=...),
    "rotary-factor-only": changed(TRANSFORMERS_FLASH, qk_rope_head_dim=...),
    "rope-head-dim-only": changed(TRANSFORMERS_FLASH, partial_rotary_factor=...),
    "no-fixed-keys": changed(RELEASED_FLASH, model_type=..., num_key_value_heads=..., attention_bias=...),
}


@pytest.mark.parametrize("config", SAME_AS_FLASH.values(), ids=SAME_AS_FLASH)
def test_other_ways_of_saying_flash(config: dict[str, Any]) -> None:
    assert DSV4Config.from_hf(config) == FLASH


@pytest.mark.parametrize(
    "config",
    [
        changed(RELEASED_FLASH, compress_ratios=[*RATIOS[:-1], 4]),
        changed(TRANSFORMERS_FLASH, layer_types=[*TYPES, CSA]),
        changed(RELEASED_FLASH, compress_ratios=RATIOS[:-1], layer_types=[*TYPES, CSA]),
        changed(RELEASED_FLASH, compress_ratios=[*RATIOS[:-1], 4], layer_types=TYPES),
    ],
    ids=["ratios", "types", "only-types-have-it", "only-ratios-have-it"],
)
def test_the_mtp_layer_comes_last(config: dict[str, Any]) -> None:
    assert DSV4Config.from_hf(config) == dataclasses.replace(FLASH, mtp_compress_ratio=4)


WHY = (
    " (the layer schedule has no default: the one that transformers makes up for 61 layers differs from that of the "
    "released DeepSeek-V4-Pro in 59)"
)
REQUIRED = (
    *("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window"),
    *("index_topk", "index_n_heads", "index_head_dim", "rms_norm_eps", "max_position_embeddings", "rope_theta"),
    *("compress_rope_theta", "num_hidden_layers"),
)
# What a config lacks, and the names that the message gives it.
MISSING = [
    *((RELEASED_FLASH, {key: ...}, key) for key in REQUIRED),
    *((RELEASED_FLASH, {f"rope_scaling__{key}": ...}, f"rope_scaling.{key}") for key in FLAT_YARN if key != "type"),
    *(
        (TRANSFORMERS_FLASH, {f"rope_parameters__{label}__rope_theta": ...}, f"rope_parameters.{label}.rope_theta")
        for label in ("main", "compress")
    ),
    (TRANSFORMERS_FLASH, {"rope_parameters__compress__factor": ...}, "rope_parameters.compress.factor"),
    (RELEASED_FLASH, {"rope_scaling": ...}, "rope_scaling or rope_parameters"),
    (RELEASED_FLASH, {"qk_rope_head_dim": ...}, "qk_rope_head_dim or partial_rotary_factor"),
    (RELEASED_FLASH, {"hidden_size": None}, "hidden_size"),
    (RELEASED_FLASH, {"rope_scaling__factor": None}, "rope_scaling.factor"),
    (
        RELEASED_FLASH,
        {"rope_theta": ..., "o_groups": ..., "head_dim": ..., "rope_scaling__factor": ...},
        "head_dim, o_groups, rope_theta, rope_scaling.factor",
    ),
    (RELEASED_FLASH, {"compress_ratios": ...}, "compress_ratios or layer_types"),
    (TRANSFORMERS_FLASH, {"layer_types": None}, "compress_ratios or layer_types"),
    (
        RELEASED_FLASH,
        {"compress_ratios": ..., "num_hidden_layers": ...},
        "num_hidden_layers, compress_ratios or layer_types",
    ),
]


@pytest.mark.parametrize(("config", "changes", "names"), MISSING, ids=[", ".join(changes) for _, changes, _ in MISSING])
def test_missing_keys_are_named_together(config: dict[str, Any], changes: dict[str, Any], names: str) -> None:
    config = changed(config, **changes)
    why = WHY if "layer_types" in names else ""
    with refuses(f"config: expected also the keys {names}, got only {', '.join(config)}{why}"):
        DSV4Config.from_hf(config)


def test_an_empty_config_lacks_everything() -> None:
    with pytest.raises(ValueError, match=r"^config: expected also the keys hidden_size, .*, got only none \(the layer"):
        DSV4Config.from_hf({})


def test_the_reason_for_no_default_schedule() -> None:
    """What transformers takes for 61 layers (spec section 7) against the released schedule."""
    default = (128, 128, 128, *(4, 128) * 29)
    assert len(default) == PRO.num_layers == 61
    assert sum(a != b for a, b in zip(default, PRO.compress_ratios, strict=True)) == 59


REFUSED = [
    (RELEASED_FLASH, {"model_type": "deepseek_v3"}, "model_type: expected 'deepseek_v4' as in DeepSeek-V4, got 'dee"),
    ({"model_type": "llama"}, {}, "model_type: expected 'deepseek_v4' as in DeepSeek-V4, got 'llama'"),
    (RELEASED_FLASH, {"num_key_value_heads": 8}, "num_key_value_heads: expected 1 as in DeepSeek-V4, got 8"),
    (RELEASED_FLASH, {"attention_bias": True}, "attention_bias: expected False as in DeepSeek-V4, got True"),
    # The layer schedule.
    (
        RELEASED_FLASH,
        {"compress_ratios": RATIOS[:-2]},
        "compress_ratios: expected 43 entries, or 44 with the MTP layer last, got 42",
    ),
    (
        RELEASED_FLASH,
        {"compress_ratios": [*RATIOS, 0]},
        "compress_ratios: expected 43 entries, or 44 with the MTP layer last, got 45",
    ),
    (
        TRANSFORMERS_FLASH,
        {"layer_types": TYPES[:-1]},
        "layer_types: expected 43 entries, or 44 with the MTP layer last, got 42",
    ),
    (
        RELEASED_FLASH,
        {"compress_ratios": [0, 2, *RATIOS[2:]]},
        "compress_ratios[1]: expected 0, 4 or 128 (or 1, read as 0), got 2",
    ),
    (RELEASED_FLASH, {"compress_ratios": []}, "compress_ratios: expected a list or tuple with an entry for each layer"),
    (RELEASED_FLASH, {"compress_ratios": 4}, "compress_ratios: expected a list or tuple with an entry for each layer"),
    (TRANSFORMERS_FLASH, {"layer_types": CSA}, "layer_types: expected a list or tuple with an entry for each layer"),
    (
        TRANSFORMERS_FLASH,
        {"layer_types": [SWA, "full_attention", *TYPES[2:]]},
        f"layer_types[1]: expected one of {SWA}, {CSA}, {HCA}, got 'full_attention'",
    ),
    (TRANSFORMERS_FLASH, {"layer_types": [[], *TYPES[1:]]}, f"layer_types[0]: expected one of {SWA}, {CSA}, {HCA}, go"),
    (
        RELEASED_FLASH,
        {"layer_types": [SWA, SWA, HCA, *TYPES[3:]]},
        "layer_types[2]: expected ratio 4 as in compress_ratios, got 128",
    ),
    (
        RELEASED_FLASH,
        {"layer_types": [*TYPES, CSA]},
        "layer_types[43]: expected ratio 0 as in compress_ratios, got 4",
    ),
    (TRANSFORMERS_FLASH, {"compress_rates": {CSA: 8, HCA: 128}}, "compress_rates: expected {'sliding_attention': 0, "),
    (TRANSFORMERS_FLASH, {"compress_rates": {CSA: [4]}}, "compress_rates: expected {'sliding_attention': 0, "),
    (TRANSFORMERS_FLASH, {"compress_rates": {"full_attention": 1}}, "compress_rates: expected {'sliding_attention': 0"),
    (TRANSFORMERS_FLASH, {"compress_rates": [4, 128]}, "compress_rates: expected a mapping, got [4, 128]"),
    (RELEASED_FLASH, {"num_hidden_layers": 43.0}, "num_hidden_layers: expected an int, got 43.0"),
    (RELEASED_FLASH, {"num_hidden_layers": 0}, "num_hidden_layers: expected a positive number, got 0"),
    # Rope.
    (RELEASED_FLASH, {"rope_scaling": "yarn"}, "rope_scaling: expected a mapping, got 'yarn'"),
    (TRANSFORMERS_FLASH, {"rope_parameters__main": ...}, "rope_parameters.main: expected a mapping, got None"),
    (TRANSFORMERS_FLASH, {"rope_parameters__compress": 3}, "rope_parameters.compress: expected a mapping, got 3"),
    (
        # The bug of SGLang 0.5.16 (spec section 7, row 1), as a config.
        TRANSFORMERS_FLASH,
        {"rope_parameters__main__rope_type": "yarn"},
        "rope_parameters.main.rope_type: expected 'default' as in DeepSeek-V4, got 'yarn'",
    ),
    (
        # What DeepseekV4Config() says when nobody gave it rope parameters.
        TRANSFORMERS_FLASH,
        {"rope_parameters__compress": {"rope_theta": 160000.0, "rope_type": "default", "partial_rotary_factor": 0.125}},
        "rope_parameters.compress.rope_type: expected 'yarn' as in DeepSeek-V4, got 'default'",
    ),
    (
        RELEASED_FLASH,
        {"rope_scaling__type": ...},
        "rope_scaling.rope_type: expected 'yarn' as in DeepSeek-V4, got 'default'",
    ),
    (
        RELEASED_FLASH,
        {"rope_scaling__type": "linear"},
        "rope_scaling.rope_type: expected 'yarn' as in DeepSeek-V4, got 'linear'",
    ),
    (
        TRANSFORMERS_FLASH,
        {"rope_parameters__compress__attention_factor": 1.2773},
        "rope_parameters.compress.attention_factor: expected 1.0 as in DeepSeek-V4, got 1.2773",
    ),
    (
        RELEASED_FLASH,
        {"rope_scaling__truncate": False},
        "rope_scaling.truncate: expected True as in DeepSeek-V4, got False",
    ),
    (RELEASED_FLASH, {"qk_rope_head_dim": 64.0}, "qk_rope_head_dim: expected an int, got 64.0"),
    (
        TRANSFORMERS_FLASH,
        {"qk_rope_head_dim": 32},
        "qk_rope_head_dim: expected partial_rotary_factor 0.125 of head_dim 512, which is 64, got 32",
    ),
    (TRANSFORMERS_FLASH, {"head_dim": "512"}, "head_dim: expected an int, got '512'"),
    (TRANSFORMERS_FLASH, {"partial_rotary_factor": "x"}, "partial_rotary_factor: expected a number, got 'x'"),
    # A rule of the class itself, under the name of its field.
    (RELEASED_FLASH, {"index_n_heads": 0}, "index_heads: expected a positive number, got 0"),
    (RELEASED_FLASH, {"rope_scaling__factor": "16"}, "yarn_factor: expected a number, got '16'"),
]


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    REFUSED,
    ids=[f"{n}-{message.split(':')[0]}" for n, (*_, message) in enumerate(REFUSED)],
)
def test_refused_configs(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        DSV4Config.from_hf(changed(config, **changes))


@pytest.mark.parametrize(
    ("config", "kind"),
    [(None, "NoneType"), ([("model_type", "deepseek_v4")], "list"), ("config.json", "str"), (HasToDict([]), "list")],
    ids=["none", "list", "path", "to-dict-list"],
)
def test_what_is_not_a_config(config: object, kind: str) -> None:
    with refuses(f"config: expected a mapping or an object with to_dict(), got {kind}"):
        DSV4Config.from_hf(config)
