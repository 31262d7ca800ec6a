"""The flat model: its logits at every position are Hugging Face's, in any chunks; what rounded caches change."""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from dsv4_backend import (
    AttnMetadata,
    CacheSize,
    DSV4AttnBackend,
    DSV4Cache,
    EntryPool,
    ForwardMode,
    IndexQuery,
    LayerCache,
    RawBatch,
)
from dsv4_backend.indexer import select_entries
from dsv4_backend.page_pool import PagePool
from dsv4_backend.table_mirror import TableMirror
from dsv4_examples.hf_dsv4.model import FlatModel
from hf_harness import Case, case, each_device, each_model

TOLERANCE = 1e-4
LENGTHS = {"tiny": 1500, "flash-dims": 2300}
"""Tokens of the longest prompt: the indexer has more entries to choose from than it may."""
CHUNKS = ((0, 0), (200, 1000), (64, 520), (7, 140), (3, 40), (1, 14))
"""Rows of a step, and tokens of the prompt; 0: all."""
ROUNDED = 600
"""Tokens of the prompt that rounded caches are compared on."""


class Serving:
    """One sequence on a model, in steps of the caller's choice."""

    def __init__(self, served: Case, kv: str = "fp32", *, length: int) -> None:
        self.served, self.model, geom = served, served.model, served.config.geometry()
        pages = -(-length // geom.page_size)
        parts = geom.page_size // geom.swa_page_size
        self.pool = PagePool(
            page_size=geom.page_size,
            window_page_size=geom.swa_page_size,
            num_pages=pages,
            num_window_pages=pages * parts,
            max_requests=1,
            max_len=length,
        )
        self.row = self.pool.open()
        self.pool.grow(self.row, length)
        size = CacheSize(pages + 1, pages * parts + 1, 2)
        cache = DSV4Cache(self.model.cfg, geom, size, format=kv, device=served.device)
        tables = TableMirror(self.pool, served.device).tables
        self.backend = DSV4AttnBackend(self.model.cfg, geom, cache, tables)

    def logits(self, tokens: list[int], start: int = 0) -> torch.Tensor:
        """[T, vocabulary]: of a step of tokens at positions `start` and up."""
        stop, device = start + len(tokens), self.served.device

        def tensor(values: object) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.int64, device=device)

        slots = tensor(self.pool.slots(self.row, start, stop).copy())
        batch = RawBatch(
            ForwardMode.EXTEND, tensor([self.row]), tensor([stop]), slots, extend_lens=tensor([len(tokens)])
        )
        meta = self.backend.prepare(batch)
        hidden = self.model.hidden(tensor(tokens), lambda index, x: self.attend(index, x, meta))
        return self.model.logits(hidden)

    def attend(self, index: int, x: torch.Tensor, meta: AttnMetadata) -> torch.Tensor:
        return self.backend.attend(index, self.model.layers[index], x, meta)


@cache
def expected(name: str, device: str) -> torch.Tensor:
    """[T, vocabulary]: Hugging Face's, in one forward without a cache."""
    served = case(name, device)
    with torch.no_grad():
        found: torch.Tensor = served.hf(
            torch.tensor([served.tokens(LENGTHS[name])], device=device), use_cache=False
        ).logits[0]
    return found


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max())


@each_model
@pytest.mark.parametrize(("chunk", "length"), CHUNKS, ids=[f"{chunk or 'whole'}" for chunk, _ in CHUNKS])
def test_logits_of_every_position(name: str, device: str, chunk: int, length: int) -> None:
    served, longest = case(name, device), LENGTHS[name]
    length, chunk = length or longest, chunk or longest
    serving, tokens = Serving(served, length=length), served.tokens(longest)[:length]
    parts = [serving.logits(tokens[start : start + chunk], start) for start in range(0, length, chunk)]
    worst = difference(torch.cat(parts), expected(name, device)[:length])
    print(f"{name} on {device}, steps of {chunk} rows: largest difference of a logit {worst:.1e}")
    assert worst < TOLERANCE


@each_device
def test_hugging_face_is_left_alone(device: str) -> None:
    served = case("small", device)
    hf, flat = served.hf, served.model
    shared = {p.data_ptr() for p in hf.parameters()}
    for ours, theirs in zip(flat.blocks, hf.model.layers, strict=True):
        assert type(theirs.self_attn).__name__ == "DeepseekV4Attention"
        assert type(ours.self_attn).__name__ == "AttentionSlot"
        assert {p.data_ptr() for p in ours.parameters()} <= shared
    assert flat.cfg.compress_ratios == (0, 4, 128)
    assert [layer.ratio for layer in flat.layers] == [0, 4, 128]


