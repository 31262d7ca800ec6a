"""plan_prefill and plan_decode: against an oracle, against a simulated cache, and as a contract."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4_backend as d4
from backends import (
    EXAMPLES,
    decode_past_checks,
    each_backend,
    each_fast_backend,
    poisoned_decode,
    poisoned_prefill,
    prefill_past_checks,
    repeats,
)
from dsv4_backend.plans import INVALID_PACKED_WORDS, INVALID_WIDE_WORDS, INVALID_WRITE_WORDS
from planner_checks import (
    GEOM,
    RATIO_CHOICES,
    SPECULATIVE,
    addresses,
    check_error_bits,
    check_prefill,
    contents,
    each_ratio_choice,
    prefill_answers,
)
from planner_oracle import Oracle, Serving, decode_bytes
from strategies import GEOMETRIES, Batch, bad_batches, batches, make_pool


@each_backend
@settings(max_examples=2 * EXAMPLES)
@given(batch=batches())
def test_prefill_is_the_oracles(impl: str, device: str, batch: Batch) -> None:
    tables, lengths = batch.pool.tables(device), batch.tensors(device)
    inputs = (*lengths, tables.req_to_token, tables.full_to_swa)
    before = [t.clone() for t in inputs]
    plan = prefill_past_checks(impl, tables, batch.geom, lengths, batch.num_rows)
    check_prefill(plan, prefill_answers(batch), batch)
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))


@each_backend
@settings(max_examples=EXAMPLES)
@given(batch=batches())
def test_decode_is_the_oracles(impl: str, device: str, batch: Batch) -> None:
    batch = dataclasses.replace(batch, seq_lens=[max(1, seq) for seq in batch.seq_lens])
    tables, (seq_lens, _, reqs) = batch.pool.tables(device), batch.tensors(device)
    inputs = (seq_lens, reqs, tables.req_to_token, tables.full_to_swa)
    before = [t.clone() for t in inputs]
    plan = decode_past_checks(impl, tables, batch.geom, (seq_lens, reqs))
    oracle = Oracle(batch.pool.req_to_token, batch.pool.full_to_swa, batch.geom)
    for ratio in (4, 128):
        expected = decode_bytes(oracle.decode(ratio, batch.seq_lens, batch.reqs))
        np.testing.assert_array_equal(plan.ratio(ratio).rows.cpu().numpy(), expected, f"c{ratio}")
    assert plan.error.tolist() == [0]
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))


@each_backend
@settings(max_examples=2 * EXAMPLES)
@given(batch=bad_batches())
def test_bad_prefill_input_is_planned_as_padding(impl: str, device: str, batch: Batch) -> None:
    plan = prefill_past_checks(impl, batch.pool.tables(device), batch.geom, batch.tensors(device), batch.num_rows)
    check_prefill(plan, prefill_answers(batch), batch)


@each_backend
@settings(max_examples=EXAMPLES)
@given(batch=bad_batches())
def test_bad_decode_input_is_planned_as_the_padding_request(impl: str, device: str, batch: Batch) -> None:
    tables, (seq_lens, _, reqs) = batch.pool.tables(device), batch.tensors(device)
    plan = decode_past_checks(impl, tables, batch.geom, (seq_lens, reqs))
    oracle = Oracle(batch.pool.req_to_token, batch.pool.full_to_swa, batch.geom)
    answers = {ratio: oracle.decode(ratio, batch.seq_lens, batch.reqs) for ratio in (4, 128)}
    for ratio, answer in answers.items():
        np.testing.assert_array_equal(plan.ratio(ratio).rows.cpu().numpy(), decode_bytes(answer), f"c{ratio}")
    check_error_bits(plan, answers)


@each_backend
@settings(max_examples=EXAMPLES // 2)
@given(batch=batches(), ratios=st.sampled_from(RATIO_CHOICES))
def test_a_ratio_is_planned_alike_alone_and_together(
    impl: str, device: str, batch: Batch, ratios: tuple[int, ...]
) -> None:
    tables, lengths = batch.pool.tables(device), batch.tensors(device)
    both = contents(prefill_past_checks(impl, tables, batch.geom, lengths, batch.num_rows))
    some = contents(prefill_past_checks(impl, tables, batch.geom, lengths, batch.num_rows, ratios))
    header = both.pop("header")
    counts = [n if ratio in ratios else 0 for ratio, n in zip((4, 4, 128, 128), header[4:], strict=True)]
    assert some.pop("header") == header[:4] + counts
    left_out = {f"c{ratio}.{name}" for ratio in {4, 128} - set(ratios) for name in ("compress", "write")}
    assert some == {name: words for name, words in both.items() if name not in left_out}


@each_backend
@settings(max_examples=EXAMPLES // 2)
@given(batch=batches())
def test_public_calls_equal_the_calls_past_the_checks(impl: str, device: str, batch: Batch) -> None:
    """Lengths on the host and on the device, num_rows given and not, out= given and not."""
    tables, lengths = batch.pool.tables(device), batch.tensors(device)
    seq_lens, extend_lens, reqs = lengths
    expected = contents(prefill_past_checks(impl, tables, batch.geom, lengths, batch.num_rows))
    on_host = batch.tensors("cpu")[:2]
    for lens in (on_host, (seq_lens, extend_lens)):
        out = poisoned_prefill(batch.num_rows, (4, 128), device)
        for given_out in (None, out):
            plan = d4.plan_prefill(*lens, reqs, tables, batch.geom, num_rows=batch.num_rows, impl=impl, out=given_out)
            assert contents(plan) == expected
            assert given_out is None or plan is out
    tight = d4.plan_prefill(*on_host, reqs, tables, batch.geom, impl=impl)
    assert len(tight.c4.compress) == len(tight.c128.write) == sum(batch.extend_lens)
    for ratio in (4, 128):
        for name in ("compress", "write"):
            rows = contents(tight)[f"c{ratio}.{name}"]
            assert rows == expected[f"c{ratio}.{name}"][: len(rows)]


@each_backend
@settings(max_examples=EXAMPLES)
@given(batch=batches())
def test_counts_and_order(impl: str, device: str, batch: Batch) -> None:
    plan = d4.plan_prefill(*batch.tensors(device), batch.pool.tables(device), batch.geom, batch.num_rows, impl=impl)
    total = sum(batch.extend_lens)
    for ratio in (4, 128):
        compress, write = plan.ratio(ratio).compress_records(), plan.ratio(ratio).write_records()
        groups = [s // ratio - (s - e) // ratio for s, e in zip(batch.seq_lens, batch.extend_lens, strict=True)]
        assert len(compress) == sum(groups)
        assert (compress["seq_len"] % ratio == 0).all()
        for ids in (compress["ragged_id"], write["ragged_id"]):
            assert (np.diff(ids.astype(np.int64)) > 0).all()
            assert (ids < total).all()
        unread = compress["buffer_len"] == 0
        assert (compress["read_page_0"][unread] == -1).all()
        assert (compress["read_page_1"][unread] == -1).all()


@each_fast_backend
@settings(max_examples=EXAMPLES // 2)
@given(
    geom=st.sampled_from(GEOMETRIES),
    seed=st.integers(0, 999),
    prefixes=st.lists(st.integers(0, 300), min_size=4, max_size=4),
    extends=st.lists(st.integers(0, 300), min_size=4, max_size=4),
)
def test_no_state_row_is_written_twice(
    impl: str, device: str, geom: d4.CacheGeometry, seed: int, prefixes: list[int], extends: list[int]
) -> None:
    """Kernels write the rows of a plan in any order, so two of them must not share a state row."""
    tables = make_pool(geom, 5, 600, seed).tables(device)
    seq_lens = torch.tensor([p + e for p, e in zip(prefixes, extends, strict=True)])
    reqs = torch.tensor([3, 1, 4, 2], device=device)
    plan = d4.plan_prefill(seq_lens, torch.tensor(extends), reqs, tables, geom, impl=impl)
    for ratio in (4, 128):
        rows = plan.ratio(ratio).write_records()["write_loc"]
        assert len(set(rows.tolist())) == len(rows)


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("extend"), st.lists(st.sampled_from((0, 1, 3, 5, 64, 127, 130, 256, 300)), min_size=3, max_size=3)
        ),
        st.tuples(st.just("verify"), st.lists(st.integers(1, 10), min_size=3, max_size=3)),
        st.tuples(st.just("decode"), st.lists(st.integers(0, 7), min_size=3, max_size=3)),
        st.tuples(st.just("share"), st.permutations((1, 2, 3))),
    ),
    min_size=2,
    max_size=14,
)


@each_fast_backend
@settings(max_examples=EXAMPLES)
@given(geom=st.sampled_from(GEOMETRIES), seed=st.integers(0, 999), steps=STEPS, drafts=st.integers(1, 10))
def test_every_state_that_is_read_was_written(
    impl: str, device: str, geom: d4.CacheGeometry, seed: int, steps: list, drafts: int
) -> None:
    serving = Serving(impl, device, geom, seed)
    # A ring with no row to spare keeps none for rejected drafts.
    most_drafts = geom.draft_capacity if geom.c4_ring > 8 and geom.c128_ring > 128 else 1
    for kind, numbers in steps:
        if kind == "extend":
            serving.extend(dict(zip((3, 1, 2), numbers, strict=True)))
        elif kind == "verify":
            serving.verify(min(drafts, most_drafts), dict(zip((2, 3, 1), numbers, strict=True)))
        elif kind == "decode":
            for step in range(max(numbers)):
                serving.decode(req for req, count in zip((1, 2, 3), numbers, strict=True) if step < count)
        else:
            serving.share(*numbers[:2])


@each_fast_backend
@pytest.mark.parametrize("then", ["prefill", "verify", "decode"])
@pytest.mark.parametrize("geom", GEOMETRIES, ids=str)
def test_a_request_goes_on_after_the_pages_of_another(
    impl: str, device: str, geom: d4.CacheGeometry, then: str
) -> None:
    """A prefix hit: the first entry of ratio 4 after the shared pages overlaps the last group on them."""
    serving = Serving(impl, device, geom, seed=0)
    serving.extend({1: 2 * geom.page_size + 37})
    serving.share(1, 3)
    assert len(serving.tokens[3]) == 2 * geom.page_size
    if then == "prefill":
        serving.extend({3: 1, 1: 2})
        serving.extend({1: 9, 3: 20})
    for _ in range(6):
        if then == "verify":
            serving.verify(1, {3: 1})
        elif then == "decode":
            serving.decode([3, 1])


@each_fast_backend
@pytest.mark.parametrize("then", ["verify", "decode"])
@pytest.mark.parametrize("prefix", [1, 5, 118, 120, 123, 125, 126, 127, 128, 245, 250, 254])
def test_rejected_drafts_leave_the_state_they_should(impl: str, device: str, prefix: int, then: str) -> None:
    """Around the borders of groups, pages and rings, for every accept length."""
    for drafts in (1, 2, 4, SPECULATIVE.draft_capacity):
        for accepted in range(1, drafts + 1):
            serving = Serving(impl, device, SPECULATIVE, seed=0)
            serving.extend({2: prefix})
            serving.verify(drafts, {2: accepted})
            for _ in range(8):
                if then == "verify":
                    serving.verify(4, {2: 1})
                else:
                    serving.decode([2])


@each_backend
@each_ratio_choice
@pytest.mark.parametrize("num_rows", [0, 1, 130])
@pytest.mark.parametrize("extends", [[], [0], [0] * 5], ids=["B=0", "B=1", "B=5"])
def test_nothing_to_plan(impl: str, device: str, extends: list[int], num_rows: int, ratios: tuple[int, ...]) -> None:
    tables = make_pool(GEOM, 3, 140, 0).tables(device)
    lens = torch.tensor(extends, dtype=torch.int32)
    reqs = torch.ones_like(lens).to(device)
    out = poisoned_prefill(num_rows, ratios, device)
    plan = d4.plan_prefill(lens + 129, lens, reqs, tables, GEOM, num_rows, ratios, impl, out)
    plan.check()
    assert plan.header.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    for ratio in ratios:
        words = plan.ratio(ratio).compress.cpu().view(torch.int32)
        assert words.tolist() == [list(INVALID_PACKED_WORDS)] * num_rows
        assert plan.ratio(ratio).write.cpu().view(torch.int32).tolist() == [list(INVALID_WRITE_WORDS)] * num_rows
        assert len(plan.ratio(ratio).compress_records()) == len(plan.ratio(ratio).write_records()) == 0


@each_backend
@each_ratio_choice
def test_decode_of_nothing(impl: str, device: str, ratios: tuple[int, ...]) -> None:
    tables, none = make_pool(GEOM, 3, 140, 0).tables(device), torch.zeros(0, dtype=torch.int32, device=device)
    plan = d4.plan_decode(none, none, tables, GEOM, ratios, impl)
    plan.check()
    for ratio in ratios:
        assert plan.ratio(ratio).rows.shape == (0, 16)
        assert plan.ratio(ratio).records().shape == (0,)


CONTIGUOUS = ((torch.int64, "contiguous"),) * 3


def drafts(batch_size: int) -> list[int]:
    """0 to 4 rows a request, in no order."""
    return np.random.default_rng(batch_size).integers(0, 5, batch_size).tolist()


MANY = {
    **{f"B={n}": drafts(n) for n in (1, 32, 33, 129, 1024, 1025, 3000, 5000, 9000)},
    "rows at the end": [0] * 5000 + [3],
    "rows at the start": [3] + [0] * 5000,
    "long among empty": [0] * 1500 + [299] + [0] * 3000 + [1, 0, 257] + [0] * 200,
    "one a request": [1] * 4100,
}


@each_backend
@pytest.mark.parametrize("extends", MANY.values(), ids=MANY.keys())
def test_many_requests(impl: str, device: str, extends: list[int]) -> None:
    """More requests than a block of threads holds."""
    rng = np.random.default_rng(len(extends))
    pool = make_pool(GEOM, 40, 300, 1)
    seqs = [e + int(rng.integers(0, 301 - e)) for e in extends]
    batch = Batch(GEOM, pool, seqs, extends, rng.integers(0, 40, len(extends)).tolist(), sum(extends) + 5, CONTIGUOUS)
    seq_lens, extend_lens, reqs = batch.tensors(device)
    plan = prefill_past_checks(impl, pool.tables(device), GEOM, (seq_lens, extend_lens, reqs), batch.num_rows)
    check_prefill(plan, prefill_answers(batch), batch)

    decode = decode_past_checks(impl, pool.tables(device), GEOM, (seq_lens.clamp(min=1), reqs))
    answer = Oracle(pool.req_to_token, pool.full_to_swa, GEOM).decode(4, [max(1, seq) for seq in seqs], batch.reqs)
    np.testing.assert_array_equal(decode.c4.rows.cpu().numpy(), decode_bytes(answer))


@each_fast_backend
@pytest.mark.parametrize("extend", [1, 2])
def test_every_row_is_kept_at_the_packed_limit(impl: str, device: str, extend: int) -> None:
    """65,536 write rows: one more than 16 bits count."""
    batch_size = 65_536 // extend
    tables = make_pool(GEOM, 3, 300, 1).tables(device)
    lengths = tuple(torch.full((batch_size,), value, device=device) for value in (200 + extend, extend, 2))
    plan = prefill_past_checks(impl, tables, GEOM, lengths, 65_536)
    assert plan.header.tolist() == [extend, extend, 65_536, 1, 0, 65_536, 0, 65_536]
    one = prefill_past_checks(impl, tables, GEOM, tuple(values[:1] for values in lengths), extend)
    for ratio in (4, 128):
        records = plan.ratio(ratio).write_records()
        assert (records["ragged_id"] == np.arange(65_536)).all()
        assert (records["write_loc"].reshape(-1, extend) == one.ratio(ratio).write_records()["write_loc"]).all()


@each_backend
@pytest.mark.parametrize("extend", [1, 4, 5, 31, 32, 33, 128, 129])
@pytest.mark.parametrize("batch_size", [1, 3, 33])
def test_uniform_extends(impl: str, device: str, batch_size: int, extend: int) -> None:
    pool = make_pool(SPECULATIVE, 9, 400, 2, layout=(3, 1))
    seqs = [extend + 17 * b % 271 for b in range(batch_size)]
    batch = Batch(
        SPECULATIVE,
        pool,
        seqs,
        [extend] * batch_size,
        [8 - b % 9 for b in range(batch_size)],
        extend * batch_size + 70,
        CONTIGUOUS,
    )
    plan = prefill_past_checks(impl, pool.tables(device), SPECULATIVE, batch.tensors(device), batch.num_rows)
    check_prefill(plan, prefill_answers(batch), batch)
    assert plan.header[:4].tolist() == [extend, extend, extend * batch_size, 1]


@each_fast_backend
@pytest.mark.parametrize("num_rows", [65_535, 65_536, 65_537, 70_000])
def test_layout_around_the_packed_limit(impl: str, device: str, num_rows: int) -> None:
    """The last row of the batch completes an entry where its id needs all 16 bits, or more."""
    total = num_rows - num_rows % 128
    half = total - 32_768
    tables = make_pool(GEOM, 3, max(half, 32_768), 0).tables(device)
    lens = torch.tensor([32_768, half])
    out = poisoned_prefill(num_rows, (4, 128), device)
    plan = d4.plan_prefill(lens, lens, torch.tensor([2, 1], device=device), tables, GEOM, num_rows, impl=impl, out=out)
    plan.check()
    wide = num_rows > 65_536
    for ratio in (4, 128):
        lists = plan.ratio(ratio)
        assert lists.compress.shape == (num_rows, 20 if wide else 16)
        records = lists.compress_records()
        assert records["ragged_id"].tolist() == list(range(ratio - 1, total, ratio))
        assert records["seq_len"].tolist() == [*range(ratio, 32_769, ratio), *range(ratio, half + 1, ratio)]
        assert set(records["buffer_len"].tolist()) == ({0, 4} if ratio == 4 else {0})
        marker = INVALID_WIDE_WORDS if wide else INVALID_PACKED_WORDS
        tail = lists.compress.cpu().view(torch.int32)[len(records) :]
        assert (tail == torch.tensor(marker, dtype=torch.int32)).all()
        writes = lists.write_records()
        tail = lists.write.cpu().view(torch.int32)[len(writes) :]
        assert (tail == torch.tensor(INVALID_WRITE_WORDS, dtype=torch.int32)).all()
        if ratio == 4:
            kept = [p for p in range(32_768) if p % 256 >= 252]
            kept += [32_768 + p for p in range(half) if p % 256 >= 252 or p >= half - 4]
            assert writes["ragged_id"].tolist() == kept


@each_fast_backend
def test_wide_rows_equal_packed_rows(impl: str, device: str) -> None:
    pool = make_pool(SPECULATIVE, 5, 500, 3)
    lengths = tuple(torch.tensor(x, device=device) for x in ([390, 7, 500, 260], [133, 7, 0, 9], [4, 1, 2, 3]))
    packed = prefill_past_checks(impl, pool.tables(device), SPECULATIVE, lengths, 149)
    wide = prefill_past_checks(impl, pool.tables(device), SPECULATIVE, lengths, 65_537)
    for ratio in (4, 128):
        one, other = packed.ratio(ratio), wide.ratio(ratio)
        assert one.compress_records().tolist() == other.compress_records().tolist()
        assert one.write_records().tolist() == other.write_records().tolist()
    assert packed.header.tolist() == wide.header.tolist()


@each_backend
def test_the_last_row_and_column_of_the_tables(impl: str, device: str) -> None:
    pool = make_pool(GEOM, 200, 520, 5, layout=(4, 2))
    batch = Batch(GEOM, pool, [520, 520, 1], [520, 3, 1], [199, 198, 199], 524, CONTIGUOUS)
    plan = prefill_past_checks(impl, pool.tables(device), GEOM, batch.tensors(device), 524)
    check_prefill(plan, prefill_answers(batch), batch)
    plan.check()
    reqs, seqs = torch.tensor([199, 0], device=device), torch.tensor([520, 520], device=device)
    decode = d4.plan_decode(seqs, reqs, pool.tables(device), GEOM, impl=impl)
    assert decode.c128.records().tolist() == [(520, 199 * 128 + 7, 199, 199), (520, 7, 0, 0)]


@each_backend
def test_lengths_of_other_requests_do_not_matter_to_a_request(impl: str, device: str) -> None:
    """Its rows are those of a batch of its own, moved by the rows before it."""
    tables = make_pool(SPECULATIVE, 4, 700, 6).tables(device)
    seqs, extends, reqs = [300, 517, 129, 700], [300, 6, 2, 260], [1, 2, 3, 1]
    together = d4.plan_prefill(
        torch.tensor(seqs), torch.tensor(extends), torch.tensor(reqs, device=device), tables, SPECULATIVE, impl=impl
    )
    for ratio in (4, 128):
        compress, write, first = [], [], 0
        for seq, extend, req in zip(seqs, extends, reqs, strict=True):
            alone = d4.plan_prefill(
                torch.tensor([seq]),
                torch.tensor([extend]),
                torch.tensor([req], device=device),
                tables,
                SPECULATIVE,
                ratios=(ratio,),
                impl=impl,
            ).ratio(ratio)
            compress += [(s, r + first, *rest) for s, r, *rest in alone.compress_records().tolist()]
            write += [(r + first, loc) for r, loc in alone.write_records().tolist()]
            first += extend
        assert together.ratio(ratio).compress_records().tolist() == compress
        assert together.ratio(ratio).write_records().tolist() == write


@each_backend
@each_ratio_choice
def test_out_is_filled_in_place(impl: str, device: str, ratios: tuple[int, ...]) -> None:
    tables = make_pool(GEOM, 5, 300, 8).tables(device)
    seq_lens, extend_lens = torch.tensor([9, 290]), torch.tensor([9, 31])
    reqs = torch.tensor([4, 2], device=device)
    out = poisoned_prefill(50, ratios, device)
    before = addresses(out)
    first = d4.plan_prefill(seq_lens, extend_lens, reqs, tables, GEOM, 50, ratios, impl, out)
    expected = contents(d4.plan_prefill(seq_lens, extend_lens, reqs, tables, GEOM, 50, ratios, impl))
    assert first is out
    assert contents(out) == expected
    d4.plan_prefill(torch.tensor([50]), torch.tensor([50]), reqs[:1], tables, GEOM, 50, ratios, impl, out)
    assert out.header[:4].tolist() == [50, 50, 50, 1]
    again = d4.plan_prefill(seq_lens, extend_lens, reqs, tables, GEOM, 50, ratios, impl, out)
    assert again is out
    assert contents(out) == expected
    assert addresses(out) == before

    decode_out = poisoned_decode(2, ratios, device)
    before = addresses(decode_out)
    assert d4.plan_decode(seq_lens.to(device), reqs, tables, GEOM, ratios, impl, decode_out) is decode_out
    assert addresses(decode_out) == before
    assert contents(decode_out) == contents(d4.plan_decode(seq_lens.to(device), reqs, tables, GEOM, ratios, impl))


@each_backend
def test_plans_are_the_same_every_time(impl: str, device: str) -> None:
    pool = make_pool(SPECULATIVE, 65, 700, 9)
    rng = np.random.default_rng(9)
    extends = torch.from_numpy(rng.integers(0, 9, 200)).to(device)
    seqs = extends + torch.from_numpy(rng.integers(0, 690, 200)).to(device)
    reqs, tables = torch.from_numpy(rng.integers(0, 65, 200)).to(device), pool.tables(device)
    first = None
    for _ in range(repeats(impl, device, on_gpu=20, on_cpu=3)):
        plan = contents(prefill_past_checks(impl, tables, SPECULATIVE, (seqs, extends, reqs), 1024))
        first = first or plan
        assert plan == first


@each_backend
def test_one_tensor_may_be_both_lengths(impl: str, device: str) -> None:
    tables = make_pool(GEOM, 5, 300, 8).tables(device)
    lens, reqs = torch.tensor([9, 0, 290], device=device), torch.tensor([4, 2, 1], device=device)
    one = d4.plan_prefill(lens, lens, reqs, tables, GEOM, 299, impl=impl)
    two = d4.plan_prefill(lens, lens.clone(), reqs.clone(), tables, GEOM, 299, impl=impl)
    assert contents(one) == contents(two)
