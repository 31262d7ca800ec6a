"""Sizes of DeepSeek-V4 attention, built in or read from a Hugging Face config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_RATIO_OF_LAYER_TYPE = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
_INTS = (
    *("hidden_size", "num_heads", "head_dim", "rope_dim", "q_lora_rank", "o_groups", "o_lora_rank", "window"),
    *("index_topk", "index_heads", "index_head_dim", "yarn_original_max_position", "max_position"),
)
_FLOATS = ("rms_norm_eps", "rope_theta", "compress_rope_theta", "yarn_factor", "yarn_beta_fast", "yarn_beta_slow")

# Fields and the keys they are read from.
_HF_KEYS = {
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "head_dim": "head_dim",
    "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "window": "sliding_window",
    "index_topk": "index_topk",
    "index_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "max_position": "max_position_embeddings",
}
_HF_YARN_KEYS = {
    "yarn_factor": "factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_original_max_position": "original_max_position_embeddings",
}
# What the attention takes for granted: a config may leave these keys out, but not say something else.
_HF_FIXED = {"model_type": "deepseek_v4", "num_key_value_heads": 1, "attention_bias": False}
_HF_YARN_FIXED = {"attention_factor": 1.0, "truncate": True}
_HF_SCHEDULES = ("compress_ratios", "layer_types")
_WHY_NO_SCHEDULE = (
    " (the layer schedule has no default: the one that transformers makes up for 61 layers differs from that of the "
    "released DeepSeek-V4-Pro in 59)"
)


@dataclass(frozen=True, kw_only=True)
class DSV4Config:
    """Sizes of the attention of a DeepSeek-V4 model. The defaults are what V4-Flash and V4-Pro have in common.

    Args:
        hidden_size: channels of a hidden state.
        num_heads: query heads; a multiple of `o_groups`. Keys and values are one head.
        head_dim: channels of a query head, and of the latent vector that is key and value at once.
        rope_dim: channels that rotate, the last ones of `head_dim` and of `index_head_dim`; even.
        q_lora_rank: channels of the query latent.
        o_groups: groups of heads in the output projection.
        o_lora_rank: channels that the output projection gives each group.
        window: tokens that a query sees through the sliding window, itself included.
        index_topk: compressed entries that the indexer selects for a query, at most.
        index_heads: query heads of the indexer.
        index_head_dim: channels of an indexer head.
        rms_norm_eps: what every RMS norm adds to the mean square.
        rope_theta: rope base of layers of ratio 0, which have no YaRN; above 1, as the next one.
        compress_rope_theta: rope base of layers of ratio 4 and 128, for all that rotates in them, always with YaRN.
        yarn_factor: what YaRN divides the lowest frequencies by; at least 1.
        yarn_beta_fast: rotations over `yarn_original_max_position` from which a frequency stays as it is.
        yarn_beta_slow: rotations up to which a frequency is divided by the whole factor; at most `yarn_beta_fast`.
        yarn_original_max_position: tokens of the context before YaRN. YaRN scales neither cos and sin nor the softmax.
        max_position: tokens of the longest sequence.
        compress_ratios: tokens a compressed entry stands for, one number a decoder layer: 4 (sparse, with an indexer),
            128 (dense) or 0 (sliding window only). 1 is read as 0. Any sequence; kept as a tuple.
        mtp_compress_ratio: the same for the next-token (MTP) layer, which `compress_ratios` leaves out.

    Raises:
        ValueError: a number is of the wrong type, not positive, or breaks one of the rules above.

    Source: spec/attention_math.md, sections 1 ("Notation and sizes") and 2 ("Rotary embedding").
    """

    hidden_size: int
    num_heads: int
    head_dim: int = 512
    rope_dim: int = 64
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int = 1024
    window: int = 128
    index_topk: int
    index_heads: int = 64
    index_head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn_factor: float = 16.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_original_max_position: int = 65536
    max_position: int = 1048576
    compress_ratios: tuple[int, ...]
    mtp_compress_ratio: int = 0

    def __post_init__(self) -> None:
        for name in _INTS:
            _expect_positive_int(name, getattr(self, name))
        for name in _FLOATS:
            object.__setattr__(self, name, _expect_positive_float(name, getattr(self, name)))
        for name in ("rope_theta", "compress_rope_theta"):
            if getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a number above 1, got {getattr(self, name)}")
        if self.yarn_factor < 1:
            raise ValueError(f"yarn_factor: expected at least 1, got {self.yarn_factor}")
        if self.yarn_beta_slow > self.yarn_beta_fast:
            raise ValueError(
                f"yarn_beta_slow: expected at most yarn_beta_fast {self.yarn_beta_fast}, got {self.yarn_beta_slow}"
            )
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim: expected an even number, got {self.rope_dim}")
        for name in ("head_dim", "index_head_dim"):
            if self.rope_dim > getattr(self, name):
                raise ValueError(f"rope_dim: expected at most {name} {getattr(self, name)}, got {self.rope_dim}")
        if self.num_heads % self.o_groups:
            raise ValueError(f"num_heads: expected a multiple of o_groups {self.o_groups}, got {self.num_heads}")
        object.__setattr__(self, "compress_ratios", _read_ratios("compress_ratios", self.compress_ratios))
        object.__setattr__(self, "mtp_compress_ratio", _read_ratio("mtp_compress_ratio", self.mtp_compress_ratio))

    @classmethod
    def v4_flash(cls) -> DSV4Config:
        """DeepSeek-V4-Flash. Source: spec/attention_math.md, section 1."""
        return cls(
            hidden_size=4096,
            num_heads=64,
            q_lora_rank=1024,
            o_groups=8,
            index_topk=512,
            compress_ratios=(0, 0, *(4, 128) * 20, 4),
        )

    @classmethod
    def v4_pro(cls) -> DSV4Config:
        """DeepSeek-V4-Pro. Source: spec/attention_math.md, section 1."""
        return cls(
            hidden_size=7168,
            num_heads=128,
            q_lora_rank=1536,
            o_groups=16,
            index_topk=1024,
            compress_ratios=(128, 128, *(4, 128) * 29, 4),
        )

    @classmethod
    def from_hf(cls, config: object) -> DSV4Config:
        """The sizes in a Hugging Face config of `DeepseekV4ForCausalLM`.

        Args:
            config: a mapping, or an object whose `to_dict()` gives one, such as transformers' `DeepseekV4Config`. Keys
                that are not about attention are ignored, and nothing is taken from a default: see below.

        What a config may say in more than one way:
            - layers: `compress_ratios`, or `layer_types` by name; both must agree. An entry after `num_hidden_layers`
              of them is the MTP layer; without it that layer has ratio 0.
            - rope: `rope_theta` and `compress_rope_theta` beside `rope_scaling` (or `rope_parameters`), or either of
              these with "main" and "compress" inside. Nested bases hide those beside them, as in transformers.
            - rotating channels: `qk_rope_head_dim`, or `partial_rotary_factor` of `head_dim`; both must agree.

        Raises:
            ValueError: it is the config of another model; keys are missing, all of which are named; a way of saying
                contradicts another; compressed layers have no YaRN, or one that scales cos and sin; or the sizes break
                a rule of `DSV4Config`, whose names the message then uses.

        Source: keys of the released config.json and of transformers 5.19; spec/attention_math.md, section 7
        ("HF-internal problems") for what is refused.
        """
        source = _read_mapping(config)
        for key, expected in _HF_FIXED.items():
            if source.get(key) not in (None, expected):
                raise ValueError(f"{key}: expected {expected!r} as in DeepSeek-V4, got {source[key]!r}")
        missing: list[str] = []
        values = _take(_HF_KEYS, source, "", missing) | _take_rope(source, missing)
        for keys in (("qk_rope_head_dim", "partial_rotary_factor"), ("num_hidden_layers",), _HF_SCHEDULES):
            if all(source.get(key) is None for key in keys):
                missing.append(" or ".join(keys))
        if missing:
            why = _WHY_NO_SCHEDULE if " or ".join(_HF_SCHEDULES) in missing else ""
            given = ", ".join(map(str, source)) or "none"
            raise ValueError(f"config: expected also the keys {', '.join(missing)}, got only {given}{why}")
        ratios, mtp_ratio = _read_schedule(source)
        return cls(**values, rope_dim=_read_rope_dim(source), compress_ratios=ratios, mtp_compress_ratio=mtp_ratio)

    @property
    def num_layers(self) -> int:
        """Decoder layers, without the MTP layer."""
        return len(self.compress_ratios)

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratios among the decoder layers, ascending, without 0."""
        return tuple(sorted({*self.compress_ratios} - {0}))

    def layers_of(self, ratio: int) -> tuple[int, ...]:
        """Indices of the decoder layers with this ratio, ascending; 0 gives those with a sliding window only.

        Raises:
            ValueError: there is no such ratio in DeepSeek-V4.
        """
        ratio = _read_ratio("ratio", ratio)
        return tuple(layer for layer, other in enumerate(self.compress_ratios) if other == ratio)


