"""Faults that others met in production, through tables, metadata, cache and a whole attention layer.

What a layer must give is computed from hidden states and weights in float64, without tables, pages or lists.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attention_harness import turn
from backends import INTERPRET, each_backend, each_fast_backend
from cache_harness import norm_rope, pool_tokens, small_config, small_geometry
from dsv4_backend import (
    AttnMetadata,
    CacheGeometry,
    CacheSize,
    DSV4Attention,
    DSV4Cache,
    DSV4Config,
    ForwardMode,
    MetadataBuilder,
    PagePool,
    RawBatch,
    store_entries,
)
from dsv4_backend.attention_exact import exact_output
from dsv4_backend.attention_verify import poison
from dsv4_backend.reference.kv_store import load_entries
from dsv4_backend.table_mirror import TableMirror

RATIOS = pytest.mark.parametrize("ratio", [0, 4, 128], ids=["window", "c4", "c128"])
TOLERANCE = 5e-6
SMALL, PACKABLE = (32, 16), (128, 64)  # head and rope dimension; format fp8 has room for the second
WINDOW = small_geometry(window=128)


class Served:
    """A layer with requests of these lengths on its cache. Memory that is nobody's is NaN: page 0 and the last, too.

    Its prompts are computed in torch where the kernels are interpreted.
    """

    def __init__(
        self,
        impl: str,
        device: str,
        ratio: int,
        lengths: list[int],
        geom: CacheGeometry,
        *,
        topk: int = 8,
        kv: str = "fp32",
    ) -> None:
        head = PACKABLE if kv == "fp8" else SMALL
        cfg = small_config(ratio, head, 64 if kv == "fp8" else 32, geom.window)
        self.cfg: DSV4Config = dataclasses.replace(cfg, index_topk=topk)
        self.lengths, self.geom, self.device = lengths, geom, torch.device(device)
        pages, parts = -(-max(lengths) // geom.page_size) * len(lengths), geom.page_size // geom.swa_page_size
        self.pool = PagePool(
            page_size=geom.page_size,
            window_page_size=geom.swa_page_size,
            num_pages=pages,
            num_window_pages=pages * parts,
            max_requests=len(lengths),
            max_len=max(lengths),
        )
        self.mirror = TableMirror(self.pool, self.device)
        size = CacheSize(pages + 2, pages * parts + 2, len(lengths) + 1)
        self.cache = DSV4Cache(self.cfg, geom, size, format=kv, device=device).layers[0]
        poison(self.cache)
        generator = torch.Generator().manual_seed(ratio)
        self.x = [torch.randn((n, self.cfg.hidden_size), generator=generator).to(device) for n in lengths]
        self.rows = [self.pool.open() for _ in lengths]
        for row, length in zip(self.rows, lengths, strict=True):
            self.pool.grow(row, length)
        self.tables = self.mirror.refresh()
        torch.manual_seed(ratio)
        weights = DSV4Attention(self.cfg, ratio, dtype=torch.float32).state_dict()
        for name, each in weights.items():
            if name.endswith(("ape", "norm", "sink")):
                each.add_(torch.randn(each.shape) * 0.3)
        self.weights = weights
        self.kernels = self._runner(impl)
        self._prompts = self._runner("torch") if INTERPRET else self.kernels
        self.meta: AttnMetadata
        self.stale: int | None = None  # what the layer finds in the list of selected entries; None: what a build leaves

    def _runner(self, impl: str) -> tuple[MetadataBuilder, DSV4Attention]:
        cfg, ratio = self.cfg, self.cache.ratio
        builder = MetadataBuilder(
            cfg,
            self.geom,
            self.tables,
            max_rows=sum(self.lengths),
            max_seq_len=max(self.lengths),
            ratios=(ratio,) if ratio else (),
            impl=impl,
        )
        weights = {name: each.clone() for name, each in self.weights.items()}
        layer = DSV4Attention.from_weights(weights, cfg, ratio, impl=impl, device=self.device, dtype=torch.float32)
        return builder, layer

    def prompts(self, left: int = 1) -> torch.Tensor:
        """All tokens of all requests but the last ones."""
        sizes = {lane: n - left for lane, n in enumerate(self.lengths) if n > left}
        return self._step(ForwardMode.EXTEND, dict.fromkeys(sizes, 0), sizes, self._prompts)

    def decode(self, lanes: list[int] | None = None) -> torch.Tensor:
        """The last token of all requests, or of some."""
        last = {lane: self.lengths[lane] - 1 for lane in lanes or range(len(self.lengths))}
        return self._step(ForwardMode.DECODE, last, dict.fromkeys(last, 1), self.kernels)

    def verify(self, drafts: int) -> torch.Tensor:
        """The last tokens of all requests as drafts."""
        starts = {lane: n - drafts for lane, n in enumerate(self.lengths)}
        return self._step(ForwardMode.TARGET_VERIFY, starts, dict.fromkeys(starts, drafts), self.kernels)

    def _step(
        self,
        mode: ForwardMode,
        starts: dict[int, int],
        sizes: dict[int, int],
        runner: tuple[MetadataBuilder, DSV4Attention],
    ) -> torch.Tensor:
        builder, layer = runner
        places = [(lane, slice(start, start + sizes[lane])) for lane, start in starts.items()]
        slots = [torch.from_numpy(self.pool.slots(self.rows[lane], part.start, part.stop)) for lane, part in places]
        verify = mode is ForwardMode.TARGET_VERIFY
        batch = RawBatch(
            mode,
            torch.tensor([self.rows[lane] for lane in starts]).to(self.device),
            torch.tensor([part.start if verify else part.stop for _, part in places]).to(self.device),
            torch.cat(slots).to(self.device),
            extend_lens=torch.tensor(list(sizes.values())).to(self.device) if mode is ForwardMode.EXTEND else None,
            num_draft_tokens=max(sizes.values()) if verify else 0,
        )
        self.meta = builder.build(batch)
        builder.check()
        if self.stale is not None:
            assert self.meta.c4_sparse_page_indices is not None
            self.meta.c4_sparse_page_indices.fill_(self.stale)
        return layer(torch.cat([self.x[lane][part] for lane, part in places]), self.meta, self.cache)

    def window_slots(self, lane: int, positions: slice) -> torch.Tensor:
        """Full slots of positions: places in `tables.full_to_swa`."""
        return self.tables.req_to_token[self.rows[lane], positions].long()

    def entry_slots(self, lane: int, entries: list[int]) -> list[int]:
        ends = torch.tensor(entries, dtype=torch.int64) * 4 + 3
        return (torch.from_numpy(self.pool.req_to_token[self.rows[lane]])[ends] // 4).tolist()

    def expected(
        self, lane: int, tokens: list[int], lost: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, list[list[int]]]:
        """Outputs of a request's tokens, float64 [n, hidden_size], and the entries that each of them attends.

        `lost`: positions that the window shall not have.
        """
        layer, cfg = self.kernels[1], self.cfg
        weights = {name: each.detach().cpu().double() for name, each in self.weights.items()}
        x, rope, at = self.x[lane].cpu().double(), layer.rope.cpu(), torch.tensor(tokens)
        latent = x[at] @ weights["wq_a"].T
        latent = latent / (latent.square().mean(dim=1, keepdim=True) + cfg.rms_norm_eps).sqrt() * weights["q_norm"]
        query = (latent @ weights["wq_b"].T).view(-1, cfg.head_dim)
        heads_at = at.repeat_interleave(cfg.num_heads)
        query = norm_rope(query, torch.ones(cfg.head_dim), heads_at, rope).view(len(at), -1, cfg.head_dim)
        window = norm_rope(x @ weights["wkv"].T, weights["kv_norm"], torch.arange(len(x)), rope)
        entries = self._entries("comp", x, weights, rope) if self.cache.ratio else window[:0]
        chosen = self._chosen(tokens, x, latent, weights, rope)
        context = torch.empty_like(query)
        for row, token in enumerate(tokens):
            seen = [p for p in range(max(0, token + 1 - cfg.window), token + 1) if p not in lost]
            values = torch.cat((window[seen], entries[chosen[row]]))
            logits = query[row] @ values.T * cfg.head_dim**-0.5
            weight = torch.cat((logits, weights["sink"][:, None]), dim=1).softmax(dim=1)[:, :-1]
            context[row] = weight @ values
        return exact_output(turn(context, -1, at, rope), weights, cfg), chosen

    def _entries(
        self, name: str, x: torch.Tensor, weights: dict[str, torch.Tensor], rope: torch.Tensor
    ) -> torch.Tensor:
        ratio = self.cache.ratio
        scores = torch.cat((x @ weights[f"{name}_wkv"].T, x @ weights[f"{name}_wgate"].T), dim=1)
        pooled = pool_tokens(scores, weights[f"{name}_ape"].double(), ratio)
        return norm_rope(pooled, weights[f"{name}_norm"], torch.arange(len(pooled)) * ratio, rope)

    def _chosen(
        self,
        tokens: list[int],
        x: torch.Tensor,
        latent: torch.Tensor,
        weights: dict[str, torch.Tensor],
        rope: torch.Tensor,
    ) -> list[list[int]]:
        """Entries that each token attends: all that are closed, or the best of them, of equal ones the first."""
        ratio, cfg = self.cache.ratio, self.cfg
        if ratio != 4:
            return [list(range((token + 1) // 128)) if ratio else [] for token in tokens]
        keys, at, found = self._entries("idx_comp", x, weights, rope), torch.tensor(tokens), []
        queries = (latent @ weights["idx_wq_b"].T).view(len(at), cfg.index_heads, cfg.index_head_dim)
        products = (turn(queries, 1, at, rope) @ keys.T).relu()
        scores = torch.einsum("nhw,nh->nw", products, x[at] @ weights["idx_wproj"].T)
        for row, token in enumerate(tokens):
            ranked, order = scores[row, : (token + 1) // 4].sort(descending=True, stable=True)
            k = cfg.index_topk
            if len(ranked) > k:
                # What float32 can tell apart; zeros, of which there may be several, are exact.
                assert not 0 < ranked[k - 1] - ranked[k] < 1e-4, "expected scores that are no near ties"
            found.append(sorted(order[:k].tolist()))
        return found

    def check(self, found: torch.Tensor, lane: int, tokens: list[int], lost: tuple[int, ...] = ()) -> None:
        """Outputs of a request's tokens are those of the definition."""
        expected, _ = self.expected(lane, tokens, lost)
        assert found.shape == expected.shape
        worst = float((found.cpu().double() - expected).abs().max())
        assert worst <= TOLERANCE, f"request {lane} of {self.lengths[lane]} tokens: {worst}"


