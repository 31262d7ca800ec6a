"""Reads goldens of attention layers: inputs, weights and right answers of another implementation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsv4_backend.config import DSV4Config
from dsv4_backend.goldens import load_arrays, load_manifest
from dsv4_backend.layer_weights import layer_weights

_CONFIG = {
    "hidden_size": "hidden",
    "num_heads": "heads",
    "head_dim": "head_dim",
    "rope_dim": "rope_dim",
    "q_lora_rank": "q_lora",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora",
    "window": "window",
    "index_topk": "index_topk",
    "index_heads": "index_heads",
    "index_head_dim": "index_dim",
    "rms_norm_eps": "eps",
    "rope_theta": "rope_theta",
    "compress_rope_theta": "compress_rope_theta",
}
_YARN = {
    "yarn_factor": "factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_original_max_position": "original_max_position_embeddings",
}
_REQUIRED = {"x", "w_wkv", "w_kv_norm", "kv_rope"}
_COMPRESSED = {"w_comp_ape", "w_comp_wkv", "w_comp_wgate", "w_comp_norm", "comp_kv"}
_INDEXED = {"w_idx_comp_ape", "w_idx_comp_wkv", "w_idx_comp_wgate", "w_idx_comp_norm", "idx_k"}
_DTYPES = {"rows": np.int32, "topk_idx": np.int32, "out_f64": np.float64}
"""Of arrays that are not float32."""
ROW_ANSWERS = ("q_latent", "q_rope", "idx_q", "idx_w", "idx_score", "ctx_rotated", "ctx", "out_f64")
"""Answers for the tokens that `rows` lists."""


@dataclass(frozen=True)
class AttentionGolden:
    """One layer on one sequence.

    Attributes:
        name: file name without its suffix.
        ratio: compression ratio of the layer.
        settings: its `cfg` in manifest.json.
        arrays: the file's arrays by name (tests/goldens/README.md explains them).
    """

    name: str
    ratio: int
    settings: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def num_tokens(self) -> int:
        return len(self.arrays["x"])

    @cached_property
    def missing_weights(self) -> list[str]:
        """Weights of the layer that the file does not have: without them there is no output to check."""
        return [name for name in layer_weights(self.config, self.ratio) if f"w_{name}" not in self.arrays]

    @cached_property
    def missing_answers(self) -> list[str]:
        """Answers that the file does not have, of those that there could be."""
        return [name for name in self._shapes if name not in self.arrays and not name.startswith("comp_raw")]

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all arrays that there can be, but for weights."""
        return _shapes(self.ratio, self.settings, self.num_tokens, len(self.arrays.get("rows", ())))

    def weights(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        """The layer's weights by their plain names."""
        return {name.removeprefix("w_"): self.tensor(name, device) for name in self.arrays if name.startswith("w_")}

    @cached_property
    def config(self) -> DSV4Config:
        """A model of this one layer."""
        sizes = {field: self.settings[key] for field, key in _CONFIG.items()}
        yarn = {field: self.settings["yarn"][key] for field, key in _YARN.items()}
        return DSV4Config(**sizes, **yarn, max_position=self.num_tokens, compress_ratios=(self.ratio,))

    def tensor(self, name: str, device: torch.device | str) -> torch.Tensor:
        return torch.from_numpy(self.arrays[name]).to(device)

    def project(self, names: tuple[str, ...], device: torch.device | str) -> torch.Tensor:
        """float32 [T, channels]: `x` times these weights, side by side, in float64 until the end: never TF32."""
        weights = torch.cat([self.tensor(name, device).double() for name in names])
        return (self.tensor("x", device).double() @ weights.T).float()


def load_attention_goldens(directory: Path) -> list[AttentionGolden]:
    """All attention goldens of a folder, in order of name.

    Raises:
        ValueError: the folder or its manifest.json is missing, there is no golden, or one of them cannot be read.
    """
    manifest = _by_file(directory / "manifest.json", load_manifest(directory, "attention"))
    goldens = []
    for path in sorted(directory.glob("*.npz")):
        if path.name not in manifest:
            raise ValueError(f"{path}: expected an entry in manifest.json, got none")
        entry, arrays = manifest[path.name], load_arrays(path)
        _check_golden(path, entry, arrays)
        goldens.append(AttentionGolden(path.stem, entry["compress_ratio"], entry["cfg"], arrays))
    if not goldens:
        raise ValueError(f"{directory}: expected at least one golden (*.npz), got none")
    return goldens


def _by_file(path: Path, manifest: Any) -> dict[str, dict[str, Any]]:
    """Entries of the manifest at `path` by the file that they describe; ValueError where it has none."""
    try:
        return {entry["file"]: entry for entry in manifest["files"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected the goldens' manifest, got {type(error).__name__}: {error}") from error


def _check_golden(path: Path, entry: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Raises ValueError unless a golden has what is checked of it, in shapes that go together."""
    ratio, settings = entry.get("compress_ratio"), entry.get("cfg")
    if ratio not in (0, 4, 128) or not isinstance(settings, dict):
        raise ValueError(f"{path}: expected compress_ratio 0, 4 or 128 and cfg in manifest.json, got {ratio!r}")
    missing = sorted({*_CONFIG.values(), "yarn"} - settings.keys())
    if missing:
        raise ValueError(f"{path}: expected cfg with {', '.join(missing)} in manifest.json, got none")
    required = _REQUIRED | (_COMPRESSED if ratio else set()) | (_INDEXED if ratio == 4 else set())
    missing = sorted(required - arrays.keys())
    if missing:
        raise ValueError(f"{path}: expected a golden of ratio {ratio}, got none of {', '.join(missing)}")
    shapes = _shapes(ratio, settings, len(arrays["x"]), len(arrays.get("rows", ())))
    for name, shape in shapes.items():
        array, dtype = arrays.get(name), np.dtype(_DTYPES.get(name, np.float32))
        if array is not None and (array.shape != shape or array.dtype != dtype):
            raise ValueError(f"{path}: {name}: expected {dtype} {list(shape)}, got {array.dtype} {list(array.shape)}")
        # Scores of entries that a token does not see may be anything.
        if array is not None and name != "idx_score" and not np.isfinite(array).all():
            raise ValueError(f"{path}: {name}: expected finite values, got {int((~np.isfinite(array)).sum())} others")
    rows = arrays.get("rows")
    if rows is not None and not (np.diff(rows, prepend=-1, append=len(arrays["x"])) > 0).all():
        raise ValueError(f"{path}: rows: expected ascending tokens below {len(arrays['x'])}, got {rows.tolist()}")


def _shapes(ratio: int, settings: dict[str, Any], tokens: int, rows: int) -> dict[str, tuple[int, ...]]:
    hidden, heads, dim = settings["hidden"], settings["heads"], settings["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "x": (tokens, hidden),
        "rows": (rows,),
        "q_latent": (rows, settings["q_lora"]),
        "q_rope": (rows, heads, dim),
        "kv_rope": (tokens, dim),
        "ctx_rotated": (rows, heads, dim),
        "ctx": (rows, heads, dim),
        "out": (tokens, hidden),
        "out_f64": (rows, hidden),
    }
    if ratio:
        width = dim * {4: 2, 128: 1}[ratio]
        shapes |= {"comp_kv": (tokens // ratio, dim)}
        shapes |= {"comp_raw_kv": (tokens, width), "comp_raw_gate": (tokens, width)}
    if ratio == 4:
        heads, dim = settings["index_heads"], settings["index_dim"]
        shapes |= {
            "idx_k": (tokens // 4, dim),
            "idx_q": (rows, heads, dim),
            "idx_w": (rows, heads),
            "idx_score": (rows, tokens // 4),
            "topk_idx": (tokens, min(settings["index_topk"], tokens // 4)),
            "topk_margin": (tokens,),
        }
    return shapes