def test_first_layers() -> None:
    served = case("small")
    draft = served.model.first_layers(1)
    assert draft.cfg.compress_ratios == (0,)
    assert draft.layers == served.model.layers[:1]
    assert draft.blocks == served.model.blocks[:1]
    seen: list[int] = []

    def attend(index: int, x: torch.Tensor) -> torch.Tensor:
        seen.append(index)
        assert x.shape == (3, served.model.cfg.hidden_size)
        return torch.zeros_like(x)

    ids = torch.tensor([1, 2, 3])
    assert draft.logits(draft.hidden(ids, attend)).shape == (3, served.vocabulary)
    assert seen == [0]
    served.model.hidden(ids, attend)
    assert seen == [0, 0, 1, 2]
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"count: expected 1 to 3 layers, got {count}"):
            served.model.first_layers(count)


@each_device
def test_a_bfloat16_model(device: str) -> None:
    served = case("small", device)
    tokens = served.tokens(140)
    whole = Serving(served, length=140).logits(tokens)
    half = Case("small", device)
    half.hf = half.hf.bfloat16()
    half.model = FlatModel.from_hf(half.hf)
    assert half.model.layers[1].dtype == torch.bfloat16
    found = Serving(half, kv="bf16", length=140).logits(tokens)
    assert found.dtype == torch.bfloat16
    error = (found.float() - whole).norm(dim=1) / whole.norm(dim=1)
    assert float(error.median()) < 5e-2


def hadamard(dim: int) -> torch.Tensor:
    made = torch.ones((1, 1))
    while len(made) < dim:
        made = torch.cat((torch.cat((made, made), dim=1), torch.cat((made, -made), dim=1)))
    return made * dim**-0.5


def rounded(values: torch.Tensor, kv: str, rope_dim: int) -> torch.Tensor:
    """What a cache of format `kv` keeps of entries [n, head_dim]."""
    values = values.bfloat16().float()
    if kv == "bf16":
        return values
    still, turning = values.split((values.shape[1] - rope_dim, rope_dim), dim=1)
    blocks = still.unflatten(1, (-1, 64))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(dim=2, keepdim=True).clamp(min=1e-4) / 448)))
    return torch.cat((((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1), turning), dim=1)


def rounded_index(values: torch.Tensor, kv: str) -> torch.Tensor:
    """The same of indexer keys or queries [.., dim], turned back into the space that they came from."""
    turn = hadamard(values.shape[-1])
    values = values @ turn
    if kv == "bf16":
        return values.bfloat16().float() @ turn
    scale = values.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4) / 448
    return (values / scale).to(torch.float8_e4m3fn).float() * scale @ turn


class RoundedServing(Serving):
    """A float32 cache whose entries are rounded as soon as they are stored, and index queries with them."""

    def __init__(self, served: Case, kv: str) -> None:
        super().__init__(served, length=ROUNDED)
        self.kv = kv

    def attend(self, index: int, x: torch.Tensor, meta: AttnMetadata) -> torch.Tensor:
        layer, cache = self.model.layers[index], self.backend.cache.layers[index]
        with torch.no_grad():
            made = layer.project(x, meta.positions)
            layer.writer(cache).write(meta, made.kv, made.kv_score, made.index_score)
            self.round(cache)
            if layer.ratio == 4:
                query = layer.index_query(made, meta.positions, cache)
                assert cache.index_keys is not None
                assert meta.c4_lengths is not None
                assert meta.c4_sparse_page_indices is not None
                select_entries(
                    IndexQuery(rounded_index(query.values, self.kv), query.weights),
                    cache.index_keys,
                    meta.page_table,
                    meta.c4_lengths,
                    out=meta.c4_sparse_page_indices,
                    max_length=meta.max_c4_length,
                )
            return layer.combine(layer.attend(made.query, meta, cache))

    def round(self, cache: LayerCache) -> None:
        rope_dim = self.model.cfg.rope_dim
        for pool in (cache.window, cache.compressed):
            if isinstance(pool, EntryPool):
                pool.data.copy_(rounded(pool.data, self.kv, rope_dim))
        if cache.index_keys is not None:
            cache.index_keys.data.copy_(rounded_index(cache.index_keys.data, self.kv))


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_rounded_caches_cost_what_rounding_costs(kv: str) -> None:
    served = case("tiny")
    tokens = served.tokens(ROUNDED)
    whole = Serving(served, length=ROUNDED).logits(tokens)

    def error(serving: Serving) -> torch.Tensor:
        return (serving.logits(tokens) - whole).norm(dim=1) / whole.norm(dim=1)

    ours, alone = error(Serving(served, kv, length=ROUNDED)), error(RoundedServing(served, kv))
    for quantile in (0.5, 0.9, 1.0):
        got, wanted = (float(each.quantile(quantile)) for each in (ours, alone))
        print(f"{kv}: error of a row's logits, quantile {quantile}: {got:.1e}, of rounding alone {wanted:.1e}")
        assert 0 < got < 1.5 * wanted
