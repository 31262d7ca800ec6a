"""The indexer past what a row usually has: long rows, many rows, large pools, graphs; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dsv4_backend.indexer as indexer
from backends import each_compiled_backend, each_fast_backend, each_triton_backend, repeats
from dsv4_backend import EntryLayout, EntryPool, dispatch
from dsv4_backend.indexer import IndexQuery, index_query, index_scores, select_entries, workspace_row
from dsv4_backend.reference import indexer as reference
from test_indexer import SIZES, Sizes, each_format, make_case, random, rope_like, score, selected

INT32 = torch.int32


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Scores of the reference up to float32 sums in another order."""
    assert found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan())
    scale = float(expected.nan_to_num(0.0).abs().max())
    assert float((found - expected).nan_to_num(0.0).abs().max()) <= 2e-6 * scale


@each_triton_backend
@each_format
def test_capacity_is_larger_than_the_rows(impl: str, device: str, kv: str) -> None:
    """Several programs share a row: all of them, some of them or none have something to do."""
    case = make_case(kv, Sizes(4, 32, 16, 32, 700), device, rows=4)
    lengths = [700, 129, 128, 0]
    close(score(impl, case, lengths, 1000), score("torch", case, lengths, 1000))


@each_compiled_backend
@each_format
@pytest.mark.parametrize("heads", [16, 64, 128], ids=str)
def test_a_long_row(impl: str, device: str, kv: str, heads: int) -> None:
    case = make_case(kv, Sizes(heads, 128, 64, 64, 262_144), device, rows=2)
    lengths = [262_144, 100_001]
    close(score(impl, case, lengths, 262_144), score("torch", case, lengths, 262_144))


@each_compiled_backend
def test_many_rows(impl: str, device: str) -> None:
    """More rows than programs are worth: each has one, which takes all turns; and a workspace of a few rows."""
    rows = 3000
    case = make_case("fp8", Sizes(64, 128, 64, 64, 700), device, rows=rows)
    lengths = [(37 * row) % 701 for row in range(rows)]
    found = score(impl, case, lengths, 700)
    close(found, score("torch", case, lengths, 700))
    raw, out = selected(impl, case, lengths, 100, max_length=700, workspace=torch.empty(1000 * 700, device=device))
    expected = torch.full_like(raw, -1)
    reference.select_topk(
        scores=found,
        lengths=torch.tensor(lengths),
        width=700,
        page_table=case[2].cpu(),
        table_rows=None,
        page_entries=64,
        num_pages=case[1].num_slots // 64,
        out=torch.empty_like(out),
        raw=expected,
    )
    assert torch.equal(raw, expected)


@each_compiled_backend
def test_a_pool_of_more_than_2_31_bytes(impl: str, device: str) -> None:
    pages = 2**31 // (64 * 132) + 100
    keys = EntryPool.empty(EntryLayout("fp8", 128, 64, 64, indexer=True), pages, device)
    query, small, _ = make_case("fp8", Sizes(64, 128, 64, 64, 64), device, rows=1)
    keys.data[-1] = small.data[1]
    table = torch.tensor([[pages - 1]], dtype=INT32, device=device)
    found = score(impl, (query, keys, table), [64], 64)
    close(found, score("torch", (query, small, torch.ones_like(table)), [64], 64))
    raw, out = selected(impl, (query, keys, table), [64], 64, max_length=64)
    assert (out - raw == (pages - 1) * 64).all()


@each_triton_backend
@each_format
def test_equal_calls_give_equal_bits(impl: str, device: str, kv: str) -> None:
    case = make_case(kv, SIZES["the model's"], device)
    first = score(impl, case, [200, 77, 129], 200)
    chosen = selected(impl, case, [200, 77, 129], 50, max_length=200)
    for _ in range(repeats(impl, device, 20, 20) - 1):
        again = score(impl, case, [200, 77, 129], 200)
        assert torch.equal(first.view(INT32), again.view(INT32))
        assert all(map(torch.equal, chosen, selected(impl, case, [200, 77, 129], 50, max_length=200)))


@each_compiled_backend
@each_format
def test_a_graph_replays_other_rows(impl: str, device: str, kv: str) -> None:
    """Lengths, pages and queries are read at replay; nothing is allocated where a workspace is given."""
    rows, k, width = 4, 32, 200
    _, keys, table = make_case(kv, SIZES["the model's"], device, rows=rows)
    q, weights = random(rows, 64, 128).to(device), random(rows, 64).to(device)
    positions = torch.arange(rows, device=device)
    rope, length = rope_like(10, 64, device), torch.zeros(rows, dtype=INT32, device=device)
    out, raw = torch.empty((2, rows, k), dtype=INT32, device=device)
    query, workspace = IndexQuery.empty(keys, rows, 64), torch.empty(2 * workspace_row(width), device=device)

    def step() -> None:
        index_query(q, weights, positions, rope, keys, out=query, impl=impl)
        select_entries(query, keys, table, length, out=out, raw=raw, max_length=width, workspace=workspace, impl=impl)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed, lengths in enumerate(([200, 33, 32, 0], [1, 199, 100, 64])):
        q.copy_(random(rows, 64, 128, seed=seed))
        length.copy_(torch.tensor(lengths, dtype=INT32))
        graph.replay()
        found = raw.clone(), out.clone()
        step()
        assert torch.equal(found[0], raw)
        assert torch.equal(found[1], out)
        assert (raw >= 0).sum(dim=1).tolist() == [min(n, k) for n in lengths]


