"""`dsv4 bench kernels`: the kernels of an attention layer beside released ones: attention, indexer, compressor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from dsv4_bench import attention, attention_peers, compressor, compressor_peer, indexer
from dsv4_bench.report import Row

COLUMNS = ("case", "rows", "gpu us", "p10", "p90", "host us", "peer", "peer gpu us", "ratio")

# Largest cases that a CPU runs, some seconds each.
CPU_ATTENTION_HEADS = 128
"""Of all rows together."""
CPU_INDEX_SCORES = 16_384
CPU_COMPRESSOR_ROWS = 256
CPU_COMPRESSOR_TOKENS = 8192
"""In the cache, of all requests together."""


class Chosen(NamedTuple):
    """The cases that a device runs."""

    attention: list[attention.Case]
    indexer: list[indexer.Case]
    compressor: list[compressor.Case]


def choose(device: torch.device) -> Chosen:
    """All cases; on a CPU without those that take longer than some seconds."""
    found = Chosen(attention.cases(), indexer.cases(), compressor.cases())
    if device.type != "cpu":
        return found
    return Chosen(
        [case for case in found.attention if case.rows * case.heads <= CPU_ATTENTION_HEADS],
        [case for case in found.indexer if case.rows * case.entries <= CPU_INDEX_SCORES],
        [
            case
            for case in found.compressor
            if case.num_rows <= CPU_COMPRESSOR_ROWS and sum(case.lengths) <= CPU_COMPRESSOR_TOKENS
        ],
    )


def left_out(device: torch.device) -> str:
    """How many cases `device` does not run, as an end of a title; empty if it runs all."""
    chosen = choose(device)
    every = len(attention.cases()) + len(indexer.cases()) + len(compressor.cases())
    left = every - len(chosen.attention) - len(chosen.indexer) - len(chosen.compressor)
    return f"; {left} of {every} cases left out, which take too long on a CPU" if left else ""


def run(device: torch.device, impl: str, peer_dir: Path | None, progress: Callable[[str], None]) -> list[Row]:
    """Checks, then times every case of `choose`; a row each, two for the indexer.

    Raises:
        ValueError: the peers' folder is not usable.
        RuntimeError: a result differs from the reference, or from a peer's.
    """
    peers = attention_peers.find(peer_dir)
    peer = compressor_peer.Peer(peer_dir) if peer_dir else None
    chosen, rows = choose(device), list[Row]()
    for case in chosen.attention:
        progress(case.id)
        rows.append(attention.run_case(case, device, impl, peers))
    for scored in chosen.indexer:
        progress(f"indexer {scored.id}")
        rows += indexer.run_case(scored, device, impl)
    for step in chosen.compressor:
        progress(step.id)
        row = compressor.run_case(step, device, impl, peer)
        rows.append(row | {"peer": "SGLang" if row.get("peer gpu us") is not None else None})
    return [{name: row.get(name) for name in COLUMNS} for row in rows]
