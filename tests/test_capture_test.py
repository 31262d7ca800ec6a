"""`dsv4 capture-test`: clean where all is well, and every kind of fault found, named and repeatable."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from backends import INTERPRET
from dsv4_backend import MetadataBuilder, cli, dispatch
from dsv4_backend.batch import ForwardMode
from dsv4_backend.reference import metadata as reference
from dsv4_bench import capture_inputs, capture_metadata, capture_planner, capture_runner, capture_test
from dsv4_bench.capture_case import CaptureCase, CaptureOptions, Difference
from dsv4_graph_runner.buffers import StaticBuffers

ON_CPU = CaptureOptions(torch.device("cpu"), "eager")


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["capture-test", *map(str, arguments)])
    return result.exit_code, result.output


def test_names_are_unique_and_every_kind_is_there() -> None:
    for name, suite in capture_test.SUITES.items():
        ids = [case.id for case in suite(ON_CPU)]
        assert len(set(ids)) == len(ids), name
    planner = [case.id for case in capture_planner.cases(ON_CPU)]
    assert all(
        any(case.startswith(f"{mode}-{size}-") for case in planner)
        for mode in capture_planner.MODES
        for size in (1, 64)
    )
    assert {"race-72x4-24x3", "race-104x3-24x2"} <= set(planner)
    metadata = {case.id for case in capture_metadata.cases(ON_CPU)}
    for mode in capture_inputs.MODES:
        assert {f"{mode}-{size}-ratios-4-128" for size in capture_metadata.BUCKETS} <= metadata
        assert {f"{mode}-4-ratios-none", f"{mode}-4-ratios-4", f"{mode}-4-ratios-128", f"{mode}-long"} <= metadata
    assert {mode.mode for mode in capture_inputs.MODES.values()} == set(ForwardMode)
    runner = [case.id for case in capture_runner.cases(ON_CPU)]
    for names in (
        {name for name in runner if "-builder-" not in name},
        {name.replace("-builder-", "-") for name in runner if "-builder-" in name},
    ):
        assert {name.split("-")[0] for name in names} == {"walk", "poison", "recapture", "back"}


@pytest.mark.parametrize(
    ("suite", "case"),
    [
        ("planner", "ragged-verify-4-ratios-4"),
        ("planner", "decode-16-ratios-4-128"),
        ("planner", "race-72x4-24x3"),
        ("metadata", "extend-long"),
        ("metadata", "drafts-growing-16-ratios-4-128"),
        ("metadata", "race-ragged-verify-96"),
        ("runner", "walk-hash-steps3-shared"),
        ("runner", "walk-builder-hash-steps3-shared"),
        ("runner", "poison-builder-hash-steps5"),
        ("runner", "poison-transformer-steps2"),
        ("runner", "recapture-hash"),
        ("runner", "back-to-back-hash-dedicated"),
    ],
)
def test_clean_on_a_cpu(suite: str, case: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    code, output = run("--device", "cpu", "--suite", suite, "--case", case, "--seconds", 0, "--json", file)
    assert code == 0, output
    assert "no difference" in output
    written = json.loads(file.read_text())
    assert written["found"] is written["repeat"] is None
    assert written["cases"] == {suite: 1}
    assert written["replays"][suite] > 1
    assert {"chip", "torch", "triton", "command", "system"} <= written["environment"].keys()


def test_a_fault_of_the_runner_is_found_and_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad values that arrive nowhere: what an earlier batch left stays in the padding lanes."""
    make_plan = StaticBuffers._make_plan

    def stale(self: StaticBuffers, bucket: int, raw: int) -> Any:
        plan = make_plan(self, bucket, raw)
        vars(plan).update(pad_to=(), pad_from=())
        return plan

    monkeypatch.setattr(StaticBuffers, "_make_plan", stale)
    file = tmp_path / "a.json"
    code, output = run("--device", "cpu", "--suite", "runner", "--seconds", 0, "--json", file)
    assert code == 1
    written = json.loads(file.read_text())
    assert written["found"]["suite"] == "runner"
    assert written["repeat"] in output
    arguments = shlex.split(written["repeat"])[2:]
    code, again = run(*arguments)
    assert code == 1
    assert f"DIFF runner {written['found']['case']}: {written['found']['what']}" in again


