"""The ledger on metadata: silent where it is right, and it names what is wrong with each kind of wrong one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from dsv4_backend import DSV4Config, MetadataBuilder, metadata_buffers
from dsv4_backend.replay import Step
from dsv4_backend.replay.building import POISON
from dsv4_backend.replay.builds import BuildMode, builds_of
from dsv4_backend.replay.metadata_faults import METADATA_FAULTS
from dsv4_backend.replay.metadata_image import COMPRESSED_FIELDS, WINDOW_FIELDS, StepImages
from ledger_bench import DECODE, EXTEND, VERIFY, Bench, kinds, silent


def _prefill(bench: Bench) -> Step:
    """Prompts and a chunk that goes on, ragged, in a padded bucket."""
    silent(bench.run_all(EXTEND, {0: 130, 1: 250, 2: 5}))
    return bench.step(EXTEND, {0: 300, 1: 7, 2: 2, 3: 1}, num_rows=384)


def _decode(bench: Bench) -> Step:
    silent(bench.run_all(EXTEND, {0: 127, 1: 255, 2: 7, 3: 2}))
    return bench.step(DECODE, dict.fromkeys(range(4), 1), num_rows=8)


def _idle(bench: Bench) -> Step:
    """A decode step without padding, and an idle step."""
    silent(bench.run_all(EXTEND, {0: 127, 1: 255, 2: 7, 3: 2}))
    bench.steps = 15
    return bench.step(DECODE, dict.fromkeys(range(4), 1))


def _verify(bench: Bench) -> Step:
    """Three requests in a bucket of four, uniform, with draft steps that grow."""
    silent(bench.run_all(EXTEND, {0: 126, 1: 300, 2: 5}))
    return bench.step(VERIFY, {0: 4, 1: 4, 2: 4}, num_rows=16)


def _ragged(bench: Bench) -> Step:
    """Four requests without padding, two of them near their end, with draft steps that do not grow."""
    silent(bench.run_all(EXTEND, {0: 126, 1: 300, 2: 5, 3: 2}))
    bench.steps = 2
    return bench.step(VERIFY, {0: 4, 1: 3, 2: 4, 3: 1})


SCENES = (_prefill, _decode, _idle, _verify, _ragged)
each_scene = pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)


def begin(scene: Callable[[Bench], Step]) -> tuple[Bench, Step, StepImages]:
    bench = Bench(4 if scene in (_verify, _ragged) else 0)
    for _ in range(4):
        bench.join()
    step = scene(bench)
    return bench, step, bench.build(step).images


# Kind of the violation, and the scenes in which the fault has an effect; None: in all of them.
CASES: dict[str, tuple[str, tuple[Callable[[Bench], Step], ...] | None]] = {
    "first_slots": ("write_slot", (_verify, _ragged)),
    "unpadded_slots": ("window_write_slot", (_verify, _ragged)),
    "frozen_steps": ("causal_length", (_verify,)),
    "committed_length": ("position", (_verify, _ragged)),
    "next_position": ("position", None),
    "next_request": ("row_request", None),
    "zero_padding": ("causal_length", None),
    "negative_padding": ("causal_length", (_verify,)),
    "shared_slot": ("shared_slot", None),
    "untranslated_slot": ("window_write_slot", None),
    "idle_slot": ("write_slot", (_idle,)),
    "late_window": ("window_slot", None),
    "reversed_window": ("window_slot", None),
    "evicted_slot": ("window_read", None),
    "foreign_window_slot": ("window_read", None),
    "stale_page": ("page", None),
    "foreign_table": ("page", None),
    "shifted_entry": ("entry_read", None),
    "open_group_slot": ("entry_slot", None),
    "clamped_length": ("entry_length", None),
    "dirty_selection": ("sparse_fill", None),
    "moved_buffer": ("moved_buffer", None),
}


def test_every_fault_has_a_case() -> None:
    assert set(CASES) == set(METADATA_FAULTS)
    assert len(CASES) >= 10


@each_scene
@pytest.mark.parametrize("fault", METADATA_FAULTS)
def test_the_ledger_reports_every_fault(fault: str, scene: Callable[[Bench], Step]) -> None:
    bench, step, images = begin(scene)
    silent(bench.check(step, images))
    untouched = [dict(image.fields) for image in images.metadata]
    kind, scenes = CASES[fault]
    applied = METADATA_FAULTS[fault](images.metadata, step)
    assert applied == (scenes is None or scene in scenes)
    found = bench.check(step, images)
    if not applied:
        silent(found)
        for image, before in zip(images.metadata, untouched, strict=True):
            assert all(np.array_equal(image.fields[name], before[name]) for name in before)
        return
    assert kind in kinds(found), [violation.message for violation in found.kept]
    assert all("\n" not in violation.message for violation in found.kept)
    # What was built is as it was: a fault is in the copy that the ledger sees.
    silent(bench.check(step, bench.build(step).images))


def test_a_message_names_request_position_and_row() -> None:
    bench, step, images = begin(_verify)
    images.metadata[0].edit("positions")[5] = 7
    assert bench.check(step, images).kept[0].message == (
        "step 1: position (request 1, position 301): expected 301, got 7 (row 5 of TARGET_VERIFY)"
    )
    draft = next(image for image in images.metadata if image.place == 1)
    draft.edit("swa_page_indices")[3, 2] = 7
    found = [violation.message for violation in bench.check(step, images).kept if violation.kind == "window_slot"]
    assert found == [
        "step 1: window_slot: expected swa_page_indices[2] = -1, got swa_page_indices[2] = 7 "
        "(row 3 of DRAFT_DECODE (growing) step 1 of 2)"
    ]


@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 7, 10])
def test_verify_steps_with_all_that_is_built_around_them(drafts: int) -> None:
    bench = Bench(drafts)
    for _ in range(5):
        bench.join()
    silent(bench.run_all(EXTEND, {0: 126, 1: 3, 2: 255, 3: 1, 4: 509}))
    rng, seen = np.random.default_rng(drafts), set()
    for _ in range(12):
        rows = {k: drafts if rng.random() < 0.7 else int(rng.integers(1, drafts + 1)) for k in range(5)}
        stay = {k: int(rng.integers(1, count + 1)) for k, count in rows.items()}
        bucket = -(-sum(rows.values()) // (4 * drafts)) * 4 * drafts
        silent(bench.run_all(VERIFY, rows, stay, num_rows=bucket))
        seen |= {(build.mode, build.chain, build.frozen) for build in builds_of(bench.last)}
    chains = {chain for chain in (drafts - 1, drafts) if chain}
    assert seen >= {(BuildMode.DRAFT_DECODE, chain, frozen) for chain in chains for frozen in (True, False)}
    assert (BuildMode.DRAFT_EXTEND, 0, False) in seen


@pytest.mark.parametrize("borders", [(1, 3, 4), (5, 127, 128), (129, 255, 256), (257, 511, 513)], ids=str)
def test_prefill_then_decode_across_borders(borders: tuple[int, ...]) -> None:
    bench = Bench()
    for _ in borders:
        bench.join()
    silent(bench.run_all(EXTEND, dict(enumerate(borders))))
    for step in range(9):
        silent(bench.run_all(DECODE, dict.fromkeys(range(len(borders)), 1), num_rows=8 if step % 2 else None))


def test_a_shared_prefix_is_found_by_another_request() -> None:
    bench = Bench()
    owner = bench.join(chain=(5,))
    silent(bench.run_all(EXTEND, {owner: 600}))
    guest = bench.join(chain=(5,), shared=tuple(bench.pool.pages(bench.rows[owner])[:2]))
    silent(bench.run_all(EXTEND, {guest: 1, owner: 1}))
    silent(bench.run_all(EXTEND, {guest: 300}))
    other = bench.join(chain=(6,), shared=tuple(bench.pool.pages(bench.rows[owner])[:2]))
    assert {"window_read", "entry_read"} <= kinds(bench.run_all(EXTEND, {other: 4}))


@pytest.mark.parametrize(
    ("field", "kind"), [("swa_out_cache_loc", "window_read"), ("c128_out_loc", "entry_read")], ids=str
)
def test_a_token_that_went_elsewhere_is_missed_by_the_next_step(field: str, kind: str) -> None:
    bench = Bench()
    bench.join()

    def lose(images: StepImages) -> None:
        images.metadata[0].edit(field)[127] = 0

    assert kinds(bench.run_all(EXTEND, {0: 130}, change=lose)) >= {kind}
    found = bench.run_all(EXTEND, {0: 5})
    assert kinds(found) == {kind}
    assert (found.kept[0].request, found.kept[0].position) == (0, 127)
    assert found.kept[0].expected == "request 0 position 127 of step 0"
    assert found.kept[0].got.startswith("a row that was not written (slot ")


def test_an_entry_of_a_rejected_draft_is_written_again() -> None:
    bench = Bench(4)
    bench.join()
    silent(bench.run_all(EXTEND, {0: 125}))
    silent(bench.run_all(VERIFY, {0: 4}, {0: 1}))
    silent(bench.run_all(VERIFY, {0: 4}, {0: 4}))
    silent(bench.run_all(VERIFY, {0: 4}, {0: 4}))


def test_a_window_token_without_a_slot_is_named() -> None:
    bench, step, images = begin(_decode)
    slot = bench.pool.req_to_token[bench.rows[1], 200]
    bench.pool.full_to_swa[slot] = 0
    assert {"evicted", "window_slot"} <= kinds(bench.check(step, images))
    (evicted,) = [v for v in bench.check(step, bench.build(step).images).kept if v.kind == "evicted"]
    assert (evicted.request, evicted.expected) == (1, "a window slot for position 200")


@pytest.mark.parametrize("wrong", ["twice", "reserved"])
def test_pages_must_be_owned(wrong: str) -> None:
    bench, step, _ = begin(_prefill)
    table = bench.pool.req_to_token[bench.rows[0]]
    table[:256] = table[256:512] if wrong == "twice" else np.arange(256)
    found = bench.check(step, bench.build(step).images)
    assert "owned_page" in kinds(found)
    assert {violation.request for violation in found.kept if violation.kind == "owned_page"} == {0}


@each_scene
@pytest.mark.parametrize("name", [*WINDOW_FIELDS, *COMPRESSED_FIELDS])
def test_tensors_of_another_form_are_named(name: str, scene: Callable[[Bench], Step]) -> None:
    bench, step, images = begin(scene)
    for image in images.metadata:
        good = image.fields.get(name)
        if good is None:
            image.fields[name] = np.zeros(len(image.fields["positions"]), np.int32)
            assert kinds(bench.check(step, images)) == {"layout"}
            del image.fields[name]
            continue
        narrow = good[:, :0] if good.ndim > 1 else good[:0]
        for bad in (None, good.astype(np.float32), good[:-1], good[:, None], narrow):
            image.fields[name] = bad  # type: ignore[assignment]
            if bad is None:
                del image.fields[name]
            found = bench.check(step, images)
            assert "layout" in kinds(found)
            assert all(violation.kind == "layout" for violation in found.kept)
            assert name in found.kept[0].expected
        image.fields[name] = good
    silent(bench.check(step, images))


def test_draft_steps_are_counted() -> None:
    bench, step, images = begin(_verify)
    images.metadata.pop()
    found = bench.check(step, images)
    assert [violation.message for violation in found.kept] == ["step 1: build_steps: expected 2 of DRAFT_DECODE, got 1"]


def test_padding_of_a_decode_plan_is_the_reserved_request() -> None:
    bench, step, images = begin(_decode)
    for ratio, rows in images.plan.decode.items():
        good = rows[-1].copy()
        rows[-1] = (2, *good.tolist()[1:])
        found = bench.check(step, images)
        assert [(v.kind, v.ratio) for v in found.kept] == [("padding_row", ratio)]
        rows[-1] = good
    short = replace(step, num_rows=16)
    assert "plan_size" in kinds(bench.ledger.check(short, images.plan, step.extend_lens))


class TestTablesOnceARequest:
    """EXTEND in buckets whose tables are too large to be kept once a row."""

    @pytest.fixture(autouse=True)
    def small_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(metadata_buffers, "MAX_TABLE_BYTES", 0)

    def test_they_are_read_through_their_row(self) -> None:
        bench, step, images = begin(_prefill)
        own = images.metadata[0]
        assert len(own.fields["page_table"]) == 6
        silent(bench.check(step, images))
        for row, value in ((0, 1), (300, 2), (-1, 0)):
            good = own.edit("table_rows")[row]
            own.fields["table_rows"][row] = value
            assert "page" in kinds(bench.check(step, images))
            own.fields["table_rows"][row] = good
        silent(bench.check(step, images))

    @pytest.mark.parametrize("value", [-1, 6, 2**31 - 1])
    def test_a_row_that_is_not_there_is_named(self, value: int) -> None:
        bench, step, images = begin(_prefill)
        images.metadata[0].edit("table_rows")[3] = value
        assert "table_row" in kinds(bench.check(step, images))

    @pytest.mark.parametrize("fault", METADATA_FAULTS)
    def test_faults(self, fault: str) -> None:
        bench, step, images = begin(_prefill)
        kind, scenes = CASES[fault]
        assert METADATA_FAULTS[fault](images.metadata, step) == (scenes is None)
        found = bench.check(step, images)
        if scenes is None:
            assert kind in kinds(found)
        else:
            silent(found)


@each_scene
def test_used_buffers_are_spoilt_before_the_next_build(scene: Callable[[Bench], Step]) -> None:
    """What a build leaves out can't be right by chance."""
    bench, step, images = begin(scene)
    rows = images.metadata[0].fields["raw_out_cache_loc"]
    assert not (rows == POISON).any()
    bench.build(replace(step, num_rows=2 * step.num_rows))  # in buffers of their own
    assert (rows == POISON).all()
    silent(bench.check(step, bench.build(step).images))


@each_scene
def test_a_builder_that_leaves_something_out_is_caught(
    scene: Callable[[Bench], Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, step, images = begin(scene)
    silent(bench.check(step, images))
    fill = torch.Tensor.fill_
    monkeypatch.setattr(torch.Tensor, "fill_", lambda t, value: t if value == -1 else fill(t, value))
    assert kinds(bench.check(step, bench.build(step).images)) == {"sparse_fill"}


@each_scene
def test_other_buffers_for_the_same_bucket_are_named(scene: Callable[[Bench], Step]) -> None:
    bench, step, images = begin(scene)
    silent(bench.check(step, images))
    bench.builder._target = MetadataBuilder(
        DSV4Config.v4_flash(), bench.geom, bench.tables, max_rows=4096, max_seq_len=bench.tables.max_seq_len
    )
    found = bench.check(step, bench.build(step).images)
    assert kinds(found) == {"moved_buffer"}