@each_backend
@pytest.mark.parametrize("topk", [8, 5], ids="k{}".format)
def test_fewer_candidates_than_k(impl: str, device: str, topk: int) -> None:
    """B21: k was a constant, not the model's; rows with fewer entries attended what a longer batch had left behind."""
    lengths = [1, 3, 4, 4 * topk - 4, 4 * topk - 1, 4 * topk, 4 * topk + 4, 8 * topk]
    count = len(lengths)
    served = Served(impl, device, 4, lengths + [8 * topk] * count, small_geometry(), topk=topk)
    served.prompts()
    served.decode(list(range(count, 2 * count)))
    selected = served.meta.c4_sparse_page_indices
    assert selected is not None
    assert selected.shape == (count, topk)
    assert (selected > 0).all()
    served.stale = int(selected[0, 0])
    out = served.decode(list(range(count)))
    again = served.meta.c4_sparse_page_indices
    assert again is not None
    assert again.data_ptr() == selected.data_ptr()
    assert served.meta.c4_sparse_lengths is not None
    assert served.meta.c4_sparse_lengths.tolist() == [0, 0, 1, topk - 1, topk - 1, topk, topk, topk]
    for lane, length in enumerate(lengths):
        _, ((*entries,),) = served.expected(lane, [length - 1])
        assert again[lane].tolist() == served.entry_slots(lane, entries) + [-1] * (topk - len(entries))
        served.check(out[lane : lane + 1], lane, [length - 1])