def test_a_fault_of_the_planner_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_prefill = capture_planner.plan_prefill

    def late(*arguments: Any) -> Any:
        plan = plan_prefill(*arguments)
        if arguments[-1] is not None and plan.c4 is not None and len(plan.c4.write) > 2:
            plan.c4.write[2, 0] += 1
        return plan

    monkeypatch.setattr(capture_planner, "plan_prefill", late)
    code, output = run("--device", "cpu", "--suite", "planner", "--seconds", 0)
    assert code == 1
    assert "c4.write differs from the reference, first at [2, 0]" in output
    assert "--suite planner --case verify-1-ratios-4-128 --seed 0" in output


@pytest.mark.parametrize("mode", capture_inputs.MODES)
def test_metadata_of_every_mode_is_clean(mode: str) -> None:
    """Eager, on a CPU, with every choice of ratios; in a bucket that the batch fills, and in a larger one."""
    cases = [case for case in capture_metadata.cases(ON_CPU) if case.id.startswith((f"{mode}-2-", f"{mode}-4-"))]
    assert [case.check(1) for case in cases] == [capture_metadata.REPLAYS] * 5


def slots_of_another_step(batch: Any, steps: Any) -> Any:
    """The first slots of the list for step 0, the next for step 1: as if it came step by step."""
    if batch.mode is not ForwardMode.DRAFT_DECODE:
        return batch
    slots = batch.out_cache_loc.view(-1, batch.batch_size).t().flatten()
    return dataclasses.replace(batch, out_cache_loc=slots)


def padding_counted(batch: Any, steps: Any) -> Any:
    """Padding requests taken for request 1."""
    ones = batch.req_pool_indices.clamp(min=1)
    return dataclasses.replace(batch, req_pool_indices=ones, seq_lens=batch.seq_lens.clamp(1, 2000))


def lengths_of_the_capture(batch: Any, steps: Any) -> Any:
    """Lengths as they were when the build was first run."""
    kept = vars(steps).setdefault("kept", batch.seq_lens.clamp(0, 2000))
    return dataclasses.replace(batch, seq_lens=kept)


@pytest.mark.parametrize(
    ("fault", "case", "message"),
    [
        (slots_of_another_step, "drafts-growing-4-ratios-none", "step 0: raw_out_cache_loc"),
        (padding_counted, "decode-4-ratios-none", "step 0: seq_lens_causal"),
        (lengths_of_the_capture, "verify-4-ratios-none", "step 0: seq_lens_causal"),
    ],
)
def test_a_build_of_another_batch_is_found(
    fault: Callable[[Any, Any], Any], case: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_builds(monkeypatch, before=fault)
    assert message in differences(case)
    assert "(expected: the reference)" in differences(case)


def unwritten(steps: Any) -> None:
    """What a build leaves as it was: here, poison."""
    for meta in steps.metas:
        meta.c128_out_loc.view(torch.uint8).fill_(capture_metadata.POISON)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (unwritten, "step 0: c128_out_loc[0]"),
        (lambda steps: steps.error.fill_(1), "raised ValueError"),
        (lambda steps: steps.metas[0].plans.c4.rows[2].fill_(7), "step 0: plans.c4"),
    ],
    ids=["unwritten", "flagged", "plan"],
)
def test_a_faulty_build_is_found(fault: Callable[[Any], object], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_builds(monkeypatch, after=fault)
    assert message in differences("decode-4-ratios-4-128")


def test_buffers_that_move_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    count = itertools.count()
    monkeypatch.setattr(MetadataBuilder, "fingerprint", lambda self: next(count))
    assert "buffers are not where they were captured" in differences("idle-2-ratios-4-128")


def break_builds(
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[Any, Any], Any] = lambda batch, steps: batch,
    after: Callable[[Any], object] = lambda steps: None,
) -> None:
    """Faults in builds of impl "auto"; those of the reference stay right."""
    choose = dispatch.metadata

    def bind(*, steps: Any, **options: Any) -> Callable[[Any], None]:
        run = reference.bind(steps=steps, **options)

        def faulty(batch: Any) -> None:
            run(before(batch, steps))
            after(steps)

        return faulty

    monkeypatch.setattr(
        dispatch,
        "metadata",
        lambda impl, device: SimpleNamespace(bind=bind) if impl == "auto" else choose(impl, device),
    )