def _expect_positive_int(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}: expected an int, got {value!r}")
    if value <= 0:
        raise ValueError(f"{name}: expected a positive number, got {value}")
    return value


def _expect_positive_float(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}: expected a number, got {value!r}")
    if not (0 < value < math.inf):
        raise ValueError(f"{name}: expected a positive finite number, got {value}")
    return float(value)


def _expect_mapping(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: expected a mapping, got {value!r}")
    return value


def _expect_list(name: str, value: object) -> list | tuple:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{name}: expected a list or tuple with an entry for each layer, got {value!r}")
    return value


def _read_ratio(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value not in (0, 1, 4, 128):
        raise ValueError(f"{name}: expected 0, 4 or 128 (or 1, read as 0), got {value!r}")
    return 0 if value == 1 else value


def _read_ratios(name: str, value: object) -> tuple[int, ...]:
    return tuple(_read_ratio(f"{name}[{layer}]", ratio) for layer, ratio in enumerate(_expect_list(name, value)))


def _read_layer_types(name: str, value: object) -> tuple[int, ...]:
    for layer, kind in enumerate(_expect_list(name, value)):
        if kind not in tuple(_RATIO_OF_LAYER_TYPE):
            raise ValueError(f"{name}[{layer}]: expected one of {', '.join(_RATIO_OF_LAYER_TYPE)}, got {kind!r}")
    return tuple(_RATIO_OF_LAYER_TYPE[kind] for kind in _expect_list(name, value))


def _read_mapping(config: object) -> Mapping[str, Any]:
    if not isinstance(config, Mapping) and callable(to_dict := getattr(config, "to_dict", None)):
        config = to_dict()
    if not isinstance(config, Mapping):
        raise ValueError(f"config: expected a mapping or an object with to_dict(), got {type(config).__name__}")
    return config


def _take(keys: Mapping[str, str], source: Mapping[str, Any], path: str, missing: list[str]) -> dict[str, Any]:
    """The fields of `keys`, read from their keys of `source`; `missing` gains those that are absent or None."""
    missing.extend(path + key for key in keys.values() if source.get(key) is None)
    return {field: source.get(key) for field, key in keys.items()}


def _take_rope(source: Mapping[str, Any], missing: list[str]) -> dict[str, Any]:
    """The fields about rope, flat or nested; like `_take` otherwise."""
    # transformers, too, prefers rope_scaling where it finds both.
    name = "rope_parameters" if source.get("rope_scaling") is None else "rope_scaling"
    params = source.get(name)
    flat = {"rope_theta": "rope_theta", "compress_rope_theta": "compress_rope_theta"}
    if params is None:
        missing.append("rope_scaling or rope_parameters")
        return _take(flat, source, "", missing)
    yarn = _expect_mapping(name, params)
    if "main" in yarn or "compress" in yarn:
        main_name, name = f"{name}.main", f"{name}.compress"
        main, yarn = _expect_mapping(main_name, yarn.get("main")), _expect_mapping(name, yarn.get("compress"))
        _expect_rope_type(main_name, main, "default")
        values = _take({"rope_theta": "rope_theta"}, main, f"{main_name}.", missing)
        values |= _take({"compress_rope_theta": "rope_theta"}, yarn, f"{name}.", missing)
    else:
        values = _take(flat, source, "", missing)
    _expect_rope_type(name, yarn, "yarn")
    for key, expected in _HF_YARN_FIXED.items():
        if yarn.get(key) not in (None, expected):
            raise ValueError(f"{name}.{key}: expected {expected} as in DeepSeek-V4, got {yarn[key]!r}")
    return values | _take(_HF_YARN_KEYS, yarn, f"{name}.", missing)


def _expect_rope_type(name: str, params: Mapping[str, Any], expected: str) -> None:
    # "type" is the older key. transformers reads neither as "default".
    rope_type = params.get("rope_type", params.get("type", "default"))
    if rope_type != expected:
        raise ValueError(f"{name}.rope_type: expected {expected!r} as in DeepSeek-V4, got {rope_type!r}")


def _read_rope_dim(source: Mapping[str, Any]) -> int:
    """`qk_rope_head_dim`, or what transformers makes of `partial_rotary_factor`."""
    rope_dim, factor = source.get("qk_rope_head_dim"), source.get("partial_rotary_factor")
    if factor is None:
        return _expect_positive_int("qk_rope_head_dim", rope_dim)
    head_dim = _expect_positive_int("head_dim", source["head_dim"])
    derived = int(head_dim * _expect_positive_float("partial_rotary_factor", factor))
    if rope_dim not in (None, derived):
        raise ValueError(
            f"qk_rope_head_dim: expected partial_rotary_factor {factor} of head_dim {head_dim}, which is {derived}, "
            f"got {rope_dim!r}"
        )
    return derived


def _read_schedule(source: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """Ratios of the decoder layers, and that of the MTP layer."""
    num_layers = _expect_positive_int("num_hidden_layers", source["num_hidden_layers"])
    rates = source.get("compress_rates")
    if rates is not None and not _RATIO_OF_LAYER_TYPE.items() >= _expect_mapping("compress_rates", rates).items():
        raise ValueError(f"compress_rates: expected {_RATIO_OF_LAYER_TYPE} or a part of it, got {rates}")
    readers = zip(_HF_SCHEDULES, (_read_ratios, _read_layer_types), strict=True)
    lists = {name: read(name, source[name]) for name, read in readers if source.get(name) is not None}
    for name, ratios in lists.items():
        if len(ratios) not in (num_layers, num_layers + 1):
            raise ValueError(
                f"{name}: expected {num_layers} entries, or {num_layers + 1} with the MTP layer last, got {len(ratios)}"
            )
    for layer, ratios in enumerate(zip(*lists.values(), strict=False)):
        if len(set(ratios)) > 1:
            raise ValueError(f"layer_types[{layer}]: expected ratio {ratios[0]} as in compress_ratios, got {ratios[1]}")
    longest = max(lists.values(), key=len)
    return longest[:num_layers], (*longest, 0)[num_layers]
