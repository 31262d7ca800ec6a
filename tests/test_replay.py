"""Replays: traces run to their end without a violation, whatever the settings, and within their budgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backends import each_backend
from dsv4_backend import AttnMetadata, MetadataBuilder, RawBatch, RequestTables, planner
from dsv4_backend.reference import metadata as reference
from dsv4_backend.replay import (
    FAULTS,
    PagePool,
    PrefixCache,
    ReplayOptions,
    ReplayResult,
    Step,
    StepMode,
    TraceRequest,
    load_step,
    planning,
    replay_trace,
    synthetic_trace,
)
from dsv4_backend.replay.building import raw_batch
from dsv4_backend.replay.builds import BuildMode, builds_of
from dsv4_backend.replay.plan_faults import PLAN_FAULTS
from dsv4_backend.replay.scheduler import Scheduler, bucket_rows
from dsv4_backend.table_mirror import TableMirror

TINY = {"num_pages": 22, "num_window_pages": 7}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Plans of a few rows: on a busy machine, threads that wait for each other take far longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def finish(requests: list[TraceRequest], **settings: object) -> ReplayResult:
    """Replays to the end and checks the totals that any schedule must have."""
    result = replay_trace(requests, ReplayOptions(**settings))  # type: ignore[arg-type]
    assert not result.violation_count, [violation.message for violation in result.violations]
    assert result.finished == len(requests)
    if not result.retracted:
        computed = sum(request.cached_tokens for request in requests) - result.hit_tokens
        assert result.committed == computed
    assert sum(result.rows) >= result.committed
    return result


@pytest.mark.parametrize("drafts", [0, 1, 2, 4, 10])
@pytest.mark.parametrize("pool", [{}, TINY], ids=["roomy", "tiny"])
def test_drafts(drafts: int, pool: dict[str, int]) -> None:
    result = finish(synthetic_trace(12, seed=drafts), drafts=drafts, **pool)
    assert (StepMode.TARGET_VERIFY in result.modes) == (drafts > 0)
    assert (StepMode.DECODE in result.modes) == (drafts == 0)
    assert pool or not result.retracted
    assert pool or result.hit_tokens


@pytest.mark.parametrize("chunk_size", [7, 64, 1000])
@pytest.mark.parametrize(("drafts", "mixed"), [(0, False), (0, True), (4, False)])
def test_chunks(chunk_size: int, drafts: int, mixed: bool) -> None:
    trace = [request for request in synthetic_trace(80, seed=1) if request.input_length < 100 * chunk_size][:6]
    result = finish(trace, chunk_size=chunk_size, drafts=drafts, mixed=mixed)
    prompts = [rows for rows, mode in zip(result.rows, result.modes, strict=True) if mode is StepMode.EXTEND]
    assert max(prompts) <= chunk_size + (8 if mixed else 0)


def test_a_tiny_pool_puts_requests_back_and_still_serves_prefixes() -> None:
    pool = {"num_pages": 18, "num_window_pages": 7}
    results = [finish(synthetic_trace(10, seed=0), drafts=drafts, **pool) for drafts in (0, 10)]
    assert all(result.retracted for result in results)
    assert all(result.hit_tokens for result in results)


@pytest.mark.parametrize("seed", range(2))
def test_seeds(seed: int) -> None:
    finish(synthetic_trace(9, seed), drafts=3, seed=seed, max_running=7, **TINY)
    finish(synthetic_trace(9, seed), mixed=True, seed=seed, max_running=7, chunk_size=300, **TINY)


def test_the_smallest_window_pool_that_is_allowed_works() -> None:
    for drafts in (0, 10):
        finish(synthetic_trace(5, seed=3), drafts=drafts, num_window_pages=2, num_pages=22)


def test_a_chunk_above_the_packed_limit_uses_the_wide_layout() -> None:
    blocks = -(-70_000 // 512)
    result = finish([TraceRequest(0, 70_000, 3, tuple(range(blocks)))], chunk_size=80_000)
    assert max(result.rows) == 70_000


def test_equal_settings_give_equal_runs() -> None:
    first, second, other = (
        finish(synthetic_trace(5, seed=5), drafts=4, seed=seed, max_running=3) for seed in (1, 1, 2)
    )
    assert (first.rows, first.modes) == (second.rows, second.modes)
    assert first.rows != other.rows


@each_backend
def test_backends(impl: str, device: str) -> None:
    """Device lengths and a table copy that is kept up to date, on a GPU."""
    trace = [TraceRequest(0, length, 6, (0, *range(9, 9 + length // 512))) for length in (3, 127, 600, 1030)]
    for drafts in (0, 4):
        where = torch.device(device)
        finish(trace, drafts=drafts, impl=impl, device=where, max_running=2, chunk_size=500, num_pages=9)


def steps_of(requests: list[TraceRequest], **settings: int) -> Iterator[tuple[Step, Scheduler, PagePool]]:
    """Steps of a schedule, each shown before it is committed."""
    options = {"chunk_size": 300, "width": 0, "max_requests": 4, "num_pages": 40, "num_window_pages": 12} | settings
    pool = PagePool(
        page_size=256,
        window_page_size=256,
        num_pages=options["num_pages"],
        num_window_pages=options["num_window_pages"],
        max_requests=options["max_requests"],
        max_len=6000,
    )
    scheduler = Scheduler(
        requests,
        pool,
        PrefixCache(pool, 512, 128),
        window=128,
        chunk_size=options["chunk_size"],
        width=options["width"],
        mixed=bool(options.get("mixed", 0)),
        rng=np.random.default_rng(0),
    )
    while (step := scheduler.next_step()) is not None:
        yield step, scheduler, pool
        scheduler.commit(scheduler.draw_accepts(step))


def request(length: int, output: int, *ids: int, first: int = 1000) -> TraceRequest:
    own = range(first, first - (-length // 512) - len(ids))
    return TraceRequest(0, length, output, (*ids, *own))


def test_several_prompts_share_a_step_and_a_long_one_takes_several() -> None:
    steps = [step for step, *_ in steps_of([request(100, 1), request(450, 1), request(50, 1)])]
    assert [dict(zip(s.requests.tolist(), s.extend_lens.tolist(), strict=True)) for s in steps] == [
        {0: 100, 1: 200},
        {1: 250, 2: 50},
    ]
    assert [s.before.tolist() for s in steps] == [[0, 0], [200, 0]]


def test_requests_are_admitted_in_order_as_rows_become_free() -> None:
    order = [
        admission.request
        for step, *_ in steps_of([request(10, 1 + k % 3) for k in range(9)], max_requests=2)
        for admission in step.admitted
    ]
    assert order == list(range(9))


def test_a_prompt_waits_for_pages_that_are_promised_to_another() -> None:
    joined: dict[int, int] = {}
    for step, scheduler, _ in steps_of([request(2000, 2), request(2000, 2, first=50)], num_pages=12):
        joined |= {admission.request: step.index for admission in step.admitted}
        assert scheduler.retracted == 0
    assert joined == {0: 0, 1: 8}, "seven chunks and a decode step come first"


def test_modes_and_lengths_follow_the_engine() -> None:
    for step, *_ in steps_of([request(10, 6), request(20, 4)], width=3):
        assert step.out_cache_loc.dtype == np.int64
        assert step.total_rows == step.extend_lens.sum() <= step.num_rows
        expected = step.before if step.mode is StepMode.TARGET_VERIFY else step.before + step.extend_lens
        assert np.array_equal(step.seq_lens, expected)
        assert (step.extend_lens <= 3).all() or step.mode is StepMode.EXTEND


def test_verify_batches_are_uniform_or_ragged_and_sometimes_padded() -> None:
    verify = [step for step, *_ in steps_of(synthetic_trace(30), width=4) if step.mode is StepMode.TARGET_VERIFY]
    ragged = [step for step in verify if step.extend_lens.min() < step.extend_lens.max()]
    assert 0 < len(ragged) < len(verify)
    assert any(step.num_rows > step.total_rows for step in verify)
    assert any(step.num_rows == step.total_rows for step in verify)


def test_running_requests_join_prompt_steps_only_when_mixed() -> None:
    trace = [request(10, 200), request(2000, 5)]
    for mixed in (0, 1):
        joined = [
            step
            for step, *_ in steps_of(trace, mixed=mixed, chunk_size=100)
            if step.mode is StepMode.EXTEND and 0 in step.requests and step.before[0] >= 10
        ]
        assert len(joined) == (20 if mixed else 0)
        assert all(step.extend_lens.tolist() == [1, 100] for step in joined[:-1])


@pytest.mark.parametrize(
    ("length", "hit"),
    [(1300, 1024), (1025, 1024), (1024, 512), (513, 512), (512, 0), (100, 0)],
    ids=str,
)
def test_a_hit_covers_whole_blocks_but_never_the_whole_prompt(length: int, hit: int) -> None:
    shared = (1, 2)[: length // 512]
    trace = [request(1300, 1, 1, 2), request(length, 1, *shared, first=2000)]
    hits = [
        admission.hit for step, *_ in steps_of(trace, max_requests=1, chunk_size=4000) for admission in step.admitted
    ]
    assert hits == [0, hit]


def test_a_hit_works_while_the_first_owner_still_runs() -> None:
    trace = [request(1300, 50, 1, 2), request(3, 1), request(1400, 50, 1, 2, first=2000)]
    seen = {a.request: a.hit for step, *_ in steps_of(trace, chunk_size=1301) for a in step.admitted}
    assert seen == {0: 0, 1: 0, 2: 1024}


def test_window_pages_behind_the_window_are_unmapped() -> None:
    checked = 0
    for step, _, pool in steps_of([request(2000, 300), request(700, 40)]):
        for row, before in zip(step.req_pool_indices, step.before, strict=True):
            resident = pool.full_to_swa[pool.req_to_token[row, :before]] > 0
            assert resident[max(0, before - 128) :].all()
            # Up to a page stays behind, and what the prefix cache keeps: the last page of each block.
            gone = resident[: max(0, before - 128) // 256 * 256].reshape(-1, 256)[::2]
            assert not gone.any()
            checked += gone.size
    assert checked > 0


def test_a_request_that_is_put_back_is_next_and_goes_on_with_its_own_lengths() -> None:
    trace = [*(request(700, 400) for _ in range(3)), request(10, 5)]
    longest, admitted, counts = dict.fromkeys(range(4), 0), [], (0, 0)
    for step, scheduler, _ in steps_of(trace, num_pages=11, num_window_pages=6, chunk_size=2000, max_requests=3):
        admitted += [admission.request for admission in step.admitted]
        for who, length in zip(step.requests.tolist(), step.after.tolist(), strict=True):
            assert step.mode is StepMode.EXTEND or length > longest[who], "tokens are generated once"
            longest[who] = max(longest[who], length)
        counts = scheduler.retracted, scheduler.finished
    assert counts[0] == len(admitted) - 4 > 0
    assert admitted == sorted(admitted), "no later request overtakes"
    assert counts[1] == 3, "the last one finishes with the last step"
    assert longest == {0: 1099, 1: 1099, 2: 1099, 3: 14}


ONLY_WITH_DRAFTS = {"first_slots", "unpadded_slots", "frozen_steps", "committed_length", "negative_padding"}


@pytest.mark.parametrize(("drafts", "mixed"), [(0, False), (4, False), (0, True)], ids=["decode", "drafts", "mixed"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_end_a_replay_and_their_step_can_be_replayed_alone(
    fault: str, drafts: int, mixed: bool, tmp_path: Path
) -> None:
    # Short chunks: state is read and buckets are padded before long.
    pool = {"num_pages": 200, "num_window_pages": 100}
    options = ReplayOptions(drafts=drafts, mixed=mixed, fault=fault, chunk_size=700, **pool)
    result = replay_trace(synthetic_trace(12, seed=2), options)
    if fault in ONLY_WITH_DRAFTS and not drafts:
        assert result.fault_step is None
        assert not result.violation_count
        return
    assert result.fault_step is not None
    assert result.violation_count
    assert result.violating_step is not None
    assert {violation.step for violation in result.violations} == {result.fault_step}
    path = tmp_path / "step.npz"
    result.violating_step.save(path)
    saved = load_step(path)
    again = saved.replay("torch", torch.device("cpu"))
    assert [v.message for v in again.kept] == [v.message for v in result.violations]
    assert replace(saved, fault=None).replay("torch", torch.device("cpu")).count == 0


def test_there_are_faults_of_both_kinds() -> None:
    assert set(PLAN_FAULTS) < set(FAULTS)
    assert len(set(FAULTS) - set(PLAN_FAULTS)) >= 10
    assert len(FAULTS) == len(set(FAULTS))


def break_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the requests of batches of a certain size in another order."""
    requests = reference._requests

    def broken(batch: RawBatch, *rest: Any) -> reference.Requests:
        found = requests(batch, *rest)
        return found._replace(req=found.req.flip(0)) if len(found.req) == 5 else found

    monkeypatch.setattr(reference, "_requests", broken)


