"""Reads goldens of the metadata: steps, and what SGLang's attention backend made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dsv4_backend.batch import ForwardMode, RawBatch
from dsv4_backend.config import DSV4Config
from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.goldens import load_arrays, load_manifest, load_pool
from dsv4_backend.metadata import FIELDS
from dsv4_backend.tables import RequestTables

MODES = {
    "DECODE": ForwardMode.DECODE,
    "DECODE_GRAPH": ForwardMode.DECODE,
    "DECODE_GRAPH_IDLE": ForwardMode.IDLE,
    "EXTEND": ForwardMode.EXTEND,
    "TARGET_VERIFY": ForwardMode.TARGET_VERIFY,
    "TARGET_VERIFY_GRAPH": ForwardMode.TARGET_VERIFY,
    "TARGET_VERIFY_RAGGED": ForwardMode.TARGET_VERIFY,
    "TARGET_VERIFY_RAGGED_GRAPH": ForwardMode.TARGET_VERIFY,
    "DRAFT_EXTEND_V2": ForwardMode.DRAFT_EXTEND,
    "DRAFT_EXTEND_V2_GRAPH": ForwardMode.DRAFT_EXTEND,
    "EAGLE_DRAFT_DECODE": ForwardMode.DRAFT_DECODE,
    "EAGLE_DRAFT_DECODE_GRAPH": ForwardMode.DRAFT_DECODE,
}
"""Kinds of steps in a manifest, and our modes. `_GRAPH`: inputs padded as for a graph's replay. `_RAGGED`: requests
have rows of their own number."""


class Answer(NamedTuple):
    """An array of a golden.

    Attributes:
        field: the field of AttnMetadata that it answers.
        clamped: it says 1 where the field says 0.
        all_rows: padding rows mean something, too.
    """

    field: str
    clamped: bool = False
    all_rows: bool = False


ANSWERS = {
    "seq_lens_causal": Answer("seq_lens_causal"),
    "positions": Answer("positions"),
    "req_pool_indices_repeated": Answer("req_pool_indices_per_row"),
    "raw_out_loc": Answer("raw_out_cache_loc"),
    "swa_out_cache_loc": Answer("swa_out_cache_loc"),
    "page_table": Answer("page_table"),
    "swa_topk_lengths": Answer("swa_lengths"),
    "swa_page_indices": Answer("swa_page_indices"),
    "c4_topk_lengths_raw": Answer("c4_lengths"),
    "c4_topk_lengths_clamp1": Answer("c4_lengths", clamped=True),
    "indexer_c4_seq_lens": Answer("c4_lengths"),
    "c4_sparse_topk_lengths": Answer("c4_sparse_lengths", clamped=True),
    "c4_sparse_page_indices": Answer("c4_sparse_page_indices"),
    "c4_out_loc": Answer("c4_out_loc"),
    "c128_topk_lengths_clamp1": Answer("c128_lengths", clamped=True),
    "c128_page_indices": Answer("c128_page_indices"),
    "c128_out_loc": Answer("c128_out_loc"),
}
"""Arrays with a row for each row of a step, by their names without "out_" or "out_step0_"."""

PERSISTENT = {"swa_out_cache_loc_persistent_buffer": Answer("swa_out_cache_loc", all_rows=True)}
"""One more for DRAFT_EXTEND_V2_GRAPH: what a replay reads, which is zeroed past the real rows."""

SCALARS = {"indexer_c4_page_size": "c4_page_size", "indexer_max_c4_seq_len": "max_c4_length"}
"""Numbers about a whole step of ratio 4, and the properties of AttnMetadata that they answer."""

_SLOT_RATIOS = {"raw_out_loc": 1, "c4_out_loc": 4, "c128_out_loc": 128}


@dataclass(frozen=True)
class MetadataGolden:
    """One step, and its metadata.

    Attributes:
        kind: one of `MODES`.
        rows, real_rows: rows of the answers, and how many of them are not padding.
        constants: sizes, by name (tests/goldens/README.md explains them, and the arrays).
        arrays: the file's arrays by name.
        req_to_token, full_to_swa: the tables that it shares with other files.
    """

    name: str
    kind: str
    rows: int
    real_rows: int
    constants: dict[str, Any]
    arrays: dict[str, np.ndarray]
    req_to_token: np.ndarray
    full_to_swa: np.ndarray

    @property
    def mode(self) -> ForwardMode:
        return MODES[self.kind]

    @property
    def in_graph(self) -> bool:
        return "_GRAPH" in self.kind

    @property
    def ratios(self) -> tuple[int, ...]:
        return tuple(ratio for ratio in self.constants["present_ratios"] if ratio)

    @property
    def num_steps(self) -> int:
        """Draft steps that run a forward; 1 in other modes."""
        return self.constants["num_steps"] - 1 if self.mode is ForwardMode.DRAFT_DECODE else 1

    @property
    def config(self) -> DSV4Config:
        return replace(DSV4Config.v4_flash(), index_topk=self.constants["index_topk"])

    @property
    def geometry(self) -> CacheGeometry:
        """Rings that a file leaves out, having no ratio, are those of its number of draft tokens."""
        usual = CacheGeometry.for_drafts(self.constants["num_draft_tokens"])
        return CacheGeometry(
            page_size=self.constants["page_size"],
            swa_page_size=self.constants["swa_page_size"],
            window=self.constants["swa_window"],
            c4_ring=self.constants.get("c4_ring_size", usual.c4_ring),
            c128_ring=self.constants.get("c128_ring_size", usual.c128_ring),
        )

    def tables(self, device: torch.device | str) -> RequestTables:
        return RequestTables(
            torch.from_numpy(self.req_to_token).to(device), torch.from_numpy(self.full_to_swa).to(device)
        )

    def answer(self, name: str, step: int = 0) -> np.ndarray:
        """What `name` must be in a draft step (in other modes: the step), as the file says, if not `is_wrong`."""
        if self.is_wrong(name):
            return self.answer_by_rule(name, step)
        return self.arrays[self.array_name(name, step)]

    def is_wrong(self, name: str) -> bool:
        """Whether the file's `name` is known to be wrong: slots of draft steps (tests/goldens/README.md)."""
        if self.mode is not ForwardMode.DRAFT_DECODE:
            return False
        return name in ("c4_out_loc", "c128_out_loc") or (name == "raw_out_loc" and self.in_graph)

    def answer_by_rule(self, name: str, step: int) -> np.ndarray:
        """`raw_out_loc`, `c4_out_loc` or `c128_out_loc` of the real rows of a draft step.

        Request b writes to `in_out_cache_loc[b * num_steps + step]`.
        """
        slots = self.arrays["in_out_cache_loc"][step :: self.constants["num_steps"]]
        lengths = self.answer("seq_lens_causal", step)[: len(slots)]
        ratio = _SLOT_RATIOS[name]
        return np.where(lengths % ratio == 0, slots // ratio, 0)

    def array_name(self, name: str, step: int = 0) -> str:
        """The file's name for an answer."""
        if self.mode is ForwardMode.DRAFT_DECODE and name != "req_pool_indices_repeated":
            return f"out_step{step}_{name}"
        return f"out_{name}"

    def answers(self) -> Iterator[tuple[str, Answer]]:
        """The answers that this golden has."""
        persistent = PERSISTENT if self.kind == "DRAFT_EXTEND_V2_GRAPH" else {}
        for name, answer in (ANSWERS | persistent).items():
            if FIELDS[answer.field].ratio in (0, *self.ratios):
                yield name, answer

    def batches(self, device: torch.device | str) -> Iterator[tuple[str, RawBatch]]:
        """The step's requests, named "", and in a graph "padded inputs", too: with requests of id 0 behind them.

        Raises:
            ValueError: the inputs are no batch of the mode.
        """
        yield "", self._batch("in_", self.arrays["in_req_pool_indices"].size, device)
        if self.in_graph and self.mode is not ForwardMode.IDLE:
            yield "padded inputs", self._batch("in_padded_", self.constants["graph_bs"], device)

    def _batch(self, prefix: str, size: int, device: torch.device | str) -> RawBatch:
        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        slots = self.arrays[f"{prefix}out_cache_loc"]
        extends = self._extends()
        if extends is not None:
            slots = slots[: max(0, int(extends.sum()))]  # zeros behind them stand for padding
            extends = np.pad(extends, (0, max(0, size - len(extends))))
        drafts = self.mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
        return RawBatch(
            self.mode,
            tensor(self.arrays[f"{prefix}req_pool_indices"][:size]),
            tensor(self.arrays[f"{prefix}seq_lens"][:size]),
            tensor(slots),
            extend_lens=None if extends is None else tensor(extends),
            num_draft_tokens=self.constants["num_draft_tokens"] if drafts else 0,
            num_steps=self.constants["num_steps"] if self.mode is ForwardMode.DRAFT_DECODE else 0,
        )

    def _extends(self) -> np.ndarray | None:
        if self.mode is ForwardMode.EXTEND:
            return self.arrays["in_extend_seq_lens"]
        return self.arrays["in_verify_lens"] if "_RAGGED" in self.kind else None


def load_metadata_goldens(directory: Path) -> list[MetadataGolden]:
    """All metadata goldens that a folder's manifest.json lists, in its order.

    Raises:
        ValueError: the folder or its manifest is missing, lists none, or what it lists is not a readable golden.
    """
    manifest, path = load_manifest(directory, "metadata"), directory / "manifest.json"
    cases = manifest.get("cases") if isinstance(manifest, dict) else None
    if not isinstance(cases, list) or not cases:
        raise ValueError(f"{path}: expected a list of cases with at least one, got {_short(cases)}")
    pools: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    goldens = []
    for number, case in enumerate(cases):
        _check_case(f"{path}: cases[{number}]", case)
        pool = case["pool"]
        if pool not in pools:
            pools[pool] = load_pool(directory / pool, "full_to_swa")
        golden = MetadataGolden(
            case["name"],
            case["mode"],
            case["rows"],
            case["real_rows"],
            case["constants"],
            load_arrays(directory / case["file"]),
            *pools[pool],
        )
        _check_arrays(directory / case["file"], golden)
        goldens.append(golden)
    return goldens


_SIZES = ("page_size", "swa_page_size", "swa_window", "max_context_len", "index_topk", "num_draft_tokens")


def _check_case(where: str, case: object) -> None:
    """Raises ValueError unless `case` says all that a golden needs, in the right types."""
    if not isinstance(case, dict):
        raise ValueError(f"{where}: expected an object, got {_short(case)}")
    for key in ("name", "file", "pool", "mode"):
        if not isinstance(case.get(key), str):
            raise ValueError(f"{where}: {key}: expected a string, got {_short(case.get(key))}")
    if case["mode"] not in MODES:
        raise ValueError(f"{where}: mode: expected one of {', '.join(MODES)}, got {case['mode']!r}")
    rows, real_rows, constants = case.get("rows"), case.get("real_rows"), case.get("constants")
    if type(rows) is not int or type(real_rows) is not int or not 0 <= real_rows <= rows:
        raise ValueError(
            f"{where}: expected real_rows from 0 to rows, got real_rows {_short(real_rows)}, rows {_short(rows)}"
        )
    if not isinstance(constants, dict):
        raise ValueError(f"{where}: constants: expected an object, got {_short(constants)}")
    least = dict.fromkeys(_SIZES, 0)
    if MODES[case["mode"]] is ForwardMode.DRAFT_DECODE:
        least["num_steps"] = 2  # the last step runs no forward
    if "_GRAPH" in case["mode"]:
        least["graph_bs"] = 0
    least |= {name: 0 for name in ("c4_ring_size", "c128_ring_size") if name in constants}
    for name, low in least.items():
        value = constants.get(name)
        if type(value) is not int or value < low:
            raise ValueError(f"{where}: constants.{name}: expected an int of at least {low}, got {_short(value)}")
    ratios = constants.get("present_ratios")
    if not isinstance(ratios, list) or any(type(ratio) is not int or ratio not in (0, 4, 128) for ratio in ratios):
        raise ValueError(f"{where}: constants.present_ratios: expected a list of 0, 4 and 128, got {_short(ratios)}")


def _check_arrays(path: Path, golden: MetadataGolden) -> None:
    """Raises ValueError unless a golden has all arrays of its kind, in shapes that go together."""
    size = _expect_ints(path, golden.arrays, "in_req_pool_indices", 1).size
    _expect_ints(path, golden.arrays, "in_seq_lens", 1, size)
    _expect_ints(path, golden.arrays, "in_out_cache_loc", 1)
    for name, needed in (("extend_seq_lens", golden.kind == "EXTEND"), ("verify_lens", "_RAGGED" in golden.kind)):
        if needed:
            _expect_ints(path, golden.arrays, f"in_{name}", 1, size)
    if golden.in_graph:
        for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
            _expect_ints(path, golden.arrays, f"in_padded_{name}", 1)
    fixed_columns = {"window": golden.constants["swa_window"], "topk": golden.constants["index_topk"]}
    for step in range(golden.num_steps):
        for name, answer in golden.answers():
            columns = FIELDS[answer.field].columns
            array_name = golden.array_name(name, step)
            array = _expect_ints(path, golden.arrays, array_name, 2 if columns else 1, golden.rows)
            if columns and array.shape[1] != fixed_columns.get(columns, array.shape[1]):
                raise ValueError(
                    f"{path}: {array_name}: expected {fixed_columns[columns]} columns, got {array.shape[1]}"
                )
        for name in SCALARS if 4 in golden.ratios else ():
            _expect_ints(path, golden.arrays, golden.array_name(name, step), 0)


def _expect_ints(
    path: Path, arrays: dict[str, np.ndarray], name: str, ndim: int, rows: int | None = None
) -> np.ndarray:
    array = arrays.get(name)
    if array is None:
        raise ValueError(f"{path}: expected an array {name}, got {', '.join(sorted(arrays)) or 'none'}")
    if array.dtype.kind != "i":
        raise ValueError(f"{path}: {name}: expected integers, got {array.dtype}")
    if array.ndim != ndim or (rows is not None and array.shape[0] != rows):
        shape = f"{ndim} dimensions" + ("" if rows is None else f", the first of {rows}")
        raise ValueError(f"{path}: {name}: expected {shape}, got {list(array.shape)}")
    return array


def _short(value: object) -> str:
    """`value` for a message, cut to a length that one can read."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
