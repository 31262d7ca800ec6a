"""Input that is only seen on the device: slots that lie outside, bad lengths and ids, too many rows."""

from __future__ import annotations

import pytest
import torch

import dsv4_backend as d4
from backends import (
    decode_past_checks,
    each_backend,
    poisoned_prefill,
    prefill_past_checks,
)
from dsv4_backend.plans import INVALID_PACKED_WORDS
from planner_checks import (
    GEOM,
    contents,
)
from planner_oracle import LENGTHS, SLOT
from strategies import make_pool


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
