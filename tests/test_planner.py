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
    INTERPRET,
    decode_past_checks,
    each_backend,
    each_fast_backend,
    poisoned_decode,
    poisoned_prefill,
    prefill_past_checks,
    repeats,
)
from dsv4_backend.plans import INVALID_PACKED_WORDS, INVALID_WIDE_WORDS, INVALID_WRITE_WORDS, MAX_ROWS
from planner_oracle import LENGTHS, SLOT, Answer, Oracle, Serving, compress_bytes, decode_bytes, write_bytes
from strategies import GEOMETRIES, Batch, bad_batches, batches, make_pool

GEOM = d4.CacheGeometry()
SPECULATIVE = d4.CacheGeometry.for_drafts(4)
RATIO_CHOICES = [(4, 128), (128, 4), (4,), (128,), ()]
each_ratio_choice = pytest.mark.parametrize("ratios", RATIO_CHOICES, ids=str)


def contents(plan: d4.PrefillPlan | d4.DecodePlans) -> dict[str, object]:
    """Everything that a plan holds."""
    found: dict[str, object] = {name: tensor.cpu().numpy().tobytes() for name, tensor in plan.tensors()}
    found["error"] = plan.error.tolist()
    if isinstance(plan, d4.PrefillPlan):
        found["header"] = plan.header.tolist()
    return found


def addresses(plan: d4.PrefillPlan | d4.DecodePlans) -> list[int]:
    return [tensor.data_ptr() for tensor in (plan.error, *(tensor for _, tensor in plan.tensors()))]


def check_prefill(plan: d4.PrefillPlan, answers: dict[int, Answer], batch: Batch) -> None:
    """Every byte of the lists, the header, and no error bit that nothing caused."""
    for ratio, answer in answers.items():
        lists = plan.ratio(ratio)
        np.testing.assert_array_equal(lists.compress.cpu().numpy(), compress_bytes(answer, batch.num_rows), f"c{ratio}")
        np.testing.assert_array_equal(lists.write.cpu().numpy(), write_bytes(answer, batch.num_rows), f"c{ratio}")
    counts = [len(rows) for r in (4, 128) for rows in (answers[r].compress, answers[r].write)]
    assert plan.header.tolist() == answers[4].header + counts
    check_error_bits(plan, answers)


def check_error_bits(plan: d4.PrefillPlan | d4.DecodePlans, answers: dict[int, Answer]) -> None:
    causes = answers[4].errors | answers[128].errors
    assert bool(plan.error.item()) == bool(causes)
    assert plan.error.item() & ~causes == 0


def prefill_answers(batch: Batch) -> dict[int, Answer]:
    oracle = Oracle(batch.pool.req_to_token, batch.pool.full_to_swa, batch.geom)
    return {
        ratio: oracle.prefill(ratio, batch.seq_lens, batch.extend_lens, batch.reqs, batch.num_rows)
        for ratio in (4, 128)
    }


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


@each_backend
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
def test_slots_that_nothing_reads_are_not_looked_at(impl: str, device: str) -> None:
    """State is looked up only where it is read or written; the other slots of a prefill may hold anything."""
    tables = make_pool(GEOM, 2, 256, 0).tables(device)
    # The entry at 4 looks at positions 0 and 3, the write rows at 96 to 99.
    tables.req_to_token[1, 4:96] = 2**31 - 1
    tables.req_to_token[1, 1:3] = -(2**31)
    lens, reqs = torch.tensor([100], device=device), torch.tensor([1], device=device)
    plan = prefill_past_checks(impl, tables, GEOM, (lens, lens, reqs), 120)
    plan.check()
    assert plan.c4.compress_records()["buffer_len"].tolist() == [4] + [0] * 24
    assert plan.c4.write_records()["ragged_id"].tolist() == [96, 97, 98, 99]
    tables.req_to_token[1, 3] = 2**31 - 1
    plan = prefill_past_checks(impl, tables, GEOM, (lens, lens, reqs), 120)
    assert plan.error.tolist() == [SLOT]


