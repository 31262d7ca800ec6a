"""`dsv4 bench kernels`: the kernels of an attention layer beside released ones: attention, indexer, compressor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from dsv4_bench import attention, attention_peers, compressor, indexer
from dsv4_bench.report import Row

COLUMNS = ("case", "rows", "gpu us", "p10", "p90", "host us", "peer", "peer gpu us", "ratio")


def run(device: torch.device, impl: str, peer_dir: Path | None, progress: Callable[[str], None]) -> list[Row]:
    """Checks, then times every case; a row each.

    Raises:
        ValueError: the peers' folder is not usable.
        RuntimeError: a result differs from the reference, or from a peer's.
    """
    peers = attention_peers.find(peer_dir)
    rows = attention.run(device, impl, peers, progress)
    rows += indexer.run(device, impl, progress)
    for row in compressor.run(device, impl, peer_dir, progress):
        rows.append(row | {"peer": "SGLang" if row.get("peer gpu us") is not None else None})
    return [{name: row.get(name) for name in COLUMNS} for row in rows]
