"""Faults that people met in production, as far as a planner is concerned. Each test carries the id of its case."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import dsv4_backend as d4
from backends import (
    INTERPRET,
    each_backend,
    each_compiled_backend,
    each_fast_backend,
    each_gpu_backend,
    poisoned_prefill,
    prefill_past_checks,
    repeats,
)
from strategies import LAYOUTS, lay_out, make_pool

GEOM = d4.CacheGeometry()
SPECULATIVE = d4.CacheGeometry.for_drafts(4)


def plain_tables(num_requests: int, columns: int, device: str) -> d4.RequestTables:
    return make_pool(GEOM, num_requests, columns, seed=0).tables(device)


def plan(
    impl: str,
    tables: d4.RequestTables,
    prefixes: list[int],
    extends: list[int],
    reqs: list[int] | None = None,
    geom: d4.CacheGeometry = GEOM,
    num_rows: int | None = None,
) -> d4.PrefillPlan:
    """Plans by the public call with lengths on the host; requests 1, 2, ... unless `reqs` names others."""
    reqs = list(range(1, len(extends) + 1)) if reqs is None else reqs
    extend_lens = torch.tensor(extends, dtype=torch.int64)
    found = d4.plan_prefill(
        torch.tensor(prefixes, dtype=torch.int64) + extend_lens,
        extend_lens,
        torch.tensor(reqs, dtype=torch.int64, device=tables.device),
        tables,
        geom,
        num_rows,
        impl=impl,
        out=None if num_rows is None else poisoned_prefill(num_rows, (4, 128), str(tables.device)),
    )
    found.check()
    return found


def entries(plan: d4.PrefillPlan, ratio: int, extends: list[int]) -> list[tuple[int, int, int]]:
    """(request in the batch, ragged_id, seq_len) of each compress row."""
    ends = np.cumsum(extends)
    records = plan.ratio(ratio).compress_records()
    owners = np.searchsorted(ends, records["ragged_id"], side="right")
    return list(zip(owners.tolist(), records["ragged_id"].tolist(), records["seq_len"].tolist(), strict=True))


def rows_of(plan: d4.PrefillPlan, ratio: int, extends: list[int]) -> list[int]:
    """Compress rows of each request of the batch."""
    owners = [owner for owner, _, _ in entries(plan, ratio, extends)]
    return [owners.count(b) for b in range(len(extends))]


def state_positions(plan: d4.PrefillPlan, ratio: int, first: int) -> list[int]:
    """Positions of the write rows of a batch of one request that starts at `first`."""
    return (plan.ratio(ratio).write_records()["ragged_id"].astype(int) + first).tolist()


@each_backend
@pytest.mark.parametrize(
    ("extends", "uniform", "rows", "first"),
    [
        ([4] * 72 + [3] * 24, 0, (90, 4), (0, 3, 1004)),
        ([3] * 104 + [2] * 24, 0, (90, 3), (1, 5, 1004)),
        ([4] * 96, 1, (96, 4), (0, 3, 1004)),
    ],
    ids=["72x4 24x3", "104x3 24x2", "96x4"],
)
def test_b01_ragged_batch_is_never_planned_as_uniform(
    impl: str, device: str, extends: list[int], uniform: int, rows: tuple[int, int], first: tuple[int, int, int]
) -> None:
    batch_size, total = len(extends), sum(extends)
    tables = plain_tables(batch_size + 1, 1200, device)
    extend_lens = torch.tensor(extends, device=device)
    lengths = (
        extend_lens + torch.arange(1000, 1000 + batch_size, device=device),
        extend_lens,
        torch.arange(1, batch_size + 1, device=device),
    )
    num_rows = 400 if INTERPRET else 4096
    answer = None
    for _ in range(repeats(impl, device, on_gpu=2000, on_cpu=5)):
        found = prefill_past_checks(impl, tables, SPECULATIVE, lengths, num_rows)
        lists = [t.cpu() for r in (found.c4, found.c128) for t in (r.compress, r.write)] + [found.header.cpu()]
        if answer is None:
            answer = lists
            assert found.header[:4].tolist() == [min(extends), max(extends), total, uniform]
            assert (len(found.c4.compress_records()), len(found.c128.compress_records())) == rows
            assert entries(found, 4, extends)[0] == first
            for ratio in (found.c4, found.c128):
                assert ratio.compress_records()["ragged_id"].max() < total
                assert ratio.write_records()["ragged_id"].tolist() == list(range(total))
        assert all(torch.equal(now, then) for now, then in zip(lists, answer, strict=True))


@each_backend
@pytest.mark.parametrize(
    ("prefix", "extend", "count", "bucket", "c4", "c128"),
    [
        (0, 6, 8, 2048, [(i, 6 * i + 3, 4) for i in range(8)], []),
        (100, 32, 3, 4096, 8, [27, 59, 91]),
        (100, 33, 3, 4096, 8, [27, 60, 93]),
    ],
    ids=["8x6", "3x32", "3x33"],
)
def test_b02_small_batch_in_a_large_bucket(
    impl: str, device: str, prefix: int, extend: int, count: int, bucket: int, c4: object, c128: list[int]
) -> None:
    extends = [extend] * count
    bucket = 200 if INTERPRET else bucket
    tables = plain_tables(count + 1, 256, device)
    found = plan(impl, tables, [prefix] * count, extends, num_rows=bucket)
    if isinstance(c4, list):
        assert entries(found, 4, extends) == c4
    else:
        assert rows_of(found, 4, extends) == [c4] * count
    assert found.c128.compress_records()["ragged_id"].tolist() == c128
    assert found.header[2].item() == extend * count
    for lists in (found.c4, found.c128):
        assert lists.write_records()["ragged_id"].max() < extend * count
        for rows, valid, marker in (
            (lists.compress, lists.compress_records(), b"\xff" * 4 + b"\0" * 4 + b"\xff" * 8),
            (lists.write, lists.write_records(), b"\xff" * 8),
        ):
            assert rows.cpu().numpy()[len(valid) :].tobytes() == marker * (bucket - len(valid))


@each_backend
@pytest.mark.parametrize(("prefix", "drafts"), [(1000, 8), (1003, 5), (1002, 6), (1001, 10), (1003, 10)])
def test_b03_more_than_four_drafts_keep_their_state(impl: str, device: str, prefix: int, drafts: int) -> None:
    found = plan(impl, plain_tables(2, 1100, device), [prefix], [drafts], geom=SPECULATIVE)
    for ratio in (4, 128):
        assert state_positions(found, ratio, prefix) == list(range(prefix, prefix + drafts))


def test_b03_more_drafts_than_the_ring_holds_are_refused() -> None:
    d4.CacheGeometry.for_drafts(10)
    with pytest.raises(ValueError, match=r"expected at most 10, got 11 \(needs 17 rows in the ratio-4 ring of 16\)"):
        d4.CacheGeometry.for_drafts(11)
    GEOM.check_drafts(2)
    with pytest.raises(ValueError, match="expected at most 2, got 3"):
        GEOM.check_drafts(3)


@each_backend
@pytest.mark.parametrize("reqs", list(itertools.permutations([7, 3, 11])), ids=str)
def test_b05_ratio_128_pages_follow_the_request(impl: str, device: str, reqs: tuple[int, ...]) -> None:
    extends = [4, 8, 2]
    tables = plain_tables(12, 400, device)
    found = plan(impl, tables, [126, 250, 383], extends, list(reqs), geom=SPECULATIVE)
    assert entries(found, 128, extends) == [(0, 1, 128), (1, 9, 256), (2, 12, 384)]
    # Ring 256 is two pages a request. The first entry has no group before it: position 0 stands in.
    expected = [(2 * reqs[0], 2 * reqs[0]), (2 * reqs[1], 2 * reqs[1] + 1), (2 * reqs[2] + 1, 2 * reqs[2])]
    records = found.c128.compress_records()
    assert list(zip(records["read_page_0"].tolist(), records["read_page_1"].tolist(), strict=True)) == expected
    if reqs == (7, 3, 11):
        assert expected == [(14, 14), (6, 7), (23, 22)]


@each_backend
@pytest.mark.parametrize("num_rows", [None, 132, 256])
def test_b06_requests_without_rows_inside_a_batch(impl: str, device: str, num_rows: int | None) -> None:
    extends = [0, 1, 0, 1, 130, 0]
    found = plan(impl, plain_tables(7, 300, device), [0, 127, 4, 3, 0, 255], extends, num_rows=num_rows)
    c4 = entries(found, 4, extends)
    assert len(c4) == 34
    assert c4[:3] == [(1, 0, 128), (3, 1, 4), (4, 5, 4)]
    assert c4[-1] == (4, 129, 128)
    assert entries(found, 128, extends) == [(1, 0, 128), (4, 129, 128)]
    assert found.header.tolist()[:4] == [0, 130, 132, 0]
    ends = np.cumsum(extends)
    for lists in (found.c4, found.c128):
        ids = lists.write_records()["ragged_id"]
        assert set(np.searchsorted(ends, ids, side="right").tolist()) <= {1, 3, 4}
    # State rows of ratio 128 name the request.
    assert {loc // 128 for loc in found.c128.write_records()["write_loc"].tolist()} <= {2, 4, 5}


@each_backend
@pytest.mark.parametrize("extends", [[0], [], [0] * 5], ids=["B=1", "B=0", "B=5"])
@pytest.mark.parametrize("num_rows", [None, 0, 64])
def test_b07_batch_without_tokens(impl: str, device: str, extends: list[int], num_rows: int | None) -> None:
    found = plan(impl, plain_tables(7, 300, device), [9] * len(extends), extends, num_rows=num_rows)
    for lists in (found.c4, found.c128):
        assert lists.compress.shape == (num_rows or 0, 16)
        assert lists.write.shape == (num_rows or 0, 8)
        assert lists.compress.dtype == lists.write.dtype == torch.uint8
        assert len(lists.compress_records()) == len(lists.write_records()) == 0
    assert found.header.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


@each_fast_backend
@pytest.mark.parametrize(
    ("prefixes", "extends", "c4", "c128"),
    [
        ([0], [65_536], (16_384, (0, 65_535, 65_536)), (512, (0, 65_535, 65_536))),
        ([0, 7], [65_535, 2], (16_384, (1, 65_535, 8)), (511, (0, 65_407, 65_408))),
        ([0, 128], [40_000, 30_000], (17_500, (1, 69_999, 30_128)), (546, (1, 69_951, 30_080))),
    ],
    ids=["one request", "last entry in the second", "row ids past 16 bits"],
)
def test_b08_more_than_65535_tokens(
    impl: str, device: str, prefixes: list[int], extends: list[int], c4: tuple, c128: tuple
) -> None:
    tables = plain_tables(len(extends) + 1, 65_536, device)
    found = plan(impl, tables, prefixes, extends)
    for ratio, (count, last) in ((4, c4), (128, c128)):
        rows = entries(found, ratio, extends)
        assert len(rows) == count
        assert rows[-1] == last
        assert [ragged_id for _, ragged_id, _ in rows] == sorted({ragged_id for _, ragged_id, _ in rows})
    assert found.header.tolist()[2] == sum(extends)


@each_backend
@pytest.mark.parametrize(
    ("extend", "c4", "c128"), [(1, 0, 0), (2, 0, 0), (3, 0, 0), (5, 1, 0), (21, 5, 0), (127, 31, 0), (129, 32, 1)]
)
def test_b11_prompt_that_is_no_multiple_of_the_ratio(impl: str, device: str, extend: int, c4: int, c128: int) -> None:
    found = plan(impl, plain_tables(2, 256, device), [0], [extend])
    assert found.c4.compress_records()["ragged_id"].tolist() == [4 * i + 3 for i in range(c4)]
    assert found.c128.compress_records()["ragged_id"].tolist() == [127] * c128
    # The open group and, for ratio 4, the closed one that it overlaps.
    assert state_positions(found, 4, 0) == list(range(max(0, 4 * c4 - 4), extend))
    assert state_positions(found, 128, 0) == list(range(128 * c128, extend))
    if extend == 21:
        assert 20 in state_positions(found, 4, 0)


@each_backend
@pytest.mark.parametrize("length", [3, 4, 5, 127, 128, 129])
def test_b13_first_boundary(impl: str, device: str, length: int) -> None:
    tables = plain_tables(3, 256, device)
    for ratio in (4, 128):
        # Prefill: every entry of the prompt, the first without a group before it.
        whole = plan(impl, tables, [0], [length], [2]).ratio(ratio).compress_records()
        assert whole["seq_len"].tolist() == list(range(ratio, length + 1, ratio))
        # One row as an extend: an entry only where a group closes.
        one = plan(impl, tables, [length - 1], [1], [2]).ratio(ratio).compress_records()
        assert one["seq_len"].tolist() == ([length] if length % ratio == 0 else [])
        # Decode: a row for every request; the reader compresses where seq_len % ratio == 0.
        decode = d4.plan_decode(
            torch.tensor([length], device=device), torch.tensor([2], device=device), tables, GEOM, impl=impl
        )
        seq_len, write_loc, read_page_0, read_page_1 = decode.ratio(ratio).records().tolist()[0]
        assert (seq_len, read_page_1) == (length, write_loc // ratio)
        if length == ratio:
            # The group that would come before position 0 is not another request's: position 0 stands in.
            assert read_page_0 == read_page_1
            assert (one["read_page_0"].tolist(), one["read_page_1"].tolist()) == ([read_page_0], [read_page_1])
            assert one["buffer_len"].tolist() == [7 if ratio == 4 else 127]


@each_gpu_backend
def test_b14_plans_dropped_while_a_kernel_still_reads_them(impl: str, device: str) -> None:
    extends, reqs = [40, 3, 77, 200], [1, 2, 3, 4]
    tables = plain_tables(5, 400, device)
    expected = plan(impl, tables, [11, 0, 64, 128], extends, reqs).c4.compress.clone()
    host = torch.tensor([11, 0, 64, 128]), torch.tensor(extends)
    ids, side = torch.tensor(reqs, device=device), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    found = d4.plan_prefill(host[0] + host[1], host[1], ids, tables, GEOM, impl=impl)
    consumed = found.c4.compress.clone()
    shape = found.c4.compress.shape
    del found
    noise = [torch.full(shape, 0xAB, dtype=torch.uint8, device=device) for _ in range(64)]
    with torch.cuda.stream(side):
        noise += [torch.full(shape, 0xCD, dtype=torch.uint8, device=device) for _ in range(64)]
    torch.cuda.synchronize()
    assert torch.equal(consumed, expected)
    assert len(noise) == 128


@each_backend
def test_b35_every_pair_of_integer_types(impl: str, device: str) -> None:
    tables = plain_tables(5, 400, device)
    values = [140, 9, 384, 0], [9, 9, 21, 0], [4, 1, 3, 2]
    found = []
    for dtypes in itertools.product((torch.int32, torch.int64), repeat=3):
        lengths = tuple(torch.tensor(x, dtype=t, device=device) for x, t in zip(values, dtypes, strict=True))
        for lens in (lengths[:2], tuple(t.cpu() for t in lengths[:2])):
            prefill = d4.plan_prefill(*lens, lengths[2], tables, GEOM, 50, impl=impl)
            decode = d4.plan_decode(lengths[0][:3], lengths[2][:3], tables, GEOM, impl=impl)
            lists = [t for r in (prefill.c4, prefill.c128) for t in (r.compress, r.write)]
            found.append([*lists, prefill.header, decode.c4.rows, decode.c128.rows])
    assert len(found) == 16
    for tensors in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(tensors, found[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int16, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("name", ["seq_lens", "extend_lens", "req_pool_indices"])
def test_b35_other_types_are_refused(name: str, dtype: torch.dtype) -> None:
    arguments = {n: torch.tensor([1, 1]) for n in ("seq_lens", "extend_lens", "req_pool_indices")}
    arguments[name] = arguments[name].to(dtype)
    tables = plain_tables(5, 400, "cpu")
    with pytest.raises(ValueError, match=f"^{name}: expected dtype int32 or int64, got {str(dtype)[6:]}$"):
        d4.plan_prefill(**arguments, tables=tables, geom=GEOM)
    if name != "extend_lens":
        del arguments["extend_lens"]
        with pytest.raises(ValueError, match=f"^{name}: expected dtype int32 or int64, got {str(dtype)[6:]}$"):
            d4.plan_decode(**arguments, tables=tables, geom=GEOM)


@each_backend
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b36_slices_read_like_copies(impl: str, device: str, layout: str) -> None:
    tables = plain_tables(5, 400, device)
    seqs, extends, reqs = (
        lay_out(x, torch.int64, layout, device) for x in ([140, 9, 384, 0], [9, 9, 21, 0], [4, 1, 3, 2])
    )
    copies = [t.clone(memory_format=torch.contiguous_format) for t in (seqs, extends, reqs)]
    assert layout in ("contiguous", "inside") or not seqs.is_contiguous()
    sliced = prefill_past_checks(impl, tables, GEOM, (seqs, extends, reqs), 50)
    copied = prefill_past_checks(impl, tables, GEOM, tuple(copies), 50)
    public = d4.plan_prefill(seqs.cpu(), extends.cpu(), reqs.flip(0).flip(0), tables, GEOM, 50, impl=impl)
    for ratio in (4, 128):
        for name in ("compress", "write"):
            a, b, c = (getattr(p.ratio(ratio), name) for p in (sliced, copied, public))
            assert torch.equal(a, b)
            assert torch.equal(a, c)
    one = d4.plan_decode(seqs[:3], reqs[:3], tables, GEOM, impl=impl)
    two = d4.plan_decode(copies[0][:3], copies[2][:3], tables, GEOM, impl=impl)
    assert torch.equal(one.c4.rows, two.c4.rows)


@each_compiled_backend
def test_b40_no_new_kernel_for_a_new_length(impl: str, device: str) -> None:
    """Not applicable to impl "torch", which compiles nothing."""
    from triton import knobs

    rng = np.random.default_rng(0)
    tables = [make_pool(GEOM, 65, 100_000, seed=0, layout=(spare, 0)).tables(device) for spare in (0, 1, 7)]

    def call(batch_size: int) -> None:
        seqs = rng.integers(1, rng.integers(2, 100_001), batch_size)
        extends = np.minimum(rng.integers(0, 9, batch_size), seqs)
        lengths = [torch.from_numpy(x).to(device) for x in (seqs, extends, rng.integers(1, 65, batch_size))]
        num_rows = int(extends.sum()) + int(rng.integers(0, 64))
        table = tables[rng.integers(0, 3)]
        d4.plan_prefill(*lengths, table, GEOM, num_rows, impl=impl).check()
        d4.plan_decode(lengths[0], lengths[2], table, GEOM, impl=impl).check()

    for batch_size in (1, 2, 16, 17, 64):
        call(batch_size)
    compiled: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **event: compiled.append(event["repr"])
    try:
        for _ in range(200):
            call(int(rng.integers(1, 65)))
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert compiled == []


def test_b42_the_speculative_ring_is_chosen_explicitly() -> None:
    """Page counts of a request (3 pages of 64 for length 129) are the allocator's: not applicable here."""
    prefill_side, decode_side = d4.CacheGeometry(c4_ring=16, c128_ring=256), d4.CacheGeometry.for_drafts(4)
    assert prefill_side == decode_side
    assert d4.CacheGeometry.for_drafts(0) != decode_side
    for ratio, swa_slot, req, position in itertools.product((4, 128), (0, 255, 256, 70_000), (1, 9), (0, 129, 5000)):
        arguments = (ratio, swa_slot, req, position)
        assert prefill_side.state_loc(*arguments) == decode_side.state_loc(*arguments)