@each_backend
@pytest.mark.parametrize("slot", ["last + 1", 2**31 - 1, -2, -(2**31)])
def test_slots_beyond_the_map_read_as_window_slot_zero(impl: str, device: str, slot: object) -> None:
    tables = make_pool(GEOM, 2, 256, 0).tables(device)
    tables.req_to_token[1, 8:12] = len(tables.full_to_swa) if slot == "last + 1" else slot
    reqs = torch.tensor([1], device=device)
    plan = d4.plan_prefill(torch.tensor([12]), torch.tensor([4]), reqs, tables, GEOM, impl=impl)
    # Rows 8 to 11: the entry at 12 reads the group 8..11 (page 0, as window slot 0 does) and the one before it.
    before = d4.plan_prefill(torch.tensor([8]), torch.tensor([1]), reqs, tables, GEOM, impl=impl)
    assert plan.c4.compress_records().tolist() == [(12, 3, 4, before.c4.compress_records()["read_page_1"][0], 0)]
    assert plan.c4.write_records().tolist() == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert plan.error.tolist() == [SLOT]
    decode = d4.plan_decode(torch.tensor([9], device=device), reqs, tables, GEOM, impl=impl)
    assert decode.c4.records()["write_loc"].tolist() == [0]
    assert decode.error.tolist() == [SLOT]
    # Ratio 128 has no use for slots.
    d4.plan_prefill(torch.tensor([12]), torch.tensor([4]), reqs, tables, GEOM, ratios=(128,), impl=impl).check()


@each_backend
def test_the_last_slot_of_the_map_is_inside(impl: str, device: str) -> None:
    tables = make_pool(GEOM, 2, 256, 0).tables(device)
    tables.req_to_token[1, 8] = len(tables.full_to_swa) - 1
    plan = d4.plan_decode(torch.tensor([9], device=device), torch.tensor([1], device=device), tables, GEOM, impl=impl)
    plan.check()
    assert plan.c4.records()["write_loc"].tolist() == [-1]


@each_backend
def test_slot_minus_one_stays_minus_one(impl: str, device: str) -> None:
    """Division truncates: window slot -1 is state row -1, of page 0."""
    tables = make_pool(GEOM, 2, 256, 0).tables(device)
    tables.req_to_token[1, 200:208] = -1
    reqs = torch.tensor([1], device=device)
    plan = d4.plan_prefill(torch.tensor([208]), torch.tensor([2]), reqs, tables, GEOM, impl=impl)
    assert plan.c4.compress_records().tolist() == [(208, 1, 6, 0, 0)]
    assert plan.c4.write_records().tolist() == [(0, -1), (1, -1)]
    assert plan.c128.write_records().tolist() == [(0, 128 + 78), (1, 128 + 79)]
    decode = d4.plan_decode(torch.tensor([205], device=device), reqs, tables, GEOM, impl=impl)
    assert decode.c4.records().tolist() == [(205, -1, 0, 0)]
    for checked in (plan, decode):
        checked.check()


# seq_lens, extend_lens, req_pool_indices of the second request of three; the table has 5 rows and 300 columns.
BAD_ROWS = {
    "negative extend": (8, -1, 2),
    "negative length": (-8, 0, 2),
    "both negative": (-3, -4, 2),
    "extend above length": (7, 8, 2),
    "length above the columns": (301, 4, 2),
    "length above the columns, no rows": (301, 0, 2),
    "largest int32": (2**31 - 1, 2**31 - 1, 2),
    "smallest int32": (-(2**31), -(2**31), 2),
}
# Legal once cut to 32 bits.
BAD_INT64_ROWS = {
    "extend and length": (2**32 + 8, 2**32 + 4, 2),
    "length": (2**32 + 8, 4, 2),
    "negative extend": (8, -(2**32) + 4, 2),
    "largest int64": (2**63 - 1, 2**63 - 1, 2),
    "smallest int64": (-(2**63), -(2**63), 2),
}


def bad_rows(rows: dict[str, tuple[int, ...]], rows_64: dict[str, tuple[int, ...]]) -> pytest.MarkDecorator:
    """Parametrises over `rows` in both dtypes and `rows_64` in the one that holds them."""
    cases = [pytest.param(row, torch.int32, id=f"int32 {name}") for name, row in rows.items()]
    cases += [pytest.param(row, torch.int64, id=f"int64 {name}") for name, row in rows.items()]
    cases += [pytest.param(row, torch.int64, id=f"past 32 bits, {name}") for name, row in rows_64.items()]
    return pytest.mark.parametrize(("bad", "dtype"), cases)


