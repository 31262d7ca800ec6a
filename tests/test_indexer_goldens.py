"""The indexer on goldens: scores and selected entries of another implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backends import INTERPRET, each_backend
from dsv4_backend import rope_table
from dsv4_backend.attention_goldens import AttentionGolden, load_attention_goldens
from dsv4_backend.indexer import index_query
from goldens_location import golden_folders
from test_indexer import each_format, key_pool, score, selected, turned

MARGIN = {"fp32": 5e-5, "bf16": 1e-2, "fp8": 1e-1}
"""Distance of the k-th score from the next, below which rounding may change a set."""
ERROR = {"fp32": 2e-6, "bf16": 5e-3, "fp8": 1e-1}
"""Of a score, relative to the largest one of a file."""


def csa_goldens() -> list[AttentionGolden]:
    needed = {"idx_q", "idx_w", "idx_score", "topk_idx", "topk_margin", "rows"}
    goldens = [golden for folder in golden_folders("attention") for golden in load_attention_goldens(folder)]
    return [golden for golden in goldens if golden.ratio == 4 and needed <= golden.arrays.keys()]


GOLDENS = csa_goldens()


@each_backend
@each_format
@pytest.mark.parametrize("golden", GOLDENS, ids=[golden.name for golden in GOLDENS])
def test_goldens(impl: str, device: str, kv: str, golden: AttentionGolden) -> None:
    """Scores and sets of another implementation, from its queries before rope and its keys."""
    every = 8 if impl == "triton" and INTERPRET and len(golden.arrays["rows"]) > 32 else 1
    cfg, arrays = golden.config, golden.arrays
    positions = torch.from_numpy(arrays["rows"][::every]).long()
    picked = slice(None, None, every)
    keys_of = torch.from_numpy(arrays["idx_k"])
    pages = torch.randperm(-(-len(keys_of) // 32), generator=torch.Generator().manual_seed(0)) + 1
    keys = key_pool(kv, keys_of, pages, cfg.rope_dim, 32, len(pages) + 1, device)
    # Queries come with rope in the golden: turned back, they are what the projection gives.
    rope = rope_table(cfg, 4)
    back = rope.clone()
    back[:, 1::2] *= -1
    q = turned(torch.from_numpy(arrays["idx_q"][picked]), positions, back).float()
    query = index_query(
        q.to(device),
        torch.from_numpy(arrays["idx_w"][picked]).to(device),
        positions.to(device),
        rope.to(device),
        keys,
        impl=impl,
    )
    lengths = ((positions + 1) // 4).tolist()
    table = pages.int().expand(len(lengths), len(pages)).contiguous().to(device)
    scores = score(impl, (query, keys, table), lengths, len(keys_of))
    k = cfg.index_topk
    raw, _ = selected(impl, (query, keys, table), lengths, k, max_length=len(keys_of))
    largest = np.abs(np.concatenate([arrays["idx_score"][picked][row, :n] for row, n in enumerate(lengths)])).max()
    compared = 0
    for row, length in enumerate(lengths):
        expected = arrays["idx_score"][picked][row, :length]
        error = np.abs(scores[row, :length].numpy() - expected)
        assert (error <= ERROR[kv] * largest).all(), f"row {row}"
        position = int(positions[row])
        if not 0 <= arrays["topk_margin"][position] < MARGIN[kv]:
            # Without the padding, of which a golden has as much as it has columns.
            assert set(raw[row].tolist()) - {-1} == set(arrays["topk_idx"][position].tolist()) - {-1}, f"row {row}"
            compared += 1
    assert compared >= len(lengths) * {"fp32": 0.9, "bf16": 0.5, "fp8": 0.1}[kv]
