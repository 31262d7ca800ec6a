"""The indexer by its definition: queries, scores and selected entries of every format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from backends import INTERPRET, each_backend
from cache_harness import norm_rope
from dsv4_backend import EntryLayout, EntryPool, store_entries
from dsv4_backend.indexer import IndexQuery, index_query, index_scores, select_entries, workspace_row
from dsv4_backend.reference.kv_store import from_e4m3, hadamard

FORMATS = ("fp32", "bf16", "fp8")
each_format = pytest.mark.parametrize("kv", FORMATS)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rope_like(positions: int, rope_dim: int, device: str) -> torch.Tensor:
    angle = random(positions, rope_dim // 2, seed=9).double() * 3
    return torch.stack((angle.cos(), angle.sin()), dim=-1).float().view(positions, rope_dim).to(device)


def key_pool(
    kv: str, values: torch.Tensor, pages: torch.Tensor, rope_dim: int, page: int, num_pages: int, device: str
) -> EntryPool:
    """A poisoned pool with the keys of one request on `pages`."""
    pool = EntryPool.empty(EntryLayout(kv, values.shape[1], rope_dim, page, indexer=True), num_pages, device)
    pool.data.view(torch.uint8).fill_(0xFF)
    entry = torch.arange(len(values))
    store_entries(values.to(device), (pages.long()[entry // page] * page + entry % page).to(device), pool, impl="torch")
    return pool


def turned(q: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """float64 [T, H, D]: rope alone."""
    heads, dim = q.shape[1:]
    flat = q.double().flatten(0, 1)
    size = flat.square().mean(dim=1, keepdim=True).sqrt()  # which the norm takes away
    return (norm_rope(flat, torch.ones(dim), positions.repeat_interleave(heads), rope) * size).view(q.shape)


@each_backend
@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "dim", "rope_dim"), [(64, 128, 64), (3, 16, 4), (1, 32, 32)], ids=str)
def test_queries(impl: str, device: str, kv: str, dtype: torch.dtype, heads: int, dim: int, rope_dim: int) -> None:
    rows = 3
    base = torch.full((rows, heads * dim + 16), torch.nan, dtype=dtype, device=device)
    base[:, 8 : 8 + heads * dim] = random(rows, heads * dim).to(dtype)
    q = base[:, 8 : 8 + heads * dim].view(rows, heads, dim)
    weights = torch.stack((random(heads, rows), random(heads, rows, seed=1)), dim=2).to(device, dtype).permute(1, 0, 2)
    weights = weights[..., 0].contiguous()
    positions = torch.tensor([[7, 0], [0, 0], [40, 0]], device=device)[:, 0]
    rope = rope_like(41, rope_dim, device)
    keys = EntryPool.empty(EntryLayout(kv, dim, rope_dim, 4, indexer=True), 1, device)
    found = index_query(q, weights, positions, rope, keys, impl=impl)
    expected = turned(q.cpu(), positions.cpu(), rope.cpu())
    scaled = weights.cpu().double() * dim**-0.5 * heads**-0.5
    values = found.values.cpu()
    assert found.weights.dtype == torch.float32
    assert values.dtype == keys.layout.dtype
    if kv != "fp32":
        expected = hadamard(expected)
    if kv == "fp8":
        scale = expected.abs().amax(dim=2).clamp(min=1e-4) / 448
        scaled = scaled * scale
        values = from_e4m3(values) * scale[..., None]
    relative = {"fp32": 1e-6, "bf16": 2**-8, "fp8": 2**-4}[kv]
    smallest = expected.abs().amax() / 448 / 512 if kv == "fp8" else 1e-6
    assert ((values.double() - expected).abs() <= 1.01 * relative * expected.abs() + smallest).all()
    assert torch.allclose(found.weights.cpu().double(), scaled, rtol=2e-6, atol=0)


@each_backend
@each_format
def test_query_bytes_are_those_of_the_reference(impl: str, device: str, kv: str) -> None:
    """Where nothing turns there is nothing to round but what the format says: a GPU gives the same bytes, too."""
    q = random(5, 64, 128) * torch.exp2(random(5, 64, 1, seed=1) * 8)
    q[0, 0], q[0, 1], q[0, 2, 3] = 0.0, 1e-9, torch.nan
    rope = torch.tensor([1.0, 0.0]).repeat(32)[None]
    positions = torch.zeros(5, dtype=torch.int32)
    keys = EntryPool.empty(EntryLayout(kv, 128, 64, 4, indexer=True), 1)
    expected = index_query(q, random(5, 64), positions, rope, keys, impl="torch")
    there = EntryPool.empty(keys.layout, 1, device)
    arguments = [part.to(device) for part in (q, random(5, 64), positions, rope)]
    found = index_query(*arguments, there, impl=impl)
    bits = torch.uint8 if kv == "fp8" else torch.int16 if kv == "bf16" else torch.int32
    same = found.values.cpu().view(bits) == expected.values.view(bits)
    assert (same | expected.values.float().isnan() | ((expected.values == 0) & (found.values.cpu() == 0))).all()
    # Products of three floats, which a GPU may take in another order.
    assert torch.allclose(found.weights.cpu(), expected.weights, rtol=1e-6, atol=0, equal_nan=True)


@each_backend
@each_format
def test_positions_without_a_rope_turn_to_nothing(impl: str, device: str, kv: str) -> None:
    keys = EntryPool.empty(EntryLayout(kv, 16, 4, 4, indexer=True), 1, device)
    q, weights = random(3, 2, 16).to(device), random(3, 2).to(device)
    rope = rope_like(5, 4, device)
    positions = torch.tensor([5, -1, 2**40], device=device)
    cut = q.clone()
    cut[..., 12:] = 0
    found = index_query(q, weights, positions, rope, keys, impl=impl)
    expected = index_query(cut, weights, torch.zeros_like(positions), rope, keys, impl=impl)
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.weights, expected.weights)


@each_backend
def test_queries_go_where_they_are_asked_to(impl: str, device: str) -> None:
    keys = EntryPool.empty(EntryLayout("bf16", 16, 4, 4, indexer=True), 1, device)
    rope = rope_like(5, 4, device)
    q, weights = random(3, 2, 16).to(device), random(3, 2).to(device)
    positions = torch.arange(3, device=device)
    out = IndexQuery.empty(keys, 3, 2)
    assert index_query(q, weights, positions, rope, keys, impl=impl, out=out) is out
    expected = index_query(q, weights, positions, rope, keys, impl=impl)
    assert torch.equal(out.values, expected.values)
    assert torch.equal(out.weights, expected.weights)
    none = index_query(q[:0], weights[:0], positions[:0], rope, keys, impl=impl)
    assert none.values.shape == (0, 2, 16)


@dataclass(frozen=True)
class Sizes:
    heads: int
    dim: int
    rope_dim: int
    page: int
    entries: int


SIZES = {
    "the model's": Sizes(64, 128, 64, 64, 200),
    "few heads": Sizes(6, 32, 16, 32, 140),
    "one head, odd pages": Sizes(1, 16, 8, 3, 131),
    "more heads": Sizes(80, 64, 64, 96, 70),
}
each_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def make_case(kv: str, sizes: Sizes, device: str, rows: int = 3) -> tuple[IndexQuery, EntryPool, torch.Tensor]:
    """Queries, keys, and a page table with shuffled pages: all rows are of one request."""
    columns = -(-sizes.entries // sizes.page)
    pages = torch.randperm(columns, generator=torch.Generator().manual_seed(3)) + 1
    values = random(sizes.entries, sizes.dim, seed=4)
    keys = key_pool(kv, values, pages, sizes.rope_dim, sizes.page, columns + 1, device)
    query = index_query(
        random(rows, sizes.heads, sizes.dim, seed=5).to(device),
        random(rows, sizes.heads, seed=6).to(device),
        torch.arange(rows, device=device),
        rope_like(rows, sizes.rope_dim, device),
        keys,
        impl="torch",
    )
    return query, keys, pages.int().expand(rows, columns).contiguous().to(device)


def score(impl: str, case: tuple[IndexQuery, EntryPool, torch.Tensor], lengths: list[int], width: int) -> torch.Tensor:
    """float32 [T, width] on the CPU, with NaN where nothing was written; and checks that nothing is around it."""
    query, keys, table = case
    base = torch.full((len(lengths) + 2, width + 5), torch.nan, device=keys.device)
    out = base[1:-1, 3 : 3 + width]
    every_other = torch.tensor([[length, 9] for length in lengths], dtype=torch.int32, device=keys.device)
    index_scores(query, keys, table, every_other[:, 0], out=out, impl=impl)
    found = out.cpu().clone()
    out.fill_(torch.nan)
    assert base.isnan().all()
    return found


@each_backend
@each_format
@each_size
def test_scores(impl: str, device: str, kv: str, sizes: Sizes) -> None:
    """By the definition, in float64, from the keys as they are in the pool; as far as each row goes."""
    query, keys, table = case = make_case(kv, sizes, device)
    lengths = [sizes.entries, 1, sizes.entries // 2]
    found = score(impl, case, lengths, sizes.entries + 2)
    scales = torch.ones(sizes.entries).double()
    entry = torch.arange(sizes.entries)
    page, place = table[0].cpu().long()[entry // sizes.page], entry % sizes.page
    if kv == "fp8":
        data = keys.data.cpu()
        stored = from_e4m3(data[:, : sizes.page * sizes.dim].reshape(-1, sizes.page, sizes.dim)[page, place])
        scales = data[:, sizes.page * sizes.dim :].contiguous().view(torch.float32)[page, place].double()
        values = from_e4m3(query.values.cpu())
    else:
        stored, values = keys.data.cpu()[page * sizes.page + place], query.values.cpu()
    products = torch.einsum("thd,nd->thn", values.double(), stored.double()).clamp(min=0)
    expected = torch.einsum("thn,th,n->tn", products, query.weights.cpu().double(), scales)
    largest = torch.einsum("thn,th,n->tn", products, query.weights.cpu().double().abs(), scales)
    for row, length in enumerate(lengths):
        error = (found[row, :length].double() - expected[row, :length]).abs()
        assert (error <= 1e-6 * largest[row, :length] + 1e-6 * largest.max()).all()
        assert found[row, length:].isnan().all()


@each_backend
@each_format
def test_keys_that_nobody_has_do_not_matter(impl: str, device: str, kv: str) -> None:
    """Keys behind the length are poison; a row reads up to its length, and to the width of the scores."""
    case = make_case(kv, SIZES["few heads"], device)
    keys = case[1]
    assert keys.data.view(torch.uint8)[0, 0] == 0xFF
    found = score(impl, case, [140, 2**31 - 1, -5], 140)
    assert found[:2].isfinite().all()
    assert found[2].isnan().all()
    narrow = score(impl, case, [140, 0, 3], 20)
    assert torch.equal(narrow[0], found[0, :20])
    assert narrow[1].isnan().all()
    assert narrow[2, :3].isfinite().all()
    assert narrow[2, 3:].isnan().all()


@each_backend
@each_format
def test_pages_are_not_trusted(impl: str, device: str, kv: str) -> None:
    query, keys, table = make_case(kv, Sizes(2, 16, 8, 2, 10), device)
    good = score(impl, (query, keys, table), [10, 10, 10], 14)
    table = table.clone()
    table[0, [0, 2, 3]] = torch.tensor([-1, 6, 2**31 - 1], dtype=torch.int32, device=device)
    table[1, :] = -(2**31)
    found = score(impl, (query, keys, table), [14, 10, 10], 14)
    gone = torch.tensor([True, True, False, False, True, True, True, True, False, False])
    assert torch.equal(found[0, :10], good[0, :10].masked_fill(gone, -torch.inf))
    assert (found[0, 10:] == -torch.inf).all()  # beyond the table
    assert (found[1, :10] == -torch.inf).all()
    assert torch.equal(found[2, :10], good[2, :10])


@each_backend
@each_format
def test_nan_and_infinity_in_keys(impl: str, device: str, kv: str) -> None:
    query, keys, table = make_case(kv, Sizes(2, 16, 8, 2, 10), device)
    good = score(impl, (query, keys, table), [10, 10, 10], 10)
    slot = int(table[0, 2]) * 2 + 1
    values = torch.ones((1, 16), device=device)
    values[0, 3] = torch.nan
    store_entries(values, torch.tensor([slot], device=device), keys, impl="torch")
    found = score(impl, (query, keys, table), [10, 10, 10], 10)
    other = torch.arange(10) != 5
    assert found[:, 5].isnan().all()
    assert torch.equal(found[:, other], good[:, other])
    if kv == "fp8":  # has no infinity, and NaN in a value as well as in the scale
        page, place = divmod(int(table[0, 4]) * 2, 2)
        keys.data[page, place * 16 + 2] = 0xFF
        found = score(impl, (query, keys, table), [10, 10, 10], 10)
        assert found[:, [5, 8]].isnan().all()
        assert found[:, [4, 9]].isfinite().all()
        return
    keys.data[slot] = torch.inf
    query.values.abs_()
    query.weights.copy_(torch.tensor([1.0, -2.0]).expand(3, 2))
    query.weights[1:].abs_()
    found = score(impl, (query, keys, table), [10, 10, 10], 10)
    assert found[0, 5].isnan()
    assert (found[1:, 5] == torch.inf).all()


@each_backend
def test_scores_with_tables_once_a_request(impl: str, device: str) -> None:
    query, keys, table = make_case("fp32", SIZES["few heads"], device)
    lengths = torch.tensor([140, 140, 77], dtype=torch.int32, device=device)
    expected = score("torch", (query, keys, table), lengths.tolist(), 140)
    two = torch.stack((torch.full_like(table[0], -1), table[0]))
    out = torch.full((3, 140), torch.nan, device=device)
    rows = torch.tensor([[1, 7], [2, 7], [1, 7]], dtype=torch.int32, device=device)[:, 0]
    index_scores(query, keys, two, lengths, out=out, table_rows=rows, impl=impl)
    assert torch.allclose(out[0].cpu(), expected[0], rtol=1e-5, atol=1e-5)
    assert (out[1] == -torch.inf).all()
    assert torch.allclose(out[2, :77].cpu(), expected[2, :77], rtol=1e-5, atol=1e-5)


def selected(
    impl: str, case: tuple[IndexQuery, EntryPool, torch.Tensor], lengths: list[int], k: int, **rest: Any
) -> Any:
    query, keys, table = case
    raw, out = torch.full((2, len(lengths), k), -7, dtype=torch.int32, device=keys.device)
    length = torch.tensor(lengths, dtype=torch.int32, device=keys.device)
    select_entries(query, keys, table, length, out=out, raw=raw, impl=impl, **rest)
    return raw.cpu(), out.cpu()


@each_backend
@each_format
def test_selected_entries(impl: str, device: str, kv: str) -> None:
    """The best of the scores, whatever the workspace has room for, and whatever is in it."""
    case = make_case(kv, SIZES["few heads"], device, rows=5)
    table = case[2]
    lengths, k = [140, 139, 21, 20, 0], 20
    scores = score(impl, case, lengths, 140)
    results = []
    for rows in (None, 1, 2, 9):
        size = workspace_row(140)
        workspace = None if rows is None else torch.full((rows * size + 3,), torch.inf, device=device)
        results.append(selected(impl, case, lengths, k, max_length=140, workspace=workspace))
    for raw, out in results:
        assert torch.equal(raw, results[0][0])
        assert torch.equal(out, results[0][1])
        if INTERPRET:
            break
    raw, out = results[0]
    for row, length in enumerate(lengths):
        best = np.argsort(-scores[row, :length].numpy(), kind="stable")[:k]
        entries = sorted(best.tolist())
        assert raw[row].tolist() == entries + [-1] * (k - len(entries))
        assert out[row].tolist() == [int(table[row, w // 32]) * 32 + w % 32 for w in entries] + [-1] * (
            k - len(entries)
        )


@each_backend
def test_everything_is_selected_without_scores(impl: str, device: str) -> None:
    """No key is read where all are taken: a workspace without room will do, and keys may be anything."""
    case = make_case("fp32", SIZES["few heads"], device)
    _, keys, table = case
    keys.data.fill_(torch.nan)
    raw, out = selected(impl, case, [140, 200, 3], 140, max_length=140, workspace=torch.zeros(0, device=device))
    assert raw[0].tolist() == raw[1].tolist() == list(range(140))
    assert raw[2].tolist() == [0, 1, 2] + [-1] * 137
    assert out[2].tolist() == [int(table[0, 0]) * 32 + w for w in range(3)] + [-1] * 137


@each_backend
def test_lengths_beyond_the_longest_count_as_that(impl: str, device: str) -> None:
    case = make_case("bf16", SIZES["few heads"], device)
    wide = selected(impl, case, [100, 100, 100], 10, max_length=100)
    assert all(map(torch.equal, wide, selected(impl, case, [140, 2**31 - 1, 101], 10, max_length=100)))
    none = selected(impl, case, [140, 5, -1], 10, max_length=0)
    assert (none[0] == -1).all()
    assert (none[1] == -1).all()


@each_backend
def test_no_rows(impl: str, device: str) -> None:
    query, keys, table = make_case("bf16", SIZES["few heads"], device)
    empty = IndexQuery(query.values[:0], query.weights[:0])
    raw, _ = selected(impl, (empty, keys, table[:0]), [], 4, max_length=140)
    assert raw.shape == (0, 4)
    out = torch.zeros((0, 140), device=device)
    index_scores(empty, keys, table[:0], torch.zeros(0, dtype=torch.int32, device=device), out=out, impl=impl)
