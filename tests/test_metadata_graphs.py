"""Builds that a CUDA graph recorded: equal to eager ones bit for bit, whatever has changed since the capture."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from backends import each_compiled_backend
from dsv4_backend import ForwardMode
from metadata_checks import assert_same_bits, contents, setting_of
from metadata_steps import GuardedBuilder, Setting, Step

COLUMNS, NUM_REQUESTS, SIZE = 1100, 33, 16
SETTING = setting_of(COLUMNS, num_requests=NUM_REQUESTS)
ONCE = dataclasses.replace(SETTING, once_a_request=True)
WINDOW_ONLY = dataclasses.replace(SETTING, ratios=())


def shape(mode: ForwardMode, size: int = SIZE, **options: object) -> Step:
    """What is captured: the shortest lengths, all requests the same, no slot but the first."""
    each = options.pop("each", 1)
    length = options.get("drafts", 1) if mode is ForwardMode.DRAFT_EXTEND else 1
    return Step(mode, [1] * size, [length] * size, [0] * (size * each), **options)


# A bucket is at least as large as what is captured in it; up to three rows of it are the bucket's alone.
CAPTURED = {
    "decode": (SETTING, shape(ForwardMode.DECODE, padded=SIZE + 3)),
    "one request in a large bucket": (SETTING, shape(ForwardMode.DECODE, 1, padded=256)),
    "idle": (SETTING, shape(ForwardMode.IDLE, padded=SIZE + 3)),
    "verify": (SETTING, shape(ForwardMode.TARGET_VERIFY, each=4, drafts=4, padded=4 * SIZE + 4)),
    "draft extend": (SETTING, shape(ForwardMode.DRAFT_EXTEND, each=4, drafts=4, padded=4 * SIZE + 4)),
    "window-only draft extend": (WINDOW_ONLY, shape(ForwardMode.DRAFT_EXTEND, each=4, drafts=4)),
    "growing": (SETTING, shape(ForwardMode.DRAFT_DECODE, each=4, num_steps=4, padded=SIZE + 3)),
    "frozen": (WINDOW_ONLY, shape(ForwardMode.DRAFT_DECODE, each=4, num_steps=4, padded=SIZE + 3, grows=False)),
    "ragged verify": (SETTING, shape(ForwardMode.TARGET_VERIFY, each=4, extends=[1] * SIZE, padded=4 * SIZE + 3)),
    "ragged draft extend": (SETTING, shape(ForwardMode.DRAFT_EXTEND, each=4, extends=[1] * SIZE, drafts=4)),
    "extend": (SETTING, shape(ForwardMode.EXTEND, each=20, extends=[1] * SIZE, padded=20 * SIZE + 3)),
    "extend, tables once a request": (ONCE, shape(ForwardMode.EXTEND, each=20, extends=[1] * SIZE)),
}


def drawn(step: Step, live: int, rng: np.random.Generator) -> Step:
    """Other values of the same shape, of which the first `live` requests are anything but padding."""
    size = len(step.reqs)
    reqs = [int(rng.integers(1, NUM_REQUESTS)) if b < live else 0 for b in range(size)]
    slots = rng.integers(1, len(SETTING.pool.full_to_swa), len(step.slots))
    counts = [step.drafts or 1] * size
    extends = None
    if step.extends is not None:
        most = min(len(step.slots) // size, step.drafts or SETTING.geom.draft_capacity)
        if step.mode is ForwardMode.EXTEND:
            most = len(step.slots) // max(1, live)
        counts = extends = [int(rng.integers(0, most + 1)) if b < live else 0 for b in range(size)]
        slots[sum(counts) :] = 0
    highest = COLUMNS - max(*counts, step.num_steps)
    seqs = [int(rng.integers(1, highest)) + (step.mode is not ForwardMode.TARGET_VERIFY) * n for n in counts]
    return dataclasses.replace(step, reqs=reqs, seqs=seqs, slots=slots.tolist(), extends=extends)


class Capture:
    """A build recorded in a graph, whose inputs and tables can be changed."""

    def __init__(self, impl: str, device: str, setting: Setting, step: Step, **options: object) -> None:
        self.setting, self.step, self.device = setting, step, device
        self.tables, self.tensors = setting.tables(device), step.tensors(device)
        self.builder = setting.builder(impl, device, tables=self.tables, **options)
        self.reference = setting.builder("torch", device, tables=self.tables)
        with setting.limits():
            self.metas = step.build(self.builder, self.tensors)
            self.places = self.builder.fingerprint()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                step.build(self.builder, self.tensors)

    def set(self, step: Step) -> None:
        for name, tensor in step.tensors(self.device).items():
            self.tensors[name].copy_(tensor)

    def move_tokens(self, rng: np.random.Generator) -> None:
        """Every request gets the pages of another one, and every slot another window slot."""
        order = torch.from_numpy(1 + rng.permutation(NUM_REQUESTS - 1)).to(self.device)
        self.tables.req_to_token[1:] = self.tables.req_to_token[order]
        self.tables.full_to_swa[:-1] = self.tables.full_to_swa[:-1].roll(256)

    def replayed(self) -> dict:
        """What a replay leaves in the buffers."""
        self.builder.poison()
        self.graph.replay()
        self.builder.check_guards()
        return contents(self.builder)

    def built(self, builder: GuardedBuilder) -> dict:
        """What another builder makes of the same tensors."""
        builder.poison()
        with self.setting.limits():
            self.expected = self.step.build(builder, self.tensors)
        return contents(builder)

    def check_replay(self, whole_buffers: bool = True) -> None:
        """A replay writes what the reference writes, and nothing else."""
        found, expected = self.replayed(), self.built(self.reference)
        for meta, reference in zip(self.metas, self.expected, strict=True):
            assert meta.difference(reference) is None
        if whole_buffers:
            assert_same_bits(found, expected)
        assert int(self.builder._error) == int(self.reference._error)
        assert self.builder.fingerprint() == self.places


@each_compiled_backend
@pytest.mark.parametrize("name", CAPTURED)
def test_a_replay_is_an_eager_build_after_everything_changed(impl: str, device: str, name: str) -> None:
    """Lengths, ids, slots, row counts and tables; from all requests live down to one, and none."""
    setting, step = CAPTURED[name]
    capture, rng = Capture(impl, device, setting, step), np.random.default_rng(0)
    eager = setting.builder(impl, device, tables=capture.tables)
    size = len(step.reqs)
    for live in sorted({size, size // 2 + 1, 1, 0}, reverse=True):
        capture.set(drawn(step, live, rng))
        capture.move_tokens(rng)
        capture.check_replay()
        assert_same_bits(capture.replayed(), capture.built(eager))
        capture.builder.check()
    for meta in capture.metas:
        assert (meta.seq_lens_causal == 1).all()


@each_compiled_backend
@pytest.mark.parametrize("name", ["decode", "verify", "ragged verify", "growing", "extend, tables once a request"])
def test_bad_values_in_a_replay_are_flagged(impl: str, device: str, name: str) -> None:
    setting, step = CAPTURED[name]
    capture, rng = Capture(impl, device, setting, step), np.random.default_rng(1)
    for place, value in (
        ("seqs", COLUMNS + 30),
        ("seqs", -40),
        ("reqs", NUM_REQUESTS),
        ("slots", 2**33),
        ("extends", -1),
    ):
        good = drawn(step, SIZE, rng)
        values = getattr(good, place)
        if values is None:
            continue
        if good.extends:
            # Rows for everyone, so that it matters who is spoiled.
            good = dataclasses.replace(
                good, extends=[2] * SIZE, slots=[9] * (2 * SIZE) + [0] * (len(good.slots) - 2 * SIZE)
            )
            values = getattr(good, place)
        capture.set(dataclasses.replace(good, **{place: [values[0], value, *values[2:]]}))
        # Where all rows are padding, nobody reads the tables of requests.
        capture.check_replay(whole_buffers=place != "extends")
        for builder in (capture.builder, capture.reference):
            with pytest.raises(ValueError, match=r"^device input: "):
                builder.check()
        capture.set(good)
        capture.check_replay()
        capture.builder.check()


@each_compiled_backend
def test_b19_captured_at_length_one_and_replayed_at_5000(impl: str, device: str) -> None:
    setting = setting_of(5100, num_requests=NUM_REQUESTS)
    for batch_size in (1, 32):
        capture = Capture(impl, device, setting, shape(ForwardMode.DECODE, batch_size))
        for length in (5000, 3, 5000):
            capture.tensors["seq_lens"].fill_(length)
            capture.check_replay()
            (meta,) = capture.metas
            assert meta.c4_lengths.tolist() == [length // 4] * batch_size
            assert meta.c128_lengths.tolist() == [length // 128] * batch_size


@each_compiled_backend
def test_b23_the_row_stride_of_a_capture_is_that_of_the_capacity(impl: str, device: str) -> None:
    setting = setting_of(1 << 20, num_requests=2)
    capture = Capture(impl, device, setting, shape(ForwardMode.DECODE, 4))
    for seqs, lengths in (([300, 128, 5000, 64000], [2, 1, 39, 500]), ([64000, 128, 300, 5000], [500, 1, 2, 39])):
        capture.tensors["seq_lens"].copy_(torch.tensor(seqs, device=device))
        capture.check_replay()
        (meta,) = capture.metas
        assert meta.c128_lengths.tolist() == lengths
        assert meta.c128_page_indices.stride() == (8192, 1)


@each_compiled_backend
def test_graphs_of_several_buckets_do_not_disturb_each_other(impl: str, device: str) -> None:
    """One builder, a graph for each mode and bucket, replayed in any order."""
    tables = SETTING.tables(device)
    builder = SETTING.builder(impl, device, tables=tables)
    graphs, rng = [], np.random.default_rng(2)
    for size in (1, 4, 16):
        for mode, each, options in (
            (ForwardMode.DECODE, 1, {}),
            (ForwardMode.TARGET_VERIFY, 4, {"drafts": 4}),
            (ForwardMode.DRAFT_DECODE, 3, {"num_steps": 3}),
        ):
            step = drawn(shape(mode, size, each=each, **options), size, rng)
            tensors = step.tensors(device)
            padded = dataclasses.replace(step, padded=size * max(1, step.drafts))
            metas, graph = padded.build(builder, tensors), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                padded.build(builder, tensors)
            expected = SETTING.builder("torch", device, tables=tables)
            graphs.append((graph, metas, step.build(expected, tensors), tensors))  # which the graph reads
    places, size = builder.fingerprint(), builder.nbytes
    builder.poison()
    for k in rng.permutation(3 * len(graphs)) % len(graphs):
        graphs[k][0].replay()
    for _, metas, expected, _ in graphs:
        for meta, reference in zip(metas, expected, strict=True):
            assert meta.difference(reference) is None
    assert (builder.fingerprint(), builder.nbytes) == (places, size)


@each_compiled_backend
@pytest.mark.parametrize("name", ["decode", "extend", "growing"])
def test_a_first_build_inside_a_capture_is_refused(impl: str, device: str, name: str) -> None:
    setting, step = CAPTURED[name]
    builder, tensors = setting.builder(impl, device), step.tensors(device)
    message = (
        rf"^batch: expected a build of {step.mode.value} in a bucket of {step.padded} rows before a graph is captured"
    )
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(ValueError, match=message):
        step.build(builder, tensors)
    assert builder.nbytes == 0
    step.build(builder, tensors)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        step.build(builder, tensors)


@each_compiled_backend
def test_debug_keeps_out_of_a_capture(impl: str, device: str) -> None:
    """It checks the build before, and builds without a graph; recorded are the launches alone."""
    setting, step = CAPTURED["verify"]
    capture = Capture(impl, device, setting, step, debug=True)
    capture.set(drawn(step, SIZE, np.random.default_rng(3)))
    capture.check_replay()
    step.build(capture.builder, capture.tensors)


@each_compiled_backend
def test_memory_stays_where_it_is_over_many_replays(impl: str, device: str) -> None:
    setting, step = CAPTURED["ragged verify"]
    capture, rng = Capture(impl, device, setting, step), np.random.default_rng(4)
    capture.check_replay()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    capture.set(drawn(step, SIZE, rng))
    for _ in range(1000):
        capture.graph.replay()
        step.build(capture.builder, capture.tensors)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    capture.check_replay()
