"""The ledger: it stays silent on right plans, and names what is wrong with each kind of wrong one."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dsv4_backend.replay as replay_package
from dsv4_backend import CacheGeometry
from dsv4_backend.replay import Step
from dsv4_backend.replay.image import PlanImage
from dsv4_backend.replay.plan_faults import PLAN_FAULTS
from ledger_bench import DECODE, EXTEND, VERIFY, Bench, kinds, silent


@pytest.mark.parametrize("borders", [(1, 3, 4), (5, 127, 128), (129, 255, 256), (257, 511, 513)])
def test_prefill_then_decode_across_borders(borders: tuple[int, ...]) -> None:
    bench = Bench()
    for _ in borders:
        bench.join()
    silent(bench.run(EXTEND, dict(enumerate(borders))))
    for _ in range(9):
        silent(bench.run(DECODE, dict.fromkeys(range(len(borders)), 1)))


@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 8, 10])
@pytest.mark.parametrize("prompt", [1, 3, 126, 250, 508])
def test_every_accept_length_leaves_the_state_that_the_next_step_needs(drafts: int, prompt: int) -> None:
    for accepted in range(1, drafts + 1):
        bench = Bench(drafts)
        bench.join()
        silent(bench.run(EXTEND, {0: prompt}))
        for _ in range(8):
            silent(bench.run(VERIFY, {0: drafts}, {0: accepted}, num_rows=16))


def test_ragged_verify_with_mixed_accepts() -> None:
    bench = Bench(4)
    for _ in range(3):
        bench.join()
    silent(bench.run(EXTEND, {0: 126, 1: 3, 2: 255}))
    for rows, stay in (((4, 2, 3), (2, 2, 1)), ((4, 4, 4), (1, 4, 3)), ((1, 4, 2), (1, 1, 2)), ((4, 3, 4), (4, 3, 4))):
        silent(bench.run(VERIFY, dict(enumerate(rows)), dict(enumerate(stay)), num_rows=16))


def test_a_shared_prefix_is_good_state_for_another_request() -> None:
    bench = Bench()
    owner = bench.join(chain=(5,))
    silent(bench.run(EXTEND, {owner: 600}))
    pages = bench.pool.pages(bench.rows[owner])[:2]
    guest = bench.join(chain=(5,), shared=tuple(pages))
    silent(bench.run(EXTEND, {guest: 1, owner: 1}))
    silent(bench.run(EXTEND, {guest: 300}))


def test_another_block_in_the_same_page_is_not() -> None:
    bench = Bench()
    owner = bench.join(chain=(5,))
    silent(bench.run(EXTEND, {owner: 600}))
    guest = bench.join(chain=(6,), shared=tuple(bench.pool.pages(bench.rows[owner])[:2]))
    assert kinds(bench.run(EXTEND, {guest: 4})) == {"stale_read"}


def test_a_page_end_that_was_not_kept_spoils_the_prefix() -> None:
    """Ratio 4 keeps the last 4 rows of every window page, also in the middle of a chunk."""
    bench = Bench()
    owner = bench.join(chain=(5,))

    def forget_page_end(image: PlanImage) -> None:
        writes = image.lists[4].write
        used = int((writes["ragged_id"] != 0xFFFFFFFF).sum())
        place = int(np.flatnonzero(writes["ragged_id"] == 511)[0])
        writes[place : used - 1] = writes[place + 1 : used].copy()
        writes[used - 1] = (0xFFFFFFFF, -1)
        assert image.header is not None
        image.header[5] -= 1

    silent(bench.run(EXTEND, {owner: 600}, change=forget_page_end))
    guest = bench.join(chain=(5,), shared=tuple(bench.pool.pages(bench.rows[owner])[:2]))
    found = bench.run(EXTEND, {guest: 9})
    assert "stale_read" in kinds(found)
    assert found.kept[0].position == 511


def test_a_rejected_draft_never_passes_for_the_token_that_took_its_place() -> None:
    """Position 6 is drafted, rejected, and drafted again without being kept: the ring holds it, but the old one."""
    bench = Bench(4)
    bench.join()
    silent(bench.run(EXTEND, {0: 5}))
    silent(bench.run(VERIFY, {0: 4}, {0: 1}))

    def forget(image: PlanImage) -> None:
        writes = image.lists[4].write
        place = int(np.flatnonzero(writes["ragged_id"] == 0)[0])
        writes[place:-1] = writes[place + 1 :].copy()
        writes[-1] = (0xFFFFFFFF, -1)
        assert image.header is not None
        image.header[5] -= 1

    found = bench.run(VERIFY, {0: 4}, {0: 2}, change=forget)
    assert kinds(found) == {"lost_state"}
    assert found.kept[0].position == 6
    assert found.kept[0].expected.startswith("request 0 position 6 of step 2")
    assert found.kept[0].got == "request 0 position 6 of step 1"


class _OldWriteRule(CacheGeometry):
    """Keeps four rows for drafts, however many there are."""

    def write_pad(self, ratio: int) -> int:
        return 4


@pytest.mark.parametrize(("prefix", "drafts"), [(1000, 8), (1003, 5), (1002, 6)])
def test_more_than_four_drafts_need_more_than_four_rows(prefix: int, drafts: int) -> None:
    for rule, expected in ((CacheGeometry, set()), (_OldWriteRule, {"lost_state"})):
        bench = Bench(geom=rule(c4_ring=16, c128_ring=256))
        bench.join()
        silent(bench.run(EXTEND, {0: prefix}))
        assert kinds(bench.run(VERIFY, {0: drafts})) == expected


def test_a_ring_too_small_for_the_drafts_is_noticed() -> None:
    bench = Bench(geom=CacheGeometry(c4_ring=8, c128_ring=128))
    bench.join()
    silent(bench.run(EXTEND, {0: 1003}))
    assert "lost_state" in kinds(bench.run(VERIFY, {0: 8}, {0: 1}))


def test_state_of_an_earlier_owner_does_not_count() -> None:
    """The same prompt in the same row and window pages, but nothing is kept: what is there was left by another."""
    bench = Bench()
    owner = bench.join(chain=(5,))
    silent(bench.run(EXTEND, {owner: 510}))
    page = bench.pool.full_to_swa[bench.pool.slots(bench.rows[owner], 509, 510)]
    bench.pool.grow(bench.rows[owner], 600)  # of three pages, the middle one comes back in its place
    bench.pool.close(bench.rows[owner])
    again = bench.join(chain=(5,))
    step = bench.step(EXTEND, {again: 511})
    assert bench.rows[again] == bench.rows[owner]
    assert bench.pool.full_to_swa[bench.pool.slots(bench.rows[again], 509, 510)] == page
    image = bench.plan(step)
    for lists in image.lists.values():
        lists.write[:] = (0xFFFFFFFF, -1)
    lost = [v for v in bench.ledger.check(step, image, step.extend_lens).kept if v.kind == "lost_state"]
    assert {(violation.ratio, violation.position) for violation in lost} >= {(4, 504), (128, 384)}


def test_requests_must_go_on_where_they_ended() -> None:
    bench = Bench()
    bench.join()
    silent(bench.run(EXTEND, {0: 10}))
    bench.lengths[0] = 9
    found = bench.run(EXTEND, {0: 4})
    assert kinds(found) == {"continuity"}
    assert (found.kept[0].expected, found.kept[0].got) == ("10", "9")


def test_a_group_that_is_skipped_for_good_is_counted() -> None:
    bench = Bench()
    bench.join()
    silent(bench.run(EXTEND, {0: 2}))
    bench.lengths[0] = 4
    assert {"continuity", "group_count"} <= kinds(bench.run(EXTEND, {0: 2}))


def test_slots_must_be_mapped_and_belong_to_one_row() -> None:
    bench = Bench()
    bench.join()
    step = bench.step(EXTEND, {0: 10})
    image = bench.plan(step)
    step.out_cache_loc[3] = step.out_cache_loc[2]
    assert "slot" in kinds(bench.ledger.check(step, image, np.array([10])))
    step.out_cache_loc[3] = 0
    assert "slot" in kinds(bench.ledger.check(step, image, np.array([10])))


def test_the_error_flag_is_a_violation() -> None:
    bench = Bench()
    bench.join()
    step = bench.step(EXTEND, {0: 10})
    image = bench.plan(step)
    image.error = 2
    assert kinds(bench.ledger.check(step, image, np.array([10]))) == {"error_flag"}


def test_a_plan_of_the_wrong_size_or_layout_is_a_violation() -> None:
    bench = Bench()
    bench.join()
    step = bench.step(EXTEND, {0: 10}, num_rows=16)
    image = bench.plan(step)
    assert kinds(bench.ledger.check(replace(step, num_rows=17), image, np.array([10]))) == {"plan_size"}
    assert kinds(bench.ledger.check(replace(step, num_rows=70_000), image, np.array([10]))) == {"plan_size"}


def test_check_changes_nothing_until_commit() -> None:
    bench = Bench()
    bench.join()
    step = bench.step(EXTEND, {0: 300})
    before = {name: array.copy() for name, array in bench.ledger.save().items()}
    bench.ledger.check(step, bench.plan(step), np.array([300]))
    assert all(np.array_equal(before[name], array) for name, array in bench.ledger.save().items())
    bench.ledger.commit()
    assert not np.array_equal(before["state4"], bench.ledger.save()["state4"])
    with pytest.raises(ValueError, match="expected a step that was checked"):
        bench.ledger.commit()


def _prefill(bench: Bench) -> Step:
    """Prompts and a chunk that goes on from state, ragged, in a padded bucket."""
    bench.run(EXTEND, {0: 130, 1: 250, 2: 5})
    return bench.step(EXTEND, {0: 300, 1: 7, 2: 2, 3: 1}, num_rows=320)


def _verify(bench: Bench) -> Step:
    bench.run(EXTEND, {0: 126, 1: 250, 2: 5, 3: 2})
    return bench.step(VERIFY, {0: 4, 1: 3, 2: 4, 3: 4}, num_rows=16)


def _decode(bench: Bench) -> Step:
    bench.run(EXTEND, {0: 127, 1: 255, 2: 7, 3: 2})
    return bench.step(DECODE, {0: 1, 1: 1, 2: 1, 3: 1})


DECODE_FAULTS = {
    *("wrong_page", "wrong_previous_page", "placeholder_page", "wrong_seq_len", "wrong_write_loc", "swapped_requests")
}
EXPECTED_KIND = {
    "dropped_row": "missing_row",
    "duplicated_row": "row_repeat",
    "shifted_id": "unexpected_row",
    "wrong_page": "stale_read",
    "wrong_previous_page": "stale_read",
    "placeholder_page": "stale_read",
    "wrong_seq_len": "seq_len",
    "wrong_buffer_len": "buffer_len",
    "stale_ring_row": "lost_state",
    "wrong_write_loc": "write_loc",
    "write_conflict": "write_conflict",
    "uniform_for_ragged": "unexpected_row",
    "dirty_tail": "marker",
    "half_marker": "marker",
    "header_lies": "header",
    "unordered_rows": "row_order",
    "padded_row": "row_range",
    "swapped_requests": "write_loc",
}


def test_every_fault_has_a_case() -> None:
    assert set(EXPECTED_KIND) == set(PLAN_FAULTS)
    assert len(PLAN_FAULTS) >= 10


@pytest.mark.parametrize("scene", [_prefill, _verify, _decode])
@pytest.mark.parametrize("fault", PLAN_FAULTS)
def test_the_ledger_reports_every_fault(fault: str, scene: Callable[[Bench], Step]) -> None:
    bench = Bench(4 if scene is _verify else 0)
    for _ in range(4):
        bench.join()
    step = scene(bench)
    image = bench.plan(step)
    silent(bench.ledger.check(step, image, step.extend_lens))
    applied = PLAN_FAULTS[fault](image, step)
    assert applied == (scene is not _decode or fault in DECODE_FAULTS)
    found = bench.ledger.check(step, image, step.extend_lens)
    if not applied:
        silent(found)
        return
    assert EXPECTED_KIND[fault] in kinds(found), [violation.message for violation in found.kept]
    for violation in found.kept:
        assert violation.step == step.index
        assert "\n" not in violation.message
    if fault not in ("header_lies", "dirty_tail", "half_marker", "padded_row"):
        assert any(violation.request >= 0 and violation.position >= 0 for violation in found.kept)


@pytest.mark.parametrize("fault", PLAN_FAULTS)
def test_a_fault_without_effect_leaves_the_plan_alone(fault: str) -> None:
    """One request, one row that completes nothing, no padding."""
    bench = Bench()
    bench.join()
    step = bench.step(EXTEND, {0: 1})
    image, untouched = bench.plan(step), bench.plan(step)
    if not PLAN_FAULTS[fault](image, step):
        assert image.header is not None
        assert np.array_equal(image.header, untouched.header)
        for ratio, lists in image.lists.items():
            assert np.array_equal(lists.compress, untouched.lists[ratio].compress)
            assert np.array_equal(lists.write, untouched.lists[ratio].write)
    else:
        assert bench.ledger.check(step, image, step.extend_lens).count


@pytest.mark.parametrize("page", [-3, 2**31 - 1, 10**6])
@pytest.mark.parametrize("scene", [_prefill, _verify, _decode])
def test_pages_outside_the_state_pool_are_named(page: int, scene: Callable[[Bench], Step]) -> None:
    bench = Bench(4 if scene is _verify else 0)
    for _ in range(4):
        bench.join()
    step = scene(bench)
    image = bench.plan(step)
    records = image.decode[4] if image.header is None else image.lists[4].compress
    reading = np.flatnonzero(records["seq_len"] % 4 == 0)[0]
    records["read_page_1"][reading] = page
    assert "page_range" in kinds(bench.ledger.check(step, image, step.extend_lens))


@pytest.mark.parametrize("loc", [-2, 2**31 - 1, 10**6])
@pytest.mark.parametrize("scene", [_prefill, _decode])
def test_writes_outside_the_state_pool_are_named(loc: int, scene: Callable[[Bench], Step]) -> None:
    bench = Bench()
    for _ in range(4):
        bench.join()
    step = scene(bench)
    image = bench.plan(step)
    records = image.decode[128] if image.header is None else image.lists[128].write
    records["write_loc"][0] = loc
    assert "write_range" in kinds(bench.ledger.check(step, image, step.extend_lens))


def test_a_decode_row_reads_the_page_that_it_writes_to() -> None:
    """Also where it completes nothing: the page and the place are two names for one row."""
    bench = Bench()
    bench.join()
    bench.run(EXTEND, {0: 5})
    step = bench.step(DECODE, {0: 1})
    image = bench.plan(step)
    image.decode[4]["read_page_1"] += 1
    assert kinds(bench.ledger.check(step, image, step.extend_lens)) == {"own_page"}


def test_all_is_counted_and_little_is_kept() -> None:
    bench = Bench()
    bench.join()
    step = bench.step(EXTEND, {0: 400})
    image = bench.plan(step)
    image.lists[4].compress["seq_len"][:100] += 1
    found = bench.ledger.check(step, image, step.extend_lens)
    assert found.count == 100
    assert len(found.kept) == 5
    assert found.kept[0].message == "step 0: seq_len (c4, request 0, position 3): expected 4, got 5"


def test_the_ledger_shares_no_code_with_what_it_judges() -> None:
    folder = Path(replay_package.__file__).parent
    pending, seen = ["ledger"], set()
    while pending:
        name = pending.pop()
        seen.add(name)
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                if module.startswith("dsv4_"):
                    assert module.startswith("dsv4_backend.replay."), f"{name}.py imports {module}"
                    pending += {module.split(".")[2]} - seen
    assert {"ledger", "plan_checks", "batch_rows", "image", "metadata_checks", "metadata_rows", "contents"} <= seen
