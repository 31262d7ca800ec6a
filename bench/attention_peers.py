"""FlashMLA, through the peer's script, and FlashInfer, where it is installed, on inputs of `dsv4_bench.attention`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dsv4_backend.layouts import EntryPool
from dsv4_bench.attention import HEAD_DIM, AttentionPeer, Case, Inputs

PREFILL_ROWS = 4096
SCALE = HEAD_DIM**-0.5


def find(directory: Path | None) -> list[AttentionPeer]:
    """The peers that can run here: FlashMLA of the peer's folder, FlashInfer if it can be imported.

    Raises:
        ValueError: the folder has no such script.
    """
    peers: list[AttentionPeer] = []
    if directory is not None:
        peers += [FlashMLADecode(directory), FlashMLAPrefill(directory)]
        if importlib.util.find_spec("flashinfer"):
            peers.append(FlashInfer())
    return peers


def _load_flashmla(directory: Path) -> Any:
    if not (directory / "flashmla_peer.py").is_file():
        raise ValueError(f"--peer: expected a folder with flashmla_peer.py, got {directory}")
    sys.path.insert(0, str(directory))
    importlib.import_module("flashmla_peer")  # loads its operators
    return torch.ops.sgl_kernel


class FlashMLADecode:
    """FlashMLA's sparse decode on packed entries: both pools, the sink in its softmax."""

    name = "FlashMLA decode"

    def __init__(self, directory: Path) -> None:
        self._ops = _load_flashmla(directory)

    def serves(self, case: Case) -> bool:
        return case.format == "fp8"

    def prepare(self, inputs: Inputs) -> Callable[[], torch.Tensor]:
        rows = inputs.case.rows
        query = inputs.query.unsqueeze(1)
        window, compressed = (_blocks(pool) for pool in (inputs.window, inputs.compressed))
        lists = [indices.view(rows, 1, -1) for indices in (inputs.window_indices, inputs.selected)]

        def call(schedule: Any = None, splits: Any = None) -> Any:
            return self._ops.sparse_decode_fwd.default(
                query, window, lists[0], inputs.window_lengths, inputs.sink, schedule, splits,
                compressed, lists[1], inputs.selected_lengths, HEAD_DIM, SCALE,
            )  # fmt: skip

        _out, _lse, schedule, splits = call()
        return lambda: call(schedule, splits)[0].squeeze(1)


class FlashMLAPrefill:
    """FlashMLA's sparse prefill on bfloat16 entries of one pool."""

    name = "FlashMLA prefill"

    def __init__(self, directory: Path) -> None:
        self._ops = _load_flashmla(directory)

    def serves(self, case: Case) -> bool:
        return case.format == "bf16" and case.rows >= PREFILL_ROWS

    def prepare(self, inputs: Inputs) -> Callable[[], torch.Tensor]:
        rows, indices, lengths = _union(inputs)
        pool, lists = rows.unsqueeze(1), indices.unsqueeze(1)

        def call() -> torch.Tensor:
            out = self._ops.sparse_prefill_fwd.default(inputs.query, pool, lists, SCALE, HEAD_DIM, inputs.sink, lengths)
            return out[0] if isinstance(out, (tuple, list)) else out

        return call


class FlashInfer:
    """FlashInfer's MLA for Hopper on bfloat16 entries of one pool. It has no sink: that is not in its time."""

    name = "FlashInfer fa3"

    def serves(self, case: Case) -> bool:
        return case.format == "bf16"

    def prepare(self, inputs: Inputs) -> Callable[[], torch.Tensor]:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        case, device = inputs.case, inputs.query.device
        rows, indices, lengths = _union(inputs)
        count = indices.shape[1]
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
        starts = torch.arange(case.rows + 1, dtype=torch.int32, device=device)
        wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
        wrapper.plan(
            qo_indptr=starts,
            kv_indptr=starts * count,
            kv_indices=indices.reshape(-1),
            kv_len_arr=lengths,
            num_heads=case.heads,
            head_dim_ckv=HEAD_DIM,
            head_dim_kpe=0,
            page_size=1,
            causal=False,
            sm_scale=SCALE,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        pool = rows.unsqueeze(1)
        nothing, no_rope = inputs.query.new_empty(case.rows, case.heads, 0), rows.new_empty(len(rows), 1, 0)
        out = torch.empty_like(inputs.query)
        lse = torch.empty((case.rows, case.heads), device=device)

        def call() -> torch.Tensor:
            wrapper.run(
                q_nope=inputs.query, q_pe=nothing, ckv_cache=pool, kpe_cache=no_rope, out=out, lse=lse, return_lse=True
            )
            return out

        call()
        keep = torch.sigmoid(lse * 0.6931471805599453 - inputs.sink)  # its logarithm is of base 2
        return _Scaled(call, keep)


class _Scaled:
    """A call without a sink, which is folded into what is compared, but not into what a graph records."""

    def __init__(self, call: Callable[[], torch.Tensor], keep: torch.Tensor) -> None:
        self._call, self._keep = call, keep

    def __call__(self) -> torch.Tensor:
        out = self._call()
        if torch.cuda.is_current_stream_capturing():
            return out
        return (out.float() * self._keep[..., None]).bfloat16()


def _blocks(pool: EntryPool) -> torch.Tensor:
    """A packed pool as FlashMLA sees it: uint8 [pages, entries, 1, 584], pages padded."""
    layout = pool.layout
    used = layout.page_entries * layout.entry_bytes
    return pool.data[:, :used].view(len(pool.data), layout.page_entries, 1, layout.entry_bytes)


def _union(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One pool, [rows, head_dim], with one list of indices for it, and lengths."""
    assert inputs.rows is not None
    indices = torch.cat([inputs.window_indices, inputs.selected + inputs.window.num_slots], dim=1).contiguous()
    return inputs.rows, indices, inputs.window_lengths + inputs.selected_lengths