def break_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """It forgets the requests' ids in batches of a certain size."""

    def broken(seq_lens: torch.Tensor, extend_lens: torch.Tensor, req: torch.Tensor, *rest: Any, **more: Any):
        return planner.plan_prefill(seq_lens, extend_lens, req.flip(0) if len(req) == 5 else req, *rest, **more)

    monkeypatch.setattr(planning, "plan_prefill", broken)


def break_draft_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses drafts of five requests."""
    build = MetadataBuilder.build_draft_steps

    def broken(self: MetadataBuilder, batch: RawBatch, *rest: Any, **more: Any) -> list[AttnMetadata]:
        if batch.batch_size == 5:
            raise ValueError("no five today")
        return build(self, batch, *rest, **more)

    monkeypatch.setattr(MetadataBuilder, "build_draft_steps", broken)


@pytest.mark.parametrize(
    ("break_it", "kinds"),
    [
        (break_builder, {"row_request", "page", "window_slot", "write_loc", "other_plan"}),
        (break_planner, {"other_plan"}),
        (break_draft_builder, {"refused"}),
    ],
    ids=["builder", "planner", "refusal"],
)
def test_what_is_broken_is_caught_and_its_step_file_tells_when_it_is_mended(
    break_it: Callable[[pytest.MonkeyPatch], None],
    kinds: set[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    break_it(monkeypatch)
    result = replay_trace(synthetic_trace(12, seed=4), ReplayOptions(drafts=4, max_running=6))
    assert {violation.kind for violation in result.violations} >= kinds
    assert result.violating_step is not None
    path = tmp_path / "step.npz"
    result.violating_step.save(path)
    assert load_step(path).replay("torch", torch.device("cpu")).count == result.violation_count
    monkeypatch.undo()
    assert load_step(path).replay("torch", torch.device("cpu")).count == 0


def test_all_that_belongs_to_a_step_is_built() -> None:
    result = finish(synthetic_trace(30, seed=2), drafts=4)
    verify = result.modes.count(StepMode.TARGET_VERIFY)
    counts = Counter(cost.mode for cost in result.builds)
    assert counts == {
        BuildMode.EXTEND: result.modes.count(StepMode.EXTEND),
        BuildMode.TARGET_VERIFY: verify,
        BuildMode.DRAFT_EXTEND: verify,
        BuildMode.DRAFT_DECODE: verify,
        BuildMode.IDLE: len(result.modes) // 16,
    }
    own = {mode.value for mode in StepMode}
    assert [cost.microseconds for cost in result.builds if cost.mode.value in own] == result.build_us
    assert all(cost.rows > 0 and cost.microseconds > 0 for cost in result.builds)


def test_builds_come_in_all_their_forms() -> None:
    forms: set[tuple[str, bool, bool, int, bool]] = set()
    padding: set[tuple[str, bool, bool]] = set()
    for step, *_ in steps_of(synthetic_trace(30), width=4):
        builds = builds_of(step)
        forms |= {(b.mode.value, b.padded, b.ragged, b.chain, b.frozen) for b in builds}
        padding |= {(b.mode.value, b.padded, b.padding_requests > 0) for b in builds}
        for build in builds:
            batch = raw_batch(build, step, torch.device("cpu"))
            assert (batch.req_pool_indices == 0).sum() == build.padding_requests or build.chain
            assert not build.padding_requests or batch.num_rows == build.num_rows
    modes = ("TARGET_VERIFY", "DRAFT_EXTEND")
    assert forms >= {(mode, padded, ragged, 0, False) for mode in modes for padded in (0, 1) for ragged in (0, 1)}
    drafts = {(chain, frozen, padded) for mode, padded, _, chain, frozen in forms if mode == "DRAFT_DECODE"}
    assert drafts == {(chain, frozen, padded) for chain in (3, 4) for frozen in (0, 1) for padded in (0, 1)}
    assert {(padded, ragged) for mode, padded, ragged, *_ in forms if mode == "EXTEND"} == {(0, 1), (1, 1)}
    three = {(False, False), (True, False), (True, True)}
    for mode in ("EXTEND", *modes):
        assert {form[1:] for form in padding if form[0] == mode} == three


@pytest.mark.parametrize(
    ("mode", "width", "expected"),
    [
        (StepMode.EXTEND, 1, {1: 64, 64: 64, 65: 96, 96: 96, 97: 128, 129: 192, 193: 256, 6145: 8192, 8193: 12288}),
        (StepMode.TARGET_VERIFY, 3, {1: 12, 12: 12, 13: 24}),
        (StepMode.DECODE, 0, {1: 8, 8: 8, 9: 16}),
    ],
    ids=lambda value: value.value if isinstance(value, StepMode) else None,
)
def test_buckets(mode: StepMode, width: int, expected: dict[int, int]) -> None:
    assert {rows: bucket_rows(mode, rows, width) for rows in expected} == expected


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_copy_of_the_tables_follows_the_pool(device: str) -> None:
    mirror: TableMirror | None = None
    for _, _, pool in steps_of(synthetic_trace(20), num_pages=22, num_window_pages=8):
        if mirror is None:
            mirror = TableMirror(pool, torch.device(device))
            if device == "cpu":  # where no copy is needed, the copying can still be run
                pool.take_changes()
                mirror._shared = False
                mirror.tables = RequestTables(mirror.tables.req_to_token.clone(), mirror.tables.full_to_swa.clone())
        tables = mirror.refresh()
        assert np.array_equal(tables.req_to_token.cpu().numpy(), pool.req_to_token)
        assert np.array_equal(tables.full_to_swa.cpu().numpy(), pool.full_to_swa)


def test_progress_is_reported_after_each_step() -> None:
    calls: list[tuple[int, int, int]] = []
    result = replay_trace(synthetic_trace(5), ReplayOptions(), lambda *call: calls.append(call))
    assert [steps for *_, steps in calls] == list(range(1, len(result.rows) + 1))
    assert calls[-1][:2] == (5, 5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafts": 11}, "num_draft_tokens: expected at most 10, got 11"),
        ({"drafts": -1}, "num_draft_tokens"),
        ({"chunk_size": 0}, "chunk_size: expected at least 1, got 0"),
        ({"max_running": 0}, "max_running: expected at least 1, got 0"),
        ({"seed": -1}, "seed: expected at least 0, got -1"),
        ({"mixed": True, "drafts": 2}, "mixed: expected drafts 0"),
        ({"fault": "gremlin"}, "fault: expected one of .*; got 'gremlin'"),
        ({"num_window_pages": 1}, "num_window_pages: expected at least 2, got 1"),
        ({"num_pages": 3}, r"request 1: expected at most 768 tokens, .*got 700 \+ 70 - 1"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_before_anything_runs(settings: dict[str, object], message: str) -> None:
    def never(*_: int) -> None:
        raise AssertionError("a step ran")

    with pytest.raises(ValueError, match=message):
        replay_trace([request(10, 2), request(700, 70)], ReplayOptions(**settings), never)  # type: ignore[arg-type]


def test_no_requests_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected at least one request, got none"):
        replay_trace([], ReplayOptions())