@each_backend
@bad_rows(BAD_ROWS, BAD_INT64_ROWS)
def test_a_bad_request_is_planned_without_rows(
    impl: str, device: str, bad: tuple[int, int, int], dtype: torch.dtype
) -> None:
    tables = make_pool(GEOM, 5, 300, 7).tables(device)

    def plan(seq: int, extend: int, req: int) -> d4.PrefillPlan:
        lengths = tuple(
            torch.tensor(values, dtype=dtype, device=device) for values in ([130, seq, 9], [4, extend, 9], [1, req, 3])
        )
        return prefill_past_checks(impl, tables, GEOM, lengths, 20)

    flagged, clean = plan(*bad), plan(8, 0, 2)
    assert flagged.error.tolist() == [LENGTHS]
    assert clean.error.tolist() == [0]
    assert clean.header[:4].tolist() == [0, 9, 13, 0]
    flagged.error.zero_()
    assert contents(flagged) == contents(clean)


BAD_IDS = {"one too large": 5, "far too large": 2**31 - 1, "-1": -1, "smallest": -(2**31)}


@each_backend
@bad_rows(
    {name: (req,) for name, req in BAD_IDS.items()}, {"cut to a legal one": (2**32 + 2,), "largest": (2**63 - 1,)}
)
def test_a_bad_id_is_planned_as_request_zero(impl: str, device: str, bad: tuple[int], dtype: torch.dtype) -> None:
    tables = make_pool(GEOM, 5, 300, 7).tables(device)
    tables.req_to_token[0] = tables.req_to_token[4]

    def plan(req: int, extend: int) -> d4.PrefillPlan:
        lengths = tuple(
            torch.tensor(values, dtype=dtype, device=device) for values in ([130, 40, 9], [4, extend, 9], [1, req, 3])
        )
        return prefill_past_checks(impl, tables, GEOM, lengths, 20)

    flagged = plan(*bad, 6)
    assert flagged.error.tolist() == [LENGTHS]
    flagged.error.zero_()
    assert contents(flagged) == contents(plan(0, 6))
    # Nothing is looked up for a request without rows.
    assert contents(plan(*bad, 0)) == contents(plan(2, 0))


BAD_DECODE_ROWS = {
    "zero": (0, 2),
    "negative": (-5, 2),
    "above the columns": (301, 2),
    "largest int32": (2**31 - 1, 2),
    "smallest int32": (-(2**31), 2),
    "id one too large": (8, 5),
    "negative id": (8, -1),
}


@each_backend
@bad_rows(BAD_DECODE_ROWS, {"length": (2**32 + 8, 2), "id": (8, 2**32 + 2), "both": (2**63 - 1, -(2**63))})
def test_a_bad_request_decodes_as_request_zero(
    impl: str, device: str, bad: tuple[int, int], dtype: torch.dtype
) -> None:
    tables = make_pool(GEOM, 5, 300, 7).tables(device)
    # Request 0 is special by its id alone; whatever its row holds is planned.
    tables.req_to_token[0, 0] = tables.req_to_token[4, 13]
    seq_lens = torch.tensor([130, bad[0], 9], dtype=dtype, device=device)
    reqs = torch.tensor([1, bad[1], 3], dtype=dtype, device=device)
    plan = decode_past_checks(impl, tables, GEOM, (seq_lens, reqs))
    seq_lens[1], reqs[1] = 1, 0
    padded = decode_past_checks(impl, tables, GEOM, (seq_lens, reqs))
    assert plan.error.tolist() == [LENGTHS]
    assert plan.c128.records()[1].tolist() == (1, 0, 0, 0)
    assert padded.error.tolist() == [0]
    plan.error.zero_()
    assert contents(plan) == contents(padded)


