"""Compression past what a batch usually has: other plans, bad plans, and arguments that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends import each_backend, each_compiled_backend, each_triton_backend
from dsv4_backend import CacheGeometry, EntryLayout, EntryPool, RequestTables, compress, plan_decode, plan_prefill
from dsv4_backend.layouts import bias_shape, state_width
from dsv4_backend.plans import INVALID_PACKED_WORDS, INVALID_WRITE_WORDS
from dsv4_backend.reference.kv_store import load_entries

GEOM = CacheGeometry(page_size=128, swa_page_size=64)
COLUMNS, PAGES = 384, 7
RATIOS = pytest.mark.parametrize("ratio", [4, 128], ids=["c4", "c128"])


def make_tables(device: str) -> RequestTables:
    """Two requests on pages 1 to 3 and 4 to 6, window slots equal to full slots."""
    table = torch.zeros((3, COLUMNS), dtype=torch.int32)
    table[1:] = torch.arange(128, 128 * PAGES).view(2, COLUMNS)
    full_to_swa = torch.arange(128 * PAGES + 1)
    full_to_swa[-1] = -1
    return RequestTables(table.to(device), full_to_swa.to(device))


def arguments(ratio: int, device: str, rows: int, seed: int = 0, head: tuple[int, int] = (32, 16)) -> dict[str, Any]:
    """Random arguments of `compress` for a step of `rows` rows; no plans."""
    generator = torch.Generator().manual_seed(seed)
    width = state_width(ratio, head[0])

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    ring_rows = {4: 2 * PAGES * 8, 128: 3 * 128}[ratio]
    layout = EntryLayout("fp32", *head, 128 // ratio)
    return dict(
        kv_score=random(rows, width),
        state=random(ring_rows, width),
        ratio=ratio,
        pool=EntryPool.empty(layout, PAGES, device),
        out_loc=torch.zeros(rows, dtype=torch.int64, device=device),
        bias=random(*bias_shape(ratio, head[0])),
        norm_weight=random(head[0]).abs() + 0.5,
        rope=random(COLUMNS, head[1]),
    )


def both(impl: str, given: dict[str, Any], plans: Any) -> None:
    """Runs `impl` and the reference on copies, and compares all that they wrote."""
    results = []
    for which in (impl, "torch"):
        pool = EntryPool(given["pool"].layout, given["pool"].data.clone())
        state = given["state"].clone()
        compress(**{**given, "pool": pool, "state": state}, plans=plans, impl=which)
        results.append((pool.data, state))
    (pool, state), (expected, expected_state) = results
    assert torch.equal(state, expected_state)
    assert torch.allclose(pool, expected, rtol=1e-5, atol=1e-5)


@each_backend
@RATIOS
def test_wide_plans_and_buckets_larger_than_the_batch(impl: str, device: str, ratio: int) -> None:
    tables = make_tables(device)
    seq, extend = torch.tensor([140, 131]), torch.tensor([20, 9])
    given = arguments(ratio, device, 29)
    given["out_loc"] = torch.arange(1, 30, device=device) % (PAGES * 128 // ratio)
    for num_rows in (29, 40, 65_537):
        plans = plan_prefill(
            seq, extend, torch.tensor([1, 2], device=device), tables, GEOM, num_rows=num_rows, impl="torch"
        )
        assert plans.ratio(ratio).compress.shape[1] == (20 if num_rows > 65_536 else 16)  # type: ignore[union-attr]
        both(impl, given, plans)


@each_backend
@RATIOS
def test_many_short_requests_share_programs(impl: str, device: str, ratio: int) -> None:
    """More entries than rows divided by the ratio."""
    size = 40
    table = torch.zeros((size + 1, 128), dtype=torch.int32)
    table[1:] = torch.arange(128, 128 * (size + 1)).view(size, 128)
    full_to_swa = torch.arange(128 * (size + 1) + 1)
    tables = RequestTables(table.to(device), full_to_swa.to(device))
    requests = torch.arange(1, size + 1, device=device)
    seq, extend = torch.full((size,), 128), torch.ones(size, dtype=torch.int64)
    plans = plan_prefill(seq, extend, requests, tables, GEOM, impl="torch")
    assert len(plans.ratio(ratio).compress_records()) == size  # type: ignore[union-attr]
    given = arguments(ratio, device, size)
    rows = {4: (size + 1) * 2 * 8, 128: (size + 1) * 128}[ratio]
    given["state"] = torch.randn((rows, given["state"].shape[1]), generator=torch.Generator().manual_seed(1)).to(device)
    given["pool"] = EntryPool.empty(given["pool"].layout, size + 1, device)
    given["out_loc"] = (requests * 128 + 127) // ratio
    both(impl, given, plans)
    both(impl, given, plan_decode(seq.to(device), requests, tables, GEOM, impl="torch"))


@each_triton_backend
@pytest.mark.parametrize(
    ("format", "ragged"),
    [("fp32", False), ("fp32", True), ("bf16", False), ("fp8", True)],
    ids=["fp32-one", "fp32-several", "bf16-one", "fp8-several"],
)
def test_many_entries_have_programs_of_their_own(
    impl: str, device: str, format: str, ragged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ratio 128 without the split of channels, which a prompt of this size would have."""
    monkeypatch.setattr("dsv4_triton_kernels.compressor.C128_MANY", 1)
    tables, head = make_tables(device), (512, 64)
    seq, extend = torch.tensor([384, 300] if ragged else [384]), torch.tensor([370, 130] if ragged else [384])
    requests = torch.tensor([2, 1] if ragged else [1], device=device)
    rows = int(extend.sum())
    plans = plan_prefill(seq, extend, requests, tables, GEOM, num_rows=rows + 70, impl="torch")
    given = arguments(128, device, rows, head=head)
    given["pool"] = EntryPool.empty(EntryLayout(format, *head, 1), PAGES, device)
    owner = torch.repeat_interleave(requests, extend.to(device))
    position = torch.cat([torch.arange(s - e, s) for s, e in zip(seq.tolist(), extend.tolist(), strict=True)])
    position = position.to(device)
    slots = tables.req_to_token[owner, position].long()
    given["out_loc"] = torch.where((position + 1) % 128 == 0, slots // 128, 0)
    if format == "fp32":
        both(impl, given, plans)
        return
    exact = EntryPool.empty(EntryLayout("fp32", *head, 1), PAGES, device)
    compress(**{**given, "pool": exact, "state": given["state"].clone()}, plans=plans, impl="torch")
    compress(**given, plans=plans, impl=impl)
    stored = given["out_loc"].unique()[1:]
    ours, values = load_entries(given["pool"], stored), load_entries(exact, stored)
    assert torch.allclose(ours, values, rtol={"bf16": 2**-8, "fp8": 2**-4}[format], atol=1e-2)
    assert len(stored) == (4 if ragged else 3)


def test_ratios_do_not_share_a_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """State rows of ratio 4 are twice as wide as those of ratio 128, though the pools may be laid out alike."""
    from dsv4_triton_kernels import compressor

    monkeypatch.setattr(compressor, "C128_MANY", 1)
    keys: list[object] = []
    for name in ("_launch_c4", "_launch_c128", "_launch_pool"):
        monkeypatch.setattr(compressor, name, lambda *launch: None)
    monkeypatch.setattr(compressor, "_launch_finish", lambda device, key, *launch: keys.append(key))
    tables, lengths = make_tables("cpu"), torch.tensor([256])
    for ratio in (4, 128):
        given = arguments(ratio, "cpu", 256)
        given["pool"] = EntryPool.empty(EntryLayout("fp32", 32, 16, 32), PAGES)
        plans = plan_prefill(lengths, lengths, torch.tensor([1]), tables, GEOM, impl="torch")
        compressor.compress(**given, plans=plans, eps=1e-6)
    assert len(set(keys)) == 2


@each_backend
@RATIOS
def test_rows_of_other_strides(impl: str, device: str, ratio: int) -> None:
    given = arguments(ratio, device, 12)
    width = given["kv_score"].shape[1]
    base = torch.full((12, width + 8), torch.nan, device=device)
    base[:, 4 : 4 + width] = given["kv_score"]
    given["kv_score"] = base[:, 4 : 4 + width]
    given["out_loc"] = torch.arange(1, 13, device=device) % (PAGES * 128 // ratio)
    seq, extend = torch.tensor([130, 5]), torch.tensor([7, 5])
    both(
        impl,
        given,
        plan_prefill(seq, extend, torch.tensor([2, 1], device=device), make_tables(device), GEOM, impl="torch"),
    )


@each_backend
@RATIOS
def test_a_plan_of_other_tables_reads_and_writes_nothing_outside(impl: str, device: str, ratio: int) -> None:
    """Rows, pages, state rows and slots that do not exist: nothing is read or written there, the rest is as it was."""
    given = arguments(ratio, device, 12)
    given["state"] = torch.cat((given["state"], given["state"]))  # more requests than entries
    given["out_loc"] = torch.tensor([1, 2, -1, 10**12, 4, 5, 6, 1, 2, 3, 4, 5], device=device)
    tables = make_tables(device)
    plans = plan_prefill(
        torch.tensor([12]), torch.tensor([12]), torch.tensor([1], device=device), tables, GEOM, impl="torch"
    )
    plan = plans.ratio(ratio)
    assert plan is not None
    big = 2**30
    rows = [  # seq_len, row + (buffer_len << 16), pages
        (ratio, 3 + (2 << 16), big, big),
        (2 * ratio, 7 + (7 << 16), -5, -1),
        (big, 2, -1, -1),
        (ratio * 3, 60_000, 0, 0),
        (ratio * 3, 5 + (1 << 16), 1, 0),
    ]
    plan.compress_words[: len(rows)] = torch.tensor(rows, dtype=torch.int32, device=device)
    plans.header[4 if ratio == 4 else 6] = len(rows)
    plan.compress_words[len(rows) :] = torch.tensor(INVALID_PACKED_WORDS, dtype=torch.int32, device=device)
    plan.write_words[:] = torch.tensor(INVALID_WRITE_WORDS, dtype=torch.int32, device=device)
    writes = [(3, big), (4, -7), (100, 3), (5, 6)]
    plan.write_words[: len(writes)] = torch.tensor(writes, dtype=torch.int32, device=device)
    plans.header[5 if ratio == 4 else 7] = len(writes)
    both(impl, given, plans)


@each_backend
@RATIOS
def test_no_rows(impl: str, device: str, ratio: int) -> None:
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    tables, given = make_tables(device), arguments(ratio, device, 0)
    both(impl, given, plan_decode(empty, empty, tables, GEOM, impl="torch"))
    both(impl, given, plan_prefill(empty, empty, empty, tables, GEOM, num_rows=0, impl="torch"))
    both(impl, given, plan_prefill(empty, empty, empty, tables, GEOM, num_rows=9, impl="torch"))


@each_compiled_backend
@RATIOS
def test_a_graph_replays_it(impl: str, device: str, ratio: int) -> None:
    given = arguments(ratio, device, 2, head=(512, 64))
    tables = make_tables(device)
    given["out_loc"] = torch.tensor([1, 2], device=device)
    plans = plan_decode(torch.tensor([128, 256], device=device), torch.tensor([1, 2], device=device), tables, GEOM)
    compress(**given, plans=plans, impl=impl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compress(**given, plans=plans, impl=impl)
    given["kv_score"].normal_()
    graph.replay()
    expected = EntryPool.empty(given["pool"].layout, PAGES, device)
    compress(**{**given, "pool": expected}, plans=plans, impl="torch")
    assert torch.allclose(given["pool"].data, expected.data, rtol=1e-5, atol=1e-5)


def changes() -> dict[str, tuple[dict[str, Any], str]]:
    key_pool = EntryPool.empty(EntryLayout("bf16", 32, 16, 1, indexer=True), 4)
    return {
        "ratio": (dict(ratio=8), "ratio: expected 4 or 128, got 8"),
        "keys": (dict(ratio=128, pool=key_pool), "ratio: expected 4 for a pool of indexer keys, got 128"),
        "plans": (dict(plans=None), "plans: expected a PrefillPlan or DecodePlans, got NoneType"),
        "width": (dict(kv_score=torch.zeros(2, 64)), "kv_score: expected 128 columns, got 64"),
        "rows": (dict(kv_score=torch.zeros(3, 128)), "kv_score: expected the 2 rows of the plans, got 3"),
        "dtype": (dict(kv_score=torch.zeros(2, 128).bfloat16()), "kv_score: expected dtype float32, got bfloat16"),
        "state": (dict(state=torch.zeros(8, 64)), r"state: expected a contiguous tensor of shape \['any', 128\]"),
        "no state": (
            dict(state=torch.zeros(0, 128)),
            "state: expected a multiple of 4 rows, at least that many, got 0",
        ),
        "slots": (dict(out_loc=torch.zeros(2, dtype=torch.int32)), "out_loc: expected dtype int64, got int32"),
        "bias": (dict(bias=torch.zeros(8, 32)), r"bias: expected a contiguous tensor of shape \[4, 64\]"),
        "impl": (dict(impl="fast"), "impl: expected one of"),
    }


@each_triton_backend
@RATIOS
def test_a_rope_table_that_ends_before_the_entry(impl: str, device: str, ratio: int) -> None:
    given = arguments(ratio, device, 2)
    given |= dict(rope=given["rope"][:8], out_loc=torch.tensor([40, 41], device=device))
    lengths = torch.tensor([256, 384], device=device)
    both(impl, given, plan_decode(lengths, torch.tensor([1, 2], device=device), make_tables(device), GEOM))


@pytest.mark.parametrize("name", changes())
def test_refusals(name: str) -> None:
    change, message = changes()[name]
    given = arguments(4, "cpu", 2)
    lengths = torch.tensor([5, 6])
    given["plans"] = plan_decode(lengths, torch.tensor([1, 2]), make_tables("cpu"), GEOM, ratios=(4,))
    with pytest.raises(ValueError, match=message):
        compress(**{**given, **change})


def test_a_plan_without_the_ratio_is_refused() -> None:
    plans = plan_decode(torch.tensor([5, 6]), torch.tensor([1, 2]), make_tables("cpu"), GEOM, ratios=(4,))
    with pytest.raises(ValueError, match=r"plans: expected a plan of ratio 128, got one of \(4,\)"):
        compress(**arguments(128, "cpu", 2), plans=plans)
