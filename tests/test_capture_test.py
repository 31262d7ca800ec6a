"""`dsv4 capture-test`: clean where all is well, and every kind of fault found, named and repeatable."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dsv4_backend import cli
from dsv4_bench import capture_planner, capture_runner, capture_test
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
    runner = [case.id for case in capture_runner.cases(ON_CPU)]
    assert {case.split("-")[0] for case in runner} == {"walk", "poison", "recapture", "back"}


@pytest.mark.parametrize(
    ("suite", "case"),
    [
        ("planner", "ragged-verify-4-ratios-4"),
        ("planner", "decode-16-ratios-4-128"),
        ("planner", "race-72x4-24x3"),
        ("runner", "walk-hash-steps3-shared"),
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
        (["--suite", "none"], "--suite: expected one of planner, runner, got 'none'"),
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