@each_backend
def test_b42_state_rows_do_not_depend_on_how_a_prompt_was_cut(impl: str, device: str) -> None:
    """The state row of a position is the same in one prefill, in chunks that end at 64, and in decode steps."""
    tables = plain_tables(4, 400, device)
    geom = d4.CacheGeometry(swa_page_size=64, c4_ring=16, c128_ring=256)
    positions = range(110, 129)
    for ratio in (4, 128):
        found = []
        for prefix in (0, 64, 110):
            part = plan(impl, tables, [prefix], [129 - prefix], [3], geom=geom)
            records = part.ratio(ratio).write_records()
            found.append({r + prefix: loc for r, loc in records.tolist() if r + prefix in positions})
        decode = d4.plan_decode(
            torch.tensor([p + 1 for p in positions], device=device),
            torch.full((len(positions),), 3, device=device),
            tables,
            geom,
            impl=impl,
        )
        by_decode = dict(zip(positions, decode.ratio(ratio).records()["write_loc"].tolist(), strict=True))
        for written in found:
            assert len(written) >= 10
            assert written == {p: by_decode[p] for p in written}


@each_fast_backend
def test_b43_one_decode_and_several_prefills(impl: str, device: str) -> None:
    tables = plain_tables(5, 4096, device)
    extends = [1, 4096, 4096, 4096]
    found = plan(impl, tables, [777, 0, 0, 0], extends)
    assert found.c4.compress.shape[0] == 12_289
    assert rows_of(found, 4, extends) == [0, 1024, 1024, 1024]
    assert rows_of(found, 128, extends) == [0, 32, 32, 32]
    assert found.header.tolist()[:4] == [1, 4096, 12_289, 0]
    # The decode completes nothing (length 778) but is kept as state.
    assert found.c4.write_records()["ragged_id"][0] == found.c128.write_records()["ragged_id"][0] == 0

    extends = [4096, 1, 0, 5]
    found = plan(impl, tables, [0, 0, 0, 0], extends)
    assert rows_of(found, 4, extends) == [1024, 0, 0, 1]
    assert rows_of(found, 128, extends) == [32, 0, 0, 0]