@each_fast_backend
def test_fewer_candidates_than_k_in_prompts(impl: str, device: str) -> None:
    """B21: the same for each row of a prompt, some of which have fewer entries and some more."""
    topk = 8
    served = Served(impl, device, 4, [8 * topk, 8 * topk], small_geometry(), topk=topk)
    rows = list(range(8 * topk))
    for _ in range(2):  # the second one finds the selection of the first
        out = served.prompts(left=0)
        selected = served.meta.c4_sparse_page_indices
        assert selected is not None
        for lane in range(2):
            part = slice(lane * len(rows), (lane + 1) * len(rows))
            _, chosen = served.expected(lane, rows)
            slots = [served.entry_slots(lane, each) + [-1] * (topk - len(each)) for each in chosen]
            assert selected[part].tolist() == slots
            served.check(out[part], lane, rows)


@each_backend
@RATIOS
@pytest.mark.parametrize("evicted", [0, -1], ids=["as 0", "as -1"])
def test_evicted_window_entries(impl: str, device: str, ratio: int, evicted: int) -> None:
    """B31: entries that had left the window were read through what stands for them in the table."""
    lengths = [300, 130]
    served = Served(impl, device, ratio, lengths, WINDOW)
    served.prompts()
    before = served.decode()
    evict(served, evicted)
    out = served.decode()
    assert torch.equal(out, before)
    for lane, length in enumerate(lengths):
        served.check(out[lane : lane + 1], lane, [length - 1])
    assert (served.meta.swa_page_indices > 0).all()
    assert served.meta.swa_lengths.tolist() == [128, 128]


