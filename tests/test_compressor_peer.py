"""SGLang's released compressor, fed our plans, on a GPU: the same entries, state and cache as with its own planner's.

Needs the folder of released kernels that DSV4_PEER names (`compressor_peer.py` and `planner_peer.py` in it).
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv4_backend as d4

PEER = os.environ.get("DSV4_PEER", "")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not PEER, reason="DSV4_PEER names no folder with the released compressor"),
]

BATCHES = 50
HEAD_DIMS = {4: (512, 128), 128: (512,)}
PAGE_BYTES = {(4, 512): (64 * 584 + 575) // 576 * 576, (4, 128): 64 * 132, (128, 512): (2 * 584 + 575) // 576 * 576}


@cache
def peer() -> tuple[Any, Any, Any]:
    """The peers' two scripts, and the released planner."""
    sys.path.insert(0, PEER)
    import compressor_peer
    import planner_peer

    return compressor_peer, planner_peer, planner_peer.load("s23", str(Path(PEER).resolve() / "s23"))


@cache
def kernels(ratio: int, head_dim: int) -> Any:
    return peer()[0].build(ratio, head_dim)


class Batch:
    """Random requests on shuffled pages of both pools."""

    def __init__(self, seed: int, drafts: int, decode: bool) -> None:
        g = torch.Generator().manual_seed(seed)
        count = int(torch.randint(1, 25, (1,), generator=g))
        self.geom = d4.CacheGeometry.for_drafts(drafts)
        most = 1 if decode else drafts or 600
        extend = torch.randint(1, most + 1, (count,), generator=g)
        prefix = torch.randint(0, 1500, (count,), generator=g)
        self.seq, self.extend = (prefix + extend).cuda(), extend.cuda()
        self.rows = int(extend.sum())
        pages = -(-int((prefix + extend).max()) // 256)
        req_to_token = torch.zeros(count + 2, pages * 256, dtype=torch.int32)
        order = (torch.randperm((count + 1) * pages, generator=g) + 1).view(count + 1, pages)
        req_to_token[1:] = (order[:, :, None] * 256 + torch.arange(256)).flatten(1).int()
        full_to_swa = torch.zeros(((count + 1) * pages + 2) * 256 + 1, dtype=torch.int64)
        swa = torch.randperm((count + 1) * pages, generator=g) + 1
        full_to_swa[256 : 256 * (len(swa) + 1)] = (swa[:, None] * 256 + torch.arange(256)).flatten()
        full_to_swa[-1] = -1
        self.req = (torch.randperm(count + 1, generator=g)[:count] + 1).cuda()
        self.tables = d4.RequestTables(req_to_token.cuda(), full_to_swa.cuda())
        self.swa_pages = len(swa) + 2
        self.longest = pages * 256

    def state_pages(self, ratio: int) -> int:
        ring = self.geom.c4_ring if ratio == 4 else self.geom.c128_ring
        owners = self.swa_pages if ratio == 4 else self.tables.num_requests
        return -(-owners * ring // ratio) + 1

    def slots(self) -> torch.Tensor:
        """Write slot of each row."""
        lens, seq = self.extend.tolist(), self.seq.tolist()
        table = self.tables.req_to_token
        return torch.cat([table[r, s - e : s] for r, s, e in zip(self.req.tolist(), seq, lens, strict=True)]).long()

    def theirs(self, ratio: int, decode: bool) -> tuple[torch.Tensor, ...]:
        _compressor, planner, module = peer()
        ring = self.geom.c4_ring if ratio == 4 else self.geom.c128_ring
        tables = self.tables.req_to_token, self.tables.full_to_swa
        if decode:
            return (torch.from_dlpack(module.plan_decode(self.req, *tables, self.seq, ratio, 256, ring, False)),)
        x = dict(rid=self.req, r2t=tables[0], f2s=tables[1], seq=self.seq, ext=self.extend, n=self.rows)
        return planner.call(module, "s23", x, ratio, 256, ring)

    def ours(self, ratio: int, decode: bool) -> tuple[torch.Tensor, ...]:
        if decode:
            rows = d4.plan_decode(self.seq, self.req, self.tables, self.geom).ratio(ratio)
            return (rows.rows,)
        plan = d4.plan_prefill(self.seq, self.extend, self.req, self.tables, self.geom, num_rows=self.rows)
        plan.check()
        lists = plan.ratio(ratio)
        return lists.compress, lists.write


def compressed(batch: Batch, ratio: int, head_dim: int, plan: tuple[torch.Tensor, ...], seed: int) -> dict[str, Any]:
    """What SGLang's kernels make of `plan`: entries by the row that closes them, state, cache."""
    compressor, _planner, _module = peer()
    module = kernels(ratio, head_dim)
    torch.manual_seed(seed)
    width = 2 * head_dim * (2 if ratio == 4 else 1)
    kv = torch.randn(batch.rows, width, device="cuda")
    ape = torch.randn(8 if ratio == 4 else 128, head_dim, device="cuda")
    state = torch.randn(batch.state_pages(ratio), ratio, width, device="cuda")
    freqs = torch.randn(batch.longest + 256, 64, device="cuda")
    weight = torch.randn(head_dim, device="cuda")
    decode = len(plan) == 1
    pooled = torch.full((plan[0].shape[0], head_dim), float("nan"), device="cuda")
    if decode:
        module.decode(state, kv, pooled, ape, plan[0])
        words = plan[0].view(torch.int32)
        closing = (words[:, 0] % ratio == 0).nonzero()[:, 0]
        closes = closing
    else:
        compressor.compress(module, state, kv, ape, plan[0], plan[1], pooled)
        words = plan[0].view(torch.int32)
        closing = (words[:, 0] != -1).nonzero()[:, 0]
        closes = words[closing, 1] & 0xFFFF
    slots = batch.slots()
    position = torch.cat(
        [torch.arange(s - e, s) for s, e in zip(batch.seq.tolist(), batch.extend.tolist(), strict=True)]
    ).cuda()
    out_loc = torch.div(slots, ratio, rounding_mode="trunc").where((position + 1) % ratio == 0, 0)
    pages = batch.tables.num_slots // 256 + 2
    cache = torch.zeros(pages, PAGE_BYTES[ratio, head_dim], dtype=torch.uint8, device="cuda")
    compressor.store(module, pooled, plan[0], weight, 1e-6, freqs, out_loc, cache, ratio, decode=decode)
    order = closes.argsort()
    return {"rows": closes[order], "entries": pooled[closing][order], "state": state, "cache": cache[1:]}


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("ratio", [4, 128])
def test_same_entries_state_and_cache(ratio: int, drafts: int, decode: bool) -> None:
    for seed in range(BATCHES):
        batch = Batch(seed, drafts, decode)
        for head_dim in HEAD_DIMS[ratio]:
            ours, theirs = (
                compressed(batch, ratio, head_dim, plan, seed)
                for plan in (batch.ours(ratio, decode), batch.theirs(ratio, decode))
            )
            for name, value in ours.items():
                assert torch.equal(value, theirs[name]), f"{name}, ratio {ratio}, width {head_dim}, batch {seed}"