def differences(case: str) -> str:
    """What `dsv4 capture-test` says about a case of metadata in which it finds something."""
    code, output = run("--device", "cpu", "--suite", "metadata", "--case", case, "--seconds", 0)
    assert code == 1, output
    assert f"DIFF metadata {case}: " in output
    assert f"--suite metadata --case {case} --seed 0" in output
    return output


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRET, reason="runs under TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    "case",
    [
        "decode-4-ratios-4-128",
        "verify-2-ratios-4-128",
        "ragged-verify-4-ratios-4-128",
        "ragged-draft-extend-4-ratios-none",
        "idle-4-ratios-4",
        "drafts-growing-1-ratios-4-128",
        "drafts-frozen-4-ratios-128",
    ],
)
def test_the_kernels_are_clean_in_the_interpreter(case: str) -> None:
    options = CaptureOptions(torch.device("cpu"), "eager", impl="triton")
    (found,) = (each for each in capture_metadata.cases(options) if each.id == case)
    assert found.check(0) == capture_metadata.REPLAYS


def test_the_line_about_rounds_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--device", "cpu", "--suite", "runner", "--case", "recapture-hash", "--seconds", 0)
    code, output = run(*arguments)
    assert code == 0, output
    assert "\n1 whole round in " in output
    monkeypatch.setattr(capture_test, "run", lambda *rest: capture_test.Outcome(rounds=2))
    assert "2 whole rounds in 0.0 s" in run(*arguments)[1]


def test_rounds_end_with_the_time_and_stop_at_the_first_difference() -> None:
    seeds: list[int] = []

    def check(seed: int) -> int:
        seeds.append(seed)
        if seed == 9:
            raise Difference("lane 3")
        return 5

    def fails(seed: int) -> int:
        raise KeyError("broken")

    case = CaptureCase("one", check)
    outcome = capture_test.run([("a", case)], 0, 3, lambda *what: None)
    assert (seeds, outcome.rounds, outcome.replays, outcome.found) == ([3], 1, {"a": 5}, None)
    outcome = capture_test.run([("a", case)], 1e9, 7, lambda *what: None)
    assert seeds[1:] == [7, 8, 9]
    assert outcome.found == capture_test.Found("a", "one", 9, "lane 3")
    outcome = capture_test.run([("a", CaptureCase("two", fails)), ("a", case)], 0, 0, lambda *what: None)
    assert outcome.found == capture_test.Found("a", "two", 0, "raised KeyError: 'broken'")
    assert outcome.cases == {"a": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "none"], "--suite: expected one of planner, metadata, runner, got 'none'"),
        (["--case", "none"], "--case: expected one of verify-1"),
        (["--device", "tpu"], "--device: expected auto, cpu or cuda"),
        (["--device", "cpu", "--executor", "cuda_graph"], "executor: expected a CUDA device for 'cuda_graph', got cpu"),
        (["--executor", "graph"], "executor: expected one of"),
        (["--seconds", "-1"], "--seconds: expected at least 0, got -1.0"),
        (["--json", "nowhere/a.json"], "expected its folder to exist"),
    ],
)
def test_refuses_bad_input(arguments: list[str], message: str) -> None:
    code, output = run(*arguments)
    assert code == 2
    assert message in output


@pytest.mark.gpu
def test_clean_on_a_gpu() -> None:
    code, output = run("--device", "cuda", "--executor", "cuda_graph", "--seconds", 0)
    assert code == 0, output
    assert "no difference" in output
