"""Steps of every kind on a GPU, and what attends to them, for a sanitizer to watch; run as a script.

Sizes are small, since a sanitizer is slow. Memory that is nobody's is NaN.
"""

from __future__ import annotations

import torch

from attention_harness import FORMATS, add_sink_and_rope, make_case
from cache_harness import Harness, small_geometry
from dsv4_backend.indexer import index_query, index_scores, select_entries, select_topk
from test_attention_kernels import run_split
from test_indexer import Sizes, random, rope_like
from test_indexer import make_case as make_index_case
from test_layer import LayerHarness

SIZES = {"fp32": ((64, 16), 32), "bf16": ((128, 64), 64), "fp8": ((512, 64), 128)}
"""Head and rope dimension, and the indexer's head dimension."""
RATIOS = (4, 128)


def store(impl: str, device: str) -> None:
    """What fills the cache: prompts, verification with rejected drafts, decode with padding."""
    for ratio in RATIOS:
        for kv, (head, index_dim) in SIZES.items():
            harness = Harness(
                impl,
                device,
                ratio,
                head=head,
                index_dim=index_dim,
                kv=kv,
                geom=small_geometry(drafts=True),
                lanes=2,
                tokens=300,
            )
            first, second = harness.open(), harness.open()
            harness.extend({first: 125, second: 6}, padded_rows=160)
            harness.verify({first: 4, second: 3}, {first: 2, second: 1})
            harness.decode([first, second], padding=2)
            harness.extend({first: 1, second: 140})
            for lane in (first, second):
                found = harness.stored(lane)
                assert not any(entries.isnan().any() for entries in found.values()), (ratio, kv)


def index(impl: str, device: str) -> None:
    """The indexer call by call: rows with fewer entries than are selected, with as many, with more, and with none."""
    rows, k, width = 5, 20, 140
    lengths = torch.tensor([139, 140, 20, 3, 0], dtype=torch.int32, device=device)
    for kv, (_, dim) in SIZES.items():
        _, keys, table = make_index_case(kv, Sizes(4, dim, 16, 16, width), device, rows=rows)
        q, weights = random(rows, 4, dim).to(device), random(rows, 4).to(device)
        query = index_query(q, weights, torch.arange(rows, device=device), rope_like(rows, 16, device), keys, impl=impl)
        scores = torch.full((rows, width), torch.nan, device=device)
        index_scores(query, keys, table, lengths, out=scores, impl=impl)
        assert scores.isnan().sum(dim=1).tolist() == [width - n for n in lengths.tolist()], kv
        raw, *outs = torch.full((4, rows, k), -7, dtype=torch.int32, device=device)
        select_topk(scores, lengths, table, 16, out=outs[0], raw=raw, impl=impl)
        select_topk(scores, lengths, table, 16, out=outs[1], impl=impl)
        select_entries(query, keys, table, lengths, out=outs[2], max_length=width, impl=impl)
        assert all(torch.equal(out, outs[0]) for out in outs), kv
        assert (raw >= 0).sum(dim=1).tolist() == [20, 20, 20, 3, 0], kv
    # More columns than a program takes in one turn.
    scores, lengths = torch.randn((3, 3000), device=device), lengths[:3] + 2800
    table = torch.arange(1, 565, dtype=torch.int32, device=device).view(3, 188)
    for slots in (raw[:3], None):
        select_topk(scores, lengths, table, 16, out=outs[0][:3], raw=slots, impl=impl)
    assert (outs[0][:3] > 0).all()


def attend(impl: str, device: str) -> None:
    """Attention in every format, with indices that are skipped, in one split and in several."""
    for kv in FORMATS:
        for compressed in ((3, 45), None):
            case = add_sink_and_rope(make_case(kv, device, heads=3, window=(3, 40), compressed=compressed))
            case.check(impl)
            for splits in (1, 3) if impl == "triton" else ():
                lse = torch.full((3, 3), torch.nan, device=device)
                out = run_split(case, impl, splits, lse)
                assert not out.isnan().any(), (kv, splits)
                assert not lse.isnan().any(), (kv, splits)


def whole_layers(impl: str, device: str) -> None:
    """Layers from hidden states to output, with more entries than are selected, drafts and padding."""
    for ratio in RATIOS:
        for kv in FORMATS:
            harness = LayerHarness(
                impl,
                device,
                ratio,
                dtype=torch.float32 if kv == "fp32" else torch.bfloat16,
                head=(128, 64),
                index_dim=64,
                kv=kv,
                geom=small_geometry(drafts=True),
                lanes=2,
                tokens=140,
            )
            first, second = harness.open(), harness.open()
            harness.extend({first: 130, second: 3}, padded_rows=140)
            outs = [harness.out]
            harness.verify({first: 2, second: 2}, {first: 1, second: 2})
            outs.append(harness.out)
            harness.decode([first, second], padding=2)
            outs.append(harness.out)
            assert all(out.isfinite().all() for out in outs), (ratio, kv)


def main(impl: str = "triton", device: str = "cuda") -> None:
    for part in (store, index, attend, whole_layers):
        part(impl, device)
    print("done")


if __name__ == "__main__":
    main()
