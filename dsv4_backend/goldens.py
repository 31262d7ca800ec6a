"""Reads goldens of plans: inputs and right answers that other implementations produced."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsv4_backend.geometry import READ_WINDOW, CacheGeometry
from dsv4_backend.tables import RequestTables


@dataclass(frozen=True)
class PlanGolden:
    """One batch and its plan of one ratio.

    Attributes:
        arrays: the file's arrays by name (tests/goldens/README.md explains them).
        req_to_token, full_to_swa: the tables it shares with other files.
    """

    name: str
    arrays: dict[str, np.ndarray]
    req_to_token: np.ndarray
    full_to_swa: np.ndarray

    @property
    def kind(self) -> str:
        """ "prefill" or "decode"."""
        return str(self.arrays["kind"])

    @property
    def ratio(self) -> int:
        return int(self.arrays["compress_ratio"])

    @property
    def geometry(self) -> CacheGeometry:
        """The file's ring, with the smallest ring for the other ratio."""
        rings = {f"c{r}_ring": int(self.arrays["ring_size"]) if r == self.ratio else w for r, w in READ_WINDOW.items()}
        return CacheGeometry(swa_page_size=int(self.arrays["swa_page_size"]), **rings)

    def tables(self, device: torch.device | str) -> RequestTables:
        return RequestTables(
            torch.from_numpy(self.req_to_token).to(device), torch.from_numpy(self.full_to_swa).to(device)
        )

    def tensor(self, name: str, device: torch.device | str) -> torch.Tensor:
        return torch.from_numpy(self.arrays[name]).to(device)


_COMMON = {"kind", "compress_ratio", "swa_page_size", "ring_size", "pool_file", "req_pool_indices", "seq_lens"}
_REQUIRED = {
    "prefill": _COMMON
    | {"extend_lens", "num_q_tokens", "planner_path", "exp_plan_c", "exp_plan_c_pages_meaningful", "exp_plan_w"},
    "decode": _COMMON | {"exp_plan_d"},
}


def load_plan_goldens(directory: Path) -> list[PlanGolden]:
    """All plan goldens of a folder, in order of name.

    Raises:
        ValueError: the folder is missing, holds none, or one of its files is not a readable golden.
    """
    check_folder(directory)
    pools: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    goldens = []
    for path in sorted(directory.glob("*.npz")):
        if path.name.startswith("pool_"):
            continue
        arrays = load_arrays(path)
        _check_arrays(path, arrays)
        pool_file = str(arrays["pool_file"])
        if pool_file not in pools:
            pools[pool_file] = load_pool(directory / pool_file, "full_to_state")
        goldens.append(PlanGolden(path.stem, arrays, *pools[pool_file]))
    if not goldens:
        raise ValueError(f"{directory}: expected at least one golden (*.npz), got none")
    return goldens


_SCALARS = ("kind", "compress_ratio", "swa_page_size", "ring_size", "pool_file", "num_q_tokens", "planner_path")
_COLUMNS = {"exp_plan_c": 5, "exp_plan_w": 2, "exp_plan_d": 4}


def _check_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Raises ValueError unless `arrays` are those of a plan golden, in shapes that go together."""
    kind = str(arrays.get("kind", "nothing"))
    if kind not in _REQUIRED:
        raise ValueError(f"{path}: expected a plan golden, got kind {kind!r}")
    missing = sorted(_REQUIRED[kind] - arrays.keys())
    if missing:
        raise ValueError(f"{path}: expected a plan golden, got kind {kind!r} without {', '.join(missing)}")
    batch = arrays["req_pool_indices"].shape
    for name in sorted(_REQUIRED[kind]):
        array = arrays[name]
        if name in _SCALARS:
            expected: tuple[int, ...] = ()
        elif name in _COLUMNS:
            expected = (array.shape[0] if array.ndim else 0, _COLUMNS[name])
        elif name == "exp_plan_c_pages_meaningful":
            expected = arrays["exp_plan_c"].shape[:1]
        else:
            expected = (batch[0] if batch else 0,)
        if array.shape != expected:
            raise ValueError(f"{path}: {name}: expected shape {list(expected)}, got {list(array.shape)}")
        if name not in ("kind", "pool_file", "planner_path") and array.dtype.kind not in "ib":
            raise ValueError(f"{path}: {name}: expected integers, got {array.dtype}")


def check_folder(directory: Path) -> None:
    """Raises ValueError unless `directory` is one."""
    if not directory.is_dir():
        found = "a file" if directory.exists() else "nothing"
        raise ValueError(f"{directory}: expected a folder of goldens, got {found}")


def load_manifest(directory: Path, kind: str) -> Any:
    """What manifest.json in a folder of `kind` goldens holds.

    Raises:
        ValueError: there is no such folder, no such file, or no readable JSON in it.
    """
    check_folder(directory)
    path = directory / "manifest.json"
    if not path.is_file():
        raise ValueError(
            f"{directory}: expected a folder of {kind} goldens, manifest.json and the .npz files that it lists, got "
            "one without manifest.json"
        )
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a readable JSON file, got {type(error).__name__}: {error}") from error


def load_pool(path: Path, full_to_swa: str) -> tuple[np.ndarray, np.ndarray]:
    """The tables of a pool file, req_to_token and the one named `full_to_swa`; ValueError unless both are there."""
    pool = load_arrays(path)
    if not {"req_to_token", full_to_swa} <= pool.keys():
        raise ValueError(f"{path}: expected req_to_token and {full_to_swa}, got {sorted(pool)}")
    for table, dtype, ndim in (("req_to_token", np.int32, 2), (full_to_swa, np.int64, 1)):
        if pool[table].dtype != dtype or pool[table].ndim != ndim:
            raise ValueError(
                f"{path}: {table}: expected {dtype.__name__} with {ndim} dimensions, got "
                f"{pool[table].dtype} {list(pool[table].shape)}"
            )
    return pool["req_to_token"], pool[full_to_swa]


def load_arrays(path: Path) -> dict[str, Any]:
    """The arrays of an .npz file by name; ValueError when it cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # there is hardly a kind that NumPy and zipfile do not raise on damaged files
        raise ValueError(f"{path}: expected a readable .npz file, got {type(error).__name__}: {error}") from error
