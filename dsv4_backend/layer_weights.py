"""The weights of an attention layer: shapes, and names in goldens, in released checkpoints and in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from dsv4_backend.config import DSV4Config

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Weight(NamedTuple):
    """One weight.

    Attributes:
        shape: [out, in] of a projection, which has no bias.
        checkpoint: its name in DeepSeek's checkpoints, and SGLang's, below `attn.`.
        transformers: its name in transformers, below `self_attn.`.
        float32: kept as float32, whatever the layer's dtype: norms, position biases and the sink.
    """

    shape: tuple[int, ...]
    checkpoint: str
    transformers: str
    float32: bool = False


def layer_weights(cfg: DSV4Config, ratio: int) -> dict[str, Weight]:
    """The weights of a layer of `ratio`, by plain name.

    Source: spec/attention_math.md, section 1.
    """
    hidden, dim, latent = cfg.hidden_size, cfg.head_dim, cfg.q_lora_rank
    heads, groups, rank = cfg.num_heads, cfg.o_groups, cfg.o_lora_rank
    found = {
        "wq_a": Weight((latent, hidden), "wq_a", "q_a_proj"),
        "q_norm": Weight((latent,), "q_norm", "q_a_norm", True),
        "wq_b": Weight((heads * dim, latent), "wq_b", "q_b_proj"),
        "wkv": Weight((dim, hidden), "wkv", "kv_proj"),
        "kv_norm": Weight((dim,), "kv_norm", "kv_norm", True),
        "sink": Weight((heads,), "attn_sink", "sinks", True),
        "wo_a": Weight((groups * rank, heads * dim // groups), "wo_a", "o_a_proj"),
        "wo_b": Weight((hidden, groups * rank), "wo_b", "o_b_proj"),
    }
    if ratio:
        found |= _compressor("comp", "compressor", "compressor", ratio, dim, hidden)
    if ratio == 4:
        heads, dim, inner = cfg.index_heads, cfg.index_head_dim, "compressor.indexer"
        found["idx_wq_b"] = Weight((heads * dim, latent), "indexer.wq_b", f"{inner}.q_b_proj")
        found["idx_wproj"] = Weight((heads, hidden), "indexer.weights_proj", f"{inner}.scorer.weights_proj")
        found |= _compressor("idx_comp", "indexer.compressor", inner, ratio, dim, hidden)
    return found


def _compressor(plain: str, checkpoint: str, transformers: str, ratio: int, dim: int, hidden: int) -> dict[str, Weight]:
    width = {4: 2, 128: 1}[ratio] * dim
    return {
        f"{plain}_wkv": Weight((width, hidden), f"{checkpoint}.wkv", f"{transformers}.kv_proj"),
        f"{plain}_wgate": Weight((width, hidden), f"{checkpoint}.wgate", f"{transformers}.gate_proj"),
        f"{plain}_ape": Weight((ratio, width), f"{checkpoint}.ape", f"{transformers}.position_bias", True),
        f"{plain}_norm": Weight((dim,), f"{checkpoint}.norm", f"{transformers}.kv_norm", True),
    }


def collect_weights(
    weights: Mapping[str, torch.Tensor], cfg: DSV4Config, ratio: int, prefix: str = ""
) -> dict[str, torch.Tensor]:
    """The weights of one layer by plain name, found under any of their names.

    Args:
        weights: tensors by name, with or without a last `.weight`.
        cfg: the model.
        ratio: compression ratio of the layer.
        prefix: what the layer's names begin with, such as "layers.3.attn." or "model.layers.3.self_attn."; names
            without it belong to something else and are left alone.

    Raises:
        ValueError: `weights` is no mapping; or a weight is missing, given twice, of another shape, or no float32,
            bfloat16 or float16 tensor; or a name is none of the layer's. The message lists all of these.
    """
    if not isinstance(weights, Mapping):
        raise ValueError(f"weights: expected a mapping of names to tensors, got {type(weights).__name__}")
    wanted = layer_weights(cfg, ratio)
    plain = {name: key for key, each in wanted.items() for name in (key, each.checkpoint, each.transformers)}
    found: dict[str, tuple[str, torch.Tensor]] = {}
    problems = []
    for full, tensor in weights.items():
        if not full.startswith(prefix):
            continue
        name = full.removeprefix(prefix).removesuffix(".weight")
        key = plain.get(name)
        if key is None:
            problems.append(f"unexpected {full} {_described(tensor)}")
        elif key in found:
            problems.append(f"{found[key][0]} and {full} are the same weight")
        else:
            found[key] = full, tensor
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FLOATS:
                problems.append(f"{full}: expected a float32, bfloat16 or float16 tensor, got {_described(tensor)}")
            elif tuple(tensor.shape) != wanted[key].shape:
                problems.append(f"{full}: expected {list(wanted[key].shape)}, got {list(tensor.shape)}")
    for key, each in wanted.items():
        if key not in found:
            names = " or ".join(dict.fromkeys((key, each.checkpoint, each.transformers)))
            problems.append(f"missing {names} {list(each.shape)}")
    if problems:
        where = f" below {prefix!r}" if prefix else ""
        raise ValueError(
            f"weights: expected all {len(wanted)} of a layer of ratio {ratio}{where}, got {len(found)} of them: "
            + "; ".join(problems)
        )
    return {key: found[key][1] for key in wanted}


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"({type(value).__name__})"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