@each_fast_backend
@RATIOS
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_evicted_window_entries_in_other_formats(impl: str, device: str, ratio: int, kv: str) -> None:
    """B31: the same where entries are rounded, and packed."""
    served = Served(impl, device, ratio, [300, 130], WINDOW, kv=kv)
    served.prompts()
    before = served.decode()
    for evicted in (0, -1):
        evict(served, evicted)
        out = served.decode()
        assert out.isfinite().all()
        assert torch.equal(out, before)


def evict(served: Served, value: int) -> None:
    """Positions 0 to 127 of the first request and 1 of the second leave the window; their entries become NaN."""
    window, full_to_swa = served.cache.window, served.tables.full_to_swa
    gone = torch.cat((served.window_slots(0, slice(0, 128)), served.window_slots(1, slice(1, 2))))
    slots = full_to_swa[gone]
    slots = slots[slots > 0]
    nothing = torch.full((len(slots), window.layout.head_dim), torch.nan, device=served.device)
    store_entries(nothing, slots, window, impl="torch")
    assert load_entries(window, torch.cat((slots, slots.new_zeros(1)))).isnan().any(dim=1).all()
    full_to_swa[gone] = value


@each_backend
@RATIOS
@pytest.mark.parametrize("table", ["full_to_swa", "req_to_token"])
def test_an_entry_of_minus_one_is_skipped(impl: str, device: str, ratio: int, table: str) -> None:
    """B31: -1 became a large unsigned number, or offset 255 of page -1. It is no fault here: the entry is left out."""
    lengths, lost = [300, 130], 290
    served = Served(impl, device, ratio, lengths, WINDOW)
    served.prompts()
    if table == "full_to_swa":
        served.tables.full_to_swa[served.window_slots(0, slice(lost, lost + 1))] = -1
    else:
        served.tables.req_to_token[served.rows[0], lost] = -1
    out = served.decode()
    column = lengths[0] - 1 - lost
    assert (served.meta.swa_page_indices == -1).nonzero().tolist() == [[0, column]]
    assert served.meta.swa_lengths.tolist() == [128, 128]
    served.check(out[:1], 0, [299], lost=(lost,))
    served.check(out[1:], 1, [129])


@each_backend
@RATIOS
@pytest.mark.parametrize("window", [128, 100], ids="w{}".format)
def test_window_lengths_are_not_the_width(impl: str, device: str, ratio: int, window: int) -> None:
    """B32: the length was 128 whatever the row had, or the width of the list, or one short of the window."""
    lengths = [1, 2, 127, 128, 129, 255, 256, 257]
    served = Served(impl, device, ratio, lengths, small_geometry(page_size=256, window=window))
    served.prompts()
    out = served.decode()
    meta = served.meta
    assert meta.swa_lengths.tolist() == [min(n, window) for n in lengths]
    assert meta.swa_page_indices.shape[1] == 128
    for lane, length in enumerate(lengths):
        assert (meta.swa_page_indices[lane] > 0).tolist() == [k < min(length, window) for k in range(128)]
        served.check(out[lane : lane + 1], lane, [length - 1])
    assert (meta.swa_page_indices >= -1).all()
    assert (meta.readable("page_table") > 0).sum(dim=1).tolist() == [1] * 7 + [2]


@each_backend
@RATIOS
def test_window_lengths_of_drafts(impl: str, device: str, ratio: int) -> None:
    """B32: the same for the rows of a verify step, each of which has a window of its own."""
    served = Served(impl, device, ratio, [131], small_geometry(drafts=True, window=128))
    served.prompts(left=6)
    out = served.verify(6)
    assert served.meta.seq_lens_causal.tolist() == [126, 127, 128, 129, 130, 131]
    assert served.meta.swa_lengths.tolist() == [126, 127, 128, 128, 128, 128]
    served.check(out, 0, list(range(125, 131)))
