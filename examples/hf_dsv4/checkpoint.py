"""Attention weights from a checkpoint in the released format: safetensors files, projections in float8 blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dsv4_backend import DSV4Attention, DSV4Config
from dsv4_backend.fp8_blocks import dequantise
from dsv4_backend.layer_weights import collect_weights

INDEX = "model.safetensors.index.json"
SCALE_SUFFIXES = (".weight_scale_inv", ".scale")
"""What a weight's scales may end in, in place of its own `.weight`. Both mean the same: factors to multiply by."""
FLOAT8 = torch.float8_e4m3fn
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint:
    """The tensors of a checkpoint by name. Files are opened when a tensor is asked for.

    Args:
        path: a safetensors file; an index (`*.index.json`, whose "weight_map" names the file of each tensor, beside the
            index); or a folder that has `model.safetensors.index.json` or else a single safetensors file.

    Attributes:
        files: the file of each tensor.

    Raises:
        ValueError: there is no such file, it is none of the above, or the index names a file that is not there.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        found = _find(self.path)
        self.files: Mapping[str, Path]
        if found.suffix == ".json":
            self.files = _read_index(found)
        else:
            with _open(found) as file:
                self.files = dict.fromkeys(file.keys(), found)

    def below(self, prefix: str) -> dict[str, torch.Tensor]:
        """All tensors whose names begin with `prefix`, as they are stored, on the CPU.

        Raises:
            ValueError: a file cannot be read or lacks a tensor that the index says it has.
        """
        by_file: dict[Path, list[str]] = {}
        for name, path in self.files.items():
            if name.startswith(prefix):
                by_file.setdefault(path, []).append(name)
        tensors: dict[str, torch.Tensor] = {}
        for path, names in by_file.items():
            with _open(path) as file:
                missing = sorted({*names} - {*file.keys()})
                if missing:
                    raise ValueError(f"{path}: expected {missing[0]}, as the index says, got no such tensor")
                tensors |= {name: file.get_tensor(name) for name in names}
        return tensors


def attention_weights(
    checkpoint: Checkpoint, cfg: DSV4Config, layer: int, prefix: str = "layers.{layer}.attn."
) -> dict[str, torch.Tensor]:
    """The attention weights of one layer, by plain name, none of them in blocks any more.

    A projection may be float8_e4m3fn with scales beside it (`fp8_blocks.dequantise` says which), which makes it float32
    with the values that it had; anything else is float32, bfloat16 or float16. `wo_a` is stored in float8 and used in
    bfloat16, without activations in float8: that is what a layer of dtype bfloat16 does with it.

    Args:
        checkpoint: where to look.
        cfg: the model.
        layer: number of the decoder layer.
        prefix: what the layer's names begin with.

    Returns:
        Tensors on the CPU by the names of `layer_weights`.

    Raises:
        ValueError: no such layer; a weight or its scales are missing, there twice, of another shape or dtype, or not
            finite; scales are there for nothing; or a tensor is none of the layer's.

    Source: spec/attention_math.md, sections 1 (names) and 6 (formats).
    """
    if type(layer) is not int or not 0 <= layer < cfg.num_layers:
        raise ValueError(f"layer: expected 0 to {cfg.num_layers - 1}, got {layer!r}")
    below = prefix.format(layer=layer)
    weights = _join_scales(checkpoint.below(below), checkpoint.path)
    try:
        return collect_weights(weights, cfg, cfg.compress_ratios[layer], below)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: {error}") from None


def attention_layers(
    checkpoint: Checkpoint,
    cfg: DSV4Config,
    *,
    impl: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    prefix: str = "layers.{layer}.attn.",
) -> list[DSV4Attention]:
    """The attention of all decoder layers; arguments as for `attention_weights` and `DSV4Attention`."""
    return [
        DSV4Attention.from_weights(
            attention_weights(checkpoint, cfg, layer, prefix), cfg, ratio, impl=impl, device=device, dtype=dtype
        )
        for layer, ratio in enumerate(cfg.compress_ratios)
    ]


def _join_scales(stored: Mapping[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """The weights without their scales, those in blocks dequantised; a ValueError lists all that is wrong."""
    problems: list[str] = []
    weights: dict[str, torch.Tensor] = {}
    scales: dict[str, tuple[str, torch.Tensor]] = {}
    for name, tensor in stored.items():
        suffix = next((each for each in SCALE_SUFFIXES if name.endswith(each)), None)
        if suffix is None:
            weights[name] = tensor
        elif (stem := name.removesuffix(suffix)) in scales:
            problems.append(f"{scales[stem][0]} and {name} are scales of the same weight")
        else:
            scales[stem] = name, tensor
    for name, tensor in weights.items():
        scale_name, scale = scales.pop(name.removesuffix(".weight"), (None, None))
        if tensor.dtype is FLOAT8 and scale is None:
            wanted = " or ".join(name.removesuffix(".weight") + suffix for suffix in SCALE_SUFFIXES)
            problems.append(f"{name} is float8: expected {wanted}, got neither")
        elif tensor.dtype is FLOAT8 and scale is not None:
            try:
                weights[name] = tensor = dequantise(tensor, scale)
            except ValueError as error:
                problems.append(f"{name} with {scale_name}: {error}")
        elif scale is not None:
            problems.append(f"{scale_name}: expected a float8_e4m3fn {name}, got {_dtype(tensor)}")
        if tensor.dtype in FLOATS and not torch.isfinite(tensor).all():
            place = (~torch.isfinite(tensor)).nonzero()[0].tolist()
            problems.append(f"{name}{place}: expected a finite number, got {tensor[tuple(place)].item()}")
    problems += [f"{name}: expected a weight beside these scales, got none" for name, _ in scales.values()]
    if problems:
        raise ValueError(f"{path}: " + "; ".join(problems))
    return weights


def _find(path: Path) -> Path:
    """The safetensors file or the index that `path` means."""
    if not path.is_dir():
        if not path.is_file():
            raise ValueError(f"{path}: expected a safetensors file, an index of several or their folder, got nothing")
        return path
    if (path / INDEX).is_file():
        return path / INDEX
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        raise ValueError(f"{path}: expected {INDEX} or one safetensors file, got {len(found)} without an index")
    return found[0]


def _read_index(path: Path) -> dict[str, Path]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from None
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files:
        raise ValueError(f'{path}: expected "weight_map" with the file of each tensor, got none')
    for file in dict.fromkeys(map(str, files.values())):
        if Path(file).name != file or not (path.parent / file).is_file():
            raise ValueError(f"{path}: expected the file {file!r} beside it, as weight_map says, got none")
    return {name: path.parent / file for name, file in files.items()}


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path}: expected a safetensors file, got {error}") from None


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