@each_backend
@pytest.mark.parametrize("extends", [[4, 9, 3], [16, 0, 0], [0, 0, 17], [15, 15, 15]], ids=str)
def test_more_rows_than_num_rows_plans_nothing(impl: str, device: str, extends: list[int]) -> None:
    tables = make_pool(GEOM, 5, 300, 7).tables(device)
    lengths = tuple(torch.tensor(values, device=device) for values in ([130, 20, 17], extends, [1, 2, 3]))
    plan = prefill_past_checks(impl, tables, GEOM, lengths, 15)
    assert plan.error.tolist() == [LENGTHS]
    assert plan.header.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    for ratio in (4, 128):
        assert (plan.ratio(ratio).compress.cpu().view(torch.int32) == torch.tensor(INVALID_PACKED_WORDS)).all()
        assert (plan.ratio(ratio).write.cpu().view(torch.int32) == -1).all()


@each_backend
def test_a_sum_that_wraps_32_bits_is_not_taken_for_small(impl: str, device: str) -> None:
    """64 requests of 2^26 rows: their sum is 2^32."""
    slots = torch.empty(1, 2**26, dtype=torch.int32, device=device).expand(2, -1)
    tables = d4.RequestTables(slots, torch.tensor([0, -1], device=device))
    lens = torch.full((64,), 2**26, dtype=torch.int32, device=device)
    plan = prefill_past_checks(impl, tables, GEOM, (lens, lens, torch.ones_like(lens)), 10)
    assert plan.error.tolist() == [LENGTHS]
    assert plan.header.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


@each_backend
def test_bad_requests_do_not_count_towards_num_rows(impl: str, device: str) -> None:
    tables = make_pool(GEOM, 5, 300, 7).tables(device)
    lengths = tuple(torch.tensor(values, device=device) for values in ([300, 301, 8], [7, 300, 8], [1, 2, 3]))
    plan = prefill_past_checks(impl, tables, GEOM, lengths, 15)
    assert plan.header[:4].tolist() == [0, 8, 15, 0]
    assert len(plan.c4.compress_records()) == 4
    with pytest.raises(ValueError, match="length or request id"):
        plan.check()


@each_backend
def test_the_flag_stays_until_checked(impl: str, device: str) -> None:
    tables = make_pool(GEOM, 5, 300, 7).tables(device)
    bad, good = ([9, 8], [10, 8], [1, 2]), ([9, 8], [9, 8], [1, 2])
    out = poisoned_prefill(20, (4, 128), device)
    for values in (bad, good, good):
        from_device = tuple(torch.tensor(x, device=device) for x in values)
        seq_lens, extend_lens, reqs = from_device
        d4.dispatch.planner(impl, tables.device).plan_prefill(
            seq_lens=seq_lens,
            extend_lens=extend_lens,
            req_pool_indices=reqs,
            tables=tables,
            geom=GEOM,
            num_rows=20,
            out=out,
        )
    assert out.header[:4].tolist() == [8, 9, 17, 0]
    with pytest.raises(ValueError, match="length or request id"):
        out.check()
    out.check()


@each_backend
def test_one_of_two_causes_is_named(impl: str, device: str) -> None:
    tables = make_pool(GEOM, 5, 300, 7).tables(device)
    tables.req_to_token[1, :9] = 2**31 - 1
    lengths = tuple(torch.tensor(values, device=device) for values in ([9, 8], [9, 10], [1, 2]))
    plan = prefill_past_checks(impl, tables, GEOM, lengths, 20)
    decode = decode_past_checks(impl, tables, GEOM, (torch.tensor([9, 0], device=device), lengths[2]))
    for flagged in (plan, decode):
        assert flagged.error.item() in (LENGTHS, SLOT)
        with pytest.raises(ValueError, match=r"^device input: "):
            flagged.check()


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


TABLES = make_pool(GEOM, 5, 40, 0).tables("cpu")
META = torch.device("meta")


def legal() -> dict[str, object]:
    return {
        "seq_lens": torch.tensor([5, 9]),
        "extend_lens": torch.tensor([5, 3]),
        "req_pool_indices": torch.tensor([1, 4]),
        "tables": TABLES,
        "geom": GEOM,
        "num_rows": 8,
        "ratios": (4, 128),
        "impl": "torch",
        "out": poisoned_prefill(8, (4, 128), "cpu"),
    }