@each_fast_backend
def test_workspaces_stay_small(impl: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows at a time as the limit allows; one, where not even that fits."""
    case = make_case("bf16", SIZES["few heads"], device, rows=5)
    expected = selected(impl, case, [140] * 5, 20, max_length=139)
    module, parts = dispatch.indexer(impl, torch.device(device)), []
    score_keys = module.index_scores

    def spy(**arguments: Any) -> None:
        parts.append(list(arguments["out"].shape))
        score_keys(**arguments)

    monkeypatch.setattr(module, "index_scores", spy)
    for limit, shapes in ((2 * 4 * 140 + 3, [[2, 139]] * 2 + [[1, 139]]), (5, [[1, 139]] * 5), (10**9, [[5, 139]])):
        monkeypatch.setattr(indexer, "WORKSPACE_BYTES", limit)
        parts.clear()
        assert all(map(torch.equal, expected, selected(impl, case, [140] * 5, 20, max_length=139)))
        assert parts == shapes
    parts.clear()
    selected(impl, case, [140] * 5, 20, max_length=20)
    assert parts == []


def arguments() -> dict[str, Any]:
    query, keys, table = make_case("bf16", Sizes(4, 32, 16, 8, 20), "cpu")
    return dict(query=query, keys=keys, page_table=table, lengths=torch.tensor([20, 3, 0], dtype=INT32))


def poisoned(*shape: int, dtype: torch.dtype = INT32) -> torch.Tensor:
    return torch.full(shape, -7, dtype=dtype)


CORE = EntryPool.empty(EntryLayout("bf16", 32, 16, 8), 2)
TINY = EntryPool.empty(EntryLayout("bf16", 8, 4, 8, indexer=True), 2)
FP8 = EntryPool.empty(EntryLayout("fp8", 32, 16, 8, indexer=True), 2)
VALUES, WEIGHTS = torch.zeros(3, 4, 32, dtype=torch.bfloat16), torch.zeros(3, 4)
COMMON_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "query": (dict(query=VALUES), "query: expected a IndexQuery, got Tensor"),
    "query's format": (dict(query=IndexQuery(VALUES.float(), WEIGHTS)), "query.values: expected dtype bfloat16"),
    "query's channels": (dict(query=IndexQuery(VALUES[..., :16], WEIGHTS)), r"query.values: expected .* 32 channels"),
    "query's strides": (dict(query=IndexQuery(VALUES.mT.contiguous().mT, WEIGHTS)), "query.values: expected a contig"),
    "query's weights": (dict(query=IndexQuery(VALUES, WEIGHTS[:, :3])), "query.weights: expected 4 columns, got 3"),
    "query's address": (
        dict(query=IndexQuery(torch.zeros(385, dtype=torch.bfloat16)[1:].view(3, 4, 32), WEIGHTS)),
        "query.values: expected an address that is a multiple of 16",
    ),
    "keys": (dict(keys=None), "keys: expected a EntryPool, got NoneType"),
    "no keys": (dict(keys=CORE), "keys: expected a pool of indexer keys of 16 to 256 channels"),
    "small keys": (dict(keys=TINY), "keys: expected a pool of indexer keys of 16 to 256 channels"),
    "keys' format": (dict(keys=FP8), "query.values: expected dtype uint8, got bfloat16"),
    "page table": (dict(page_table=poisoned(2, 3)), "page_table: expected 3 elements, got 2"),
    "page table's strides": (dict(page_table=poisoned(3, 3).T), "page_table: expected unit column stride"),
    "lengths": (dict(lengths=poisoned(3, dtype=torch.int64)), "lengths: expected dtype int32, got int64"),
    "table rows": (dict(table_rows=poisoned(4)), "table_rows: expected 3 elements, got 4"),
    "impl": (dict(impl="cuda"), "impl: expected one of"),
}
SCORE_REFUSALS = COMMON_REFUSALS | {
    "out": (dict(out=poisoned(3, 20)), "out: expected dtype float32, got int32"),
    "rows of out": (dict(out=torch.zeros(2, 20)), "out: expected 3 elements, got 2"),
    "rows of out that share memory": (
        dict(out=torch.zeros(20).expand(3, 20)),
        "out: expected strides by which no elements share",
    ),
    "strides of out": (dict(out=torch.zeros(20, 3).T), r"out: expected unit column stride, got \[1, 3\]"),
}
SELECT_REFUSALS = COMMON_REFUSALS | {
    "out": (dict(out=torch.zeros(3, 4)), "out: expected dtype int32, got float32"),
    "rows that share memory": (
        dict(out=poisoned(4).expand(3, 4)),
        "out: expected strides by which no elements share memory",
    ),
    "raw is out": (dict(out=(both := poisoned(3, 4)), raw=both), "raw: expected memory of its own, got that of out"),
    "no column": (dict(out=poisoned(3, 0)), "out: expected at least one column, got none"),
    "raw": (dict(raw=poisoned(3, 5)), r"raw: expected the shape of out, \[3, 4\], got \[3, 5\]"),
    "longest": (dict(max_length=-1), "max_length: expected an int of at least 0, got -1"),
    "workspace": (dict(workspace=torch.zeros(19)), "workspace: expected 20 contiguous elements or more .* got 19"),
    "workspace's dtype": (dict(workspace=torch.zeros(20).double()), "workspace: expected dtype float32, got float64"),
    "workspace's stride": (dict(workspace=torch.zeros(40)[::2]), "workspace: expected 20 contiguous .* stride 2"),
    "workspace's address": (dict(workspace=torch.zeros(21)[1:]), "workspace: expected 20 contiguous .* boundary"),
}
Q = torch.zeros(3, 4, 32)
QUERY_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "q": (dict(q=Q.double()), "q: expected dtype float32 or bfloat16, got float64"),
    "channels": (dict(q=Q[..., :16]), r"q: expected heads of 32 channels, got shape \[3, 4, 16\]"),
    "no head": (dict(q=Q[:, :0]), "q: expected 1 to 1024 heads of 32 channels, got 0"),
    "too many heads": (dict(q=torch.zeros(3, 1025, 32)), "q: expected 1 to 1024 heads of 32 channels, got 1025"),
    "strides": (dict(q=Q.transpose(0, 1).contiguous().transpose(0, 1)), "q: expected heads side by side"),
    "row stride": (dict(q=torch.zeros(3, 132)[:, :128].view(3, 4, 32)), "q: expected heads side by side"),
    "address": (dict(q=torch.zeros(388)[2:386].view(3, 4, 32)), "q: expected an address that is a multiple of 16"),
    "weights": (dict(head_weights=torch.zeros(3, 5)), "head_weights: expected 4 columns, got 5"),
    "positions": (dict(positions=torch.zeros(3)), "positions: expected dtype int32 or int64, got float32"),
    "rope": (dict(rope=torch.zeros(5, 8)), "rope: expected 16 columns, got 8"),
    "no rope": (dict(rope=torch.zeros(0, 16)), "rope: expected at least one position"),
    "strides of rope": (dict(rope=torch.zeros(5, 32)[:, :16]), "rope: expected at least one position, contiguous"),
    "keys": (dict(keys=CORE), "keys: expected a pool of indexer keys"),
    "impl": (dict(impl="cuda"), "impl: expected one of"),
    "out": (dict(out=IndexQuery(VALUES[:2], WEIGHTS[:2])), "out: expected 3 rows of 4 heads, got shape"),
    "out's format": (dict(out=IndexQuery(VALUES.float(), WEIGHTS)), "out.values: expected dtype bfloat16, got float32"),
}


@pytest.mark.parametrize("case", SCORE_REFUSALS.values(), ids=SCORE_REFUSALS)
def test_refused_scores(case: tuple[dict[str, Any], str]) -> None:
    given = arguments() | dict(out=poisoned(3, 20, dtype=torch.float32))
    with pytest.raises(ValueError, match=case[1]):
        index_scores(**{**given, **case[0]})
    assert (given["out"] == -7).all()


@pytest.mark.parametrize("case", SELECT_REFUSALS.values(), ids=SELECT_REFUSALS)
def test_refused_selections(case: tuple[dict[str, Any], str]) -> None:
    given = arguments() | dict(out=poisoned(3, 4), raw=poisoned(3, 4), max_length=20)
    with pytest.raises(ValueError, match=case[1]):
        select_entries(**{**given, **case[0]})
    assert (given["out"] == -7).all()
    assert (given["raw"] == -7).all()


@pytest.mark.parametrize("case", QUERY_REFUSALS.values(), ids=QUERY_REFUSALS)
def test_refused_queries(case: tuple[dict[str, Any], str]) -> None:
    given: dict[str, Any] = dict(q=Q, head_weights=WEIGHTS, positions=torch.zeros(3, dtype=INT32))
    given |= dict(rope=torch.zeros(5, 16), keys=arguments()["keys"], out=IndexQuery(VALUES.clone() + 3, WEIGHTS + 3))
    with pytest.raises(ValueError, match=case[1]):
        index_query(**{**given, **case[0]})
    assert (given["out"].values == 3).all()
    assert (given["out"].weights == 3).all()
