"""The released compressor on our plans, through the peer's script (`compressor_peer.py`): results and times."""

from __future__ import annotations

import importlib
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from dsv4_backend.layouts import EntryPool
from dsv4_backend.plans import INVALID, PACKED_MAX_ROWS, DecodePlans, PrefillPlan
from dsv4_backend.reference import compressor as reference
from dsv4_backend.reference import kv_store
from dsv4_bench.timing import graph_us

if TYPE_CHECKING:
    from dsv4_bench.compressor import Inputs

EPS = 1e-6
TOLERANCE = 1e-5
"""Relative norm to which both pool the same; values of packed entries may differ where this could have moved them."""


class Peer:
    """Builds the peer's kernels on demand, a module for each ratio and head dimension.

    Raises:
        ValueError: the folder has no such script.
    """

    def __init__(self, directory: Path) -> None:
        if not (directory / "compressor_peer.py").is_file():
            raise ValueError(f"--peer: expected a folder with compressor_peer.py, got {directory}")
        sys.path.insert(0, str(directory))
        self._script: ModuleType = importlib.import_module("compressor_peer")
        self._modules: dict[tuple[int, int], Any] = {}

    def serves(self, inputs: Inputs) -> bool:
        """Whether it has kernels for a case: packed entries, ratios 4 and 128, plans in the packed layout."""
        case = inputs.case
        return bool(case.ratio) and case.format == "fp8" and case.num_rows <= PACKED_MAX_ROWS

    def microseconds(self, inputs: Inputs) -> tuple[float, float]:
        """GPU time of its compression, state included, and of norm, rope and store."""
        calls = _Calls(self, inputs, inputs.state, inputs.pool)
        return statistics.median(graph_us(calls.compress)), statistics.median(graph_us(calls.store))

    def check(self, inputs: Inputs, impl: str) -> None:
        """Raises RuntimeError unless pooled values, packed entries and state agree with ours."""
        case, plans = inputs.case, inputs.plans
        assert plans is not None
        state, pool = inputs.state.clone(), EntryPool.empty(case.layout, inputs.num_pages, inputs.pool.device)
        calls = _Calls(self, inputs, state, pool)
        calls.compress()
        calls.store()
        ours, our_state = EntryPool.empty(case.layout, inputs.num_pages, inputs.pool.device), inputs.state.clone()
        inputs.run(impl, ours, our_state)
        if not torch.equal(state, our_state):
            raise RuntimeError(f"{case.id}: state differs from the peer's")
        entries = reference.completed(plans, case.ratio)
        if not len(entries.row):
            return
        windows = reference.read_windows(inputs.kv, inputs.state, entries, case.ratio)
        pooled = reference.pool_windows(windows, entries, inputs.bias, case.ratio)
        theirs = calls.pooled[entries.row if isinstance(plans, DecodePlans) else slice(len(entries.row))]
        error = float((pooled - theirs).norm() / pooled.norm())
        if not error < TOLERANCE:
            raise RuntimeError(f"{case.id}: the peer pools differently, by {error:.1e} of the norm")
        values = kv_store.norm_rope(pooled, inputs.norm_weight, EPS, entries.seq_len - case.ratio, inputs.rope)
        slots = inputs.out_loc[entries.row]
        for who, found in (("ours", ours), ("the peer's", pool)):
            far = beyond_rounding(found, slots, values)
            if far:
                raise RuntimeError(f"{case.id}: {far} values of {who} are not the float32 ones, rounded")

    def module(self, ratio: int, head_dim: int) -> Any:
        key = ratio, head_dim
        if key not in self._modules:
            self._modules[key] = self._script.build(ratio, head_dim)
        return self._modules[key]

    @property
    def script(self) -> ModuleType:
        return self._script


class _Calls:
    """The peer's two calls of a case."""

    def __init__(self, peer: Peer, inputs: Inputs, state: torch.Tensor, pool: EntryPool) -> None:
        case = inputs.case
        self._script, self._module = peer.script, peer.module(case.ratio, case.head_dim)
        self._inputs, self._pool = inputs, pool
        self._state = state.view(-1, case.ratio, state.shape[1])
        assert inputs.plans is not None
        plan = inputs.plans.ratio(case.ratio)
        self._decode = isinstance(inputs.plans, DecodePlans)
        if isinstance(inputs.plans, PrefillPlan):
            compress, write = plan.compress, plan.write  # type: ignore[union-attr]
            self._lists = tuple(
                rows[: int((rows.view(torch.int32)[:, 0] != INVALID - 2**32).sum())].contiguous()
                for rows in (compress, write)
            )
        else:
            self._lists = (plan.rows,)  # type: ignore[union-attr]
        self.pooled = torch.zeros((len(self._lists[0]), case.head_dim), device=pool.device)
        # In the order of the tokens that an entry reads: ratio 4 has the half for the next group first.
        halves = inputs.bias.chunk(2, dim=1) if case.ratio == 4 else (inputs.bias,)
        self._bias = torch.cat(halves)

    def compress(self) -> None:
        inputs = self._inputs
        if self._decode:
            self._module.decode(self._state, inputs.kv, self.pooled, self._bias, self._lists[0])
        else:
            self._script.compress(self._module, self._state, inputs.kv, self._bias, *self._lists, self.pooled)

    def store(self) -> None:
        inputs = self._inputs
        self._script.store(
            self._module,
            self.pooled,
            self._lists[0],
            inputs.norm_weight,
            EPS,
            inputs.rope,
            inputs.out_loc,
            self._pool.data,
            inputs.case.ratio,
            decode=self._decode,
        )


def beyond_rounding(pool: EntryPool, slots: torch.Tensor, values: torch.Tensor) -> int:
    """How many stored values of an fp8 pool are not `values`, float32 [n, head_dim], rounded after a change of 1e-5."""
    layout = pool.layout
    if layout.hadamard:
        values = kv_store.hadamard(values)
    found = kv_store.load_entries(pool, slots)
    slack = TOLERANCE * (values.abs() + values.square().mean(dim=1, keepdim=True).sqrt())
    pools = []
    for moved in (values - slack, values + slack):
        other = EntryPool.empty(layout, len(pool.data), pool.device)
        # The transform is its own inverse.
        kv_store.store_entries(values=kv_store.hadamard(moved) if layout.hadamard else moved, slots=slots, pool=other)
        pools.append(kv_store.load_entries(other, slots))
    low, high = torch.minimum(*pools), torch.maximum(*pools)
    # Where the scale itself sits on a border, or is not a power of two, values move with it a little.
    give = slack if layout.indexer else torch.zeros_like(slack)
    return int(((found < low - 2 * give) | (found > high + 2 * give)).sum())