# arguments that replace the legal ones, and how the message begins
REFUSED_PREFILL = [
    ({"seq_lens": [5, 9]}, "seq_lens: expected a torch.Tensor, got list"),
    ({"seq_lens": np.array([5, 9])}, "seq_lens: expected a torch.Tensor, got ndarray"),
    ({"seq_lens": torch.tensor([5.0, 9.0])}, "seq_lens: expected dtype int32 or int64, got float32"),
    ({"seq_lens": torch.tensor([5, 9], dtype=torch.int16)}, "seq_lens: expected dtype int32 or int64, got int16"),
    ({"seq_lens": torch.tensor([[5, 9]])}, "seq_lens: expected 1 dimension, got shape [1, 2]"),
    ({"seq_lens": torch.tensor(5)}, "seq_lens: expected 1 dimension, got shape []"),
    ({"seq_lens": torch.tensor([5, 9, 1])}, "seq_lens: expected 2 elements, got 3"),
    ({"seq_lens": torch.tensor([5])}, "seq_lens: expected 2 elements, got 1"),
    ({"seq_lens": torch.tensor([5, -9])}, "seq_lens[1]: expected 0 to 40 (columns of req_to_token), got -9"),
    ({"seq_lens": torch.tensor([41, 9])}, "seq_lens[0]: expected 0 to 40 (columns of req_to_token), got 41"),
    (
        {"seq_lens": torch.tensor([5, 9], device=META), "extend_lens": torch.tensor([5, 3], device=META)},
        "seq_lens: expected a tensor on cpu, got one on meta",
    ),
    (
        {"seq_lens": torch.tensor([5, 9], device=META)},
        "seq_lens and extend_lens: expected both on one device, got meta",
    ),
    ({"extend_lens": None}, "extend_lens: expected a torch.Tensor, got NoneType"),
    ({"extend_lens": torch.tensor([True, True])}, "extend_lens: expected dtype int32 or int64, got bool"),
    ({"extend_lens": torch.tensor([[5], [3]])}, "extend_lens: expected 1 dimension, got shape [2, 1]"),
    ({"extend_lens": torch.tensor([])}, "extend_lens: expected dtype int32 or int64, got float32"),
    ({"extend_lens": torch.tensor([5])}, "extend_lens: expected 2 elements, got 1"),
    ({"extend_lens": torch.tensor([-1, 3])}, "extend_lens[0]: expected 0 to 40 (columns of req_to_token), got -1"),
    ({"extend_lens": torch.tensor([5, 10])}, "extend_lens[1]: expected at most seq_lens[1] = 9, got 10"),
    ({"req_pool_indices": (1, 4)}, "req_pool_indices: expected a torch.Tensor, got tuple"),
    ({"req_pool_indices": torch.tensor([1.0, 4.0])}, "req_pool_indices: expected dtype int32 or int64, got float32"),
    ({"req_pool_indices": torch.tensor([[1, 4]])}, "req_pool_indices: expected 1 dimension, got shape [1, 2]"),
    ({"req_pool_indices": torch.tensor([1, 5])}, "req_pool_indices[1]: expected 0 to 4 (rows of req_to_token), got 5"),
    (
        {"req_pool_indices": torch.tensor([-1, 4])},
        "req_pool_indices[0]: expected 0 to 4 (rows of req_to_token), got -1",
    ),
    (
        {"req_pool_indices": torch.tensor([1, 4], device=META)},
        "req_pool_indices: expected a tensor on cpu, got one on meta",
    ),
    ({"num_rows": 7}, "num_rows: expected at least the sum of extend_lens, 8, got 7"),
    ({"num_rows": -1}, f"num_rows: expected a number from 0 to {MAX_ROWS}, got -1"),
    ({"num_rows": MAX_ROWS + 1}, f"num_rows: expected a number from 0 to {MAX_ROWS}, got {MAX_ROWS + 1}"),
    ({"num_rows": 8.0}, "num_rows: expected an int, got 8.0"),
    ({"num_rows": True}, "num_rows: expected an int, got True"),
    ({"num_rows": "8"}, "num_rows: expected an int, got '8'"),
    ({"num_rows": torch.tensor(8)}, "num_rows: expected an int, got tensor(8)"),
    ({"ratios": (4, 4)}, "ratios: expected a selection of (4, 128), each at most once, got (4, 4)"),
    ({"ratios": (4, 64)}, "ratios: expected a selection of (4, 128), each at most once, got (4, 64)"),
    ({"ratios": 4}, "ratios: expected "),
    ({"impl": "numpy"}, "impl: expected one of "),
    ({"impl": None}, "impl: expected one of "),
    ({"tables": (TABLES.req_to_token, TABLES.full_to_swa)}, "tables: expected a RequestTables, got tuple"),
    ({"geom": 256}, "geom: expected a CacheGeometry, got int"),
    ({"out": object()}, "out: expected a PrefillPlan, got object"),
    ({"out": poisoned_decode(8, (4, 128), "cpu")}, "out: expected a PrefillPlan, got DecodePlans"),
    ({"out": poisoned_prefill(8, (4,), "cpu")}, "out: expected a plan of the ratios (4, 128), got one of (4,)"),
    ({"ratios": (4,)}, "out: expected a plan of the ratios (4,), got one of (4, 128)"),
    ({"ratios": ()}, "out: expected a plan of the ratios (), got one of (4, 128)"),
    ({"out": poisoned_prefill(9, (4, 128), "cpu")}, "out: expected a plan of 8 rows, got one of 9"),
    ({"num_rows": None, "out": poisoned_prefill(9, (4, 128), "cpu")}, "out: expected a plan of 8 rows, got one of 9"),
    ({"num_rows": 65_537}, "out: expected a plan of 65537 rows, got one of 8"),
    ({"out": d4.PrefillPlan.empty(8, device=META)}, "out: expected a plan on cpu, got one on meta"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [pytest.param(*case, id=f"{i}-{'-'.join(case[0])}") for i, case in enumerate(REFUSED_PREFILL)],
)
def test_prefill_refusals_come_before_anything_is_written(changes: dict[str, object], message: str) -> None:
    arguments = {**legal(), **changes}
    buffers = list_buffers(arguments["out"])
    before = [buffer.clone() for buffer in buffers]
    with pytest.raises(ValueError, match=r"expected .*, got ") as raised:
        d4.plan_prefill(**arguments)
    assert str(raised.value).startswith(message)
    assert all(torch.equal(now, then) for now, then in zip(buffers, before, strict=True))


def list_buffers(out: object) -> list[torch.Tensor]:
    if not isinstance(out, d4.PrefillPlan | d4.DecodePlans):
        return []
    buffers = [tensor for _, tensor in out.tensors()]
    return [tensor for tensor in buffers if not tensor.is_meta]


REFUSED_DECODE = [
    ({"seq_lens": [5, 9]}, "seq_lens: expected a torch.Tensor, got list"),
    ({"seq_lens": torch.tensor([5.0, 9.0])}, "seq_lens: expected dtype int32 or int64, got float32"),
    ({"seq_lens": torch.tensor([[5], [9]])}, "seq_lens: expected 1 dimension, got shape [2, 1]"),
    ({"seq_lens": torch.tensor([5])}, "seq_lens: expected 2 elements, got 1"),
    ({"seq_lens": torch.tensor([5, 9], device=META)}, "seq_lens: expected a tensor on cpu, got one on meta"),
    ({"seq_lens": torch.tensor([0, 9])}, "seq_lens[0]: expected 1 to 40 (columns of req_to_token), got 0"),
    ({"seq_lens": torch.tensor([5, -1])}, "seq_lens[1]: expected 1 to 40 (columns of req_to_token), got -1"),
    ({"seq_lens": torch.tensor([5, 41])}, "seq_lens[1]: expected 1 to 40 (columns of req_to_token), got 41"),
    ({"req_pool_indices": None}, "req_pool_indices: expected a torch.Tensor, got NoneType"),
    ({"req_pool_indices": torch.tensor([1.0, 4.0])}, "req_pool_indices: expected dtype int32 or int64, got float32"),
    ({"req_pool_indices": torch.tensor([5, 4])}, "req_pool_indices[0]: expected 0 to 4 (rows of req_to_token), got 5"),
    (
        {"req_pool_indices": torch.tensor([1, -4])},
        "req_pool_indices[1]: expected 0 to 4 (rows of req_to_token), got -4",
    ),
    ({"req_pool_indices": torch.tensor([1, 4], device=META)}, "req_pool_indices: expected a tensor on cpu, got one on"),
    ({"ratios": (128, 128)}, "ratios: expected a selection of (4, 128), each at most once, got (128, 128)"),
    ({"ratios": None}, "ratios: expected "),
    ({"impl": "cuda"}, "impl: expected one of "),
    ({"tables": None}, "tables: expected a RequestTables, got NoneType"),
    ({"geom": None}, "geom: expected a CacheGeometry, got NoneType"),
    ({"out": poisoned_prefill(2, (4, 128), "cpu")}, "out: expected a DecodePlans, got PrefillPlan"),
    ({"ratios": (128,)}, "out: expected a plan of the ratios (128,), got one of (4, 128)"),
    ({"out": poisoned_decode(3, (4, 128), "cpu")}, "out: expected a plan of 2 rows, got one of 3"),
    ({"out": d4.DecodePlans.empty(2, device=META)}, "out: expected a plan on cpu, got one on meta"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [pytest.param(*case, id=f"{i}-{'-'.join(case[0])}") for i, case in enumerate(REFUSED_DECODE)],
)
def test_decode_refusals_come_before_anything_is_written(changes: dict[str, object], message: str) -> None:
    arguments = {**legal(), "out": poisoned_decode(2, (4, 128), "cpu"), **changes}
    del arguments["extend_lens"], arguments["num_rows"]
    buffers = list_buffers(arguments["out"])
    before = [buffer.clone() for buffer in buffers]
    with pytest.raises(ValueError, match=r"expected .*, got ") as raised:
        d4.plan_decode(**arguments)
    assert str(raised.value).startswith(message)
    assert all(torch.equal(now, then) for now, then in zip(buffers, before, strict=True))


def test_the_legal_arguments_are_legal() -> None:
    d4.plan_prefill(**legal()).check()
    arguments = {**legal(), "out": poisoned_decode(2, (4, 128), "cpu")}
    del arguments["extend_lens"], arguments["num_rows"]
    d4.plan_decode(**arguments).check()


@pytest.mark.skipif(INTERPRET, reason="the interpreter runs Triton on a CPU")
def test_an_explicit_choice_never_falls_back() -> None:
    with pytest.raises(ValueError, match=r"^impl: expected a GPU, or TRITON_INTERPRET=1, for 'triton', got .* cpu$"):
        d4.plan_prefill(**{**legal(), "impl": "triton"})
    assert d4.dispatch.resolve_impl("auto", torch.device("cpu")) == "torch"


@pytest.mark.gpu
def test_lengths_on_the_gpu_need_num_rows() -> None:
    tables = make_pool(GEOM, 5, 40, 0).tables("cuda")
    lens = torch.tensor([5, 9])
    with pytest.raises(ValueError, match=r"^num_rows: expected an int, since the lengths are on the device; got None"):
        d4.plan_prefill(lens.cuda(), lens.cuda(), lens.cuda() % 5, tables, GEOM)
    with pytest.raises(ValueError, match=r"^seq_lens and extend_lens: expected both on one device"):
        d4.plan_prefill(lens, lens.cuda(), lens.cuda() % 5, tables, GEOM, 14)
    with pytest.raises(ValueError, match=r"^req_pool_indices: expected a tensor on cuda:0, got one on cpu"):
        d4.plan_prefill(lens, lens, lens % 5, tables, GEOM)
    with pytest.raises(ValueError, match=r"^seq_lens: expected a tensor on cuda:0, got one on cpu"):
        d4.plan_decode(lens, lens.cuda() % 5, tables, GEOM)
    with pytest.raises(ValueError, match=r"^out: expected a plan on cuda:0, got one on cpu"):
        d4.plan_prefill(lens, lens, lens.cuda() % 5, tables, GEOM, out=poisoned_prefill(14, (4, 128), "cpu"))


@pytest.mark.gpu
def test_host_lengths_are_refused_while_a_graph_is_captured() -> None:
    tables = make_pool(GEOM, 5, 40, 0).tables("cuda")
    lens, reqs = torch.tensor([5, 9]), torch.tensor([1, 2], device="cuda")
    out = poisoned_prefill(14, (4, 128), "cuda")
    before = contents(out)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(ValueError, match="while a CUDA graph is captured"):
        d4.plan_prefill(lens, lens, reqs, tables, GEOM, 14, out=out)
    assert contents(out) == before
